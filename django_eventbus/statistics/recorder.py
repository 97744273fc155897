"""Count the work of a worker process by queue and handler: per minute, and in total.

Committed settlements are counted in memory. The counts are written to the database every few
seconds, and when the worker ends. A worker that is killed loses the statistics of its last few
seconds, but no events.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import NamedTuple

from django.db import Error

from django_eventbus.conf import settings
from django_eventbus.counters.counting import WRITE_EVERY, ProcessCounters
from django_eventbus.counters.process import counters_of_process
from django_eventbus.errors import failures
from django_eventbus.events import uuid7
from django_eventbus.logs import about
from django_eventbus.models import EVENTS, RUNS, STARTS, MinuteStatistics
from django_eventbus.outcomes.event_run import Outcome
from django_eventbus.outcomes.starts import first_start
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.schema.deliveries import DEAD, DISCARDED, DONE, HANDED_OFF, RETRY
from django_eventbus.schema.histograms import COLUMNS, add_to
from django_eventbus.store import UNCOUNTED, Series, Settlement, Store, is_outage

logger = logging.getLogger(__name__)

DELETE_EVERY = 60.0

#: The state of a message to an executor that was ignored.
IGNORED = "ignored"
#: The column that counts each state of a delivery, of an event or of a message.
_COLUMN_OF = {
    DONE: "done",
    RETRY: "retried",
    DEAD: "dead",
    DISCARDED: "discarded",
    HANDED_OFF: "handed_off",
    IGNORED: "ignored_messages",
}

#: A committed settlement with the outcomes of its handler calls. It is a tuple, because creating an
#: instance of a class for every event would cost more than the counting.
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


class StatisticsRecorder:
    """The statistics of one worker process, shared by its threads."""

    def __init__(self, worker_id: uuid.UUID, counters: ProcessCounters | None = None) -> None:
        self.worker_id = worker_id
        self.counters = ProcessCounters() if counters is None else counters
        self._counts: dict[_Row, _Counts] = {}
        self._unwritten: set[_Row] = set()
        self._lock = threading.Lock()
        #: Only one thread writes at a time, so that older totals do not replace newer totals.
        self._writing = threading.Lock()
        self._write_at = time.monotonic() + WRITE_EVERY
        self._delete_at = time.monotonic()

    def count(self, queue: str, settled: Sequence[Settled]) -> None:
        """Count events of one claim that were committed together."""
        if not settled:
            return
        now = settled[0][0].database_epoch()
        ended: dict[str, list[float]] = defaultdict(list)
        runs: dict[tuple[str, str], list[float]] = defaultdict(list)
        hand_offs: Counter[str] = Counter()
        starts: list[float] = []
        for event, settlement, outcomes in settled:
            if outcomes and not event.is_started:
                event.is_started = True
                if (start := first_start(event, outcomes)) is not None:
                    starts.append(start)
            state = _state(settlement, outcomes)
            ended[state].append(event.age(now))
            if state == UNCOUNTED and settlement.hand_off is not None:
                hand_offs[settlement.hand_off.handler] += 1
            for outcome in outcomes:
                runs[outcome.handler, outcome.state].append(outcome.seconds)
        ended.pop(UNCOUNTED, None)
        postponed = ended.pop(RETRY, ())
        minute = int(now // 60)
        with self._lock:
            self._row(minute, queue, "").states[RETRY] += len(postponed)
            for state, seconds in ended.items():
                self._add(minute, queue, "", state, seconds)
            for (handler, state), seconds in runs.items():
                self._add(minute, queue, handler, state, seconds)
            for handler, count in hand_offs.items():
                self._row(minute, queue, handler).states[HANDED_OFF] += count
        self._count_totals(queue, ended, runs, starts)
        if postponed:
            self.counters.add(Series(EVENTS, queue), retried=len(postponed))
        for handler, count in hand_offs.items():
            self.counters.add(Series(RUNS, queue, handler), handed_off=count)

    def _count_totals(
        self,
        queue: str,
        ended: Mapping[str, list[float]],
        runs: Mapping[tuple[str, str], list[float]],
        starts: list[float],
    ) -> None:
        for state, seconds in ended.items():
            self.counters.add_durations(Series(EVENTS, queue), seconds, _COLUMN_OF[state])
        for (handler, state), seconds in runs.items():
            self.counters.add_durations(Series(RUNS, queue, handler), seconds, _COLUMN_OF[state])
        if starts:
            self.counters.add_durations(Series(STARTS, queue), starts)

    def count_lost(self, queue: str, number: int) -> None:
        """Count events whose claim was lost to another worker."""
        self.counters.add(Series(EVENTS, queue), lost=number)

    def count_ignored(self, store: Store, queue: str = "") -> None:
        """Count a message that was ignored, and write the count. Database errors are only logged.

        ``queue`` must be a queue of the project: the content of a message is not trusted.
        """
        with _logging_errors(store):
            minute = int(store.read_clock().timestamp() // 60)
            with self._lock:
                self._row(minute, queue, "").states[IGNORED] += 1
            self.counters.add(Series(EVENTS, queue), ignored_messages=1)
            self.write(store)

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
        """Write the counts if WRITE_EVERY has passed and no other thread is writing them.

        After an error, the counts are kept and written later. Only the error of a database outage
        is raised; other database errors are logged.
        """
        if time.monotonic() < self._write_at or not self._writing.acquire(blocking=False):
            return
        try:
            self._write_at = time.monotonic() + WRITE_EVERY
            self._write(store)
            if time.monotonic() >= self._delete_at:
                # If rows were deleted, more old rows may exist. The next write deletes them.
                more = store.delete_old_statistics() + store.fold_counters() > 0
                self._delete_at = time.monotonic() + (0 if more else DELETE_EVERY)
        except Error as error:
            if is_outage(error):
                raise
            _log_error(error)
        finally:
            self._writing.release()

    def write(self, store: Store) -> None:
        """Write the unwritten counts when the worker ends. Database errors are only logged."""
        with self._writing, _logging_errors(store):
            self._write(store)

    def _write(self, store: Store) -> None:
        self._write_minutes(store)
        self.counters.write(store)

    def _write_minutes(self, store: Store) -> None:
        with self._lock:
            rows = [self._as_model(row) for row in sorted(self._unwritten)]
            written, self._unwritten = self._unwritten, set()
        if not rows:
            return
        try:
            store.write_statistics(rows)
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

    def _as_model(self, row: _Row) -> MinuteStatistics:
        counts = self._counts[row]
        return MinuteStatistics(
            namespace=settings.NAMESPACE,
            minute=datetime.fromtimestamp(row.minute * 60, UTC),
            worker_id=self.worker_id,
            queue=row.queue,
            handler=row.handler,
            seconds=counts.seconds,
            **{_COLUMN_OF[state]: number for state, number in counts.states.items()},
            **dict(zip(COLUMNS, counts.histogram, strict=True)),
        )


def recorder_of_process(using: str) -> StatisticsRecorder:
    """Return the recorder of this process for a database.

    It is for a process that registers as another worker for each message. With a recorder per
    message, the statistics would have rows for each message instead of each minute.
    """
    return _recorder(os.getpid(), using)


@cache
def _recorder(process: int, using: str) -> StatisticsRecorder:
    # A forked process needs a recorder of its own. Otherwise it would replace the totals that its
    # parent has written, and the locks of the parent may be locked forever.
    return StatisticsRecorder(uuid7(), counters_of_process(using))


def _state(settlement: Settlement, outcomes: Sequence[Outcome]) -> str:
    state = settlement.counts_as
    if state == RETRY and not any(outcome.state == RETRY for outcome in outcomes):
        return UNCOUNTED  # No call failed. The event waits for another reason, such as a hold.
    return state


@contextmanager
def _logging_errors(store: Store) -> Iterator[None]:
    """Log database errors of the block instead of raising them."""
    try:
        yield
    except Error as error:
        _log_error(error)
        if not store.connection.in_atomic_block:
            # The session may be broken. Later statements open a new connection.
            store.connection.close()


def _log_error(error: Error) -> None:
    logger.warning(
        "the statistics of this worker could not be written: %s",
        failures.in_a_line(error),
        extra=about(),
    )
