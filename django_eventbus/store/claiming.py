"""Claim events: route keyed events to lanes, lock ready rows, write the claim to these rows."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Any

from django.db.models import F, QuerySet, TextField
from django.db.models.functions import Cast

from django_eventbus.conf import settings
from django_eventbus.exceptions import WorkerEvictedError
from django_eventbus.models import QueuedEvent, QueuedStatus
from django_eventbus.schema.claims import Claim, ClaimedEvent
from django_eventbus.store.lanes import Lanes
from django_eventbus.store.rows import UNCLAIMED, Clock, retried

ROUTE_CHUNK = 1000

#: The columns that a claim reads, in the order of ClaimedEvent's fields after ``claim``.
CLAIM_COLUMNS = (
    "id",
    "event_id",
    "type",
    "version",
    "payload",
    "headers",
    "key",
    "lane_id",
    "priority",
    "attempts",
    "crashes",
    "interruptions",
    "producer",
    "caused_by",
    "created_at",
    "due_at",
    "processing_started_at",
    "deliveries",
    "errors",
    "replay_of",
    "only_handler",
)
_JSON_COLUMNS = ("payload", "headers", "deliveries", "errors")


class Claiming(Lanes):
    """Claims, each in its own transaction, and queries for the events of a claim."""

    def __init__(self, using: str, *, clock: Clock | None = None) -> None:
        super().__init__(using, clock=clock)
        # If a claim may take only one event, claims alternate: one takes an event with a key, the
        # next one an event without a key.
        self._turn = random.getrandbits(1)

    @retried
    def claim(
        self, queue: str, *, limit: int, worker_id: uuid.UUID, token: uuid.UUID | None = None
    ) -> list[ClaimedEvent]:
        """Claim up to ``limit`` events of the queue, in order, for one worker.

        A caller that passes its own new token can release the claim even if the response of the
        database is lost.
        """
        claim = self._new_claim(queue, worker_id, token)
        return self._route_until_claimed(claim, self._claim_both(claim, limit), limit)

    def _claim_both(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        """Claim events with a key and events without a key, in one transaction."""
        with self.atomic():
            self._lock_registration(claim.worker_id)
            self.route(claim.queue, limit)
            return self._claim_in_turn(claim, limit)

    def _route_until_claimed(
        self, claim: Claim, claimed: list[ClaimedEvent], limit: int
    ) -> list[ClaimedEvent]:
        """Repeat routing and claiming until an event is claimed or no unrouted event is left.

        An empty result must mean that no event is ready. So if all lanes of the routed events have
        to wait, the next chunk of unrouted events is routed. Each chunk has its own transaction.
        """
        while not claimed and self._route_more(claim):
            claimed = self._claim_both(claim, limit)
        return claimed

    def _route_more(self, claim: Claim) -> bool:
        with self.atomic():
            return self.route(claim.queue, ROUTE_CHUNK) > 0

    def _claim_in_turn(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        """Claim events with a key and events without a key, each up to half of the batch.

        So neither kind can starve. If one kind has too few events, the other kind fills the batch.
        With a limit of one event, claims alternate between the two kinds.
        """
        self._turn = 1 - self._turn
        share = (limit + self._turn) // 2
        unkeyed = self._claim_unkeyed(claim, share) if share else []
        room = limit - len(unkeyed)
        keyed = self._claim_keyed(claim, room) if room else []
        if len(unkeyed) == share and len(keyed) < room:
            unkeyed += self._claim_unkeyed(claim, room - len(keyed))
            unkeyed.sort(key=order_in_queue)
        return keyed + unkeyed

    def may_claim_ahead(self) -> bool:
        """Return whether another connection can claim events while this connection is in use."""
        connection = self.connection
        skips = connection.features.has_select_for_update_skip_locked
        return skips and not connection.in_atomic_block

    def _new_claim(self, queue: str, worker_id: uuid.UUID, token: uuid.UUID | None) -> Claim:
        return Claim(token or uuid.uuid4(), worker_id, settings.NAMESPACE, queue, self.using)

    def _lock_registration(self, worker_id: uuid.UUID) -> None:
        """Lock the registration of the worker.

        Raise WorkerEvictedError if the registration is missing or has expired.

        The lock serializes this claim and a recovery that considers the worker dead: the
        transaction that comes second waits for the end of the first transaction.
        """
        alive = self.workers.filter(pk=worker_id, expires_at__gt=self.now)
        if not self.waiting_lock(alive).values_list("pk"):
            raise WorkerEvictedError(f"worker {worker_id} is not registered any more")

    def _claim_keyed(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        return self._mark_claimed(claim, self.own_lanes(claim, limit))

    def _claim_unkeyed(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        ready = self.queued.filter(
            queue=claim.queue,
            key__isnull=True,
            available_at__isnull=True,
            held_by__isnull=True,
            status=QueuedStatus.PENDING,
        ).order_by("-priority", "id")
        ids = list(self.locked(ready).values_list("id", flat=True)[:limit])
        return self._mark_claimed(claim, ids)

    @staticmethod
    def _claimed(claim: Claim, rows: Iterable[Iterable[Any]]) -> list[ClaimedEvent]:
        claim.answered_at = time.monotonic()
        return [ClaimedEvent(claim, *row) for row in rows]

    def _mark_claimed(self, claim: Claim, ids: Sequence[int], **changes: Any) -> list[ClaimedEvent]:
        """Write the claim, and other changes, to locked rows.

        Return the events in the order of ``ids``.
        """
        if not ids:
            return []
        self.queued.filter(id__in=ids).update(
            status=QueuedStatus.PROCESSING,
            attempts=F("attempts") + 1,
            claim_token=claim.token,
            claimed_by=claim.worker_id,
            processing_started_at=self.now,
            handed_off_to=None,
            **changes,
        )
        position = {row_id: index for index, row_id in enumerate(ids)}
        claimed = self._read_claimed(claim, self.queued.filter(id__in=ids))
        return sorted(claimed, key=lambda event: position[event.row_id])

    def _read_claimed(self, claim: Claim, rows: QuerySet[QueuedEvent]) -> list[ClaimedEvent]:
        as_text = {f"{name}_json": Cast(name, TextField()) for name in _JSON_COLUMNS}
        columns = [f"{name}_json" if name in _JSON_COLUMNS else name for name in CLAIM_COLUMNS]
        found = rows.annotate(**as_text).values_list(*columns)
        return self._claimed(claim, [map(_as_number, row) for row in found])

    def find_claimed(self, worker_id: uuid.UUID, row_id: int) -> ClaimedEvent | None:
        """Return an event that a worker has claimed, or None. The worker may be dead already."""
        rows = self.queued.filter(id=row_id, claimed_by=worker_id)
        held = rows.values_list("claim_token", "queue").first()
        if held is None:
            return None
        token, queue = held
        claimed = self._read_claimed(self._new_claim(queue, worker_id, token), rows)
        for event in claimed:
            seconds = self.read_clock().timestamp() - event.started_epoch
            event.claim.answered_at = time.monotonic() - seconds
        return claimed[0] if claimed else None

    def still_held(self, token: uuid.UUID, ids: Collection[int]) -> dict[int, Any]:
        """Return the deliveries, by row id, of the rows that are still claimed under this token.

        Rows that were settled or recovered are not returned. The query waits for row locks: if this
        worker lost the connection of a transaction, the server may still commit that transaction.
        """
        held = self.queued.filter(id__in=list(ids), claim_token=token).order_by("id")
        with self.atomic():
            return dict(self.waiting_lock(held).values_list("id", "deliveries"))

    @retried
    def release(self, token: uuid.UUID, ids: Collection[int]) -> int:
        """Release events whose handlers were not started. No attempt is counted for the claim."""
        held = self.queued.filter(id__in=list(ids), claim_token=token)
        return held.update(**UNCLAIMED, attempts=F("attempts") - 1)


def _as_number(value: Any) -> Any:
    return value.timestamp() if isinstance(value, datetime) else value


def order_in_queue(event: ClaimedEvent) -> tuple[int, int]:
    """Return the sort key of an event in its queue: priority (highest first), then row id."""
    return -event.priority, event.row_id
