"""``manage.py dead_events list|retry|purge``: dead letters, for people and for scripts."""

from __future__ import annotations

import json
import shutil
import uuid
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import QuerySet

from django_eventbus import dead_letters
from django_eventbus.failures import one_line
from django_eventbus.management.console import (
    UNITS,
    conclude,
    confirmed,
    database,
    event_id,
    number,
    period,
    progress,
)
from django_eventbus.models import DeadEvent
from django_eventbus.store import store_for

COLUMNS = ("died", "type", "handler", "error", "attempts", "event id")
#: Columns that give way when the terminal is narrow, and down to what width.
FLEXIBLE = (1, 2, 3)
NARROWEST = 6
GAP = "  "

#: The filters of ``dead_letters.matching``, and how a sentence says them.
FILTERS = {
    "event_id": "with the id {}",
    "type": "of type {}",
    "handler": "of the handler {}",
    "error_type": "with the error {}",
    "queue": "in the queue {}",
    "key": "with the key {}",
    "older_than": "that died by {}",
}


class Command(BaseCommand):
    help = "List, retry or purge dead letters: events that a handler gave up on."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        _add_list(actions.add_parser("list", help="show them, newest dead first"))
        _add_retry(
            actions.add_parser(
                "retry",
                help="queue them again; handlers that were done with an event are not run again",
            )
        )
        _add_purge(actions.add_parser("purge", help="delete them for good"))

    def handle(self, *args: Any, **options: Any) -> None:
        actions = {"list": self._list, "retry": self._retry, "purge": self._purge}
        actions[options["action"]](Selection.chosen_by(options), options)

    def _list(self, selection: Selection, options: dict[str, Any]) -> None:
        limit, offset = options["limit"], options["offset"]
        # One more than is shown tells whether there are more, without counting them all.
        found = dead_letters.list(limit + 1, offset, using=selection.using, **selection.filters)
        if options["format"] == "json":
            self.stdout.write(_as_json(found[:limit]))
            return
        if not found:
            self.stdout.write(f"{selection.in_words(0)}.")
            return
        for line in self._table(found[:limit], selection.now()):
            self.stdout.write(line)
        if len(found) > limit:
            self.stdout.write(f"There are more: --offset {offset + limit}")

    def _table(self, events: Sequence[DeadEvent], now: datetime) -> Iterator[str]:
        rows = [COLUMNS, *(_cells(each, now) for each in events)]
        width = shutil.get_terminal_size().columns if self.stdout.isatty() else None
        return _aligned(rows, width)

    def _retry(self, selection: Selection, options: dict[str, Any]) -> None:
        count = selection.rows().count()
        if options["dry_run"]:
            self.stdout.write(f"{selection.in_words(count)} would be retried.")
            return
        retried = dead_letters.retry(
            selection.ids or None,
            using=selection.using,
            progress=progress(self.stdout, f"of {count:,} retried"),
            **selection.filters,
        )
        conclude(self.stdout, f"{selection.in_words(retried)} put back into the queue.")
        if retried < len(selection.ids):
            missing = len(selection.ids) - retried
            self.stdout.write(f"{missing:,} of the given ids fit no dead letter (any more).")

    def _purge(self, selection: Selection, options: dict[str, Any]) -> None:
        # Whoever dies while the question is open is not among those asked about.
        older_than = selection.now() - selection.filters.get("older_than", timedelta(0))
        selection = replace(selection, filters={**selection.filters, "older_than": older_than})
        count = selection.rows().count()
        if options["dry_run"]:
            self.stdout.write(f"{selection.in_words(count)} would be purged.")
        elif count and not options["yes"] and not confirmed(selection.in_words(count)):
            self.stdout.write("Nothing was purged.")
        else:
            purged = dead_letters.purge(
                using=selection.using,
                progress=progress(self.stdout, f"of {count:,} purged"),
                **selection.filters,
            )
            conclude(self.stdout, f"{selection.in_words(purged)} purged.")


EVERY_TYPE = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which dead letters are meant."""

    using: str
    filters: dict[str, Any]
    ids: tuple[uuid.UUID, ...] = ()

    @classmethod
    def chosen_by(cls, options: dict[str, Any]) -> Selection:
        action, ids = options["action"], tuple(dict.fromkeys(options.get("event_ids") or ()))
        filters = {name: options[name] for name in FILTERS if options.get(name) is not None}
        narrowed, everything = bool(filters or ids), options.get("all", False)
        if action != "list" and not narrowed and not everything:
            which = "event ids" if action == "retry" else "--older-than 30d"
            raise CommandError(
                f"Say which dead letters to {action}: {which}, a filter such as "
                "--type 'order.*', or --all."
            )
        if narrowed and everything:
            raise CommandError("Give --all or a selection, not both.")
        if everything:
            filters["type"] = EVERY_TYPE
        return cls(using=database(options["database"]), filters=filters, ids=ids)

    def now(self) -> datetime:
        return store_for(self.using).read_clock()

    def rows(self) -> QuerySet[DeadEvent]:
        rows = dead_letters.matching(using=self.using, **self.filters)
        return rows.filter(event_id__in=self.ids) if self.ids else rows

    def in_words(self, count: int) -> str:
        """``3 dead letters of type 'order.*' with the key 'order:7'``."""
        said = [f"{count:,} dead letter{'' if count == 1 else 's'}" if count else "No dead letters"]
        said += [
            FILTERS[name].format(_said(value))
            for name, value in self.filters.items()
            if value != EVERY_TYPE
        ]
        return " ".join([*said, "with the given ids"] if self.ids else said)


def _add_list(parser: ArgumentParser) -> None:
    _add_filters(parser)
    parser.add_argument(
        "--limit", type=number(1), default=100, help="how many to show (default: 100)"
    )
    parser.add_argument(
        "--offset", type=number(0), default=0, help="how many to pass over (default: 0)"
    )
    parser.add_argument(
        "--format",
        choices=("table", "json"),
        default="table",
        help="a table for people (the default), or one JSON array of all there is to know",
    )


def _add_retry(parser: ArgumentParser) -> None:
    parser.add_argument(
        "event_ids", nargs="*", type=event_id, metavar="event-id", help="the events to retry"
    )
    _add_filters(parser)
    parser.add_argument("--all", action="store_true", help="retry every dead letter")
    parser.add_argument("--dry-run", action="store_true", help="only say how many it would be")


def _add_purge(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--older-than", type=period, help="only what died so long ago: 30d, 12h, 90m, or days"
    )
    _add_filters(parser)
    parser.add_argument("--all", action="store_true", help="purge every dead letter")
    parser.add_argument("--dry-run", action="store_true", help="only say how many it would be")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _add_filters(parser: ArgumentParser) -> None:
    parser.add_argument("--type", type=_type_or_prefix, help="an event type; may end in *")
    parser.add_argument("--handler", help="the name of the handler that died (first)")
    parser.add_argument("--queue", help="the queue they were in")
    parser.add_argument("--key", help="the key they were published with")
    parser.add_argument("--event-id", type=event_id, help="the id of one event")
    parser.add_argument("--error-type", help="the last error's class: ValueError, shop.NoStock")
    parser.add_argument("--database", help="the alias that holds the bus")


def _type_or_prefix(text: str) -> str:
    if "*" in text[:-1]:
        raise ArgumentTypeError(f"{text!r} has a * before its end; give a type, or 'order.*'")
    return text


def _said(value: Any) -> str:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S %Z}"
    return one_line(repr(value) if isinstance(value, str) else str(value))


def _cells(event: DeadEvent, now: datetime) -> tuple[str, ...]:
    told = (event.type, event.dead_handler, _reason(event))
    age = _age(now - event.finished_at)
    return (age, *map(one_line, told), str(event.attempts), str(event.event_id))


def _reason(event: DeadEvent) -> str:
    """The last words of the handler that died."""
    errors = event.errors or []
    its_own = [each for each in errors if each["handler"] == event.dead_handler]
    last = (its_own or errors or [None])[-1]
    return f"{last['type']}: {last['message']}" if last else event.error_type


def _age(passed: timedelta) -> str:
    for letter, unit in UNITS.items():
        if passed >= unit:
            return f"{passed // unit}{letter}"
    return f"{max(0, int(passed.total_seconds()))}s"


def _aligned(rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for _ in range(sum(widths) + len(GAP) * (len(widths) - 1) - width if width else 0):
        widest = max(FLEXIBLE, key=lambda column: widths[column])
        widths[widest] = max(widths[widest] - 1, NARROWEST)
    for row in rows:
        cells = [_fitted(cell, room) for cell, room in zip(row, widths, strict=True)]
        yield GAP.join(cells).rstrip()


def _fitted(cell: str, room: int) -> str:
    return cell.ljust(room) if len(cell) <= room else f"{cell[: room - 1]}…"


def _as_json(events: Sequence[DeadEvent]) -> str:
    """Plain ASCII: whatever is in an event, the terminal is safe from it."""
    names = [field.attname for field in DeadEvent._meta.concrete_fields]
    records = [{name: getattr(each, name) for name in names} for each in events]
    return json.dumps(records, cls=DjangoJSONEncoder, indent=2)
