"""Events that are handed off to another executor, such as Celery.

Such an event waits in the queue until HANDOFF_DEADLINE. Until then, its executor can claim it with
the token of the message. Afterwards an event worker claims it and hands it off again, with a new
token, so the old message has no effect any more.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import Any

from django.db.models import Q

from django_eventbus.models import QueuedStatus
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.store.claiming import Claiming
from django_eventbus.store.rows import UNCLAIMED, retried
from django_eventbus.store.waits import After, Wait, holder_of

#: The largest number of interrupted events that a process claims in addition to its message.
INTERRUPTED_AT_ONCE = 50


class HandingOff(Claiming):
    """Claims by the token of a message, and the events whose message could not be sent."""

    def count_handed_off(self, handler: str, *, at_most: int) -> int:
        """Return how many events wait for the executor of a handler; stop at ``at_most``.

        An event without a key whose deadline has passed is not counted. It may wait for an event
        worker, for example because its queue is paused.
        """
        before_deadline = Q(available_at__isnull=False) | Q(lane_id__isnull=False)
        waiting = self.queued.filter(before_deadline, handed_off_to=handler)
        return waiting.values("id")[:at_most].count()

    @retried
    def claim_handed_off(
        self,
        queue: str,
        rows: Collection[int],
        *,
        handlers: Collection[str],
        token: uuid.UUID,
        worker_id: uuid.UUID,
    ) -> list[ClaimedEvent]:
        """Claim the events of a message, except events that were claimed or handed off again.

        Other events that were handed off to these handlers, and whose last claim was lost, are
        claimed too. Otherwise they would wait until all older messages in the broker are processed.
        """
        of_message = Q(id__in=list(rows), claim_token=token)
        interrupted = Q(crashes__gt=0) | Q(interruptions__gt=0)
        claim = self._new_claim(queue, worker_id, None)
        with self.atomic():
            self._lock_registration(worker_id)
            waiting = self.queued.filter(
                of_message | interrupted,
                handed_off_to__in=list(handlers),
                queue=queue,
                status=QueuedStatus.PENDING,
            )
            found = self.locked(waiting.order_by("id")).values_list("id", "lane_id")
            lane_of = dict(found[: len(rows) + INTERRUPTED_AT_ONCE])
            owned = self._own_waiting_lanes(claim, set(lane_of.values()) - {None})
            mine = [row for row, lane in lane_of.items() if lane is None or lane in owned]
            self.queued.filter(id__in=mine).update(available_at=None)
            return self._mark_claimed(claim, mine)

    def _own_waiting_lanes(self, claim: Any, lanes: set[Any]) -> set[int]:
        """Claim the lanes of handed-off events; return the ids of the lanes that were free."""
        if not lanes:
            return set()
        free = self.lanes.filter(id__in=lanes, claim_token__isnull=True, blocked_by__isnull=True)
        owned = set(self.locked(free).values_list("id", flat=True))
        self.lanes.filter(id__in=owned).update(claim_token=claim.token, claimed_by=claim.worker_id)
        return owned

    @retried
    def take_back_handed_off(self, rows: Collection[int], *, token: uuid.UUID, wait: Wait) -> int:
        """Return events whose message could not be sent to the queue, where they wait."""
        with self.atomic():
            unsent = self.queued.filter(
                id__in=list(rows), claim_token=token, status=QueuedStatus.PENDING
            )
            lane_of = dict(self.locked(unsent.order_by("id")).values_list("id", "lane_id"))
            taken = self.queued.filter(id__in=lane_of)
            count = taken.update(**UNCLAIMED, handed_off_to=None, available_at=None)
            ready_at = self.after(wait.seconds) if isinstance(wait, After) else None
            taken.filter(lane_id__isnull=True).update(
                held_by=holder_of(wait), available_at=ready_at
            )
            lanes = self.lanes.filter(
                id__in=set(lane_of.values()) - {None}, claim_token__isnull=True
            )
            lanes.update(**self.lane_ready_after(wait))
        return count
