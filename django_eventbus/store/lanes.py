"""Lanes: one row per key with waiting events. Only the owner of a lane handles its events."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from django.db.models import Case, Exists, F, OuterRef, Q, QuerySet, Subquery, Value, When

from django_eventbus.conf import settings
from django_eventbus.models import EventLane, QueuedEvent, QueuedStatus
from django_eventbus.schema.claims import Claim
from django_eventbus.store.rows import (
    LOWEST_ID,
    Clock,
    Rows,
    retried,
)
from django_eventbus.store.waits import HeldBy, Wait

#: Seconds until the next check of a lane whose first event is locked or being handled.
LOCKED_WAIT = 0.2


class Lanes(Rows):
    """Order per key: events are routed to their lane, and lanes are claimed.

    Neither routing nor claiming waits long for a row lock. A transaction that coalesced an event,
    or that changed a lane, may stay open for a long time, and must not delay events of other keys.
    """

    def __init__(self, using: str, *, clock: Clock | None = None) -> None:
        super().__init__(using, clock=clock)
        #: Queues in which the last routing skipped keys because of a lock.
        self._queues_with_locks: set[str] = set()

    def own_lanes(self, claim: Claim, limit: int) -> list[int]:
        """Claim ready lanes; return the row ids of a run (consecutive events) from each lane."""
        ready = self.ready_lanes(claim.queue).order_by("ready_at", "id")
        while lanes := list(self.locked(ready).values_list("id", flat=True)[:limit]):
            runs = self.unlocked_runs(self.runs_of(lanes, max(1, limit // len(lanes))))
            # A lane without a run becomes ready later, so that this loop reads other lanes next.
            idle = {lane_id for lane_id in lanes if not runs.get(lane_id)}
            empty = self.confirmed_empty(idle - runs.keys())
            self.lanes.filter(id__in=idle - empty).update(ready_at=self.after(LOCKED_WAIT))
            self.lanes.filter(id__in=empty).delete()
            if rows := [row_id for run in runs.values() for row_id in run]:
                owned = self.lanes.filter(id__in=[lane_id for lane_id, run in runs.items() if run])
                owned.update(claim_token=claim.token, claimed_by=claim.worker_id)
                return rows
        return []

    def confirmed_empty(self, lanes: set[int]) -> set[int]:
        """Return the subset of the locked lanes that are really empty.

        This transaction has locked the lanes and sees no event in them. A lane must not be deleted
        while it has an event, because that event would wait forever. A store whose snapshot may
        hide events overrides this method.
        """
        return lanes

    def runs_of(self, lanes: list[int], length: int) -> dict[int, list[int]]:
        """Return the ids of events that may be claimed now, in order, for each lane with events."""
        runs: dict[int, list[int]] = {}
        ended = set()
        for lane_id, row_id, status, is_new in self.heads(lanes, length):
            run = runs.setdefault(lane_id, [])
            if status != QueuedStatus.PENDING:
                ended.add(lane_id)  # Events after a running event must wait.
            if lane_id not in ended:
                run.append(row_id)
            if not is_new:
                # The run ends with an event that has already failed. Otherwise, each time this
                # event fails again, the worker would have to release the events after it unhandled.
                ended.add(lane_id)
        return runs

    def unlocked_runs(self, runs: dict[int, list[int]]) -> dict[int, list[int]]:
        """Lock the rows of the runs; end each run before the first row that cannot be locked."""
        free = self.lock_free([row_id for run in runs.values() for row_id in run])
        return {
            lane_id: list(itertools.takewhile(free.__contains__, run))
            for lane_id, run in runs.items()
        }

    def lock_free(self, ids: Collection[int]) -> set[int]:
        """Lock those of the events that no other transaction has locked; return their ids."""
        if not ids or not self.connection.features.has_select_for_update:
            return set(ids)
        rows = self.queued.filter(id__in=ids)
        return set(self.locked(rows).values_list("id", flat=True))

    def heads(self, lanes: list[int], length: int) -> Iterable[tuple[int, int, str, bool]]:
        """Yield (lane id, row id, status, is new) of the first events of each lane.

        An event is new if none of its handlers has failed yet.
        """
        for lane_id in lanes:
            waiting = self.queued.filter(lane_id=lane_id).order_by("id")
            annotated = waiting.annotate(is_new=Q(deliveries__isnull=True))
            for row_id, status, is_new in annotated.values_list("id", "status", "is_new")[:length]:
                yield lane_id, row_id, status, bool(is_new)

    def ready_lanes(self, queue: str) -> QuerySet[EventLane]:
        return self.lanes.filter(queue=queue, claim_token__isnull=True, ready_at__lte=self.now)

    def unrouted(self, queue: str) -> QuerySet[QueuedEvent]:
        """Return events with a key that are not in a lane yet.

        Such events are never held. MariaDB needs the condition on held_by to use its index.
        """
        return self.queued.filter(
            queue=queue,
            key__isnull=False,
            lane_id__isnull=True,
            available_at__isnull=True,
            held_by__isnull=True,
        )

    def route(self, queue: str, limit: int) -> int:
        """Route new events with a key to their lanes, oldest first; return how many.

        Events are read in windows of ``limit`` events. If all events of a window are skipped
        because of locks, the next window is read.
        """
        self._queues_with_locks.discard(queue)
        last, held = LOWEST_ID, set[str]()
        while window := self.window_of_unrouted(queue, last, limit):
            held |= self.locked_keys(queue, window)
            last = window[-1][0]
            free = {row_id: key for row_id, key in window if key not in held}
            if held:
                self._queues_with_locks.add(queue)
            if free and (routed := self.put_into_lanes(queue, free)):
                return routed
        return 0

    def window_of_unrouted(self, queue: str, last: int, limit: int) -> list[tuple[int, str]]:
        """Return (row id, key) of the first new events whose row id is above ``last``.

        The query takes no locks. A locking query would lock every row that it reads. On a database
        without partial indexes, the query reads all events without a lane, including events that
        other workers are handling.
        """
        unrouted = self.unrouted(queue).filter(id__gt=last).order_by("id")
        return [(row_id, str(key)) for row_id, key in unrouted.values_list("id", "key")[:limit]]

    def locked_keys(self, queue: str, window: list[tuple[int, str]]) -> set[str]:
        """Lock the events of the window and their lanes; return the keys of rows locked elsewhere.

        All events of such a key are skipped, because a later event must not be routed before an
        earlier event. Two workers cannot route the same key at the same time, because the second
        worker finds rows that the first worker has locked.
        """
        if not self.connection.features.has_select_for_update:
            return set()
        rows = self.unrouted(queue).filter(id__in=[row_id for row_id, _ in window])
        free = set(self.locked(rows).values_list("id", flat=True))
        held = {key for row_id, key in window if row_id not in free}
        lanes = self.lanes.filter(queue=queue, key__in={key for _, key in window} - held)
        known = set(lanes.values_list("key", flat=True))
        return held | (known - set(self.locked(lanes).values_list("key", flat=True)))

    def put_into_lanes(self, queue: str, events: dict[int, str]) -> int:
        """Create or lock the lanes of these events, and store the lane id in each event.

        A transaction that wants to delete one of the lanes waits for the lock. It then sees the new
        events and keeps the lane.
        """
        keys = sorted(set(events.values()))
        EventLane.objects.using(self.using).bulk_create(
            [
                EventLane(namespace=settings.NAMESPACE, queue=queue, key=key, ready_at=self.now)
                for key in keys
            ],
            ignore_conflicts=True,
        )
        lanes = dict(
            self.locked(self.lanes.filter(queue=queue, key__in=keys)).values_list("key", "id")
        )
        self.lanes.filter(id__in=lanes.values()).update(version=F("version") + 1)
        of_their_key = self.lanes.filter(queue=queue, key=OuterRef("key")).values("id")[:1]
        routed = [row_id for row_id, key in events.items() if key in lanes]
        return self.queued.filter(id__in=routed).update(lane_id=Subquery(of_their_key))

    @retried
    def release_lanes(self, token: uuid.UUID, waits: Mapping[int, Wait]) -> None:
        """Release lanes of a claim: delete empty lanes, make other lanes ready after their wait.

        A blocked lane is not deleted, even if it is empty, and does not become ready.
        """
        with self.atomic():
            mine = self.lanes.filter(id__in=waits, claim_token=token).order_by("id")
            owned = set(self.waiting_lock(mine).values_list("id", flat=True))
            # The ids of lanes with events are read before the DELETE. A DELETE with the condition
            # ``has_events`` would lock every lane that it reads, on MariaDB until the end of the
            # transaction.
            has_events = Exists(self.queued.filter(lane_id=OuterRef("id")))
            kept = Q(has_events) | Q(blocked_by__isnull=False)
            needed = set(self.lanes.filter(kept, id__in=owned).values_list("id", flat=True))
            empty = self.confirmed_empty(owned - needed)
            self.lanes.filter(id__in=empty).delete()
            needed = owned - empty
            for wait in {waits[lane_id] for lane_id in needed}:
                alike = [lane_id for lane_id in needed if waits[lane_id] == wait]
                self.lanes.filter(id__in=alike).update(
                    claim_token=None, claimed_by=None, **self.lane_ready_after(wait)
                )

    def lane_ready_after(self, wait: Wait) -> dict[str, Any]:
        """Return the column values that make a lane ready after this wait, unless it is blocked."""
        if isinstance(wait, HeldBy):
            return {"ready_at": None, "held_by": unless_blocked(Value(wait.flow_control_id))}
        return {"ready_at": unless_blocked(self.after(wait.seconds)), "held_by": None}

    # -- lanes that a dead letter blocks

    def block_lane(self, lane_id: int, row_id: int) -> None:
        """Block a lane, in the transaction of the caller, which settles the dead event."""
        dead = self.queued.filter(id=row_id).values("event_id")
        blocked = {"ready_at": None, "held_by": None, "blocked_by": Subquery(dead)}
        self.lanes.filter(id=lane_id).update(**blocked)

    def resume_lanes(self, delays: Mapping[uuid.UUID, float]) -> None:
        """Unblock the lanes of retried dead letters, and put each event first in its lane."""
        blocked = self.blocked_lanes(delays).order_by("key")
        for lane in list(self.waiting_lock(blocked)):
            head = self.queued.values_list("id", flat=True).get(event_id=lane.blocked_by)
            self.queued.filter(id=head).update(lane_id=lane.pk, available_at=None)
            ready_at = self.after(delays[cast(uuid.UUID, lane.blocked_by)])
            self.lanes.filter(pk=lane.pk).update(ready_at=ready_at, blocked_by=None)

    def unblock_lanes(self, event_ids: Collection[uuid.UUID]) -> None:
        """Unblock lanes whose dead letters were deleted."""
        if event_ids:
            self.blocked_lanes(event_ids).update(ready_at=self.now, blocked_by=None)

    def blocked_lanes(self, event_ids: Collection[uuid.UUID]) -> QuerySet[EventLane]:
        """Return the lanes that these events block, filtered by the ids of the lanes.

        ``blocked_by`` has no index. On MariaDB a locking statement that filters by this column
        alone would wait for every locked lane.
        """
        blocked = self.lanes.filter(blocked_by__in=list(event_ids))
        return blocked.filter(id__in=list(blocked.values_list("id", flat=True)))

    # -- actions of operators

    @retried
    def free_lane(self, queue: str, key: str) -> bool:
        """Make a waiting or blocked lane ready; return False for a missing or claimed lane."""
        with self.atomic():
            lane = self.lock_idle_lane(queue, key)
            if lane is None:
                return False
            self.make_due(self.lane_head(lane.pk))
            locked = self.lanes.filter(pk=lane.pk)
            return bool(locked.update(ready_at=self.now, held_by=None, blocked_by=None))

    def lock_idle_lane(self, queue: str, key: str) -> EventLane | None:
        """Lock a lane by its id, unless a worker owns it.

        On MariaDB a lock through the unique index of the key may also lock the gap before the index
        entry, as long as InnoDB has not purged a deleted lane of the key. Routers that insert a key
        into this gap would wait.
        """
        idle = self.lanes.filter(queue=queue, key=key, claim_token__isnull=True)
        lane_id = idle.values_list("id", flat=True).first()
        lane: EventLane | None = self.waiting_lock(idle.filter(id=lane_id or 0)).first()
        return lane

    def make_due(self, event: QueuedEvent | None) -> None:
        """Make an event due now, and also its handlers that wait for a retry."""
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


def unless_blocked(value: Any) -> Case:
    """Return an expression for the value, or for NULL if a dead letter blocks the lane."""
    return Case(When(blocked_by__isnull=True, then=value), default=None)
