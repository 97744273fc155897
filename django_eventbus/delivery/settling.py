"""Settle events: write a settlement, then count it and send its signals.

All events are settled with this module: events of a group, events that run alone or outside of a
transaction, polled events, and events whose process was killed at a deadline. Only this module sets
aside events that cannot be read or settled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from django.db import transaction

from django_eventbus.conf import settings
from django_eventbus.delivery.batch import Batch
from django_eventbus.errors import failures
from django_eventbus.errors.failpoints import reached
from django_eventbus.exceptions import ClaimLostError, UnsettleableError
from django_eventbus.flow.admission import Admission
from django_eventbus.logs import about
from django_eventbus.outcomes.endings import unsettleable
from django_eventbus.outcomes.event_run import EventRun, Outcome
from django_eventbus.retries import RetryPolicy
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.schema.deliveries import DONE
from django_eventbus.signals import delivery_failed, delivery_succeeded, event_dead_lettered
from django_eventbus.statistics.recorder import Settled, StatisticsRecorder
from django_eventbus.store import (
    AT_ONCE,
    After,
    Finished,
    SetAside,
    Settlement,
    Store,
    is_outage,
    set_aside,
    through_outage,
)
from django_eventbus.tracing import spans

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Settler:
    """Settles the events of one thread.

    During a database outage, ``pause`` waits before each retry (see ``through_outage``). If
    ``pause`` is None, the caller owns the connection: the error of an outage is raised at once, and
    the connection is never closed here.
    """

    def __init__(
        self,
        store: Store,
        *,
        statistics: StatisticsRecorder | None = None,
        admission: Admission | None = None,
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        self.store = store
        self.statistics = statistics
        self.admission = admission
        self.pause = pause
        #: The time, in Unix nanoseconds, at which the last settlement began.
        self._began = 0

    # -- write

    def write(self, batch: Batch, settlements: Sequence[Settlement]) -> None:
        """Write settlements in the open transaction, together with the work of atomic handlers."""
        self._began = time.time_ns()
        self.store.settle(batch.token, [each for each in settlements if not each.is_on_disk])
        reached("settle.before_commit")

    def settle(self, batch: Batch, run: EventRun, settlement: Settlement) -> bool:
        """Settle one event in its own transaction. Return False if its claim was lost."""
        if not self._write_alone(batch, run.event, settlement):
            return False
        self.committed(batch, run, settlement)
        return True

    def end(self, batch: Batch, event: ClaimedEvent, verdict: Settlement) -> bool:
        """Settle an event for which no handler was called. Return False if its claim was lost."""
        if not self._write_alone(batch, event, verdict):
            return False
        if (tracer := spans.tracer()) is not None:
            tracer.settled([event], [], self._began)
        self._report(batch, event, verdict, ())
        return True

    def _write_alone(self, batch: Batch, event: ClaimedEvent, settlement: Settlement) -> bool:
        def write() -> None:
            with self.store.atomic():
                self.write(batch, [settlement])
            reached("settle.committed")

        try:
            self.through_outage(write)
        except ClaimLostError:
            batch.lost(event)
            return False
        return True

    def refuses(self, batch: Batch, settlement: Settlement) -> bool:
        """Return whether the database rejects the settlement in a new session too.

        If the new session accepts the settlement, a handler is guilty: the handler may have changed
        the role or the search path of the old session.
        """

        def try_to_settle() -> None:
            with self.store.atomic():
                self.store.settle(batch.token, [settlement])
                transaction.set_rollback(True, using=self.store.using)

        try:
            self.through_outage(try_to_settle)
        except UnsettleableError:
            return True
        except ClaimLostError:
            return False  # The caller detects the lost claim when it settles.
        return False

    # -- count and report after the commit

    def committed_together(
        self, batch: Batch, runs: Sequence[EventRun], settlements: Sequence[Settlement]
    ) -> None:
        """Count and report the events of a group. Count all successful events with one call."""
        self._trace(runs)
        quiet = not (delivery_succeeded.has_listeners() or self._notes_outcomes())
        succeeded: list[Settled] = []
        for run, settlement in zip(runs, settlements, strict=True):
            if quiet and settlement.counts_as == DONE:
                succeeded.append((run.event, settlement, run.outcomes))
            else:
                self._committed(batch, run, settlement)
        batch.tally.handled += len(succeeded)
        if self.statistics is not None:
            self.statistics.count(batch.queue, succeeded)

    def committed(self, batch: Batch, run: EventRun, settlement: Settlement) -> None:
        """Count and report an event whose settlement was committed.

        If only handlers outside of a transaction remain, they run later (see
        ``Batch.run_outside``).
        """
        self._trace([run])
        self._committed(batch, run, settlement)

    def _committed(self, batch: Batch, run: EventRun, settlement: Settlement) -> None:
        self._report(batch, run.event, settlement, run.commit())
        if settlement.goes_on and not run.atomic:
            batch.run_outside(run)

    def _trace(self, runs: Sequence[EventRun]) -> None:
        """Record a span for the settlement of the handler calls that have a recorded span."""
        called = [span for run in runs for span in run.spans]
        if called and (tracer := spans.tracer()) is not None:
            tracer.settled([run.event for run in runs], called, self._began)
            for run in runs:
                run.spans = ()

    def _report(
        self,
        batch: Batch,
        event: ClaimedEvent,
        settlement: Settlement,
        outcomes: Sequence[Outcome],
    ) -> None:
        batch.note(event, settlement)
        batch.note_hand_off(event, settlement)
        batch.tally.count(settlement)
        if self.statistics is not None:
            self.statistics.count(batch.queue, [(event, settlement, outcomes)])
        for outcome in outcomes:
            batch.tally.failed += outcome.error is not None
            if self.admission is not None:
                self.admission.note(outcome)
            _send_outcome(event, outcome)
        if settlement.is_dead:
            event_dead_lettered.send_robust(Settler, event=event, status=settlement.status)

    def _notes_outcomes(self) -> bool:
        return self.admission is not None and self.admission.counts

    # -- errors

    @contextmanager
    def guarded(self, batch: Batch, event: ClaimedEvent) -> Iterator[None]:
        """Set the event aside after an error that its handlers did not raise.

        Other events of the batch are not affected. An error of a database outage is raised again.
        """
        try:
            yield
        except Exception as error:
            if is_outage(error):
                raise
            self.set_aside(batch, event, error)

    def set_aside(self, batch: Batch, event: ClaimedEvent, error: Exception) -> SetAside:
        """Set aside an event that cannot be read or settled, and return the result.

        The event waits longer after each interruption. After MAX_INTERRUPTIONS interruptions, the
        event becomes a dead letter.
        """
        cause = error.__cause__ or error
        tried = event.interruptions + 1
        delay = RetryPolicy(**settings.UNHANDLED_RETRY).wait_before(tried + 1)
        record = failures.describe(
            cause, handler="", attempt=event.attempts, at=event.database_now()
        )
        verdict = unsettleable(event, record) if tried >= settings.MAX_INTERRUPTIONS else None
        self.drop_session()
        became = self.through_outage(
            lambda: set_aside(
                self.store,
                batch.token,
                event.row_id,
                error=record,
                delay=delay,
                verdict=verdict,
            )
        )
        logger.error(
            "event %s could not be read or settled and was set aside (%s): %s",
            event.event_id,
            became.value,
            failures.in_a_line(cause),
            extra=about(event, attempt=event.attempts),
        )
        self._count_set_aside(batch, event, became, delay, verdict)
        return became

    def _count_set_aside(
        self,
        batch: Batch,
        event: ClaimedEvent,
        became: SetAside,
        delay: float,
        verdict: Finished | None,
    ) -> None:
        if became is SetAside.DUPLICATE:
            batch.tally.handled += 1
        elif became is SetAside.DEAD and verdict:
            self._report(batch, event, verdict, ())
        elif became is SetAside.LOST:
            batch.lost(event)
        else:
            batch.tally.postponed += became is SetAside.WAITING
            batch.block(event, After(delay) if became is SetAside.WAITING else AT_ONCE)

    # -- the database

    def still_held(self, batch: Batch, runs: Sequence[EventRun]) -> dict[int, Any]:
        """Return the deliveries, by row id, of the events that this batch still has claimed.

        The query uses a new session. Its result also shows whether a COMMIT without a reply
        succeeded. If the COMMIT succeeded, a settled event is missing in the result, and an event
        that continues under this claim has its outcomes in its deliveries.
        """
        self.drop_session()
        rows = [each.event.row_id for each in runs]
        return self.through_outage(lambda: self.store.still_held(batch.token, rows))

    def drop_session(self) -> None:
        """Close the connection, so that no change that a handler made to its session remains."""
        connection = self.store.connection
        if self.pause is not None and not connection.in_atomic_block:
            connection.close()

    def through_outage(self, action: Callable[[], T]) -> T:
        """Run the action. During a database outage, retry it as long as ``pause`` returns True."""
        return action() if self.pause is None else through_outage(self.store, action, self.pause)


def _send_outcome(event: ClaimedEvent, outcome: Outcome) -> None:
    facts: dict[str, Any] = {
        "event": event,
        "handler": outcome.handler,
        "attempt": outcome.attempt,
        "seconds": outcome.seconds,
    }
    if outcome.error is None:
        if delivery_succeeded.has_listeners():
            delivery_succeeded.send_robust(Settler, **facts)
    else:
        delivery_failed.send_robust(
            Settler,
            error=outcome.error,
            exception=outcome.exception,
            retry_in=outcome.retry_in,
            **facts,
        )
