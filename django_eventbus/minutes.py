"""What a worker process did, counted by minute, queue and handler, and written now and then.

Counted when a settlement is committed, by the group, in memory; written every few seconds and when
the worker ends, in a statement of its own. Whoever kills a worker loses its last few seconds of
figures, and of nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from django.db import Error

from django_eventbus import failures
from django_eventbus.conf import settings
from django_eventbus.events import ClaimedEvent
from django_eventbus.histograms import COLUMNS, add_to
from django_eventbus.models import EventMinute, LogStatus
from django_eventbus.progress import DEAD, DISCARDED, DONE, RETRY, Outcome
from django_eventbus.store import Completed, Finished, Postponed, Settlement, Store, is_trouble

logger = logging.getLogger(__name__)

WRITE_EVERY = 5.0
FORGET_EVERY = 60.0

#: Of an event that goes on under its claim, or waits at a gate as before.
NOT_YET = ""
#: The column that counts each outcome of a run, and of an event.
_COLUMN_OF = {DONE: "done", RETRY: "retried", DEAD: "dead", DISCARDED: "discarded"}
_STATE_OF = {
    LogStatus.COMPLETED: DONE,
    LogStatus.COMPLETED_WITH_ERRORS: DEAD,
    LogStatus.FAILED: DEAD,
    LogStatus.DISCARDED: DISCARDED,
}


#: What was committed of one event, with the runs that led to it. Every event comes by here: a class
#: of its own would cost more than the counting.
Settled = tuple[ClaimedEvent, Settlement, Sequence[Outcome]]


class _Row(NamedTuple):
    minute: int
    queue: str
    handler: str


@dataclass(slots=True)
class _Counts:
    states: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COLUMN_OF, 0))
    seconds: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * len(COLUMNS))


class Minutes:
    """The figures of one worker process, shared by its threads."""

    def __init__(self, worker_id: uuid.UUID) -> None:
        self.worker_id = worker_id
        self._counts: dict[_Row, _Counts] = {}
        self._unwritten: set[_Row] = set()
        self._lock = threading.Lock()
        #: One at a time: an older state of a row must not be written after a newer one.
        self._writing = threading.Lock()
        self._write_at = time.monotonic() + WRITE_EVERY
        self._forget_at = time.monotonic()

    def count(self, queue: str, settled: Sequence[Settled]) -> None:
        """Events of one claim that were committed together, just now."""
        if not settled:
            return
        now = settled[0][0].database_epoch()
        ended: dict[str, list[float]] = defaultdict(list)
        runs: dict[tuple[str, str], list[float]] = defaultdict(list)
        for event, settlement, outcomes in settled:
            ended[_state(settlement, outcomes)].append(event.age(now))
            for outcome in outcomes:
                runs[outcome.handler, outcome.state].append(outcome.seconds)
        ended.pop(NOT_YET, None)
        postponed = ended.pop(RETRY, ())
        minute = int(now // 60)
        with self._lock:
            self._row(minute, queue, "").states[RETRY] += len(postponed)
            for state, seconds in ended.items():
                self._add(minute, queue, "", state, seconds)
            for (handler, state), seconds in runs.items():
                self._add(minute, queue, handler, state, seconds)

    def _add(self, minute: int, queue: str, handler: str, state: str, seconds: list[float]) -> None:
        counts = self._row(minute, queue, handler)
        counts.states[state] += len(seconds)
        counts.seconds += sum(seconds)
        add_to(counts.histogram, seconds)

    def _row(self, minute: int, queue: str, handler: str) -> _Counts:
        row = _Row(minute, queue, handler)
        self._unwritten.add(row)
        return self._counts.setdefault(row, _Counts())

    def write_if_due(self, store: Store) -> None:
        """Every few seconds, by whichever thread comes by. Raises only if the database is away:
        then it is written later, as all of it is still here."""
        if time.monotonic() < self._write_at or not self._writing.acquire(blocking=False):
            return
        try:
            self._write_at = time.monotonic() + WRITE_EVERY
            self._write(store)
            if time.monotonic() >= self._forget_at:
                # A full chunk was not all: the next time goes on.
                self._forget_at = time.monotonic() + (0 if store.forget_minutes() else FORGET_EVERY)
        except Error as error:
            if is_trouble(error):
                raise
            _complain(error)
        finally:
            self._writing.release()

    def write(self, store: Store) -> None:
        """All there is, because the worker ends."""
        with self._writing:
            try:
                self._write(store)
            except Error as error:
                _complain(error)
                if not store.connection.in_atomic_block:
                    store.connection.close()  # what the worker has still to say finds a new one

    def _write(self, store: Store) -> None:
        with self._lock:
            rows = [self._as_model(row) for row in sorted(self._unwritten)]
            written, self._unwritten = self._unwritten, set()
        if not rows:
            return
        try:
            store.write_minutes(rows)
        except Error:
            with self._lock:
                self._unwritten |= written
            raise
        with self._lock:
            latest = max(row.minute for row in self._counts)
            over = [row for row in self._counts if row.minute < latest - 1]
            for row in over:
                if row not in self._unwritten:
                    del self._counts[row]

    def _as_model(self, row: _Row) -> EventMinute:
        counts = self._counts[row]
        return EventMinute(
            namespace=settings.NAMESPACE,
            minute=datetime.fromtimestamp(row.minute * 60, UTC),
            worker_id=self.worker_id,
            queue=row.queue,
            handler=row.handler,
            seconds=counts.seconds,
            **{_COLUMN_OF[state]: number for state, number in counts.states.items()},
            **dict(zip(COLUMNS, counts.histogram, strict=True)),
        )


def _state(settlement: Settlement, outcomes: Sequence[Outcome]) -> str:
    if isinstance(settlement, Completed):
        return DONE
    if isinstance(settlement, Finished):
        return _STATE_OF[LogStatus(settlement.status)]
    # Of those that go back, some only wait for a gate: nothing has failed.
    failed = any(outcome.state == RETRY for outcome in outcomes)
    return RETRY if isinstance(settlement, Postponed) and failed else NOT_YET


def _complain(error: Error) -> None:
    logger.warning("the figures of this worker are not written: %s", failures.in_a_line(error))
