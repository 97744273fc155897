"""``manage.py event_schedules``: list, run, enable and disable schedules."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from django.core.management.base import BaseCommand, CommandError
from django.core.serializers.json import DjangoJSONEncoder

from django_eventbus import schedules
from django_eventbus.errors.text import one_line
from django_eventbus.exceptions import EventBusError
from django_eventbus.management.console import accept_django_options, database
from django_eventbus.models import EventSchedule, ScheduleOrigin
from django_eventbus.scheduling.cron import Cron, in_local_time
from django_eventbus.store import store_for

COLUMNS = ("name", "event", "state", "last run", "when")
GAP = "  "
RUNS_SHOWN = 3
FIELDS = (
    "name",
    "origin",
    "type",
    "cron",
    "tz",
    "payload",
    "key",
    "queue",
    "priority",
    "headers",
    "misfire",
    "enabled",
    "next_at",
    "last_at",
)


class Command(BaseCommand):
    help = "List the schedules and their next runs; run, enable or disable one."
    missing_args_message = (
        "Name an action: list, run, enable or disable. Example: event_schedules list"
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        listing = actions.add_parser("list", help="list the schedules and their next runs")
        listing.add_argument(
            "--format",
            choices=("table", "json"),
            default="table",
            help="table (default) or json, one array with all fields",
        )
        run = actions.add_parser(
            "run", help="publish the event of a schedule now; its next run is unchanged"
        )
        enable = actions.add_parser("enable", help="enable a schedule; past runs are skipped")
        disable = actions.add_parser("disable", help="disable a schedule until it is enabled again")
        for each in (run, enable, disable):
            each.add_argument("name", help="the name of the schedule")
        for each in (listing, run, enable, disable):
            each.add_argument("--database", help="alias of the database that contains the events")
            accept_django_options(each)

    def handle(self, *args: Any, **options: Any) -> None:
        alias = database(options["database"])
        actions = {
            "list": self._list,
            "run": self._run,
            "enable": self._enable,
            "disable": self._disable,
        }
        try:
            actions[options["action"]](alias, options)
        except EventBusError as error:
            raise CommandError(str(error)) from None

    def _list(self, alias: str, options: dict[str, Any]) -> None:
        now = store_for(alias).read_clock()
        found = schedules.every(using=alias)
        if options["format"] == "json":
            # json.dumps escapes control characters, so a name or a payload cannot send escape
            # sequences to the terminal.
            records = [_record(each, now) for each in found]
            self.stdout.write(json.dumps(records, cls=DjangoJSONEncoder, indent=2))
        elif not found:
            self.stdout.write("No schedules.")
        else:
            for line in _aligned([COLUMNS, *(_cells(each, now) for each in found)]):
                self.stdout.write(line)

    def _run(self, alias: str, options: dict[str, Any]) -> None:
        event = schedules.run(options["name"], using=alias)
        if event is None:
            self.stdout.write(
                "No event was published: a limit is reached and its overflow policy is drop."
            )
        else:
            self.stdout.write(f"Published {one_line(event.type)} {event.event_id}.")

    def _enable(self, alias: str, options: dict[str, Any]) -> None:
        schedules.enable(options["name"], using=alias)
        row = store_for(alias).schedules.get(name=options["name"])
        self.stdout.write(f"Enabled {one_line(row.name)}: {schedules.explain(row)}.")

    def _disable(self, alias: str, options: dict[str, Any]) -> None:
        schedules.disable(options["name"], using=alias)
        self.stdout.write(f"Disabled {one_line(options['name'])}.")


def _state(schedule: EventSchedule) -> str:
    declared = {each.name for each in schedules.declared()}
    if schedule.pk is None:
        return "new"  # The next worker that starts inserts a row for the schedule.
    if schedule.origin == ScheduleOrigin.CODE and schedule.name not in declared:
        return "not in code"
    return "enabled" if schedule.enabled else "disabled"


def _cells(schedule: EventSchedule, now: datetime) -> tuple[str, ...]:
    state, zone = _state(schedule), ZoneInfo("UTC")
    try:
        cron = Cron(schedule.cron, schedule.tz)
        zone = cron.zone
        shown = RUNS_SHOWN if state in ("new", "enabled") else 0
        runs = [in_local_time(each, zone) for each in _runs(schedule, shown, now)]
        when = f"{cron.words}; next: {', '.join(runs)}" if runs else cron.words
    except EventBusError as error:
        when = f"cannot fire: {error}"
    last_run = in_local_time(schedule.last_at, zone) if schedule.last_at else "-"
    return tuple(map(one_line, (schedule.name, schedule.type, state, last_run, when)))


def _runs(schedule: EventSchedule, count: int, now: datetime) -> list[datetime]:
    return schedules.coming_runs(schedule, count, now=now)


def _record(schedule: EventSchedule, now: datetime) -> dict[str, Any]:
    record: dict[str, Any] = {name: getattr(schedule, name) for name in FIELDS}
    record |= {"state": _state(schedule), "words": None, "next_runs": [], "error": None}
    try:
        record["words"] = Cron(schedule.cron, schedule.tz).words
        record["next_runs"] = _runs(schedule, RUNS_SHOWN, now)
    except EventBusError as error:
        record["error"] = str(error)
    return record


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield GAP.join(cells).rstrip()
