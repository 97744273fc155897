"""Count in memory, and write the counts to the database."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from django_eventbus.events import uuid7
from django_eventbus.schema.histograms import COLUMNS, add_to
from django_eventbus.store import COUNTED, FOLD_AFTER, Series, Store

#: Seconds between two regular writes of one process.
WRITE_EVERY = 5.0

_PLACE = {name: place for place, name in enumerate(COUNTED)}
_SECONDS = _PLACE["seconds"]
_HISTOGRAM = _PLACE[COLUMNS[0]]


class ProcessCounters:
    """The counts of this process for one database, shared by its threads.

    ``_added`` has the numbers since the last write. ``_written`` has the totals that the rows of
    ``source`` contain.
    """

    def __init__(self) -> None:
        self.source = uuid7()
        self._added: dict[Series, list[float]] = {}
        self._written: dict[Series, list[float]] = {}
        self._lock = threading.Lock()
        #: Only one thread writes at a time, so that older totals do not replace newer totals.
        self._writing = threading.Lock()
        self._write_at = time.monotonic()
        self._written_at = _clocks()

    def add(self, series: Series, **numbers: float) -> None:
        """Add numbers to columns of ``EventCounter``."""
        with self._lock:
            counts = self._counts(series)
            for column, number in numbers.items():
                counts[_PLACE[column]] += number

    def add_durations(self, series: Series, seconds: list[float], column: str = "") -> None:
        """Add durations to the sum and the histogram, and their number to ``column``."""
        histogram = [0] * len(COLUMNS)
        add_to(histogram, seconds)
        total = sum(seconds)
        with self._lock:
            counts = self._counts(series)
            if column:
                counts[_PLACE[column]] += len(seconds)
            counts[_SECONDS] += total
            for place, number in enumerate(histogram, _HISTOGRAM):
                counts[place] += number

    def _counts(self, series: Series) -> list[float]:
        found = self._added.get(series)
        if found is None:
            found = self._added[series] = [0] * len(COUNTED)
        return found

    @property
    def has_counts(self) -> bool:
        """Whether there are counts to write."""
        return bool(self._added)

    @property
    def is_due(self) -> bool:
        """Whether there are counts to write, and WRITE_EVERY has passed since the last write."""
        return self.has_counts and time.monotonic() >= self._write_at

    def postpone(self, seconds: float) -> None:
        self._write_at = time.monotonic() + seconds

    def write(self, store: Store) -> None:
        """Write all counts in one statement. After an error, the counts are kept."""
        with self._writing:
            self.postpone(WRITE_EVERY)
            with self._lock:
                added, self._added = self._added, {}
            if not added:
                return
            try:
                self._write(store, added)
            except BaseException:
                with self._lock:
                    self._added = _summed(added, self._added)
                raise

    def _write(self, store: Store, added: Mapping[Series, Sequence[float]]) -> None:
        now = _clocks()
        if max(b - a for a, b in zip(self._written_at, now, strict=True)) > FOLD_AFTER / 2:
            # The rows of this source may have been folded, or may be folded soon. If they were
            # written again, their numbers would be counted twice.
            self.source, self._written = uuid7(), {}
        totals = _summed(added, {each: self._written.get(each, _NOTHING) for each in added})
        store.write_counters(self.source, totals)
        self._written |= totals
        self._written_at = now


_NOTHING = (0,) * len(COUNTED)


def _summed(
    one: Mapping[Series, Sequence[float]], other: Mapping[Series, Sequence[float]]
) -> dict[Series, list[float]]:
    return {
        each: [
            a + b for a, b in zip(one.get(each, _NOTHING), other.get(each, _NOTHING), strict=True)
        ]
        for each in (one.keys() | other.keys())
    }


def _clocks() -> tuple[float, float]:
    """Return two clocks: one continues while a machine is suspended, one is never set back."""
    return time.time(), time.monotonic()
