"""Run many events in one transaction, and commit them together (group commit).

If the transaction is lost, its events are run again one by one, so that only the event that broke
the transaction is charged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import zip_longest

from django_eventbus.conf import settings
from django_eventbus.delivery.alone import AloneRunner
from django_eventbus.delivery.atomic import AtomicHandlers
from django_eventbus.delivery.batch import Batch, take
from django_eventbus.delivery.group import GroupTransaction
from django_eventbus.delivery.settling import Settler
from django_eventbus.errors import failures
from django_eventbus.errors.failpoints import reached
from django_eventbus.flow.admission import Admission
from django_eventbus.logs import about
from django_eventbus.outcomes.event_run import EventRun
from django_eventbus.store import AT_ONCE, Settlement

logger = logging.getLogger(__name__)

#: A group accepts no further event after this number of seconds or savepoints.
GROUP_SECONDS = 0.05
GROUP_SAVEPOINTS = 50


class GroupRunner:
    """Runs groups of events.

    After a lost group, the next group has one event. The size doubles with each committed group.
    """

    def __init__(
        self,
        settler: Settler,
        handlers: AtomicHandlers,
        alone: AloneRunner,
        admission: Admission,
        stopping: Callable[[], bool],
    ) -> None:
        self.settler = settler
        self.handlers = handlers
        self.alone = alone
        self.admission = admission
        self.stopping = stopping
        self._size = settings.BATCH_SIZE

    def run(self, batch: Batch) -> None:
        """Run the events of one group, settle them in the same transaction, and commit."""
        members: list[EventRun] = []
        settlements: list[Settlement] = []
        group = self.handlers.transaction()
        try:
            with group:
                self._run_members(batch, group, members, settlements)
                self.settler.write(batch, settlements)
            reached("settle.committed")
        except Exception as error:
            logger.info(
                "running %s events again one by one: %s",
                len(members),
                failures.in_a_line(error),
                extra=about(queue=batch.queue),
            )
            self._size = 1
            self.settler.drop_session()
            if self.settler.through_outage(group.was_committed):
                self._settle_members(batch, members, settlements, error)
            else:
                self._run_each_alone(batch, members, settlements)
        else:
            self._size = min(self._size * 2, settings.BATCH_SIZE)
            self.settler.committed_together(batch, members, settlements)

    def _run_members(
        self,
        batch: Batch,
        group: GroupTransaction,
        members: list[EventRun],
        settlements: list[Settlement],
    ) -> None:
        """Run events until the group is full.

        Keep this loop fast, because every event passes through it.
        """
        full_at = time.monotonic() + GROUP_SECONDS
        guarded = self.admission.is_needed
        while not batch.next_is_isolated() and (run := take(batch.grouped)):
            if batch.is_blocked(run):
                batch.unstarted.append(run.event)
                continue
            members.append(run)
            if guarded:
                self.admission.hold_back(run)
            self.handlers.run(run, run.atomic, group)
            settlements.append(settlement := run.settlement())
            batch.note(run.event, settlement)
            full = len(members) >= self._size or group.savepoints >= GROUP_SAVEPOINTS
            if full or group.disturbed or time.monotonic() > full_at or self.stopping():
                break

    def _run_each_alone(
        self, batch: Batch, members: list[EventRun], settlements: list[Settlement]
    ) -> None:
        """Run the events of a lost group one by one.

        If the group was committed and only the reply was lost, do not run its handlers again.
        """
        held = self.settler.still_held(batch, members)
        already_committed = dict(zip(map(id, members), settlements, strict=False))
        for each in members:
            if not each.is_stored_in(held.get(each.event.row_id)):
                already_committed.pop(id(each), None)
                each.forget()
            if each.event.lane_id is not None:
                batch.blocked.pop(each.event.lane_id, None)
        lanes = (event.lane_id for event in batch.unstarted)
        skipped_lanes = {lane_id for lane_id in lanes if lane_id is not None}
        for each in members:
            if each.event.row_id not in held:
                batch.lost(each.event)
            elif id(each) in already_committed:
                self.settler.committed(batch, each, already_committed[id(each)])
            elif batch.is_blocked(each):
                batch.unstarted.append(each.event)
            else:
                with self.settler.guarded(batch, each.event):
                    self.alone.run(batch, each)
        # Events of these lanes were skipped, because an earlier event of the lane failed or was
        # held. Even if the earlier event has succeeded now, this batch starts no further event of
        # these lanes. Otherwise later events would overtake the skipped events.
        for lane_id in skipped_lanes:
            batch.blocked.setdefault(lane_id, AT_ONCE)

    def _settle_members(
        self,
        batch: Batch,
        members: list[EventRun],
        settlements: list[Settlement],
        error: Exception,
    ) -> None:
        """Settle a group whose transaction was committed by the handler that was called last.

        Handlers that have succeeded are not run again, because that would repeat their work.
        """
        logger.error(
            "a handler committed the transaction of a group of %s events; handlers that have "
            "succeeded are not run again: %s",
            len(members),
            failures.in_a_line(error),
            extra=about(queue=batch.queue),
        )
        for run, settlement in zip_longest(members, settlements):
            with self.settler.guarded(batch, run.event):
                if settlement is None:
                    self._charge_last(run, error.__cause__ or error)
                verdict = settlement or run.settlement()
                if self.settler.settle(batch, run, verdict) and verdict.goes_on and run.atomic:
                    self._run_remaining(batch, run)

    def _charge_last(self, run: EventRun, error: BaseException) -> None:
        """Charge the handler that was called last, if it has no outcome yet."""
        last = run.current
        if last is not None and all(each.handler != last.name for each in run.outcomes):
            self.handlers.charge(run, last, error)

    def _run_remaining(self, batch: Batch, run: EventRun) -> None:
        """Run the handlers that were not called.

        If the lane of the event is in ``batch.blocked``, return the event to the queue instead.
        """
        if batch.is_blocked(run):
            batch.unstarted.append(run.event)
        else:
            self.alone.run(batch, run)
