"""Deliver the events of a claim: read, run and settle events, and release unstarted events.

An event runs in a group, alone, or outside of a transaction. Each runner gets the settlement of an
event from ``EventRun.settlement`` and passes it to the ``Settler``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor

from django_eventbus.conf import settings
from django_eventbus.delivery.alone import AloneRunner
from django_eventbus.delivery.atomic import AtomicHandlers
from django_eventbus.delivery.batch import Batch, Tally, take_all
from django_eventbus.delivery.call import Caller
from django_eventbus.delivery.deadlines import Watch
from django_eventbus.delivery.event_loop import AsyncLoop
from django_eventbus.delivery.grouped import GroupRunner
from django_eventbus.delivery.handing_off import HandOffSender
from django_eventbus.delivery.outside import OutsideRunner
from django_eventbus.delivery.returning import HOLD_SECONDS, Returner
from django_eventbus.delivery.settling import Settler
from django_eventbus.delivery.suspects import Announcement, Suspects
from django_eventbus.errors import failures
from django_eventbus.exceptions import UnreadableEventError
from django_eventbus.flow.admission import Admission
from django_eventbus.logs import about
from django_eventbus.outcomes.assignments import EVENT_WORKER, Assignment
from django_eventbus.outcomes.endings import exhausted
from django_eventbus.outcomes.event_run import EventRun
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.statistics.recorder import StatisticsRecorder
from django_eventbus.store import Store

__all__ = ["HOLD_SECONDS", "Deliverer", "Suspects"]

logger = logging.getLogger(__name__)


class Deliverer:
    """Delivers the batches of one thread."""

    def __init__(
        self,
        store: Store,
        *,
        watch: Watch,
        suspects: Suspects,
        loop: AsyncLoop,
        admission: Admission,
        statistics: StatisticsRecorder,
        stopping: Callable[[], bool] = lambda: False,
        assignment: Assignment = EVENT_WORKER,
    ) -> None:
        self.store = store
        self.assignment = assignment
        self.admission = admission
        self.stopping = stopping
        self.caller = Caller(watch, loop)
        self.settler = Settler(
            store, statistics=statistics, admission=admission, pause=self._wait_for_database
        )
        self.handlers = AtomicHandlers(store, self.caller)
        self.alone = AloneRunner(self.settler, self.handlers, admission)
        self.groups = GroupRunner(self.settler, self.handlers, self.alone, admission, stopping)
        self.outside = OutsideRunner(
            self.settler, self.caller, admission, self._halted, self._stopped
        )
        self.returner = Returner(self.settler)
        self.hand_offs = HandOffSender(
            self.settler, admission.controls, report=lambda: watch.expect(0)
        )
        self.announcement = Announcement(suspects, self.settler)
        self._give_up_at: float | None = None

    # -- the pipeline

    def deliver(self, events: list[ClaimedEvent]) -> Tally:
        """Run the handlers of a claim's events, and release the events that were not started."""
        batch = Batch.of(events)
        self.handlers.begin_batch()
        self.caller.begin_batch()
        self.caller.watch.connection = self.store.connection
        for event in events:
            if event.is_new and event.lane_id not in batch.cut:
                batch.waiting.append(EventRun(event, self.assignment))
            else:
                with self.settler.guarded(batch, event):
                    self._read(batch, event)
        self.admission.begin(batch.waiting)
        self.returner.begin(batch)
        try:
            while batch.waiting and not self._halted(batch):
                batch.begin_wave()
                self._run_wave(batch)
        finally:
            self.returner.end(batch)
        self.returner.release(batch)
        self.settler.through_outage(self.admission.end)
        self.hand_offs.send_all(batch)
        self._report_lost_claims(batch, len(events))
        return batch.tally

    def _read(self, batch: Batch, event: ClaimedEvent) -> None:
        """Prepare an event for delivery, or end it if its claims ended without a result too often.

        An event that cannot be delivered is ended or set aside only if no earlier event of its key
        waits. Otherwise it is left to the next claim, to keep the order of the key.
        """
        if event.lane_id in batch.cut:
            batch.unstarted.append(event)
            return
        try:
            verdict = exhausted(event)
            run = EventRun(event, self.assignment) if verdict is None else None
        except UnreadableEventError:
            if not batch.cut_before(event):
                raise
            return
        if run:
            batch.waiting.append(run)
        elif verdict and not batch.cut_before(event):
            self.settler.end(batch, event, verdict)

    def _run_wave(self, batch: Batch) -> None:
        while batch.grouped and not self._halted(batch):
            if batch.next_is_isolated():
                self.alone.run_isolated(batch)
            else:
                self.groups.run(batch)
            self.settler.through_outage(self.admission.keep_up)
        self.outside.run(batch)
        try:
            for each in take_all(batch.suspects):
                self._run_suspect(batch, each)
        finally:
            self.announcement.announce(None)

    def _run_suspect(self, batch: Batch, run: EventRun) -> None:
        """Announce a suspect and run it alone, unless its lane or the batch was stopped."""
        if batch.is_blocked(run) or self._halted(batch):
            batch.unstarted.append(run.event)
            return
        with self.settler.guarded(batch, run.event):
            self.admission.hold_back(run)
            self.announcement.announce(run.event.row_id)
            self.alone.run(batch, run)
        self.outside.run(batch)

    def _halted(self, batch: Batch) -> bool:
        if self._stopped(batch):
            batch.halted = True
        return batch.halted

    def _stopped(self, batch: Batch) -> bool:
        return self.stopping() or self.admission.is_paused(batch.queue)

    def _report_lost_claims(self, batch: Batch, size: int) -> None:
        if not batch.tally.lost:
            return
        if self.settler.statistics is not None:
            self.settler.statistics.count_lost(batch.queue, batch.tally.lost)
        logger.warning(
            "lost the claim on %s of %s events: the work of their handlers in this process was "
            "rolled back, or it was committed and the database's reply was lost",
            batch.tally.lost,
            size,
            extra=about(queue=batch.queue),
        )

    # -- for the watchdog, for a batch that failed as a whole, and for database outages

    @property
    def current(self) -> Batch | None:
        """The batch that is being delivered. The watchdog's thread checks its duration."""
        return self.returner.current

    def return_unstarted(self, executor: Executor) -> None:
        """Release the unstarted events of a slow batch. The watchdog's thread calls this."""
        self.returner.return_unstarted(executor)

    def interrupt(self, event: ClaimedEvent, error: Exception) -> None:
        """Release a claim whose delivery failed as a whole.

        It is unknown which event caused the error. So an interruption is counted for each event of
        the claim that is not a suspect yet.
        """
        record = failures.describe(error, handler="", attempt=0, at=event.database_now())
        record["type"] = "DeliveryInterrupted"
        self.settler.drop_session()
        self.settler.through_outage(
            lambda: self.store.interrupt_claim(event.claim.token, error=record)
        )

    def _wait_for_database(self, seconds: float) -> bool:
        """Wait, and return whether to retry.

        During a shutdown, return False after SHUTDOWN_TIMEOUT seconds.
        """
        if self.stopping():
            self._give_up_at = self._give_up_at or time.monotonic() + settings.SHUTDOWN_TIMEOUT
            if time.monotonic() > self._give_up_at:
                return False
        self.caller.watch.expect(seconds)
        time.sleep(seconds)
        return True
