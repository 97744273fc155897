"""Events that are handed off to another executor, such as Celery.

Such an event waits in the queue until HANDOFF_DEADLINE. Until then, its executor can claim it with
the token of the message. Afterwards an event worker claims it and hands it off again, with a new
token, so the old message has no effect any more.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import Any, NamedTuple

from django.db.models import Exists, OuterRef, Q, QuerySet

from django_eventbus.models import QueuedEvent, QueuedStatus
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.store.claiming import Claiming
from django_eventbus.store.rows import UNCLAIMED, retried
from django_eventbus.store.waits import After, Wait, holder_of


class HandedOffClaim(NamedTuple):
    """The result of a claim by the token of a message."""

    events: list[ClaimedEvent]
    #: The row ids of the events of the message that can be claimed later: events beyond the limit,
    #: and events whose row was locked by another transaction.
    left: set[int]
    #: The row ids of the events of the message whose lane another transaction had locked.
    behind_locks: set[int]


class HandingOff(Claiming):
    """Claims by the token of a message, and the events whose message could not be sent."""

    def count_handed_off(self, handler: str, *, at_most: int) -> int:
        """Return how many events wait for the executor of a handler; stop at ``at_most``.

        An event whose deadline has passed is not counted. Such an event may wait for an event
        worker, for example because its queue is paused.
        """
        lane_waits = Exists(self.lanes.filter(id=OuterRef("lane_id"), ready_at__gt=self.now))
        before_deadline = Q(available_at__isnull=False) | lane_waits
        waiting = self.queued.filter(before_deadline, handed_off_to=handler)
        return waiting.values("id")[:at_most].count()

    @retried
    def claim_handed_off(
        self,
        queue: str,
        rows: Collection[int],
        *,
        limit: int,
        limit_of_others: int,
        handlers: Collection[str],
        token: uuid.UUID,
        worker_id: uuid.UUID,
    ) -> HandedOffClaim:
        """Claim events of a message, except events that were claimed or handed off again.

        Events of other messages to these handlers are claimed too, if an earlier claim of the event
        ended without a result (a crash or an interruption). Otherwise these events would wait until
        all older messages in the broker are processed. ``limit`` applies to the events of the
        message, ``limit_of_others`` to the other events.
        """
        interrupted = Q(crashes__gt=0) | Q(interruptions__gt=0)
        claim = self._new_claim(queue, worker_id, None)
        with self.atomic():
            self._lock_registration(worker_id)
            waiting = self.queued.filter(
                Q(id__in=list(rows), claim_token=token) | interrupted,
                handed_off_to__in=list(handlers),
                queue=queue,
                status=QueuedStatus.PENDING,
            )
            of_message, others = self._find_waiting(waiting, rows, token)
            lane_of = {
                **self._lock_some(waiting, others, limit_of_others),
                **self._lock_some(waiting, of_message, limit),
            }
            owned, busy = self._own_waiting_lanes(claim, set(lane_of.values()) - {None})
            mine = [row for row, lane in lane_of.items() if lane is None or lane in owned]
            events = self._mark_claimed(claim, mine, available_at=None)
        behind_locks = of_message.intersection(
            row for row in lane_of.keys() - mine if lane_of[row] not in busy
        )
        return HandedOffClaim(events, of_message - lane_of.keys(), behind_locks)

    def _find_waiting(
        self, waiting: QuerySet[QueuedEvent], rows: Collection[int], token: uuid.UUID
    ) -> tuple[set[int], set[int]]:
        """Return the row ids of the events of the message, and of the interrupted events.

        The query takes no locks. On MariaDB a locking search would lock every event that it reads,
        so the claims of other messages would skip these events.
        """
        found = dict(waiting.values_list("id", "claim_token"))
        of_message = {row_id for row_id in rows if found.get(row_id) == token}
        return of_message, found.keys() - of_message

    def _lock_some(
        self, waiting: QuerySet[QueuedEvent], rows: Collection[int], limit: int
    ) -> dict[int, int | None]:
        """Lock up to ``limit`` of these rows; return the lane of each locked row."""
        if not rows:
            return {}
        found = waiting.filter(id__in=list(rows)).order_by("id")
        return dict(self.locked(found).values_list("id", "lane_id")[:limit])

    def _own_waiting_lanes(self, claim: Any, lanes: set[Any]) -> tuple[set[int], set[int]]:
        """Claim those lanes of handed-off events that are free and not locked.

        Return the ids of the claimed lanes, and of the lanes that are not free: another process
        has claimed them, or a dead letter blocks them.
        """
        if not lanes:
            return set(), set()
        free = self.lanes.filter(id__in=lanes, claim_token__isnull=True, blocked_by__isnull=True)
        owned = set(self.locked(free).values_list("id", flat=True))
        self.lanes.filter(id__in=owned).update(claim_token=claim.token, claimed_by=claim.worker_id)
        if owned == lanes:
            return owned, set()
        return owned, lanes - owned - set(free.values_list("id", flat=True))

    @retried
    def take_back_handed_off(self, rows: Collection[int], *, token: uuid.UUID, wait: Wait) -> int:
        """Return events to the queue, because their message could not be sent; return how many.

        The events can be claimed again after ``wait``.
        """
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
