"""``manage.py erase_events``: erase personal data from events, after a confirmation."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from django_eventbus import erasure
from django_eventbus.erasure import Erased
from django_eventbus.management.console import (
    add_confirmation,
    conclude,
    confirmed,
    database,
    number,
    progress,
)

LARGEST_BATCH = 10_000
TABLES = {"queued": "queued events", "completed": "completed events", "dead": "dead letters"}


class Command(BaseCommand):
    help = "Erase personal data from events in the queue, the log and the dead letters."

    def add_arguments(self, parser: ArgumentParser) -> None:
        chosen = parser.add_mutually_exclusive_group(required=True)
        chosen.add_argument("--key", help="erase events with this key")
        chosen.add_argument(
            "--field",
            type=_field,
            action="append",
            metavar="PATH=VALUE",
            help="erase events with this value in their payload: customer.email=ann@example.com; "
            "if given several times, all must match",
        )
        parser.add_argument(
            "--only",
            action="append",
            default=[],
            metavar="PATH",
            help="erase only this field of the payload; may be given several times",
        )
        add_confirmation(parser)
        parser.add_argument(
            "--batch-size",
            type=number(1, LARGEST_BATCH),
            default=erasure.BATCH,
            help=f"events per transaction (default: {erasure.BATCH:,})",
        )
        parser.add_argument(
            "--format",
            choices=("text", "json"),
            default="text",
            help="text (default) or json, one object",
        )
        parser.add_argument("--database", help="alias of the database that contains the events")

    def handle(self, *args: Any, **options: Any) -> None:
        using = database(options["database"])
        found = self._erase(options, using, dry_run=True)
        if options["format"] == "text":
            for name, label in TABLES.items():
                self.stdout.write(f"{label:<16}  {getattr(found, name):>9,}")
        if options["dry_run"] or not found.total:
            self._report(found, options)
        elif confirmed(_question(found.total), yes=options["yes"]):
            self._report(self._erase(options, using, of_all=found.total), options)
        else:
            self._report(Erased(), options)

    def _erase(
        self, options: dict[str, Any], using: str, *, dry_run: bool = False, of_all: int = 0
    ) -> Erased:
        shown = progress(self.stdout, "found" if dry_run else f"of {of_all:,} erased")
        try:
            return erasure.erase(
                key=options["key"],
                where=dict(options["field"] or ()),
                only=options["only"],
                dry_run=dry_run,
                batch_size=options["batch_size"],
                using=using,
                progress=shown,
            )
        except ValueError as error:
            raise CommandError(str(error)) from None

    def _report(self, erased: Erased, options: dict[str, Any]) -> None:
        dry_run = options["dry_run"]
        if options["format"] == "json":
            conclude(self.stdout, json.dumps({"dry_run": dry_run, **asdict(erased)}))
            return
        verb = "Would erase" if dry_run else "Erased"
        conclude(self.stdout, f"{verb} the data of {_count(erased.total)}.")
        if erased.skipped:
            self.stdout.write(
                f"Skipped {_count(erased.skipped)}: being handled. Run the command again later."
            )
        if erased.queued and not dry_run:
            self.stdout.write(
                "Queued events keep their keys until they end. Run the command again later."
            )


def _field(text: str) -> tuple[str, str]:
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise ArgumentTypeError(
            f"{text!r} is not PATH=VALUE, for example customer.email=ann@example.com"
        )
    return path, value


def _count(events: int) -> str:
    return f"{events:,} event{'' if events == 1 else 's'}"


def _question(count: int) -> str:
    return f"Erase the data of {_count(count)} permanently?"
