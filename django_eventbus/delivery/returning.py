"""Return the unstarted events of a batch to the queue, and release the lanes of the batch."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from concurrent.futures import Executor, Future

from django.db import Error

from django_eventbus.delivery.batch import Batch
from django_eventbus.delivery.settling import Settler
from django_eventbus.errors import failures
from django_eventbus.errors.failpoints import reached
from django_eventbus.logs import about
from django_eventbus.schema.claims import ClaimedEvent

logger = logging.getLogger(__name__)

#: A batch that runs longer than this number of seconds is slow: its unstarted events are returned
#: to the queue.
HOLD_SECONDS = 1.0


class Returner:
    """Releases the unstarted events of a batch. For a slow batch, another thread releases them."""

    def __init__(self, settler: Settler) -> None:
        self.settler = settler
        self.store = settler.store
        #: The batch that is being delivered.
        self.current: Batch | None = None
        self._returning: Future[list[ClaimedEvent]] | None = None
        self._lock = threading.Lock()

    def begin(self, batch: Batch) -> None:
        self.current = batch

    def return_unstarted(self, executor: Executor) -> None:
        """Release the unstarted events of a slow batch. The watchdog's thread calls this.

        A slow handler must not delay events that an idle worker could handle.
        """
        with self._lock:
            batch = self.current
            if batch is None or self._returning is not None:
                return
            if time.monotonic() < batch.started + HOLD_SECONDS:
                return
            if unstarted := batch.take_unstarted():
                batch.tally.returned += len(unstarted)
                self._returning = executor.submit(self._return, batch.token, unstarted)

    def _return(self, token: uuid.UUID, unstarted: list[ClaimedEvent]) -> list[ClaimedEvent]:
        """Release events in the executor's thread. Return the events whose release failed."""
        try:
            self.store.release(token, [event.row_id for event in unstarted])
            self.store.wake()
        except Error as error:
            claim = unstarted[0].claim
            logger.warning(
                "could not release unstarted events: %s",
                failures.in_a_line(error),
                extra=about(queue=claim.queue, worker_id=claim.worker_id),
            )
            self.store.connection.close()
            return unstarted
        return []

    def end(self, batch: Batch) -> None:
        """Add all events that were not started to ``batch.unstarted``.

        If another thread is releasing events, wait for that thread, and add the events whose
        release failed.
        """
        with self._lock:
            self.current = None
            returning, self._returning = self._returning, None
        if returning is not None:
            batch.unstarted += returning.result()
        unstarted = batch.take_unstarted()
        batch.unstarted += unstarted
        batch.tally.returned += len(unstarted)

    def release(self, batch: Batch) -> None:
        """Release the lanes and the unstarted events. No attempt is counted for these events."""
        rows = [event.row_id for event in batch.unstarted]
        if rows:
            reached("release.before")
            self.settler.through_outage(lambda: self.store.release(batch.token, rows))
        if batch.lanes:
            waits = batch.lane_waits()
            self.settler.through_outage(lambda: self.store.release_lanes(batch.token, waits))
