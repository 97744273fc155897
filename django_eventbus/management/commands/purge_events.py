"""``manage.py purge_events``: keep the log at a size, in batches, for cron as for people."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand

from django_eventbus import retention
from django_eventbus.management.console import (
    conclude,
    confirmed,
    database,
    number,
    period,
    progress,
)
from django_eventbus.store import store_for

LARGEST_BATCH = 10_000
LARGEST_LIMIT = 10**12


class Command(BaseCommand):
    help = "Delete events from the log that ended long ago. Dead letters only if asked to."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--older-than",
            type=period,
            required=True,
            help="what ended so long ago or longer: 30d, 12h, 90m, or days",
        )
        parser.add_argument(
            "--status",
            choices=retention.STATUSES,
            default=retention.COMPLETED,
            help="completed (the default); dead letters, all or one kind of them, are asked about",
        )
        parser.add_argument("--dry-run", action="store_true", help="only say how many it would be")
        parser.add_argument("--yes", action="store_true", help="do not ask about dead letters")
        parser.add_argument(
            "--batch-size",
            type=number(1, LARGEST_BATCH),
            default=retention.BATCH,
            help=f"events per transaction (default: {retention.BATCH:,})",
        )
        parser.add_argument(
            "--limit", type=number(1, LARGEST_LIMIT), help="the most to delete in this run"
        )
        parser.add_argument(
            "--format",
            choices=("text", "json"),
            default="text",
            help="a sentence for people (the default), or one JSON object",
        )
        parser.add_argument("--database", help="the alias that holds the bus")

    def handle(self, *args: Any, **options: Any) -> None:
        using = database(options["database"])
        # A moment, not an age: what is purged is what was counted and asked about.
        ended_by = store_for(using).read_clock() - options["older_than"]
        chosen = Chosen(ended_by=ended_by, status=options["status"], using=using)
        if options["dry_run"]:
            count = min(chosen.count(), options["limit"] or LARGEST_LIMIT)
            self._tell(chosen, count, "would be purged", options)
        elif self._may_purge(chosen, options):
            self._tell(chosen, self._purge(chosen, options), "purged", options)
        else:
            self._tell(chosen, 0, "purged", options)

    @staticmethod
    def _may_purge(chosen: Chosen, options: dict[str, Any]) -> bool:
        if not chosen.are_dead or options["yes"]:
            return True
        count = chosen.count()
        return not count or confirmed(chosen.in_words(count))

    def _purge(self, chosen: Chosen, options: dict[str, Any]) -> int:
        of_what = "purged"
        if self.stdout.isatty():
            # Only a person waits for the end, and counting a large log takes a while.
            of_what = f"of {min(chosen.count(), options['limit'] or LARGEST_LIMIT):,} purged"
        return retention.purge(
            chosen.ended_by,
            status=chosen.status,
            limit=options["limit"],
            batch_size=options["batch_size"],
            using=chosen.using,
            progress=progress(self.stdout, of_what),
        )

    def _tell(self, chosen: Chosen, count: int, done: str, options: dict[str, Any]) -> None:
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
        conclude(self.stdout, f"{chosen.in_words(count)} {done}.")
        if kept:
            letters = "dead letter is" if kept == 1 else "dead letters are"
            self.stdout.write(f"{kept:,} {letters} as old, and kept: see --status.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which events are meant."""

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
        """``1,204 completed events that ended by 2026-10-17 02:45:57 UTC``."""
        name = "dead letter" if self.are_dead else "completed event"
        many = f"{count:,} {name}{'' if count == 1 else 's'}" if count else f"No {name}s"
        if self.status not in (retention.COMPLETED, retention.DEAD):
            many += f" of status {self.status.upper()}"
        return f"{many} that ended by {self.ended_by:%Y-%m-%d %H:%M:%S %Z}"
