"""A worker process: the objects that its threads share, its start and its stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.db import connections

from django_eventbus.conf import settings
from django_eventbus.counters.process import counters_of_process
from django_eventbus.delivery.batch import Tally
from django_eventbus.delivery.deadlines import Board, Watchdog
from django_eventbus.delivery.deliverer import Suspects
from django_eventbus.delivery.event_loop import AsyncLoop
from django_eventbus.errors.failpoints import reached
from django_eventbus.flow.controls import FlowControls
from django_eventbus.flow.fleet import OtherWorkers
from django_eventbus.internals.django import turn_off_pool
from django_eventbus.logs import set_worker, worker_context
from django_eventbus.outcomes.assignments import EVENT_WORKER, Assignment
from django_eventbus.publishing import publisher
from django_eventbus.statistics.recorder import StatisticsRecorder
from django_eventbus.store import Clock, name_own_sessions, store_for
from django_eventbus.worker.dispatcher import Dispatcher
from django_eventbus.worker.registration import Heartbeat, WorkerOptions, new_registration
from django_eventbus.worker.wakeup import Bell


class Worker:
    """A worker process. A supervisor or a ``Heartbeat`` renews its registration."""

    def __init__(
        self,
        options: WorkerOptions,
        worker_id: uuid.UUID,
        board: Board | None = None,
        clock: Clock | None = None,
        assignment: Assignment = EVENT_WORKER,
    ) -> None:
        self.options = options
        self.assignment = assignment
        self.worker_id = worker_id
        self.board = board or Board.local(slots(options))
        self.clock = clock
        self.tally = Tally()
        self.evicted = self.worn_out = False
        self.bell = Bell()
        self.suspects = Suspects(worker_id)
        self.async_loop = AsyncLoop()
        self.flow_controls = FlowControls(
            options.queues,
            # A worker with a time limit may end before it would search.
            searches_at_once=options.max_seconds is not None,
            releases=assignment.executor is None,
        )
        self.other_workers = OtherWorkers(worker_id)
        self.statistics = StatisticsRecorder(worker_id, counters_of_process(options.using))
        self.watchdog = Watchdog(worker_id)
        self._stopping = False
        self.started = time.monotonic()
        #: The monotonic time at which the last successful renewal of the registration was sent. A
        #: supervisor has this time in its ``Child``.
        self.renewed = self.started

    def stop(self, *_: Any) -> None:
        """Finish running events and release unstarted events. A signal handler may call this."""
        self._stopping = True
        self.bell.ring()

    def stopping(self) -> bool:
        return self._stopping

    def run(self) -> Tally:
        """Deliver events until the worker is stopped or, with ``drain``, until no event is left."""
        with worker_context(self.worker_id):
            return self._run()

    def _run(self) -> Tally:
        stopped = threading.Event()
        listener = threading.Thread(
            target=self._listen, args=(stopped,), name="eventbus-listener", daemon=True
        )
        self.watchdog.start()
        if not self.options.drain:
            listener.start()
        try:
            Dispatcher(self).run()
        finally:
            stopped.set()
            self.watchdog.stop()
            self.async_loop.stop()
        return self.tally

    def _listen(self, stopped: threading.Event) -> None:
        try:
            set_worker(self.worker_id)
            name_own_sessions(self.options.using, "listener")
            store_for(self.options.using).listen(self.bell.ring_for_events, stopped)
        finally:
            connections.close_all()

    def count(self, tally: Tally) -> None:
        self.tally.add(tally)
        self.board.count(tally.handled, tally.failed, tally.dead)
        if self._has_done_enough():
            self.stop()
        elif settings.MAX_MEMORY and _megabytes() > settings.MAX_MEMORY:
            self.worn_out = True
            self.stop()

    def _has_done_enough(self) -> bool:
        most, seconds = self.options.max_events, self.options.max_seconds
        if most is not None and self.tally.handled + self.tally.postponed >= most:
            return True
        return seconds is not None and time.monotonic() - self.started >= seconds


def slots(options: WorkerOptions) -> int:
    """Return the number of slots of the board: one per delivering thread, plus the dispatcher."""
    return options.concurrency + 1


def run_here(
    options: WorkerOptions,
    on_start: Callable[[Worker], None] = lambda w: None,
    *,
    clock: Clock | None = None,
    assignment: Assignment = EVENT_WORKER,
) -> Tally:
    """Work in this process, without a supervisor: for debuggers, tests and code reloading."""
    total = Tally()
    while True:
        store = store_for(options.using, clock=clock)
        registration = new_registration(options)
        # In the transaction of a test, no other connection sees the registration, so a heartbeat
        # could not renew it.
        in_transaction = store.connection.in_atomic_block
        worker = Worker(options, registration.pk, clock=clock, assignment=assignment)
        # on_start() can install signal handlers. It is called before the registration is written:
        # otherwise a signal could end the process and leave its registration in the database.
        on_start(worker)
        store.register(registration, expires=not in_transaction)
        reached("start.registered")
        try:
            with contextlib.nullcontext() if in_transaction else Heartbeat(worker):
                worker.run()
        finally:
            total.add(worker.tally)
            if not worker.evicted:
                store.dismiss(worker.worker_id)
        if not worker.evicted:
            return total


def _megabytes() -> float:
    """Return the resident memory of this process; 0 if /proc does not exist."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def stop_on_signals(worker: Worker) -> None:
    """Stop the worker at the first signal, and end the process at the second signal."""
    if threading.current_thread() is not threading.main_thread():
        return

    def stop(signum: int, frame: Any) -> None:
        signal.signal(signum, signal.SIG_DFL)
        worker.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def leave_pools() -> None:
    """Turn off connection pools in a worker process.

    A session that a handler has changed must be closed. A pool would keep the session open and give
    it to the next handler.
    """
    for alias in connections:
        turn_off_pool(alias)


def end_of_process() -> None:
    """Shut down the bus of this process. A handler that still runs cannot publish afterwards."""
    publisher.shutdown()
