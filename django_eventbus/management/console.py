"""What the commands share: reading options, asking a person, showing how far they have come."""

from __future__ import annotations

import re
import sys
import uuid
from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError
from django.db import connections

from django_eventbus.registry import did_you_mean
from django_eventbus.store import default_alias

UNITS = {"d": timedelta(days=1), "h": timedelta(hours=1), "m": timedelta(minutes=1)}
OLDEST = timedelta(days=36_500)
LARGEST_NUMBER = 1_000_000
CLEAR_LINE = "\r\x1b[2K"


def database(named: str | None) -> str:
    """The alias an option named, or the router's choice."""
    alias = named or default_alias()
    if alias not in connections:
        raise CommandError(f"there is no database {alias!r}{did_you_mean(alias, connections)}")
    return alias


def period(text: str) -> timedelta:
    found = re.fullmatch("([0-9]{1,9})([dhm]?)", text)
    length = int(found[1]) * UNITS[found[2] or "d"] if found else None
    if length is None or length > OLDEST:
        raise ArgumentTypeError(
            f"{text!r} is not a time; give days, hours or minutes: 30d, 12h, 90m (30 means 30d)"
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


def confirmed(what: str) -> bool:
    """Whether a person agrees to a purge."""
    if not sys.stdin.isatty():
        raise CommandError(f"{what} would be purged. Nobody is there to confirm it: give --yes.")
    try:
        answer = input(f"Delete {what} for good? [y/N] ")
    except (EOFError, KeyboardInterrupt):
        return False
    return answer.strip().lower() in ("y", "yes")


def progress(stdout: Any, of_what: str) -> Callable[[int], None]:
    """Tells a person ``2,000 of 5,000 purged …``; a pipe gets only the conclusion."""
    if not stdout.isatty():
        return lambda done: None

    def show(done: int) -> None:
        stdout.write(f"{CLEAR_LINE}{done:,} {of_what} …", ending="")
        stdout.flush()

    return show


def conclude(stdout: Any, text: str) -> None:
    stdout.write(f"{CLEAR_LINE if stdout.isatty() else ''}{text}")
