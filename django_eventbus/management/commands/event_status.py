"""``manage.py event_status``: the figures of the bus, and an exit code for those who watch it."""

from __future__ import annotations

import json
import operator
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

from django.core.management.base import BaseCommand, CommandError

from django_eventbus import findings, status
from django_eventbus.findings import Finding
from django_eventbus.management.console import database
from django_eventbus.registry import did_you_mean
from django_eventbus.status import COUNTED_UP_TO, NAMES, Status, in_words, shown_count

#: What monitors take for "critical"; 1 is a command that could not be understood.
FAILED = 2
SECONDS = ("lag", "p50", "p95")

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
        """What is not known, because nothing happened, is no reason to fail."""
        value = figures[self.name]
        return value is not None and _COMPARISONS[self.comparison](value, self.limit)


def conditions(text: str) -> list[Condition]:
    return [_condition(each) for each in text.split(",")]


def _condition(text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ArgumentTypeError(f'{text.strip()!r} is not like "dead>0" or "lag>=60"')
    name, comparison, limit = found.groups()
    if name not in NAMES:
        raise ArgumentTypeError(f"there is no figure {name!r}{did_you_mean(name, NAMES)}")
    return Condition(name, comparison, float(limit))


class Command(BaseCommand):
    help = "Show how the event bus is doing, and what needs attention."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--format",
            choices=("table", "json"),
            default="table",
            help="a table for people (the default), or one JSON object",
        )
        parser.add_argument(
            "--fail-if",
            type=conditions,
            default=[],
            metavar="CONDITIONS",
            help=f'end with exit code {FAILED} if one of them is met: "dead>0,lag>60"',
        )
        parser.add_argument("--database", help="the alias that holds the bus")

    def handle(self, *args: Any, **options: Any) -> None:
        using = database(options["database"])
        seen = status.look(using=using)
        found = findings.of(seen)
        self.stdout.write(
            _as_json(seen, found) if options["format"] == "json" else _as_table(seen, found)
        )
        met = [each for each in options["fail_if"] if each.is_met(seen.figures)]
        if met:
            reasons = (
                f"{name} is {shown(name, seen.figures[name])} ({name} {comparison} {limit:g})"
                for name, comparison, limit in met
            )
            raise CommandError("; ".join(reasons), returncode=FAILED)


def _as_json(seen: Status, found: list[Finding]) -> str:
    handlers = {
        each.name: {
            "runs": each.runs.total,
            "failed": each.runs.failed,
            "dead": each.runs.dead,
            "p50": each.runs.p50,
            "p95": each.runs.p95,
        }
        for each in seen.handlers
    }
    told = {
        "at": seen.at.isoformat(),
        "counted_up_to": COUNTED_UP_TO,
        **seen.figures,
        "handlers": handlers,
        "needs_attention": [asdict(each) for each in found],
    }
    return json.dumps(told, indent=2, ensure_ascii=False)


def _as_table(seen: Status, found: list[Finding]) -> str:
    width = max(map(len, NAMES))
    lines = [f"{name:<{width}}  {shown(name, value)}" for name, value in seen.figures.items()]
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
