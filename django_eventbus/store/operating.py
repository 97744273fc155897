"""Actions of operators on waiting events: run now, cancel, skip the head of a lane."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from typing import Any

from django.db.models import Q, QuerySet

from django_eventbus.errors import failures
from django_eventbus.errors.failures import fingerprint
from django_eventbus.models import EventLog, LogStatus, QueuedEvent, QueuedStatus
from django_eventbus.store.rows import retried
from django_eventbus.store.settlements import Finished
from django_eventbus.store.settling import Settling, require_all
from django_eventbus.store.waits import AT_ONCE

#: Large columns that these actions do not need.
_LARGE = ("payload", "headers", "edits", "history")


class Operating(Settling):
    """Actions on events that no worker is handling."""

    @retried
    def skip_head(self, queue: str, key: str, error: dict[str, Any]) -> EventLog | None:
        """Discard the first event of an idle lane, and make the lane ready for its next event."""
        with self.atomic():
            lane = self.lock_idle_lane(queue, key)
            head = lane and self.lane_head(lane.pk)
            if not lane or not head:
                return None
            self._discard([head], error)
            self.lanes.filter(pk=lane.pk).update(**self.lane_ready_after(AT_ONCE))
            return EventLog.objects.using(self.using).get(pk=head.pk)

    def _discard(self, events: Sequence[QueuedEvent], error: dict[str, Any]) -> None:
        """Discard pending events. The caller has locked the events, or the lane of the events."""
        token = uuid.uuid4()
        ids = [event.pk for event in events]
        pending = self.queued.filter(id__in=ids, status=QueuedStatus.PENDING)
        require_all(pending.update(claim_token=token), len(ids))
        ends = [
            Finished(
                row_id=event.pk,
                status=LogStatus.DISCARDED,
                deliveries=event.deliveries,
                errors=failures.bounded([*(event.errors or []), error]),
                error_type=error["type"],
                error_fingerprint=fingerprint(error),
            )
            for event in events
        ]
        self.settle(token, ends)

    @retried
    def cancel(self, ids: Collection[int], error: dict[str, Any]) -> int:
        """Discard events that no worker is handling; return how many."""
        with self.atomic():
            pending = self._pending(ids)
            # Lanes are locked before events, as in a claim, to avoid deadlocks with claims.
            laned = [lane_id for lane_id, _ in self._laned(pending)]
            lanes = self.lanes.filter(id__in=laned, claim_token__isnull=True).order_by("id")
            idle = [lane.pk for lane in self.waiting_lock(lanes)]
            firsts = {head.pk: lane for lane in idle if (head := self.lane_head(lane))}
            cancelled = list(self.locked(pending.order_by("id")).defer(*_LARGE))
            self._discard(cancelled, error)
            freed = [firsts[event.pk] for event in cancelled if event.pk in firsts]
            self.lanes.filter(id__in=freed).update(**self.lane_ready_after(AT_ONCE))
        return len(cancelled)

    @retried
    def hasten(self, ids: Collection[int]) -> int:
        """Make delayed or held events ready; return how many.

        In a lane, only the first event can be made ready.
        """
        with self.atomic():
            pending = self._pending(ids)
            hastened = sum(self._hasten_head(*each) for each in self._laned(pending))
            waits = Q(available_at__isnull=False) | Q(held_by__isnull=False)
            waiting = pending.filter(waits, lane_id__isnull=True)
            rows = list(self.locked(waiting.order_by("id")).defer(*_LARGE))
            for event in rows:
                self.make_due(event)
            hastened_rows = self.queued.filter(id__in=[event.pk for event in rows])
            hastened_rows.update(available_at=None, held_by=None)
        return hastened + len(rows)

    def _hasten_head(self, lane_id: int, row_id: int) -> bool:
        waits = Q(ready_at__gt=self.now) | Q(held_by__isnull=False)
        idle = self.lanes.filter(
            waits, id=lane_id, claim_token__isnull=True, blocked_by__isnull=True
        )
        lane = self.waiting_lock(idle).first()
        head = lane and self.lane_head(lane_id)
        if not head or head.pk != row_id:
            return False
        self.make_due(head)
        return bool(idle.update(ready_at=self.now, held_by=None))

    def _pending(self, ids: Collection[int]) -> QuerySet[QueuedEvent]:
        return self.queued.filter(id__in=list(ids), status=QueuedStatus.PENDING)

    @staticmethod
    def _laned(events: QuerySet[QueuedEvent]) -> list[tuple[int, int]]:
        rows = events.values_list("lane_id", "id")
        return [(lane_id, row_id) for lane_id, row_id in rows if lane_id is not None]
