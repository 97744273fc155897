"""The loop of a worker process: claim batches, give them to threads, and do upkeep."""

from __future__ import annotations

import contextlib
import logging
import random
from typing import TYPE_CHECKING

from django.db import Error

from django_eventbus.delivery.deadlines import Phase, Watch
from django_eventbus.errors import failures
from django_eventbus.exceptions import WorkerEvictedError
from django_eventbus.logs import about
from django_eventbus.store import is_outage, store_for
from django_eventbus.worker import wakeup
from django_eventbus.worker.claiming import ClaimAhead, ClaimedBatch, Claims, Pace
from django_eventbus.worker.threads import Delivered, OneThread, ThreadPool, Threads
from django_eventbus.worker.upkeep import Upkeep

if TYPE_CHECKING:
    from django_eventbus.worker.worker import Worker

logger = logging.getLogger(__name__)


class Dispatcher:
    """The main loop of a worker process, in its main thread.

    docs/explanation/worker.md explains which thread owns a batch at which time.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.options = options = worker.options
        self.bell = worker.bell
        self.store = store_for(options.using, clock=worker.clock)
        self.claims = Claims(self.store, options, worker.worker_id, worker.flow_controls)
        self.pace = Pace(options.batch_size)
        self.upkeep = Upkeep(worker, self.store, self.claims)
        self.timing = wakeup.Timing(
            options.poll_interval, reports_wakeups=self.store.reports_wakeups
        )
        self.threads: Threads
        if options.concurrency == 1:
            self.threads = one = OneThread(worker)
            self.watch = one.delivery.watch
        else:
            self.threads = ThreadPool(worker)
            self.watch = Watch(worker.board, options.concurrency)
        self.ahead = ClaimAhead(self.claims, self.threads.executor)
        # Inside the transaction of a test, only this connection sees the events, so another thread
        # could not release them.
        self._has_transaction = self.store.connection.in_atomic_block
        # This must be the last statement: the watchdog's thread uses the attributes set above.
        worker.watchdog.supervise(self.watch, self.release_waiting_events)

    def run(self) -> None:
        try:
            with self.store.connection.execute_wrapper(self.watch.report_after):
                self._work()
        finally:
            self._end()
        self.worker.statistics.write(self.store)

    def _work(self) -> None:
        while not self.worker.stopping():
            try:
                self.watch.expect(0)
                self.keep_up()
                if not self.hand_out():
                    if self.is_drained():
                        return
                    self.wait()
                self.collect()
                self.timing.outage_is_over()
            except WorkerEvictedError:
                self.worker.evicted = True
                self.worker.stop()
            except Error as error:
                if not is_outage(error):
                    raise
                self.wait_for_database(error)

    def keep_up(self) -> None:
        if self.bell.take_rings():
            self.claims.expect_events()
        self.threads.run_submitted()
        self.upkeep.keep_up()
        self.threads.keep_up()

    def hand_out(self) -> bool:
        """Give a batch to an idle thread; return whether there was a batch."""
        idle = self.threads.idle
        if not idle:
            return False
        batch = self.ahead.take() or self.claim(self.pace.share(idle))
        if batch is None:
            return False
        self.worker.board.progress()
        if idle == 1 and self.pace.allows_claim_ahead(batch) and self.store.may_claim_ahead():
            self.ahead.start(self.pace.size)
        self.threads.hand(batch)
        return True

    def claim(self, limit: int) -> ClaimedBatch | None:
        if not self.claims.are_possible():
            return None
        batch = self.claims.claim(limit)
        if batch is None:
            self.timing.found_nothing()
        return batch

    def is_drained(self) -> bool:
        """Return whether ``drain`` is set and no event is running, ready or due any more."""
        if not self.options.drain or self.threads.busy:
            return False
        return not self.upkeep.promote()

    def wait(self) -> None:
        """Wait until a wake-up arrives, an event or a duty is due, or the poll interval ends."""
        if self.threads.has_finished() or (self.options.drain and not self.threads.busy):
            return
        if not self.upkeep.is_current:
            self.upkeep.check()
            if self.threads.idle and self.claims.are_possible():
                return
        self.worker.board.progress()
        seconds = self._seconds_to_wait()
        self.timing.pause_after_false_alarms()
        self.watch.expect(seconds)
        if self.worker.stopping():
            return  # ``keep_up`` may have consumed the wake-up of the stop signal.
        rang = self.bell.wait(seconds)
        self.timing.woke_up(for_events=rang and self.bell.rang_for_events)
        self.upkeep.is_current = False

    def _seconds_to_wait(self) -> float:
        if not self.threads.idle:
            return self.timing.idle_wait(self.upkeep.other_duties())
        if self.upkeep.attention.ready:
            return self.timing.wait_for_locks()
        return self.timing.idle_wait([self.upkeep.attention.wait, *self.upkeep.other_duties()])

    def collect(self) -> None:
        """Process the results of the threads."""
        for delivered in self.threads.finished():
            self.upkeep.is_current = False
            self.claims.expect_events()
            if delivered.outage is not None:
                self.claims.mark_in_doubt(delivered.batch)
                raise delivered.outage
            self.claims.end(delivered.batch)
            self._count(delivered)

    def _count(self, delivered: Delivered) -> None:
        self.timing.delivered()
        self.worker.count(delivered.tally)
        started = len(delivered.batch.events) - delivered.tally.returned
        self.pace.fit(delivered.batch, started, delivered.seconds)
        if delivered.failed:
            self.bell.wait(wakeup.OUTAGE_WAIT)

    def release_waiting_events(self) -> None:
        """Release events that wait behind a slow handler. The watchdog calls this."""
        if self._has_transaction:
            return
        # The executor may have been shut down; submit() raises RuntimeError in that case.
        with contextlib.suppress(RuntimeError):
            for delivery in self.threads.deliveries:
                delivery.deliverer.return_unstarted(self.threads.executor)
            self.ahead.release_if_old()

    def wait_for_database(self, error: Exception) -> None:
        wait = self.timing.outage_wait()
        logger.warning(
            "database error, retrying in %.1f s: %s",
            wait,
            failures.in_a_line(error),
            extra=about(),
        )
        self.store.connection.close()
        self.worker.board.enter(Phase.OUTAGE)
        self.watch.expect(wakeup.LONGEST_OUTAGE_WAIT * 1.25)
        self.bell.wait(wait * random.uniform(0.75, 1.25))

    def _end(self) -> None:
        """Release unstarted events without counting an attempt, and finish running events."""
        self.worker.board.enter(Phase.STOPPING)
        self.watch.expect(float("inf"))
        self.threads.run_submitted()
        self.ahead.release()
        self.threads.end()
        while self.threads.has_finished():
            # After an error, some events stay claimed. They are released when the registration of
            # this worker is deleted.
            with contextlib.suppress(Error):
                self.collect()
