"""``manage.py dead_events list|retry|purge``: list, retry and purge dead letters."""

from __future__ import annotations

import getpass
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
from django_eventbus.errors.failures import recorded
from django_eventbus.errors.text import one_line
from django_eventbus.management.console import (
    UNITS,
    accept_django_options,
    add_confirmation,
    conclude,
    database,
    event_id,
    number,
    period,
    progress,
    purge_confirmed,
)
from django_eventbus.models import DeadEvent
from django_eventbus.store import store_for

COLUMNS = ("died", "type", "handler", "error", "attempts", "event id")
#: The positions in COLUMNS of the columns that are shortened on a narrow terminal, and the smallest
#: width of such a column.
FLEXIBLE = (1, 2, 3)
NARROWEST = 6
GAP = "  "

#: The filters of ``dead_letters.matching``, in words.
FILTERS = {
    "event_id": "with the id {}",
    "type": "of type {}",
    "handler": "of the handler {}",
    "error_type": "with the error {}",
    "queue": "in the queue {}",
    "key": "with the key {}",
    "older_than": "that died before {}",
}


class Command(BaseCommand):
    help = "List, retry or purge dead letters: events whose handler failed permanently."
    missing_args_message = "Name an action: list, retry or purge. Example: dead_events list"

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        listing = actions.add_parser("list", help="list dead letters, newest first")
        retry = actions.add_parser(
            "retry",
            help="put dead letters back into the queue; handlers that succeeded are not run again",
        )
        purge = actions.add_parser("purge", help="delete dead letters permanently")
        _add_list(listing)
        _add_retry(retry)
        _add_purge(purge)
        for each in (listing, retry, purge):
            accept_django_options(each)

    def handle(self, *args: Any, **options: Any) -> None:
        actions = {"list": self._list, "retry": self._retry, "purge": self._purge}
        actions[options["action"]](Selection.chosen_by(options), options)

    def _list(self, selection: Selection, options: dict[str, Any]) -> None:
        limit, offset = options["limit"], options["offset"]
        # Read one row more than is shown, to find out without a count whether more rows exist.
        found = dead_letters.list(limit + 1, offset, using=selection.using, **selection.filters)
        if options["format"] == "json":
            self.stdout.write(_as_json(found[:limit]))
            return
        if not found:
            self.stdout.write(f"Found {selection.in_words(0)}.")
            return
        for line in self._table(found[:limit], selection.now()):
            self.stdout.write(line)
        if len(found) > limit:
            self.stdout.write(f"More dead letters exist: pass --offset {offset + limit}.")

    def _table(self, events: Sequence[DeadEvent], now: datetime) -> Iterator[str]:
        rows = [COLUMNS, *(_cells(each, now) for each in events)]
        width = shutil.get_terminal_size().columns if self.stdout.isatty() else None
        return _aligned(rows, width)

    def _retry(self, selection: Selection, options: dict[str, Any]) -> None:
        count = selection.rows().count()
        if options["dry_run"]:
            self.stdout.write(f"Would retry {selection.in_words(count)}.")
            return
        retried = dead_letters.retry(
            selection.ids or None,
            by=_operator(),
            using=selection.using,
            progress=progress(self.stdout, f"of {count:,} retried"),
            **selection.filters,
        )
        text = f"Retried {selection.in_words(retried)}"
        if retried < len(selection.ids):
            skipped = len(selection.ids) - retried
            text += f", {skipped:,} skipped: unknown id, no longer dead, or not matched by a filter"
        conclude(self.stdout, f"{text}.")

    def _purge(self, selection: Selection, options: dict[str, Any]) -> None:
        # Use a fixed time, so that the command does not purge dead letters that are added while it
        # waits for the answer.
        older_than = selection.now() - selection.filters.get("older_than", timedelta(0))
        selection = replace(selection, filters={**selection.filters, "older_than": older_than})
        count = selection.rows().count()
        if options["dry_run"]:
            self.stdout.write(f"Would purge {selection.in_words(count)}.")
        elif count and not purge_confirmed(selection.in_words(count), yes=options["yes"]):
            self.stdout.write("Not confirmed: purged no dead letters.")
        else:
            purged = dead_letters.purge(
                using=selection.using,
                progress=progress(self.stdout, f"of {count:,} purged"),
                **selection.filters,
            )
            conclude(self.stdout, f"Purged {selection.in_words(purged)}.")


EVERY_TYPE = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The dead letters that the options select."""

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
                f"Select the dead letters to {action}: {which}, a filter such as "
                "--type 'order.*', or --all."
            )
        if narrowed and everything:
            raise CommandError("--all cannot be combined with ids or filters: pass one of them.")
        if everything:
            filters["type"] = EVERY_TYPE
        return cls(using=database(options["database"]), filters=filters, ids=ids)

    def now(self) -> datetime:
        return store_for(self.using).read_clock()

    def rows(self) -> QuerySet[DeadEvent]:
        rows = dead_letters.matching(using=self.using, **self.filters)
        return rows.filter(event_id__in=self.ids) if self.ids else rows

    def in_words(self, count: int) -> str:
        """Return a text such as ``3 dead letters of type 'order.*' with the key 'order:7'``."""
        words = [
            f"{count:,} dead letter{'' if count == 1 else 's'}" if count else "no dead letters"
        ]
        words += [
            FILTERS[name].format(_quoted(value))
            for name, value in self.filters.items()
            if value != EVERY_TYPE
        ]
        return " ".join([*words, "with the given ids"] if self.ids else words)


def _add_list(parser: ArgumentParser) -> None:
    _add_filters(parser)
    parser.add_argument(
        "--limit", type=number(1), default=100, help="maximum number of events (default: 100)"
    )
    parser.add_argument(
        "--offset", type=number(0), default=0, help="number of events to skip (default: 0)"
    )
    parser.add_argument(
        "--format",
        choices=("table", "json"),
        default="table",
        help="table (default) or json, one array with all fields",
    )


def _add_retry(parser: ArgumentParser) -> None:
    parser.add_argument(
        "event_ids", nargs="*", type=event_id, metavar="event-id", help="ids of the events to retry"
    )
    _add_filters(parser)
    parser.add_argument("--all", action="store_true", help="retry every dead letter")
    parser.add_argument("--dry-run", action="store_true", help="only count the dead letters")


def _add_purge(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--older-than",
        type=period,
        help="minimum age of the dead letters: 30d, 12h, 90m; a plain number is days",
    )
    _add_filters(parser)
    parser.add_argument("--all", action="store_true", help="purge every dead letter")
    add_confirmation(parser)


def _add_filters(parser: ArgumentParser) -> None:
    parser.add_argument("--type", type=_type_or_prefix, help="an event type; may end in *")
    parser.add_argument("--handler", help="name of the first handler that died")
    parser.add_argument("--queue", help="queue of the events")
    parser.add_argument("--key", help="key of the events")
    parser.add_argument("--event-id", type=event_id, help="id of one event")
    parser.add_argument("--error-type", help="class of the last error: ValueError, shop.NoStock")
    parser.add_argument("--database", help="alias of the database that contains the events")


def _type_or_prefix(text: str) -> str:
    if "*" in text[:-1]:
        raise ArgumentTypeError(
            f"{text!r} has a * before its end; pass a type, or a prefix: 'order.*'"
        )
    return text


def _quoted(value: Any) -> str:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S %Z}"
    return one_line(repr(value) if isinstance(value, str) else str(value))


def _cells(event: DeadEvent, now: datetime) -> tuple[str, ...]:
    texts = (event.type, event.dead_handler, _reason(event))
    age = _age(now - event.finished_at)
    return (age, *map(one_line, texts), str(event.attempts), str(event.event_id))


def _reason(event: DeadEvent) -> str:
    """Return the last error of the handler that died."""
    errors = recorded(event.errors)
    its_own = [each for each in errors if each["handler"] == event.dead_handler]
    if not errors:
        return event.error_type
    last = (its_own or errors)[-1]
    return f"{last['type']}: {last['message']}"


def _operator() -> str:
    """Return the name of the operating system user; empty if a container has no such name."""
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):
        return ""


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
    """Return JSON in ASCII, so that an event cannot send escape sequences to the terminal."""
    names = [field.attname for field in DeadEvent._meta.concrete_fields]
    records = [{name: getattr(each, name) for name in names} for each in events]
    return json.dumps(records, cls=DjangoJSONEncoder, indent=2)
