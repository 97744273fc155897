"""``manage.py replay_events``: handle ended events again, and follow or cancel replays."""

from __future__ import annotations

import json
import re
import time
from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import asdict
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime

from django_eventbus import replay
from django_eventbus.exceptions import EventBusError
from django_eventbus.management.console import (
    CLEAR_LINE,
    add_confirmation,
    conclude,
    confirmed,
    database,
    event_id,
    number,
    period,
)
from django_eventbus.models import EventReplay
from django_eventbus.replay import ReplayStatus
from django_eventbus.retention import STATUSES
from django_eventbus.status import in_words
from django_eventbus.store import store_for

LOOK_EVERY = 0.5
BAR_WIDTH = 20
LISTED = 20
LARGEST_ID = 10**12 - 1
#: The arguments of ``replay.start`` that are options of the command.
OPTIONS = ("type", "since", "until", "status", "key", "event_id", "handler", "queue", "rate")


class Command(BaseCommand):
    help = (
        "Handle ended events of the log again: copy them into the queue for all their handlers, or "
        "for one handler. Workers do the copying, so a replay continues if this command is stopped."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--type", default="", help="event type; may end in *")
        parser.add_argument(
            "--since",
            type=moment,
            help="events that ended at this time or later: 2026-11-01, 2026-11-01T12:00, or 7d, "
            "12h, 90m ago",
        )
        parser.add_argument("--until", type=moment, help="events that ended before (default: now)")
        parser.add_argument("--status", choices=STATUSES, help="default: completed and dead")
        parser.add_argument("--key", help="events with this key")
        parser.add_argument(
            "--event-id", type=event_id, action="append", help="one event; can be repeated"
        )
        parser.add_argument(
            "--handler", help="the only handler that receives the copies (default: all handlers)"
        )
        parser.add_argument("--queue", help="queue of the copies (default: that of each event)")
        parser.add_argument("--rate", type=float, help="maximum number of copies per second")
        add_confirmation(parser)
        parser.add_argument(
            "--detach", action="store_true", help="start the replay and do not wait for its end"
        )
        parser.add_argument("--list", action="store_true", help="list the latest replays")
        parser.add_argument(
            "--follow", type=number(1, LARGEST_ID), metavar="ID", help="wait for a replay"
        )
        parser.add_argument(
            "--cancel", type=number(1, LARGEST_ID), metavar="ID", help="cancel a replay"
        )
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="text (default) or json"
        )
        parser.add_argument("--database", help="alias of the database that contains the events")

    def handle(self, *args: Any, **options: Any) -> None:
        self.using = database(options["database"])
        self.as_json = options["format"] == "json"
        try:
            if options["list"]:
                self._list()
            elif options["cancel"] is not None:
                self._cancel(options["cancel"])
            elif options["follow"] is not None:
                self._follow(options["follow"])
            else:
                self._start(options)
        except EventBusError as error:
            raise CommandError(str(error)) from None
        except EventReplay.DoesNotExist:
            wanted = options["follow"] or options["cancel"]
            raise CommandError(f"there is no replay {wanted}: see --list") from None

    def _start(self, options: dict[str, Any]) -> None:
        given: Any = {name: options[name] for name in OPTIONS}
        planned = replay.prepare(using=self.using, **given)
        count, to = planned.total, planned.handler or "all their handlers"
        if options["dry_run"]:
            self._write(f"Would replay {_events(count)} to {to}.", {"selected": count})
        elif not count:
            self._write("No event matches the filters.", {"selected": 0})
        elif confirmed(f"Replay {_events(count)} to {to}?", yes=options["yes"]):
            # The end is fixed, so that the replay selects the events that were counted.
            started = replay.start(using=self.using, **{**given, "until": planned.until})
            if options["detach"]:
                self._write(f"Started replay {started.pk}.", {"id": started.pk, "selected": count})
            else:
                self._follow(started.pk)

    def _follow(self, replay_id: int) -> None:
        """Show the progress until all copies have ended. Ctrl-C does not stop the replay."""
        began, first = time.monotonic(), replay.status(replay_id, using=self.using)
        progress = first
        try:
            while not progress.is_over:
                self._show(progress, first, time.monotonic() - began)
                self._warn_without_workers()
                time.sleep(LOOK_EVERY)
                progress = replay.status(replay_id, using=self.using)
        except KeyboardInterrupt:
            conclude(
                self.stdout,
                f"Replay {replay_id} continues in the workers. Follow it with --follow "
                f"{replay_id}, or cancel it with --cancel {replay_id}.",
            )
            return
        dead = f", {progress.dead:,} became dead letters" if progress.dead else ""
        text = f"Replay {replay_id} is {progress.state.label}: {_events(progress.handled)} handled"
        self._write(f"{text}{dead}.", {"id": replay_id, **asdict(progress)})

    def _show(self, progress: ReplayStatus, first: ReplayStatus, seconds: float) -> None:
        if self.stdout.isatty() and not self.as_json:
            self.stdout.write(f"{CLEAR_LINE}{_bar(progress, first, seconds)}", ending="")
            self.stdout.flush()

    _warned = False

    def _warn_without_workers(self) -> None:
        store = store_for(self.using)
        if self._warned or store.workers.filter(expires_at__gt=store.now).exists():
            return
        self._warned = True
        self.stderr.write("No worker is running: start one with manage.py run_event_worker.")

    def _cancel(self, replay_id: int) -> None:
        row = store_for(self.using).replays.get(pk=replay_id)
        cancelled = replay.cancel(row, using=self.using)
        text = f"Cancelled replay {replay_id}." if cancelled else f"Replay {replay_id} has ended."
        self._write(text, {"id": replay_id, "cancelled": cancelled})

    def _list(self) -> None:
        rows = replay.list(limit=LISTED, using=self.using)
        if self.as_json:
            records = [_record(each, replay.status(each, using=self.using)) for each in rows]
            self.stdout.write(json.dumps(records))
            return
        for each in rows:
            done = replay.status(each, using=self.using)
            self.stdout.write(
                f"{each.pk:>6}  {each.created_at:%Y-%m-%d %H:%M}  {done.state.label:<10} "
                f"{done.handled:>9,} of {done.total:,}  {each.type or '*'}"
                + (f" to {each.handler}" if each.handler else "")
            )
        if not rows:
            self.stdout.write("No replays.")

    def _write(self, text: str, record: dict[str, Any]) -> None:
        conclude(self.stdout, json.dumps(record) if self.as_json else text)


def _record(row: EventReplay, progress: ReplayStatus) -> dict[str, Any]:
    return {
        "id": row.pk,
        "type": row.type,
        "handler": row.handler,
        "started_by": row.created_by,
        "started_at": row.created_at.isoformat(),
        **asdict(progress),
    }


def _bar(progress: ReplayStatus, first: ReplayStatus, seconds: float) -> str:
    total = max(progress.total, progress.copied, 1)
    filled = BAR_WIDTH * progress.handled // total
    text = f"[{'#' * filled:<{BAR_WIDTH}}] {progress.handled:,} of {total:,}"
    speed = (progress.handled - first.handled) / seconds if seconds else 0.0
    if speed:
        text += f" · {speed:,.0f}/s · {in_words((total - progress.handled) / speed)} left"
    return text + (f" · {progress.dead:,} dead" if progress.dead else "")


def _events(count: int) -> str:
    return f"{count:,} event{'' if count == 1 else 's'}"


def moment(text: str) -> datetime:
    """Return a time from a date, a date with a time, or a period before now."""
    if re.fullmatch("[0-9]{1,9}[dhm]", text):
        return timezone.now() - period(text)
    try:
        found = parse_datetime(text)
        day = None if found else parse_date(text)
    except ValueError:
        found = day = None
    if day is not None:
        found = datetime(day.year, day.month, day.day)
    if found is None:
        raise ArgumentTypeError(
            f"{text!r} is not a time; give 2026-11-01, 2026-11-01T12:00, or a period before now: "
            "7d, 12h, 90m"
        )
    return found if timezone.is_aware(found) else timezone.make_aware(found)
