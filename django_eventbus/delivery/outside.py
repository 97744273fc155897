"""Run handlers outside of a transaction (``atomic=False``): plain functions and coroutines."""

from __future__ import annotations

import time
from collections.abc import Callable

from django_eventbus.delivery.batch import Batch, take
from django_eventbus.delivery.call import Caller, NotStartedError
from django_eventbus.delivery.event_loop import LoopBlockedError, Running, UnknownCulpritError
from django_eventbus.delivery.group import SessionWatch, close_if_left_open
from django_eventbus.delivery.settling import Settler
from django_eventbus.exceptions import BrokerUnavailableError, EventBusError
from django_eventbus.flow.admission import Admission
from django_eventbus.outcomes.event_run import EventRun
from django_eventbus.registry import Handler
from django_eventbus.store import AT_ONCE, After

Started = tuple[Handler, float, Running]


class OutsideRunner:
    """Runs handlers outside of a transaction, and settles each event in its own transaction."""

    def __init__(
        self,
        settler: Settler,
        caller: Caller,
        admission: Admission,
        halted: Callable[[Batch], bool],
        stopped: Callable[[Batch], bool],
    ) -> None:
        self.settler = settler
        self.store = settler.store
        self.caller = caller
        self.admission = admission
        self.halted = halted
        self.stopped = stopped

    def run(self, batch: Batch) -> None:
        """Run the events and settle each event.

        All coroutines run concurrently. Meanwhile, this thread runs the plain handlers one by one.
        """
        started = self._start_coroutines(batch)
        started = [each for each in started if self._run_plain_beside(batch, *each)]
        while not self.halted(batch) and (each := take(batch.outside)):
            with self.settler.guarded(batch, each.event):
                self._run_plain(each)
                self._settle(batch, each)
        for run, running in started:
            with self.settler.guarded(batch, run.event):
                self._collect_async(batch, run, running)
                self._settle(batch, run)

    def _settle(self, batch: Batch, run: EventRun) -> None:
        """Settle the event at once.

        If the worker died before the settlement, the handlers would run again and repeat their
        effects outside of the database.
        """
        self.settler.settle(batch, run, run.settlement())
        self.settler.through_outage(self.admission.keep_up)

    def _start_coroutines(self, batch: Batch) -> list[tuple[EventRun, list[Started]]]:
        """Start all coroutines, unless the batch is halted.

        Events without coroutines stay in ``batch.outside``.
        """
        started, others = [], []
        while not self.halted(batch) and (each := take(batch.outside)):
            if running := self._start_async(batch, each):
                started.append((each, running))
            else:
                others.append(each)
        batch.outside.extendleft(reversed(others))
        return started

    def _start_async(self, batch: Batch, run: EventRun) -> list[Started]:
        return [
            (
                handler,
                time.monotonic(),
                self.caller.start(
                    run,
                    handler,
                    self.admission.turns_of(handler),
                    stopped=lambda: self.stopped(batch),
                ),
            )
            for handler in run.outside
            if handler.is_async
        ]

    def _collect_async(self, batch: Batch, run: EventRun, running: list[Started]) -> None:
        for each in running:
            try:
                self._collect(run, each)
            except UnknownCulpritError:
                self._run_alone(batch, run, each[0])

    def _collect(self, run: EventRun, running: Started) -> None:
        handler, started, future = running
        try:
            self.caller.collect(run, handler, future)
        except UnknownCulpritError:
            raise
        except (LoopBlockedError, NotStartedError):
            run.hold([handler], AT_ONCE)
        except BaseException as error:
            self.caller.blame(run, handler, error, time.monotonic() - started)
        else:
            run.succeed(handler.name, time.monotonic() - started)

    def _run_alone(self, batch: Batch, run: EventRun, handler: Handler) -> None:
        """Run a coroutine on a loop of its own, which no other coroutine can block or close.

        ``batch.halted`` is not checked, because it is set for every slow batch. If the event
        returned to the queue instead, its coroutine would run on a shared loop again, and might
        block or close that loop again.
        """
        if self.stopped(batch):
            run.hold([handler], AT_ONCE)
            return
        running = self.caller.start(run, handler, alone=True)
        try:
            self._collect(run, (handler, time.monotonic(), running))
        finally:
            running.loop.stop()

    def _run_plain(self, run: EventRun) -> None:
        self.admission.hold_back_again(run)
        for handler in run.outside:
            if not handler.is_async:
                self._call_plain(run, handler)

    def _run_plain_beside(self, batch: Batch, run: EventRun, running: list[Started]) -> bool:
        """Run the plain handlers of an event whose coroutines are running.

        Return False if the event was set aside.
        """
        with self.settler.guarded(batch, run.event):
            self._run_plain(run)
            return True
        # The event was set aside, so its claim has ended and no result of its coroutines could be
        # settled.
        for _, _, each in running:
            self.caller.cancel(each)
        return False

    def _call_plain(self, run: EventRun, handler: Handler) -> None:
        started = time.monotonic()
        error: BaseException | None = None
        wait: After | None = None
        session = SessionWatch(self.store.connection)
        try:
            with self.store.connection.execute_wrapper(session):
                self.caller.call(run, handler)
        except BrokerUnavailableError as raised:
            error, wait = raised, After(raised.retry_in)
        except BaseException as raised:
            error = raised
        if close_if_left_open(self.store.connection):
            error = EventBusError("the handler left a transaction open") if error is None else error
        if error is not None or session.changed:
            self.settler.drop_session()
        if error is None:
            run.succeed(handler.name, time.monotonic() - started)
        elif wait is not None:
            run.hold([handler], wait)
        else:
            self.caller.blame(run, handler, error, time.monotonic() - started)
