"""Run one event in transactions of its own.

This module runs three kinds of events: the events of a lost group, the events of handlers that are
declared with ``isolated=True``, and suspects (see ``delivery.suspects``).
"""

from __future__ import annotations

from django.db import Error

from django_eventbus.delivery.atomic import AtomicHandlers
from django_eventbus.delivery.batch import Batch, take
from django_eventbus.delivery.group import GroupLostError
from django_eventbus.delivery.settling import Settler
from django_eventbus.errors.failpoints import reached
from django_eventbus.exceptions import ClaimLostError, EventBusError, UnsettleableError
from django_eventbus.flow.admission import Admission
from django_eventbus.outcomes.event_run import EventRun
from django_eventbus.registry import Handler
from django_eventbus.store import CONFLICT_RETRIES, Settlement, is_shortage

#: Errors after which the transaction is lost, but the worker may still have the claim on the event.
LostTransaction = GroupLostError | UnsettleableError | Error


class AloneRunner:
    """Runs events one by one, so that it is known which handler broke a transaction."""

    def __init__(self, settler: Settler, handlers: AtomicHandlers, admission: Admission) -> None:
        self.settler = settler
        self.store = settler.store
        self.handlers = handlers
        self.admission = admission

    def run_isolated(self, batch: Batch) -> None:
        """Run the next event, which must not share its transaction with other events."""
        run = take(batch.grouped)
        if run is None:
            return
        if batch.is_blocked(run):
            batch.unstarted.append(run.event)
            return
        with self.settler.guarded(batch, run.event):
            if self.admission.is_needed:
                self.admission.hold_back(run)
            self.run(batch, run)

    def run(self, batch: Batch, run: EventRun) -> None:
        """Run each atomic handler in its own transaction.

        With ATOMIC="event", run all atomic handlers of the event in one transaction.
        """
        together = self.handlers.together or not run.atomic
        units = [run.atomic] if together else [[each] for each in run.atomic]
        for unit in units:
            if not self._run_unit(batch, run, unit):
                return

    def _run_unit(
        self,
        batch: Batch,
        run: EventRun,
        handlers: list[Handler],
        chances: int = CONFLICT_RETRIES,
    ) -> bool:
        """Run handlers and settle in one transaction. Return False if the claim was lost."""
        settlement: Settlement | None = None
        group = self.handlers.transaction()
        try:
            with group:
                self.handlers.run(run, handlers, group)
                settlement = run.settlement()
                self.settler.write(batch, [settlement])
            reached("settle.committed")
        except ClaimLostError:
            batch.lost(run.event)
            return False
        except (GroupLostError, UnsettleableError, Error) as error:
            held = self.settler.still_held(batch, [run])
            # The return value is not needed. The call deletes the commit guard, which remains if a
            # handler committed the transaction.
            self.settler.through_outage(group.was_committed)
            if not held:
                run.forget()
                batch.lost(run.event)
                return False
            if settlement is None or not run.is_stored_in(held[run.event.row_id]):
                run.forget()
                return self._after_rollback(batch, run, handlers, settlement, error, chances)
        self.settler.committed(batch, run, settlement)
        return True

    def _after_rollback(
        self,
        batch: Batch,
        run: EventRun,
        handlers: list[Handler],
        settlement: Settlement | None,
        error: LostTransaction,
        chances: int,
    ) -> bool:
        """Run the handlers again if the settlement deadlocked, else charge the guilty handler."""
        if settlement is not None and chances and self.store.is_conflict(error):
            # All handlers had returned, so no handler is guilty: the settlement was the victim of a
            # deadlock. This happens on InnoDB, which takes gap locks at REPEATABLE READ.
            return self._run_unit(batch, run, handlers, chances - 1)
        guilty = self._guilty(batch, run, settlement, error)
        cause = error.__cause__ if isinstance(error, EventBusError) else None
        self.handlers.charge(run, guilty, error if cause is None else cause)
        return self.settler.settle(batch, run, run.settlement())

    def _guilty(
        self, batch: Batch, run: EventRun, settlement: Settlement | None, error: LostTransaction
    ) -> Handler:
        """Return the handler that broke the transaction. Raise the error if no handler did."""
        if run.current is None or is_shortage(error):
            raise error
        if settlement is not None and self.settler.refuses(batch, settlement):
            raise error
        return run.current
