"""Lanes: one row per key with events waiting. Owning the lane is owning the key."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from django.db.models import Exists, F, OuterRef, QuerySet, Subquery

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
        runs: dict[int, list[int]] = {lane_id: [] for lane_id in lanes}
        held_up = set()
        for lane_id, row_id, status in self.heads(lanes, max(1, limit // len(lanes))):
            if status != QueuedStatus.PENDING:
                held_up.add(lane_id)  # what comes after one that is being handled must wait
            if lane_id not in held_up:
                runs[lane_id].append(row_id)
        empty = [lane_id for lane_id, run in runs.items() if not run and lane_id not in held_up]
        if empty:
            self.lanes.filter(id__in=empty).delete()
        owned = self.lanes.filter(id__in=[lane_id for lane_id, run in runs.items() if run])
        owned.update(claim_token=claim.token, claimed_by=claim.worker_id)
        return [row_id for run in runs.values() for row_id in run]

    def heads(self, lanes: list[int], length: int) -> Iterable[tuple[int, int, str]]:
        """(lane, row, status) of the first events of each lane, in order."""
        for lane_id in lanes:
            waiting = self.queued.filter(lane_id=lane_id).order_by("id")
            for row_id, status in waiting.values_list("id", "status")[:length]:
                yield lane_id, row_id, status

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
        found = self.take_unrouted(queue, limit)
        if not found:
            return
        keys = sorted({key for _, key in found if key is not None})
        EventLane.objects.using(self.using).bulk_create(
            [
                EventLane(namespace=settings.NAMESPACE, queue=queue, key=key, ready_at=self.now)
                for key in keys
            ],
            ignore_conflicts=True,
        )
        lanes = self.lanes.filter(queue=queue, key__in=keys)
        list(self.waiting_lock(lanes.order_by("id")).values_list("id"))
        lanes.update(version=F("version") + 1)
        of_their_key = self.lanes.filter(queue=queue, key=OuterRef("key")).values("id")[:1]
        self.queued.filter(id__in=[row_id for row_id, _ in found]).update(
            lane_id=Subquery(of_their_key)
        )

    def take_unrouted(self, queue: str, limit: int) -> list[tuple[int, str | None]]:
        """(row, key) of the oldest new events, for one router at a time."""
        unrouted = self.unrouted(queue).order_by("id")
        return list(self.waiting_lock(unrouted).values_list("id", "key")[:limit])

    @retried
    def release_lanes(self, token: uuid.UUID, waits: dict[int, float]) -> None:
        """Give back lanes owned under this token: gone if empty, else ready after their wait."""
        with self.atomic():
            mine = self.lanes.filter(id__in=waits, claim_token=token).order_by("id")
            owned = set(self.waiting_lock(mine).values_list("id", flat=True))
            # Asked for first: a DELETE with the condition in it locks every lane it looks at, on
            # MariaDB until it ends.
            has_events = Exists(self.queued.filter(lane_id=OuterRef("id")))
            needed = set(self.lanes.filter(has_events, id__in=owned).values_list("id", flat=True))
            self.lanes.filter(id__in=owned - needed).delete()
            for wait in {waits[lane_id] for lane_id in needed}:
                alike = [lane_id for lane_id in needed if waits[lane_id] == wait]
                self.lanes.filter(id__in=alike).update(
                    claim_token=None, claimed_by=None, ready_at=self.after(wait)
                )
