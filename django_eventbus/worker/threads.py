"""The delivering threads: each receives a batch, delivers and settles it, and reports the result.

A thread has a database connection and no timers: the dispatcher decides when the thread gets a
batch and when the thread closes its connection. The dispatcher owns a batch until the batch is in a
thread's inbox. Then that thread owns the batch until the result is in the queue of results.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from django.db import connections

from django_eventbus.delivery.batch import Tally
from django_eventbus.delivery.deadlines import Watch
from django_eventbus.delivery.deliverer import Deliverer
from django_eventbus.errors import failures
from django_eventbus.flow.admission import Admission
from django_eventbus.logs import about, set_worker
from django_eventbus.outcomes.assignments import EVENT_WORKER
from django_eventbus.store import is_outage, name_own_sessions, store_for
from django_eventbus.worker.claiming import ClaimedBatch
from django_eventbus.worker.wakeup import Bell

if TYPE_CHECKING:
    from django_eventbus.worker.worker import Worker

logger = logging.getLogger(__name__)

#: Seconds after which an idle thread closes its connections.
REST_AFTER = 5.0
#: Seconds between two checks whether all threads have ended. A wait without a timeout would delay
#: signal handlers.
END_EVERY = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The result of a batch."""

    batch: ClaimedBatch
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    #: The error of a database outage, or None. After an outage, events of the batch may still be
    #: claimed.
    outage: Exception | None = None
    #: Whether the batch failed as a whole, so that its events were released to run one by one.
    failed: bool = False


class Delivery:
    """Delivers batches in the thread that created it, on the connection of that thread."""

    def __init__(self, worker: Worker, index: int) -> None:
        self.using = worker.options.using
        self.store = store_for(self.using, clock=worker.clock)
        self.watch = Watch(worker.board, index)
        holder = f"{worker.worker_id}/{index}"
        self.admission = Admission(
            self.store,
            worker.flow_controls,
            worker.other_workers,
            holder,
            hands_off=worker.assignment == EVENT_WORKER,
        )
        self.deliverer = Deliverer(
            self.store,
            watch=self.watch,
            suspects=worker.suspects,
            loop=worker.async_loop,
            admission=self.admission,
            statistics=worker.statistics,
            stopping=worker.stopping,
            assignment=worker.assignment,
        )

    def deliver(self, batch: ClaimedBatch) -> Delivered:
        started = time.monotonic()
        self.watch.expect(0)
        try:
            self._close_other_connections()
            self.admission.upkeep()
            tally = self._deliver(batch)
        except Exception as error:
            if not is_outage(error):
                raise
            self.store.connection.close()
            return Delivered(batch=batch, outage=error)
        seconds = time.monotonic() - started
        return Delivered(batch=batch, tally=tally or Tally(), seconds=seconds, failed=tally is None)

    def _deliver(self, batch: ClaimedBatch) -> Tally | None:
        """Deliver a batch. Return None if the batch failed as a whole."""
        try:
            return self.deliverer.deliver(batch.events)
        except Exception as error:
            if is_outage(error):
                raise
            logger.error(
                "delivery of a batch failed; its events are returned to the queue and will run one "
                "by one: %s",
                failures.in_a_line(error),
                extra=about(queue=batch.events[0].claim.queue),
            )
            self.deliverer.interrupt(batch.events[0], error)
        return None

    def _close_other_connections(self) -> None:
        """Close connections that handlers opened, if unusable or older than CONN_MAX_AGE.

        The connection of the bus stays open, so that no event waits for a new connection.
        """
        for connection in connections.all(initialized_only=True):
            if connection.alias != self.using:
                connection.close_if_unusable_or_obsolete()

    def rest(self) -> None:
        """Release the slots and connections of an idle thread."""
        self.watch.expect(0)
        self.admission.finish()
        connections.close_all()
        self.is_done()

    def is_done(self) -> None:
        """Record that no report of the thread is expected until it gets the next batch."""
        self.watch.expect(float("inf"))


class Threads(Protocol):
    """The interface of the threads for the dispatcher."""

    #: Runs actions on a connection that no handler uses.
    executor: Executor
    #: One Delivery per thread. The watchdog uses them to release unstarted events of slow batches.
    deliveries: list[Delivery]

    @property
    def idle(self) -> int:
        """The number of threads without a batch."""

    @property
    def busy(self) -> bool:
        """Whether a thread has a batch, or the dispatcher has not processed a result yet."""

    def hand(self, batch: ClaimedBatch) -> None:
        """Give a batch to an idle thread."""

    def finished(self) -> Iterator[Delivered]:
        """Yield the results. Raises the error that ended a thread."""

    def has_finished(self) -> bool: ...

    def run_submitted(self) -> None:
        """Run actions that other threads submitted to the dispatcher's thread."""

    def keep_up(self) -> None:
        """Close the connections of threads that have been idle for a while."""

    def end(self) -> None:
        """End all threads, and return when every thread has ended."""


class OneThread:
    """The ``Threads`` of a worker with concurrency 1: the dispatcher's own thread delivers batches.

    So handlers run in the main thread, where a signal can interrupt even a system call. In a test,
    only the connection of this thread sees the events of the test's transaction, so no other thread
    could deliver them. While this thread delivers a batch, a helper thread may claim the next batch
    and release unstarted events.
    """

    def __init__(self, worker: Worker) -> None:
        self.delivery = Delivery(worker, 0)
        self.deliveries = [self.delivery]
        self.executor: Executor = Helper(worker)
        self._finished: list[Delivered] = []

    @property
    def idle(self) -> int:
        return 1

    @property
    def busy(self) -> bool:
        return bool(self._finished)

    def hand(self, batch: ClaimedBatch) -> None:
        self._finished.append(self.delivery.deliver(batch))

    def finished(self) -> Iterator[Delivered]:
        while self._finished:
            yield self._finished.pop()

    def has_finished(self) -> bool:
        return bool(self._finished)

    def run_submitted(self) -> None:
        """Do nothing: the helper runs submitted actions."""

    def keep_up(self) -> None:
        self.delivery.admission.upkeep()
        assert isinstance(self.executor, Helper)
        self.executor.rest_if_idle()

    def end(self) -> None:
        self.delivery.admission.finish()
        self.executor.shutdown()


class Helper(Executor):
    """A thread with its own connection, started when it is first needed."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="eventbus-claim", initializer=self._begin
        )
        self._used_at: float | None = None

    def _begin(self) -> None:
        set_worker(self.worker.worker_id)
        name_own_sessions(self.worker.options.using, "claim")

    def submit(self, action: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._used_at = time.monotonic()
        return self._pool.submit(action, *args, **kwargs)

    def rest_if_idle(self) -> None:
        if self._used_at is not None and time.monotonic() > self._used_at + REST_AFTER:
            self._used_at = None
            self._pool.submit(connections.close_all)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self._used_at is not None:
            self._pool.submit(connections.close_all)
        self._pool.shutdown(wait)


class ThreadPool:
    """Several delivering threads beside the dispatcher, started when they are first needed."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.deliveries: list[Delivery] = []
        self.executor: Executor = DispatcherExecutor(worker.bell)
        self._finished: queue.SimpleQueue[tuple[PoolThread, Delivered | BaseException]] = (
            queue.SimpleQueue()
        )
        self._threads: list[PoolThread] = []
        #: The thread that delivered last is at the end of the list and gets the next batch. So the
        #: other threads stay idle and can close their connections.
        self._idle: list[PoolThread] = []

    @property
    def idle(self) -> int:
        return len(self._idle) + self.worker.options.concurrency - len(self._threads)

    @property
    def busy(self) -> bool:
        return len(self._idle) < len(self._threads)

    def hand(self, batch: ClaimedBatch) -> None:
        thread = self._idle.pop() if self._idle else self._start()
        thread.is_rested = False
        thread.inbox.put(batch)

    def _start(self) -> PoolThread:
        thread = PoolThread(self.worker, len(self._threads), self.deliveries, self._finished)
        self._threads.append(thread)
        thread.start()
        return thread

    def finished(self) -> Iterator[Delivered]:
        while not self._finished.empty():
            thread, result = self._finished.get()
            if isinstance(result, BaseException):
                raise result
            thread.idle_since = time.monotonic()
            self._idle.append(thread)
            yield result

    def has_finished(self) -> bool:
        return not self._finished.empty()

    def keep_up(self) -> None:
        for thread in self._idle:
            if not thread.is_rested and time.monotonic() > thread.idle_since + REST_AFTER:
                thread.is_rested = True
                thread.inbox.put(REST)

    def run_submitted(self) -> None:
        assert isinstance(self.executor, DispatcherExecutor)
        self.executor.run()

    def end(self) -> None:
        """End all threads. Run submitted actions meanwhile: a thread may wait for their result."""
        for thread in self._threads:
            thread.inbox.put(None)
        while any(thread.is_alive() for thread in self._threads):
            self.worker.bell.wait(END_EVERY)
            self.run_submitted()
        self.executor.shutdown()


#: The inbox item that makes a thread close its connections.
REST = object()


class PoolThread(threading.Thread):
    """A thread of the pool."""

    def __init__(
        self,
        worker: Worker,
        index: int,
        deliveries: list[Delivery],
        finished: queue.SimpleQueue[tuple[PoolThread, Delivered | BaseException]],
    ) -> None:
        super().__init__(name=f"eventbus-{index}")
        self.worker = worker
        self.index = index
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.idle_since = 0.0
        self.is_rested = True
        self._deliveries = deliveries
        self._finished = finished

    def run(self) -> None:
        try:
            set_worker(self.worker.worker_id)
            self._work()
        except BaseException as error:
            self._finished.put((self, error))
        finally:
            connections.close_all()
            self.worker.bell.ring()

    def _work(self) -> None:
        delivery = Delivery(self.worker, self.index)
        self._deliveries.append(delivery)
        self.worker.watchdog.supervise(delivery.watch)
        with delivery.store.connection.execute_wrapper(delivery.watch.report_after):
            self._deliver_batches(delivery)
        delivery.rest()

    def _deliver_batches(self, delivery: Delivery) -> None:
        while (job := self.inbox.get()) is not None:
            if job is REST:
                delivery.rest()
                continue
            self._finished.put((self, delivery.deliver(job)))
            delivery.is_done()
            self.worker.bell.ring()


class DispatcherExecutor(Executor):
    """Runs actions that other threads submit, in the dispatcher's thread and on its connection."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._submitted: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = (
            queue.SimpleQueue()
        )

    def submit(self, action: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._submitted.put((future, lambda: action(*args, **kwargs)))
        self._bell.ring()
        return future

    def run(self) -> None:
        while not self._submitted.empty():
            future, action = self._submitted.get()
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)
