"""``manage.py purge_events``: delete old events from the log, in batches."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand

from django_eventbus import retention
from django_eventbus.management.console import (
    add_confirmation,
    conclude,
    database,
    number,
    period,
    progress,
    purge_confirmed,
)
from django_eventbus.store import store_for

LARGEST_BATCH = 10_000
LARGEST_LIMIT = 10**12


class Command(BaseCommand):
    help = "Delete old events from the log; dead letters only with --status."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--older-than",
            type=period,
            required=True,
            help="events that ended at least this long ago: 30d, 12h, 90m; a plain number is days",
        )
        parser.add_argument(
            "--status",
            choices=retention.STATUSES,
            default=retention.COMPLETED,
            help="completed (default), dead for all dead letters, or one status of dead letters",
        )
        add_confirmation(parser)
        parser.add_argument(
            "--batch-size",
            type=number(1, LARGEST_BATCH),
            default=retention.BATCH,
            help=f"events per transaction (default: {retention.BATCH:,})",
        )
        parser.add_argument(
            "--limit", type=number(1, LARGEST_LIMIT), help="maximum number of events to delete"
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
        # Use a fixed time, so that events that reach the age after the confirmation are not purged.
        ended_by = store_for(using).read_clock() - options["older_than"]
        chosen = Chosen(ended_by=ended_by, status=options["status"], using=using)
        if options["dry_run"]:
            self._report(chosen, _count(chosen, options), "Would purge", options)
        elif self._may_purge(chosen, options):
            self._report(chosen, self._purge(chosen, options), "Purged", options)
        else:
            self._report(chosen, 0, "Purged", options)

    @staticmethod
    def _may_purge(chosen: Chosen, options: dict[str, Any]) -> bool:
        if options["yes"]:
            return True  # Only the prompt needs the count, which is slow for a large log.
        count = _count(chosen, options)
        return not count or purge_confirmed(chosen.in_words(count), yes=False)

    def _purge(self, chosen: Chosen, options: dict[str, Any]) -> int:
        # Only a terminal shows the total. Otherwise skip the count, which is slow for a large log.
        of_all = f"of {_count(chosen, options):,} " if self.stdout.isatty() else ""
        return retention.purge(
            chosen.ended_by,
            status=chosen.status,
            limit=options["limit"],
            batch_size=options["batch_size"],
            using=chosen.using,
            progress=progress(self.stdout, f"{of_all}purged"),
        )

    def _report(self, chosen: Chosen, count: int, verb: str, options: dict[str, Any]) -> None:
        kept = 0 if chosen.are_dead else chosen.dead_of_that_age()
        if options["format"] == "json":
            record = {
                "status": chosen.status,
                "ended_by": chosen.ended_by.isoformat(),
                "dry_run": options["dry_run"],
                "purged": count,
                "dead_letters_kept": kept,
            }
            conclude(self.stdout, json.dumps(record))
            return
        conclude(self.stdout, f"{verb} {chosen.in_words(count)}.")
        if kept:
            letters = "dead letter" if kept == 1 else "dead letters"
            self.stdout.write(
                f"Kept {kept:,} {letters} of the same age: pass --status dead to purge them."
            )


def _count(chosen: Chosen, options: dict[str, Any]) -> int:
    return min(chosen.count(), options["limit"] or LARGEST_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The events that the options select."""

    ended_by: datetime
    status: str
    using: str

    @property
    def are_dead(self) -> bool:
        return self.status != retention.COMPLETED

    def count(self) -> int:
        return retention.ended(self.ended_by, status=self.status, using=self.using).count()

    def dead_of_that_age(self) -> int:
        return retention.ended(self.ended_by, status=retention.DEAD, using=self.using).count()

    def in_words(self, count: int) -> str:
        """Return a text: ``1,204 completed events that ended before 2026-10-17 02:45:57 UTC``."""
        name = "dead letter" if self.are_dead else "completed event"
        many = f"{count:,} {name}{'' if count == 1 else 's'}" if count else f"no {name}s"
        if self.status not in (retention.COMPLETED, retention.DEAD):
            many += f" with the status {self.status.upper()}"
        return f"{many} that ended before {self.ended_by:%Y-%m-%d %H:%M:%S %Z}"
