"""``manage.py event_status``: the status of the bus, with an exit code for monitoring."""

from __future__ import annotations

import contextlib
import json
import operator
import re
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import Any, NamedTuple

from django.core.management.base import BaseCommand, CommandError
from django.db import Error, connections

from django_eventbus import status
from django_eventbus.conf import settings
from django_eventbus.errors import failures
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.errors.text import one_line
from django_eventbus.management.console import database
from django_eventbus.statistics import problems
from django_eventbus.statistics.problems import Problem
from django_eventbus.status import COUNTED_UP_TO, METRICS, Status, in_words, shown_count

#: The exit code if a condition of --fail-if is met; monitoring systems read 2 as "critical".
FAILED = 2
#: The exit code of any other failure, for example an unknown option.
MISTAKEN = 1
SECONDS = ("lag", "p50", "p95")
WATCH_EVERY = 2.0
#: Moves the cursor to the first line of the terminal, and clears the terminal.
CLEAR_SCREEN = "\x1b[H\x1b[2J"

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*(\d+(?:\.\d+)?)\s*")


class Condition(NamedTuple):
    name: str
    comparison: str
    limit: float

    def is_met(self, figures: dict[str, Any]) -> bool:
        """Return whether the condition is met.

        A metric without a value meets no condition. Some metrics, such as the failure rate, have no
        value if no event has ended recently.
        """
        value = figures[self.name]
        return value is not None and _COMPARISONS[self.comparison](value, self.limit)


def conditions(text: str) -> list[Condition]:
    return [_condition(each) for each in text.split(",")]


def _condition(text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ArgumentTypeError(f'{text.strip()!r} is not a condition; write "dead>0" or "lag>=60"')
    name, comparison, limit = found.groups()
    if name not in METRICS:
        raise ArgumentTypeError(f"there is no metric {name!r}{did_you_mean(name, METRICS)}")
    return Condition(name, comparison, float(limit))


class Command(BaseCommand):
    help = "Show the statistics of the event bus and what needs attention."
    _understood = False

    def run_from_argv(self, argv: list[str]) -> None:
        """Exit with ``MISTAKEN`` after a usage error.

        argparse would exit with 2, which monitoring systems read as an alarm.
        """
        try:
            super().run_from_argv(argv)
        except SystemExit as ended:
            if self._understood or not ended.code:
                raise
            sys.exit(MISTAKEN)

    def execute(self, *args: Any, **options: Any) -> str | None:
        self._understood = True
        return super().execute(*args, **options)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--format",
            choices=("table", "json"),
            default="table",
            help="table (default) or json, one object",
        )
        parser.add_argument(
            "--fail-if",
            type=conditions,
            default=[],
            metavar="CONDITIONS",
            help=f'exit with code {FAILED} if a condition is met: "dead>0,lag>60"',
        )
        parser.add_argument(
            "--watch",
            action="store_true",
            help=f"show the status again every {WATCH_EVERY:g} seconds until Ctrl-C",
        )
        parser.add_argument("--database", help="alias of the database that contains the events")

    def handle(self, *args: Any, **options: Any) -> None:
        using = database(options["database"])
        if options["watch"]:
            # Ctrl-C is the normal end of this loop.
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    self._refresh(using, options)
                    time.sleep(WATCH_EVERY)
        else:
            seen, found = _look(using)
            is_json = options["format"] == "json"
            self.stdout.write(_as_json(seen, found, 2) if is_json else _as_table(seen, found))
            self._check(seen, options["fail_if"])

    def _refresh(self, using: str, options: dict[str, Any]) -> None:
        """Show the status once more. A database error does not end the command."""
        try:
            seen, found = _look(using)
        except Error as error:
            connections[using].close()
            reason = failures.in_a_line(error)
            self.stderr.write(f"database error, retrying in {WATCH_EVERY:g} s: {reason}")
            return
        if options["format"] == "json":
            self.stdout.write(_as_json(seen, found))
        else:
            clear = CLEAR_SCREEN if self.stdout.isatty() else ""
            at = f"{seen.at:%Y-%m-%d %H:%M:%S %Z}"
            self.stdout.write(f"{clear}{at}\n\n{_as_table(seen, found)}\n")
        self.stdout.flush()
        self._check(seen, options["fail_if"])

    @staticmethod
    def _check(seen: Status, conditions: list[Condition]) -> None:
        """Raise CommandError if a condition is met."""
        met = [each for each in conditions if each.is_met(seen.metrics)]
        if met:
            reasons = (
                f"{name} is {shown(name, seen.metrics[name])} ({name} {comparison} {limit:g})"
                for name, comparison, limit in met
            )
            raise CommandError("; ".join(reasons), returncode=FAILED)


def _look(using: str) -> tuple[Status, list[Problem]]:
    seen = status.look(using=using)
    return seen, problems.find_problems(seen)


def _as_json(seen: Status, found: list[Problem], indent: int | None = None) -> str:
    handlers = {
        each.name: {
            "runs": each.runs.total,
            "failed": each.runs.failed,
            "dead": each.runs.dead,
            "p50": each.runs.p50,
            "p95": each.runs.p95,
            "executor": each.executor,
            "hand_offs": each.runs.handed_off,
            "handed_off": each.handed_off,
        }
        for each in seen.handlers
    }
    executors = {
        each.name: {
            "unavailable_since": _moment(each.unavailable_since),
            "next_attempt_at": _moment(each.next_attempt_at),
            "held": each.held,
        }
        for each in seen.executors
    }
    record = {
        "at": seen.at.isoformat(),
        "counted_up_to": COUNTED_UP_TO,
        **seen.metrics,
        "handlers": handlers,
        "executors": executors,
        "handoff_window": settings.HANDOFF_WINDOW,
        "needs_attention": [asdict(each) for each in found],
    }
    return json.dumps(record, indent=indent, ensure_ascii=False)


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _as_table(seen: Status, found: list[Problem]) -> str:
    width = max(map(len, METRICS))
    lines = [f"{name:<{width}}  {shown(name, value)}" for name, value in seen.metrics.items()]
    handed_off = [
        f"- {one_line(each.name)} ({each.executor}): {shown_count(each.handed_off)} of "
        f"{settings.HANDOFF_WINDOW:,}"
        for each in seen.handlers
        if each.executor
    ]
    if handed_off:
        lines += ["", "Handed off, of at most HANDOFF_WINDOW events:", *handed_off]
    if found:
        lines += ["", "Needs attention:", *(f"- {each.text}" for each in found)]
    return "\n".join(lines)


def shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name in SECONDS:
        return in_words(value)
    if name == "failure_rate":
        return f"{value:.1f} %"
    return shown_count(value) if isinstance(value, int) else f"{value:.1f}"
