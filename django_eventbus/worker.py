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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.db import Error, connections

from django_eventbus import failures, publishing
from django_eventbus.admission import Admission, Gates
from django_eventbus.batch import Tally
from django_eventbus.conf import settings
from django_eventbus.coroutines import AsyncLoop
from django_eventbus.deadlines import Board, Watch, Watchdog
from django_eventbus.delivery import Deliverer, Suspects
from django_eventbus.events import ClaimedEvent, uuid7
from django_eventbus.exceptions import WorkerEvictedError
from django_eventbus.failpoints import reached
from django_eventbus.minutes import Minutes
from django_eventbus.models import EventWorker
from django_eventbus.schedules import Scheduler
from django_eventbus.store import Clock, is_trouble, store_for

logger = logging.getLogger(__name__)

PROMOTE_EVERY = 0.1
RECOVER_EVERY = 1.0
LOOK_FOR_ORPHANS_EVERY = 60.0
FIRST_BATCH = 20
BATCH_SECONDS = 1.0
CLAIM_AHEAD_BELOW = 0.1
FIRST_IDLE_WAIT = 0.02
SHORTEST_WAIT = 0.02
FALSE_ALARMS = 5
FALSE_ALARM_PAUSE = 0.02
TROUBLE_WAIT = 0.2
LONGEST_TROUBLE_WAIT = 10.0
AT_ONCE = 0.0


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
    fires_schedules: bool = True


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
        self,
        options: WorkerOptions,
        worker_id: uuid.UUID,
        board: Board | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.options = options
        self.worker_id = worker_id
        self.board = board or Board.local(options.concurrency)
        self.clock = clock
        self.tally = Tally()
        self.evicted = self.worn_out = False
        #: When a thread of this process last looked through the whole queue.
        self.orphans_sought = float("-inf")
        self._stopping = False
        #: Tokens of the claims that a thread here is busy with, or will be.
        self.claims: set[uuid.UUID] = set()
        self._suspects = Suspects(worker_id)
        self._async_loop = AsyncLoop()
        self._gates = Gates(options.queues)
        self.minutes = Minutes(worker_id)
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
            self.tally.add(tally)
            self.board.count(tally.handled, tally.failed, tally.dead)
            limit = self.options.max_events
            if limit is not None and self.tally.handled + self.tally.postponed >= limit:
                self.stop()
            elif settings.MAX_MEMORY and _megabytes() > settings.MAX_MEMORY:
                self.worn_out = True
                self.stop()


class WorkerLoop:
    """One thread of a worker."""

    def __init__(self, worker: Worker, index: int) -> None:
        self.worker = worker
        self.options = worker.options
        self.news = worker._news[index]
        self.store = store_for(self.options.using, clock=worker.clock)
        self.scheduler = Scheduler(self.store)
        self.watch = watch = Watch(worker.board, index)
        worker._watchdog.look_after(watch)
        self.gates = worker._gates
        self.admission = Admission(self.store, self.gates, f"{worker.worker_id}/{index}")
        self.deliverer = Deliverer(
            self.store,
            watch=watch,
            suspects=worker._suspects,
            loop=worker._async_loop,
            admission=self.admission,
            minutes=worker.minutes,
            stopping=worker.stopping,
        )
        self._batch = min(FIRST_BATCH, self.options.batch_size)
        self._batch_seconds = BATCH_SECONDS
        self._queues = list(self.options.queues)
        self._idle_wait = FIRST_IDLE_WAIT
        self._false_alarms = 0
        self._trouble_wait = TROUBLE_WAIT
        self._promoted = self._recovered = 0.0
        #: Claims that may have been made although we do not know of it, and when to look for them.
        self._in_doubt: dict[uuid.UUID, float] = {}
        self._forgotten_sought = float("-inf")
        self._session: Any = None
        self._next: Future[list[ClaimedEvent]] | None = None
        self._claimer = ThreadPoolExecutor(1, thread_name_prefix=f"eventbus-claim-{index}")

    def run(self) -> None:
        try:
            self._work()
            self.admission.finish()
            self.worker.minutes.write(self.store)
        finally:
            self._stop_claiming()
            self.watch.expect(float("inf"))

    def _work(self) -> None:
        while not self.worker.stopping():
            try:
                self.watch.expect(0)
                self.news.forget()
                self.upkeep()
                events = self.next_batch()
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

    def next_batch(self) -> list[ClaimedEvent]:
        if self._next is None:
            return self.claim()
        claiming, self._next = self._next, None
        return claiming.result() or self.claim()

    def claim(self) -> list[ClaimedEvent]:
        """From the queues in turn, so that none starves; a batch is of one queue."""
        for _ in self._queues:
            self._queues.append(self._queues.pop(0))
            if self.gates.is_paused(self._queues[-1]):
                continue
            if events := self.claim_from(self._queues[-1]):
                return events
        return []

    def claim_from(self, queue_name: str) -> list[ClaimedEvent]:
        """If the answer is lost with the connection, the claim may have been made all the same."""
        self._take_back_doubtful()
        token = uuid.uuid4()
        self._in_doubt[token] = AT_ONCE
        self.worker.claims.add(token)
        events = self.store.claim(
            queue_name, limit=self._batch, worker_id=self.worker.worker_id, token=token
        )
        reached("claim.committed")
        del self._in_doubt[token]
        if not events:
            self.worker.claims.discard(token)
        return events

    def _take_back_doubtful(self) -> None:
        """At once, and again when a claim that was still under way must have arrived: the server
        may have got it after we looked."""
        now = time.monotonic()
        for token, due in tuple(self._in_doubt.items()):
            if due > now:
                continue
            self.store.release_claim(token)
            self.worker.claims.discard(token)
            if due == AT_ONCE:
                self._in_doubt[token] = now + settings.ABANDON_AFTER
            else:
                del self._in_doubt[token]

    def claim_ahead(self, size: int) -> None:
        """Claim the next batch while this one is delivered: Python and the database take turns
        otherwise. Only where batches go fast and are full: what one worker holds before its time,
        an idle one could have done."""
        full = size * 2 >= self._batch
        if full and self._batch_seconds < CLAIM_AHEAD_BELOW and self.store.may_claim_ahead():
            self._next = self._claimer.submit(self._claim_there)

    def _claim_there(self) -> list[ClaimedEvent]:
        """In the claimer's thread, on a connection that nobody else would close."""
        try:
            return self.claim()
        except Error:
            self.store.connection.close()
            raise

    def _stop_claiming(self) -> None:
        """Nobody will start what was claimed ahead: it returns uncharged."""
        try:
            if self._next is not None and (events := self._next.result()):
                self.store.release_claim(events[0].claim.token)
        except (Error, WorkerEvictedError) as error:
            logger.warning(
                "events claimed ahead are left to the recovery: %s", failures.in_a_line(error)
            )
        finally:
            self._next = None
            self._claimer.submit(connections.close_all)
            self._claimer.shutdown()

    def deliver(self, events: list[ClaimedEvent]) -> None:
        self.claim_ahead(len(events))
        started = time.monotonic()
        token = events[0].claim.token
        try:
            self.worker.count(self.deliverer.deliver(events))
        except Exception as error:
            if is_trouble(error):
                self._in_doubt[token] = AT_ONCE
                raise
            logger.error(
                "delivering a batch failed; its events are run again one by one: %s",
                failures.in_a_line(error),
            )
            self.deliverer.take_back(token, error, events[0])
            self.news.wait(TROUBLE_WAIT)
        self.worker.claims.discard(token)
        self._idle_wait = FIRST_IDLE_WAIT
        self._false_alarms = 0
        self._fit_batch(len(events), time.monotonic() - started)

    def _fit_batch(self, size: int, seconds: float) -> None:
        """As many as take about a second: fast handlers get large batches, slow ones share.

        Half a batch is as good as a full one: keyed events alone get no more of a claim.
        """
        self._batch_seconds = seconds
        if seconds > BATCH_SECONDS:
            self._batch = max(1, int(size * BATCH_SECONDS / seconds))
        elif size * 2 >= self._batch and seconds < BATCH_SECONDS / 2:
            self._batch = min(self._batch * 2, self.options.batch_size)

    def upkeep(self) -> None:
        """What keeps the queue moving is every worker's duty: no leader, no reaper."""
        self._close_other_connections()
        self.admission.upkeep()
        now = time.monotonic()
        if now - self._promoted >= PROMOTE_EVERY:
            self._promoted = now
            self.store.promote()
        if self.options.fires_schedules:
            self.scheduler.fire_due()
        self.worker.minutes.write_if_due(self.store)
        if now - self._recovered >= RECOVER_EVERY:
            self._recovered = now
            self.store.forget_marks()
            recovered = self.store.recover()
            if now - self.worker.orphans_sought >= LOOK_FOR_ORPHANS_EVERY:
                self.worker.orphans_sought = now
                recovered += self.store.recover_orphans()
            if now - self._forgotten_sought >= settings.ABANDON_AFTER and self._is_reconnected():
                self._forgotten_sought = now
                recovered += self._release_forgotten()
            if recovered:
                logger.warning("%s abandoned events are back in the queue", recovered)

    def _is_reconnected(self) -> bool:
        before, self._session = self._session, self.store.connection.connection
        return before is not self._session

    def _release_forgotten(self) -> int:
        """Another server may answer now, one that never heard of our last settlements: what it
        takes for claimed by us would wait for us for ever."""
        held = self.store.claims_of(self.worker.worker_id)
        # Asked for first: a claim is known here before it is in the database.
        return sum(self.store.release_claim(token) for token in held - self.worker.claims)

    def wait(self) -> None:
        """Until there is news, something is due, or it is time to look again."""
        longest = self.options.poll_interval
        if not self.store.hears:
            longest = min(longest, self._idle_wait)
            self._idle_wait *= 1.5
        served = [each for each in self.options.queues if not self.gates.is_paused(each)]
        due = [self.store.next_due(served), self.gates.next_look(), self.scheduler.wait()]
        if self._false_alarms >= FALSE_ALARMS:
            # NOTIFY needs no right: who rings without end must not make us look without end.
            time.sleep(FALSE_ALARM_PAUSE)
        jittered = longest * random.uniform(0.75, 1.0)
        soonest = min(each for each in due if each is not None)
        seconds = min(jittered, max(soonest, SHORTEST_WAIT))
        self.watch.expect(seconds)
        self._false_alarms = self._false_alarms + 1 if self.news.wait(seconds) else 0

    def _close_other_connections(self) -> None:
        """Those of handlers, by Django's rules. Ours stays open: an event must not wait for it."""
        for connection in connections.all(initialized_only=True):
            if connection.alias != self.options.using:
                connection.close_if_unusable_or_obsolete()

    def wait_for_database(self, error: Exception) -> None:
        logger.warning(
            "the database does not answer, next try in %.1f s: %s",
            self._trouble_wait,
            failures.in_a_line(error),
        )
        self.store.connection.close()
        self.watch.expect(LONGEST_TROUBLE_WAIT * 1.25)
        self.news.wait(self._trouble_wait * random.uniform(0.75, 1.25))
        self._trouble_wait = min(self._trouble_wait * 2, LONGEST_TROUBLE_WAIT)


class News:
    """A bell that a signal handler may ring: SimpleQueue.put is reentrant, an Event is not."""

    def __init__(self) -> None:
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def tell(self) -> None:
        self._bell.put(None)

    def wait(self, seconds: float) -> bool:
        """Whether it rang."""
        with contextlib.suppress(queue.Empty):
            self._bell.get(timeout=seconds)
            return True
        return False

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
        store = store_for(self.worker.options.using, clock=self.worker.clock)
        try:
            if not store.renew([self.worker.worker_id]):
                self.worker.evicted = True
                self.worker.stop()
        except Error as error:
            logger.warning("the registration could not be renewed: %s", failures.in_a_line(error))
            store.connection.close()


def run_here(
    options: WorkerOptions,
    on_start: Callable[[Worker], None] = lambda w: None,
    *,
    clock: Clock | None = None,
) -> Tally:
    """Work in this process, without a supervisor: for debuggers, tests and code reloading."""
    total = Tally()
    while True:
        store = store_for(options.using, clock=clock)
        registration = new_registration(options)
        # In a test's transaction nobody else can see the registration, the heartbeat neither.
        in_transaction = store.connection.in_atomic_block
        store.register(registration, expires=not in_transaction)
        worker = Worker(options, registration.pk, clock=clock)
        on_start(worker)
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
    """What this process has in memory; 0 where nobody tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def stop_on_signals(worker: Worker) -> None:
    """The first signal asks, the second one ends the process."""
    if threading.current_thread() is not threading.main_thread():
        return

    def stop(signum: int, frame: Any) -> None:
        signal.signal(signum, signal.SIG_DFL)
        worker.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def leave_pools() -> None:
    """For a process that works: it keeps its sessions, more of them than a pool may have, and one
    that a handler has changed has to end, where a pool would give it to the next."""
    for alias in connections:
        connections.settings[alias]["OPTIONS"].pop("pool", None)


def end_of_process() -> None:
    """The bus of this process is shut down: a handler that outlived its worker cannot publish."""
    publishing.shutdown()
