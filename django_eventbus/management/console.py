"""Functions that the commands share: options, confirmation, progress, choice of the database."""

from __future__ import annotations

import re
import sys
import uuid
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django import get_version
from django.apps import apps
from django.core.management.base import CommandError
from django.db import DEFAULT_DB_ALIAS, OperationalError, connections

from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.store import default_alias

UNITS = {"d": timedelta(days=1), "h": timedelta(hours=1), "m": timedelta(minutes=1)}
OLDEST = timedelta(days=36_500)
LARGEST_NUMBER = 1_000_000
CLEAR_LINE = "\r\x1b[2K"


def database(named: str | None) -> str:
    """Return the database alias of the option ``--database``, or the alias that the router chooses.

    Raises CommandError if there is no such database, or if it lacks tables of the bus.
    """
    alias = named or default_alias()
    if alias not in connections:
        raise CommandError(f"there is no database {alias!r}{did_you_mean(alias, connections)}")
    _require_tables(alias)
    return alias


def _require_tables(alias: str) -> None:
    try:
        present = connections[alias].introspection.table_names()
    except OperationalError:
        # The database is down. The worker waits for the database; any other command raises the
        # error at its first query.
        return
    models = apps.get_app_config("django_eventbus").get_models()
    missing = sorted({each._meta.db_table for each in models}.difference(present))
    if missing:
        migrate = "manage.py migrate"
        if alias != DEFAULT_DB_ALIAS:
            migrate += f" --database {alias}"
        raise CommandError(
            f"the database {alias!r} lacks tables of the event bus "
            f"({missing[0]} is missing): run {migrate}"
        )


#: Options that Django gives to every command, as arguments of ``add_argument``.
DJANGO_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--version",), {"action": "version", "version": get_version()}),
    (("-v", "--verbosity"), {"type": int, "choices": range(4)}),
    (("--settings",), {}),
    (("--pythonpath",), {}),
    (("--traceback",), {"action": "store_true"}),
    (("--no-color",), {"action": "store_true"}),
    (("--force-color",), {"action": "store_true"}),
    (("--skip-checks",), {"action": "store_true"}),
)


def accept_django_options(action: ArgumentParser) -> None:
    """Accept Django's options also after an action: ``dead_events list --traceback``.

    The options have no default in the parser of the action. A default would overwrite the value
    that the user passed before the action.
    """
    for flags, arguments in DJANGO_OPTIONS:
        action.add_argument(*flags, default=SUPPRESS, help=SUPPRESS, **arguments)


def period(text: str) -> timedelta:
    found = re.fullmatch("([0-9]{1,9})([dhm]?)", text)
    length = int(found[1]) * UNITS[found[2] or "d"] if found else None
    if length is None or length > OLDEST:
        raise ArgumentTypeError(
            f"{text!r} is not a period; give days, hours or minutes: 30d, 12h, 90m (30 means 30d)"
        )
    return length


def number(least: int, most: int = LARGEST_NUMBER) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch("[0-9]{1,12}", text) or not least <= int(text) <= most:
            raise ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return read


def event_id(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not an event id, which looks like 01890a5d-ac96-774b-bcce-b302099a8057"
        ) from None


def add_confirmation(parser: ArgumentParser) -> None:
    """Add the options ``--dry-run`` and ``--yes`` to a command that destroys data."""
    parser.add_argument("--dry-run", action="store_true", help="only count the events")
    parser.add_argument(
        "--yes",
        action="store_true",
        help="do not ask for confirmation; required without a terminal",
    )


def confirmed(question: str, *, yes: bool) -> bool:
    """Return whether ``--yes`` was given or the user answered yes."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise CommandError(f"{question} Not a terminal, so there is no prompt: pass --yes.")
    try:
        answer = input(f"{question} [y/N] ")
    except (EOFError, KeyboardInterrupt):
        return False
    return answer.strip().lower() in ("y", "yes")


def purge_confirmed(what: str, *, yes: bool) -> bool:
    return confirmed(f"Delete {what} permanently?", yes=yes)


def progress(stdout: Any, of_what: str) -> Callable[[int], None]:
    """Return a function that shows ``2,000 of 5,000 purged …``, but only on a terminal."""
    if not stdout.isatty():
        return lambda done: None

    def show(done: int) -> None:
        stdout.write(f"{CLEAR_LINE}{done:,} {of_what} …", ending="")
        stdout.flush()

    return show


def conclude(stdout: Any, text: str) -> None:
    """Write the result in place of the progress line."""
    stdout.write(f"{CLEAR_LINE if stdout.isatty() else ''}{text}")
