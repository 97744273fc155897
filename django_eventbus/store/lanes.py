"""Lanes: one row per key with events waiting. Owning the lane is owning the key."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

from django.db.models import F, QuerySet

from django_eventbus.conf import settings
from django_eventbus.events import Claim
from django_eventbus.models import EventLane, QueuedEvent, QueuedStatus
from django_eventbus.store.rows import Rows, retried


class Lanes(Rows):
    """Order per key: events are routed to their lane, and lanes are claimed."""

    def own_lanes(self, claim: Claim, limit: int) -> list[int]:
        """Own ready lanes; return the rows of a run of consecutive events from each."""
        self.route(claim.queue, limit)
        ready = self.ready_lanes(claim.queue).order_by("ready_at", "id")
        lanes = list(self.locked(ready).values_list("id", flat=True)[:limit])
        if not lanes:
            return []
        run_length = max(1, limit // len(lanes))
        ids: list[int] = []
        empty: list[int] = []
        for lane_id in lanes:
            run = list(self.waiting_in(lane_id)[: min(run_length, limit - len(ids))])
            if not run:
                empty.append(lane_id)
            in_order = itertools.takewhile(lambda row: row[1] == QueuedStatus.PENDING, run)
            ids += [row_id for row_id, _ in in_order]
            if len(ids) >= limit:
                break
        self.lanes.filter(id__in=empty).delete()
        owned = self.lanes_of(self.queued.filter(id__in=ids))
        self.lanes.filter(id__in=owned).update(claim_token=claim.token, claimed_by=claim.worker_id)
        return ids

    def waiting_in(self, lane_id: int) -> QuerySet[Any]:
        # Given as an equality, a planner may walk the primary key, which has the order too.
        lane = self.queued.filter(lane_id__gte=lane_id, lane_id__lte=lane_id)
        return lane.order_by("lane_id", "id").values_list("id", "status")

    @staticmethod
    def lanes_of(rows: QuerySet[QueuedEvent]) -> set[int]:
        lanes = rows.order_by().values_list("lane_id", flat=True).distinct()
        return {lane_id for lane_id in lanes if lane_id is not None}

    def ready_lanes(self, queue: str) -> QuerySet[EventLane]:
        return self.lanes.filter(queue=queue, claim_token__isnull=True, ready_at__lte=self.now)

    def unrouted(self, queue: str) -> QuerySet[QueuedEvent]:
        return self.queued.filter(
            queue=queue, key__isnull=False, lane_id__isnull=True, available_at__isnull=True
        )

    def route(self, queue: str, limit: int) -> None:
        """Give new keyed events their lane, oldest first.

        Routers wait for each other: one that passed over the rows another holds would put later
        events of a key into its lane before earlier ones. Holding the lanes' rows makes a release
        that wants to delete one wait, and then see these events.
        """
        unrouted = self.unrouted(queue).order_by("id")
        found = list(self.waiting_lock(unrouted).values_list("id", "key")[:limit])
        if not found:
            return
        keys = sorted({key for _, key in found})
        EventLane.objects.using(self.using).bulk_create(
            [
                EventLane(namespace=settings.NAMESPACE, queue=queue, key=key, ready_at=self.now)
                for key in keys
            ],
            ignore_conflicts=True,
        )
        lanes = self.lanes.filter(queue=queue, key__in=keys)
        held = list(self.waiting_lock(lanes.order_by("id")).values_list("id", "key"))
        lanes.update(version=F("version") + 1)
        for lane_id, key in held:
            members = [row_id for row_id, its_key in found if its_key == key]
            self.queued.filter(id__in=members).update(lane_id=lane_id)

    @retried
    def release_lanes(self, token: uuid.UUID, waits: dict[int, float]) -> None:
        """Give back lanes owned under this token: gone if empty, else ready after their wait."""
        with self.atomic():
            mine = self.waiting_lock(
                self.lanes.filter(id__in=waits, claim_token=token).order_by("id")
            )
            owned = set(mine.values_list("id", flat=True))
            waiting = self.lanes_of(self.queued.filter(lane_id__in=owned))
            self.lanes.filter(id__in=owned - waiting).delete()
            for lane_id in waiting:
                self.lanes.filter(id=lane_id).update(
                    claim_token=None, claimed_by=None, ready_at=self.after(waits[lane_id])
                )
