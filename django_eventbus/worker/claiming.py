"""The claims of a worker process: their size, their queue, and claims with an unknown result."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from django.db import Error

from django_eventbus.conf import settings
from django_eventbus.delivery.deliverer import HOLD_SECONDS
from django_eventbus.errors import failures
from django_eventbus.errors.failpoints import reached
from django_eventbus.exceptions import WorkerEvictedError
from django_eventbus.flow.controls import FlowControls
from django_eventbus.logs import about
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.store import Store
from django_eventbus.worker.registration import WorkerOptions

logger = logging.getLogger(__name__)

FIRST_BATCH = 20
BATCH_SECONDS = 1.0
SHORTEST_DELIVERY = 0.001
CLAIM_AHEAD_BELOW = 0.1
AT_ONCE = 0.0
#: Seconds until a claim is released again, if another transaction had locked one of its events.
RELEASE_AGAIN_AFTER = 1.0


@dataclass(frozen=True, slots=True)
class ClaimedBatch:
    """The events of one claim, which one thread delivers, and the limit of the claim."""

    events: list[ClaimedEvent]
    limit: int

    @property
    def token(self) -> uuid.UUID:
        return self.events[0].claim.token

    @property
    def is_full(self) -> bool:
        """Whether the batch has at least half as many events as its limit allows.

        Half counts as full, because a claim of keyed events may return only half of its limit
        although more events wait.
        """
        return len(self.events) * 2 >= self.limit


class Pace:
    """The size of a claim: fast handlers get large batches, slow handlers get small batches."""

    def __init__(self, largest: int, *, first: int = FIRST_BATCH) -> None:
        self._largest = largest
        #: The number of events that a thread delivers in about a second.
        self.size = min(first, largest)
        self.seconds = BATCH_SECONDS

    def share(self, threads: int) -> int:
        """Return the size of a claim for one idle thread: the idle threads share ``size``."""
        return -(-self.size // threads)

    def fit(self, batch: ClaimedBatch, delivered: int, seconds: float) -> None:
        self.seconds = seconds
        fitting = max(1, int(delivered * BATCH_SECONDS / max(seconds, SHORTEST_DELIVERY)))
        if seconds > BATCH_SECONDS:
            self.size = fitting
        elif delivered * 2 >= batch.limit and seconds < BATCH_SECONDS / 2:
            # At most double the size: a small batch gives only a rough estimate of the speed.
            self.size = min(self.size * 2, fitting, self._largest)

    def allows_claim_ahead(self, batch: ClaimedBatch) -> bool:
        """Return whether to claim the next batch while this batch is delivered.

        This is useful only if batches are fast and full. Otherwise the claimed events would wait in
        this process, although an idle worker could deliver them.
        """
        return batch.is_full and self.seconds < CLAIM_AHEAD_BELOW


class Claims:
    """The claims of one worker process.

    The dispatcher's thread calls these methods. The helper thread of ``ClaimAhead`` also calls
    three of them: ``claim``, but never while the dispatcher claims, and ``release`` and
    ``expect_events`` at any time.
    """

    def __init__(
        self,
        store: Store,
        options: WorkerOptions,
        worker_id: uuid.UUID,
        flow_controls: FlowControls,
    ) -> None:
        self.store = store
        self.worker_id = worker_id
        self.flow_controls = flow_controls
        self.queues = options.queues
        #: Tokens of the claims that this process knows: waiting for a thread, being delivered, or
        #: in doubt.
        self.tokens: set[uuid.UUID] = set()
        #: Queues that may have events to claim.
        self.ready = set(options.queues)
        self._in_turn = list(options.queues)
        #: Tokens of claims in doubt, and the time to release each. The database may have committed
        #: such a claim, but this process did not get the reply.
        self._in_doubt: dict[uuid.UUID, float] = {}

    def served(self) -> tuple[str, ...]:
        return tuple(each for each in self.queues if not self.flow_controls.is_paused(each))

    def are_possible(self) -> bool:
        """Return whether a queue that is not paused may have events to claim."""
        return any(each in self.ready for each in self.served())

    def expect_events(self) -> None:
        """Note that every queue may have events to claim."""
        self.ready.update(self.queues)

    def claim(self, limit: int) -> ClaimedBatch | None:
        """Claim from the queues in turn, so that no queue starves. A batch is from one queue."""
        for _ in self.queues:
            self._in_turn.append(queue := self._in_turn.pop(0))
            if queue not in self.ready or self.flow_controls.is_paused(queue):
                continue
            if events := self.claim_from(queue, limit):
                return ClaimedBatch(events, limit)
            self.ready.discard(queue)
        return None

    def claim_from(self, queue: str, limit: int) -> list[ClaimedEvent]:
        """Claim events of the queue. The claim is in doubt until the database has replied."""
        self._release_doubtful()
        token = uuid.uuid4()
        self._in_doubt[token] = AT_ONCE
        self.tokens.add(token)
        events = self.store.claim(queue, limit=limit, worker_id=self.worker_id, token=token)
        reached("claim.committed")
        del self._in_doubt[token]
        if not events:
            self.tokens.discard(token)
        return events

    def _release_doubtful(self) -> None:
        """Release each claim in doubt at once, and a second time after ABANDON_AFTER.

        The second release is needed if the claim statement was delayed, and the database executed
        it after the first release.
        """
        now = time.monotonic()
        for token, due in tuple(self._in_doubt.items()):
            if due > now:
                continue
            if not self._try_release(token):
                continue
            if due == AT_ONCE:
                self._in_doubt[token] = now + settings.ABANDON_AFTER
            else:
                self._in_doubt.pop(token, None)

    def release_late(self) -> None:
        """Release the claims in doubt whose next release is due.

        ``claim_from`` also does this, but an idle worker does not claim. A claim that was never
        released is skipped here: the thread of ``ClaimAhead`` may still wait for the reply to it.
        """
        now = time.monotonic()
        for token, due in tuple(self._in_doubt.items()):
            if due != AT_ONCE and due <= now and self._try_release(token):
                self._in_doubt.pop(token, None)
                self.expect_events()

    def _try_release(self, token: uuid.UUID) -> bool:
        """Release a claim. Return False if another transaction has locked one of its events.

        In that case, the claim is released again after RELEASE_AGAIN_AFTER. One complete release is
        then enough, because the locked event shows that the database has executed the claim.
        """
        self.store.release_claim(token)
        if not self.store.is_released(token):
            self._in_doubt[token] = time.monotonic() + RELEASE_AGAIN_AFTER
            return False
        self.tokens.discard(token)
        return True

    def end(self, batch: ClaimedBatch) -> None:
        """Remove the token of a delivered batch, because no event is claimed under it any more."""
        self.tokens.discard(batch.token)

    def mark_in_doubt(self, batch: ClaimedBatch) -> None:
        """Mark the claim of the batch as in doubt.

        The next ``claim_from`` releases its remaining events.
        """
        self._in_doubt[batch.token] = AT_ONCE

    def release(self, batch: ClaimedBatch) -> None:
        """Release a batch of which no event was started, without counting an attempt."""
        # If the release fails or is incomplete, the claim stays in doubt and is released later.
        self.mark_in_doubt(batch)
        if self._try_release(batch.token):
            self._in_doubt.pop(batch.token, None)

    def release_forgotten(self) -> int:
        """Release claims that this worker has in the database, but that this process does not know.

        After a failover, the new server may lack the last settlements, so their events are still
        claimed.
        """
        held = self.store.claims_of(self.worker_id)
        # Query the database before reading self.tokens. A new token is in self.tokens before it is
        # in the database. So a claim that another thread makes meanwhile is not released.
        return sum(self.store.release_claim(token) for token in held - self.tokens)


class ClaimAhead:
    """Claims the next batch while all threads deliver.

    So Python and the database work at the same time. The executor makes the claim, and releases the
    batch if no thread takes it soon.
    """

    def __init__(self, claims: Claims, executor: Executor) -> None:
        self._claims = claims
        self._executor = executor
        self._next: Future[ClaimedBatch | None] | None = None
        self._started = 0.0
        self._lock = threading.Lock()
        self._releasing = False

    def start(self, limit: int) -> None:
        self._started = time.monotonic()
        self._next = self._executor.submit(self._claim_in_helper, limit)

    def _claim_in_helper(self, limit: int) -> ClaimedBatch | None:
        try:
            return self._claims.claim(limit)
        except Error:
            # Only the helper's thread uses this connection, so no other code would close it.
            self._claims.store.connection.close()
            raise

    def take(self, only: Future[ClaimedBatch | None] | None = None) -> ClaimedBatch | None:
        """Return the batch that was claimed ahead, or None.

        If ``only`` is given, return only the batch of this claim, and do not take any other batch.
        """
        claiming = self._take(only)
        if claiming is None:
            return None
        batch = claiming.result()
        if batch is None:
            # The claim may have found no event, because the previous batch still owned the lanes of
            # the waiting events.
            self._claims.expect_events()
        return batch

    def _take(self, only: Future[ClaimedBatch | None] | None) -> Future[ClaimedBatch | None] | None:
        """Remove and return the claim, so that only one caller gets it: dispatcher or release."""
        with self._lock:
            if only is not None and self._next is not only:
                return None
            claiming, self._next = self._next, None
            return claiming

    def release_if_old(self) -> None:
        """Release a batch that no thread took in time. The watchdog's thread calls this."""
        old = self._next
        is_old = time.monotonic() > self._started + HOLD_SECONDS
        if old is not None and is_old and not self._releasing:
            self._releasing = True
            # Release only this claim. A later claim may be queued behind this release in the
            # executor. If the release waited for that claim, both would wait forever.
            self._executor.submit(self.release, old)

    def release(self, only: Future[ClaimedBatch | None] | None = None) -> None:
        """Release the batch without counting an attempt. After an error, release it later."""
        try:
            if batch := self.take(only):
                self._claims.release(batch)
        except (Error, WorkerEvictedError) as error:
            logger.warning(
                "could not release the batch that was claimed ahead; it is released later, or "
                "recovered after this worker has ended: %s",
                failures.in_a_line(error),
                extra=about(),
            )
            self._claims.store.connection.close()
        finally:
            self._releasing = False
