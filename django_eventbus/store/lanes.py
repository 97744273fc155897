"""Lanes: one row per key with events waiting. Owning the lane is owning the key."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping
from typing import cast

from django.db.models import Exists, F, OuterRef, Q, QuerySet, Subquery

from django_eventbus.conf import settings
from django_eventbus.events import Claim
from django_eventbus.models import EventLane, QueuedEvent, QueuedStatus
from django_eventbus.store.rows import NEVER, Rows, retried, unless_blocked

#: Seconds until a lane is looked at again whose first event somebody holds.
HELD_UP_WAIT = 0.2


class Lanes(Rows):
    """Order per key: events are routed to their lane, and lanes are claimed."""

    def own_lanes(self, claim: Claim, limit: int) -> list[int]:
        """Own ready lanes; return the rows of a run of consecutive events from each."""
        ready = self.ready_lanes(claim.queue).order_by("ready_at", "id")
        while lanes := list(self.locked(ready).values_list("id", flat=True)[:limit]):
            runs = self.runs_of(lanes, max(1, limit // len(lanes)))
            # Out of the way: others may be behind them.
            idle = {lane_id for lane_id in lanes if not runs.get(lane_id)}
            empty = self.surely_empty(idle - runs.keys())
            self.lanes.filter(id__in=idle - empty).update(ready_at=self.after(HELD_UP_WAIT))
            self.lanes.filter(id__in=empty).delete()
            if rows := [row_id for run in runs.values() for row_id in run]:
                owned = self.lanes.filter(id__in=[lane_id for lane_id, run in runs.items() if run])
                owned.update(claim_token=claim.token, claimed_by=claim.worker_id)
                return rows
        return []

    def surely_empty(self, lanes: set[int]) -> set[int]:
        """Of lanes that this transaction holds and sees no event in, those that have none.

        An event whose lane is gone would wait for ever.
        """
        return lanes

    def runs_of(self, lanes: list[int], length: int) -> dict[int, list[int]]:
        """Of each lane that has events: the rows that may be handled now, in order."""
        runs: dict[int, list[int]] = {}
        held_up = set()
        for lane_id, row_id, status, is_new in self.heads(lanes, length):
            run = runs.setdefault(lane_id, [])
            if status != QueuedStatus.PENDING:
                held_up.add(lane_id)  # what comes after one that is being handled must wait
            if lane_id not in held_up:
                run.append(row_id)
            if not is_new:
                # One that failed before goes alone, or those behind it would be claimed and given
                # back each time it fails again.
                held_up.add(lane_id)
        return runs

    def heads(self, lanes: list[int], length: int) -> Iterable[tuple[int, int, str, bool]]:
        """(lane, row, status, nothing failed yet) of the first events of each lane, in order."""
        for lane_id in lanes:
            waiting = self.queued.filter(lane_id=lane_id).order_by("id")
            told = waiting.annotate(is_new=Q(deliveries__isnull=True))
            for row_id, status, is_new in told.values_list("id", "status", "is_new")[:length]:
                yield lane_id, row_id, status, bool(is_new)

    def ready_lanes(self, queue: str) -> QuerySet[EventLane]:
        return self.lanes.filter(queue=queue, claim_token__isnull=True, ready_at__lte=self.now)

    def unrouted(self, queue: str) -> QuerySet[QueuedEvent]:
        return self.queued.filter(
            queue=queue, key__isnull=False, lane_id__isnull=True, available_at__isnull=True
        )

    def route(self, queue: str, limit: int) -> int:
        """Give new keyed events their lane, oldest first; return how many.

        Routers wait for each other: one that passed over the rows another holds would put later
        events of a key into its lane before earlier ones. Holding the lanes' rows makes a release
        that wants to delete one wait, and then see these events.
        """
        found = self.take_unrouted(queue, limit)
        if not found:
            return 0
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
        return len(found)

    def take_unrouted(self, queue: str, limit: int) -> list[tuple[int, str | None]]:
        """(row, key) of the oldest new events, for one router at a time."""
        unrouted = self.unrouted(queue).order_by("id")
        # Looked for first: a locking read locks all it looks at, and on databases without partial
        # indexes that is every event without a key, also those that others are handling.
        found = list(unrouted.values_list("id", flat=True)[:limit])
        if not found:
            return []
        return list(self.waiting_lock(unrouted.filter(id__in=found)).values_list("id", "key"))

    @retried
    def release_lanes(self, token: uuid.UUID, waits: dict[int, float]) -> None:
        """Give back lanes owned under this token: gone if empty, else ready after their wait."""
        with self.atomic():
            mine = self.lanes.filter(id__in=waits, claim_token=token).order_by("id")
            owned = set(self.waiting_lock(mine).values_list("id", flat=True))
            # Asked for first: a DELETE with the condition in it locks every lane it looks at, on
            # MariaDB until it ends.
            has_events = Exists(self.queued.filter(lane_id=OuterRef("id")))
            kept = Q(has_events) | Q(blocked_by__isnull=False)
            needed = set(self.lanes.filter(kept, id__in=owned).values_list("id", flat=True))
            empty = self.surely_empty(owned - needed)
            self.lanes.filter(id__in=empty).delete()
            needed = owned - empty
            for wait in {waits[lane_id] for lane_id in needed}:
                alike = [lane_id for lane_id in needed if waits[lane_id] == wait]
                self.lanes.filter(id__in=alike).update(
                    claim_token=None, claimed_by=None, ready_at=unless_blocked(self.after(wait))
                )

    # -- a dead head that holds up its key

    def block_lane(self, lane_id: int, row_id: int) -> None:
        """With the settlement of the event that died, so that no crash comes in between."""
        dead = self.queued.filter(id=row_id).values("event_id")
        self.lanes.filter(id=lane_id).update(ready_at=NEVER, blocked_by=Subquery(dead))

    def resume_lanes(self, delays: Mapping[uuid.UUID, float]) -> None:
        """The dead letters that held up these lanes are back: each goes first, where it was."""
        blocked = self.lanes.filter(blocked_by__in=list(delays)).order_by("key")
        for lane in list(self.waiting_lock(blocked)):
            self.queued.filter(event_id=lane.blocked_by).update(lane_id=lane.pk, available_at=None)
            ready_at = self.after(delays[cast(uuid.UUID, lane.blocked_by)])
            self.lanes.filter(pk=lane.pk).update(ready_at=ready_at, blocked_by=None)

    def unblock_lanes(self, event_ids: Collection[uuid.UUID]) -> None:
        """The dead letters that held up these lanes are gone for good."""
        if event_ids:
            blocked = self.lanes.filter(blocked_by__in=event_ids)
            blocked.update(ready_at=self.now, blocked_by=None)

    # -- an operator's hand

    @retried
    def free_lane(self, queue: str, key: str) -> bool:
        """Make a lane ready that waits for a retry's time or is blocked; False if there is none."""
        with self.atomic():
            idle = self.lanes.filter(queue=queue, key=key, claim_token__isnull=True)
            lane = self.waiting_lock(idle).first()
            if lane is None:
                return False
            self.make_due(self.lane_head(lane.pk))
            return bool(idle.update(ready_at=self.now, blocked_by=None))

    def make_due(self, event: QueuedEvent | None) -> None:
        """Neither it nor its handlers that wait for their retry need wait any longer."""
        if event is None:
            return
        if event.due_at is not None:
            self.queued.filter(pk=event.pk, due_at__gt=self.now).update(due_at=self.now)
        if not event.deliveries:
            return
        now = self.read_clock().isoformat()
        due = {
            name: {**state, "due": now} if "due" in state else state
            for name, state in event.deliveries.items()
        }
        self.queued.filter(pk=event.pk).update(deliveries=due)

    def lane_depth(self, lane_id: int, *, at_most: int) -> int:
        return self.queued.filter(lane_id=lane_id).values("id")[:at_most].count()

    def lane_head(self, lane_id: int) -> QueuedEvent | None:
        return self.queued.filter(lane_id=lane_id).order_by("id").first()
