"""Counters that only increase. Each process writes only the rows of its own source."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from django.db.models import F, QuerySet, Sum

from django_eventbus.conf import settings
from django_eventbus.models import FOLDED, EventCounter
from django_eventbus.schema.histograms import COLUMNS
from django_eventbus.store.rows import Rows, retried

#: The columns with numbers, in the order of the lists of numbers in this module.
COUNTED = (
    *("done", "retried", "dead", "discarded", "handed_off", "ignored_messages", "lost"),
    *("published", "dropped", "coalesced", "seconds"),
    *COLUMNS,
)
#: The rows of a process are folded if the process has not written them for this number of seconds.
FOLD_AFTER = 3600.0
FOLD_CHUNK = 1000

_IDENTITY = ("namespace", "source", "measure", "queue", "handler", "event_type")

Numbers = Sequence[float]


class Series(NamedTuple):
    """What a row counts, without the process that counted it."""

    measure: str
    queue: str
    handler: str = ""
    event_type: str = ""


class Counters(Rows):
    """Counters of all processes. A reader sums the rows of all sources in one statement."""

    @property
    def counters(self) -> QuerySet[EventCounter]:
        return EventCounter.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    @retried
    def write_counters(self, source: uuid.UUID, totals: Mapping[Series, Numbers]) -> None:
        """Insert or replace rows of one source in one statement.

        A row has the totals of its source, not increments, so writing it a second time after a lost
        connection is harmless.
        """
        self._upsert_counters(source, totals)

    def read_counters(self) -> dict[Series, list[float]]:
        """Return the sums over all sources.

        One statement reads all rows, so it sees each fold completely or not at all.
        """
        sums = {f"sum_{name}": Sum(F(name)) for name in COUNTED}
        rows = self.counters.order_by().values_list(*Series._fields).annotate(**sums)
        width = len(Series._fields)
        return {Series(*row[:width]): [each or 0 for each in row[width:]] for row in rows}

    @retried
    def fold_counters(self) -> int:
        """Add a chunk of rows of ended processes to the rows of ``FOLDED``; return how many.

        Rows that another transaction folds at the same time are skipped.
        """
        ended = self.counters.exclude(source=FOLDED).filter(written_at__lt=self.after(-FOLD_AFTER))
        if not ended.exists():
            return 0
        with self.atomic():
            rows = list(self.locked(ended.order_by("id"))[:FOLD_CHUNK])
            added: dict[Series, list[float]] = defaultdict(lambda: [0] * len(COUNTED))
            for row in rows:
                series = _series(row)
                added[series] = _sum(added[series], _numbers(row))
            self._add_to_folded(added)
            self.counters.filter(pk__in=[row.pk for row in rows]).delete()
        return len(rows)

    def _add_to_folded(self, added: Mapping[Series, Numbers]) -> None:
        """Add numbers to the rows of ``FOLDED`` in the open transaction.

        The rows are inserted and locked in the order of their names, so that two transactions that
        fold at the same time wait for each other and do not deadlock.
        """
        names = sorted(added)
        EventCounter.objects.using(self.using).bulk_create(
            [_row(FOLDED, each) for each in names], ignore_conflicts=True
        )
        folded = self.waiting_lock(self.counters.filter(source=FOLDED).order_by(*Series._fields))
        before = {_series(row): _numbers(row) for row in folded}
        self._upsert_counters(FOLDED, {each: _sum(before[each], added[each]) for each in names})

    def _upsert_counters(self, source: uuid.UUID, totals: Mapping[Series, Numbers]) -> None:
        targeted = self.connection.features.supports_update_conflicts_with_target
        EventCounter.objects.using(self.using).bulk_create(
            [
                _row(source, each, **dict(zip(COUNTED, totals[each], strict=True)))
                for each in sorted(totals)
            ],
            update_conflicts=True,
            update_fields=("written_at", *COUNTED),
            unique_fields=_IDENTITY if targeted else None,
        )


def _row(source: uuid.UUID, series: Series, **numbers: Any) -> EventCounter:
    return EventCounter(namespace=settings.NAMESPACE, source=source, **series._asdict(), **numbers)


def _series(row: EventCounter) -> Series:
    return Series(*(getattr(row, name) for name in Series._fields))


def _numbers(row: EventCounter) -> list[float]:
    return [getattr(row, name) for name in COUNTED]


def _sum(one: Numbers, other: Numbers) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)]
