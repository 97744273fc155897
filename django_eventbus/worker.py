"""Claim, deliver, settle: the loop of one worker process."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import Error, connections

from django_eventbus import publishing
from django_eventbus.conf import settings
from django_eventbus.deadlines import Board, Watch, Watchdog
from django_eventbus.delivery import AsyncLoop, Deliverer, Suspects, Tally
from django_eventbus.events import ClaimedEvent, uuid7
from django_eventbus.exceptions import WorkerEvictedError
from django_eventbus.models import EventWorker
from django_eventbus.store import is_trouble, store_for

logger = logging.getLogger(__name__)

PROMOTE_EVERY = 0.1
RECOVER_EVERY = 1.0
LOOK_FOR_ORPHANS_EVERY = 600.0
FIRST_BATCH = 20
BATCH_SECONDS = 1.0
FIRST_IDLE_WAIT = 0.02
SHORTEST_WAIT = 0.02
TROUBLE_WAIT = 0.2
LONGEST_TROUBLE_WAIT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What ``run_event_worker`` was told. Plain values: they travel to child processes."""

    using: str
    queues: tuple[str, ...]
    concurrency: int = 1
    batch_size: int = 500
    poll_interval: float = 1.0
    drain: bool = False
    max_events: int | None = None


def new_registration(options: WorkerOptions) -> EventWorker:
    return EventWorker(
        id=uuid7(),
        host=socket.gethostname()[:64],
        pid=os.getpid(),
        queues=list(options.queues),
    )


class Worker:
    """A process at work. Somebody else may keep its registration alive; see ``Heartbeat``."""

    def __init__(
        self, options: WorkerOptions, worker_id: uuid.UUID, board: Board | None = None
    ) -> None:
        self.options = options
        self.worker_id = worker_id
        self.board = board or Board.local(options.concurrency)
        self.tally = Tally()
        self.evicted = False
        self._stopping = False
        self._suspects = Suspects(worker_id)
        self._async_loop = AsyncLoop()
        self._watchdog = Watchdog()
        self._news: list[News] = []
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def stop(self, *_: Any) -> None:
        """Finish what runs, give back the rest. Safe in a signal handler: it only sets flags."""
        self._stopping = True
        self.tell()

    def tell(self) -> None:
        for news in self._news:
            news.tell()

    def stopping(self) -> bool:
        return self._stopping

    def run(self) -> Tally:
        """Work until stopped, or until nothing is left if draining."""
        stopped = threading.Event()
        listener = threading.Thread(
            target=self._listen, args=(stopped,), name="eventbus-listener", daemon=True
        )
        self._news = [News() for _ in range(self.options.concurrency)]
        self._watchdog.start()
        if not self.options.drain:
            listener.start()
        try:
            self._run_threads()
        finally:
            stopped.set()
            self._watchdog.stop()
            self._async_loop.stop()
        if self._failure is not None:
            raise self._failure
        return self.tally

    def _run_threads(self) -> None:
        if self.options.concurrency == 1:
            # In the main thread a signal can interrupt even a handler's system call.
            WorkerLoop(self, 0).run()
            return
        threads = [
            threading.Thread(target=self._run_thread, args=(index,), name=f"eventbus-{index}")
            for index in range(self.options.concurrency)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # an endless join would keep signals from their handlers

    def _run_thread(self, index: int) -> None:
        try:
            WorkerLoop(self, index).run()
        except BaseException as error:
            self._failure = error
            self.stop()
        finally:
            connections.close_all()

    def _listen(self, stopped: threading.Event) -> None:
        try:
            store_for(self.options.using).listen(self.tell, stopped)
        finally:
            connections.close_all()

    def count(self, tally: Tally) -> None:
        with self._lock:
            for name in ("handled", "postponed", "failed", "dead", "lost"):
                setattr(self.tally, name, getattr(self.tally, name) + getattr(tally, name))
            self.board.count(tally.handled, tally.failed, tally.dead)
            limit = self.options.max_events
            if limit is not None and self.tally.handled + self.tally.postponed >= limit:
                self.stop()


class WorkerLoop:
    """One thread of a worker."""

    def __init__(self, worker: Worker, index: int) -> None:
        self.worker = worker
        self.options = worker.options
        self.news = worker._news[index]
        self.store = store_for(self.options.using)
        watch = Watch(worker.board, index)
        worker._watchdog.look_after(watch)
        self.deliverer = Deliverer(
            self.store,
            watch=watch,
            suspects=worker._suspects,
            loop=worker._async_loop,
            stopping=worker.stopping,
        )
        self._batch = min(FIRST_BATCH, self.options.batch_size)
        self._queues = list(self.options.queues)
        self._idle_wait = FIRST_IDLE_WAIT
        self._trouble_wait = TROUBLE_WAIT
        self._promoted = self._recovered = 0.0
        self._in_doubt: uuid.UUID | None = None
        self._orphans_sought = float("-inf")

    def run(self) -> None:
        while not self.worker.stopping():
            try:
                self.news.forget()
                self.upkeep()
                events = self.claim()
                if events:
                    self.deliver(events)
                elif self.options.drain and not self.store.promote():
                    return
                elif not self.options.drain:
                    self.wait()
                self._trouble_wait = TROUBLE_WAIT
            except WorkerEvictedError:
                self.worker.evicted = True
                self.worker.stop()
            except Error as error:
                if not is_trouble(error):
                    raise
                self.wait_for_database(error)

    def claim(self) -> list[ClaimedEvent]:
        """From the queues in turn, so that none starves; a batch is of one queue."""
        for _ in self._queues:
            self._queues.append(self._queues.pop(0))
            if events := self.claim_from(self._queues[-1]):
                return events
        return []

    def claim_from(self, queue_name: str) -> list[ClaimedEvent]:
        """If the answer is lost with the connection, the claim may have been made all the same."""
        if self._in_doubt is not None:
            self.store.release_claim(self._in_doubt)
        self._in_doubt = uuid.uuid4()
        events = self.store.claim(
            queue_name,
            limit=self._batch,
            worker_id=self.worker.worker_id,
            token=self._in_doubt,
        )
        self._in_doubt = None
        return events

    def deliver(self, events: list[ClaimedEvent]) -> None:
        started = time.monotonic()
        try:
            self.worker.count(self.deliverer.deliver(events))
        except Exception as error:
            token = events[0].claim.token
            if is_trouble(error):
                self._in_doubt = token
                raise
            logger.exception("delivering a batch failed; its events are run again one by one")
            self.deliverer.take_back(token, error, events[0])
            self.news.wait(TROUBLE_WAIT)
        self._idle_wait = FIRST_IDLE_WAIT
        self._fit_batch(len(events), time.monotonic() - started)

    def _fit_batch(self, size: int, seconds: float) -> None:
        """As many as take about a second: fast handlers get large batches, slow ones share.

        Half a batch is as good as a full one: keyed events alone get no more of a claim.
        """
        if seconds > BATCH_SECONDS:
            self._batch = max(1, int(size * BATCH_SECONDS / seconds))
        elif size * 2 >= self._batch and seconds < BATCH_SECONDS / 2:
            self._batch = min(self._batch * 2, self.options.batch_size)

    def upkeep(self) -> None:
        """What keeps the queue moving is every worker's duty: no leader, no reaper."""
        now = time.monotonic()
        if now - self._promoted >= PROMOTE_EVERY:
            self._promoted = now
            self.store.promote()
        if now - self._recovered >= RECOVER_EVERY:
            self._recovered = now
            recovered = self.store.recover()
            if now - self._orphans_sought >= LOOK_FOR_ORPHANS_EVERY:
                self._orphans_sought = now
                recovered += self.store.recover_orphans()
            if recovered:
                logger.warning("%s abandoned events are back in the queue", recovered)

    def wait(self) -> None:
        """Until there is news, something is due, or it is time to look again."""
        longest = self.options.poll_interval
        if not self.store.hears:
            longest = min(longest, self._idle_wait)
            self._idle_wait *= 1.5
        due = self.store.next_due(self.options.queues)
        jittered = longest * random.uniform(0.75, 1.0)
        self._close_other_connections()
        self.news.wait(jittered if due is None else min(jittered, max(due, SHORTEST_WAIT)))

    def _close_other_connections(self) -> None:
        """Those of handlers, by Django's rules. Ours stays open: an event must not wait for it."""
        for connection in connections.all(initialized_only=True):
            if connection.alias != self.options.using:
                connection.close_if_unusable_or_obsolete()

    def wait_for_database(self, error: Exception) -> None:
        logger.warning(
            "the database does not answer, next try in %.1f s: %s", self._trouble_wait, error
        )
        self.store.connection.close()
        self.news.wait(self._trouble_wait * random.uniform(0.75, 1.25))
        self._trouble_wait = min(self._trouble_wait * 2, LONGEST_TROUBLE_WAIT)


class News:
    """A bell that a signal handler may ring: SimpleQueue.put is reentrant, an Event is not."""

    def __init__(self) -> None:
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def tell(self) -> None:
        self._bell.put(None)

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._bell.get(timeout=seconds)

    def forget(self) -> None:
        while not self._bell.empty():
            self._bell.get()


class Heartbeat:
    """Keeps a worker registered that has no supervisor to do it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eventbus-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(settings.ABANDON_AFTER / 4):
                self._beat()
        finally:
            connections.close_all()

    def _beat(self) -> None:
        store = store_for(self.worker.options.using)
        try:
            if not store.renew([self.worker.worker_id]):
                self.worker.evicted = True
                self.worker.stop()
        except Error as error:
            logger.warning("the registration could not be renewed: %s", error)
            store.connection.close()


def run_here(options: WorkerOptions, on_start: Callable[[Worker], None] = lambda w: None) -> Tally:
    """Work in this process, without a supervisor: for debuggers, tests and code reloading."""
    total = Tally()
    while True:
        store = store_for(options.using)
        registration = new_registration(options)
        store.register(registration)
        worker = Worker(options, registration.pk)
        on_start(worker)
        try:
            with Heartbeat(worker):
                worker.run()
        finally:
            total.handled += worker.tally.handled
            total.failed += worker.tally.failed
            total.dead += worker.tally.dead
            if not worker.evicted:
                store.dismiss(worker.worker_id)
        if not worker.evicted:
            return total


def stop_on_signals(worker: Worker) -> None:
    """The first signal asks, the second one ends the process."""
    if threading.current_thread() is not threading.main_thread():
        return

    def stop(signum: int, frame: Any) -> None:
        signal.signal(signum, signal.SIG_DFL)
        worker.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def end_of_process() -> None:
    """The bus of this process is shut down: a handler that outlived its worker cannot publish."""
    publishing.shutdown()
