"""List lanes, release them, and skip their first events.

The waiting events of a key are its lane. They are handled one at a time, oldest first. While the
first event waits for a retry or is held, or a dead letter blocks the lane, all events of the lane
wait.
"""

from __future__ import annotations

import builtins
import uuid
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from django.db.models import F, Q

from django_eventbus.conf import settings
from django_eventbus.errors import failures
from django_eventbus.models import EventLane, EventLog, QueuedEvent
from django_eventbus.publishing.wakeup import wake_on_commit
from django_eventbus.store import Store, store_for

COUNTED = 1000


class LaneState(StrEnum):
    READY = "ready"
    RUNNING = "running"
    #: The first event is due later, for example for a retry, is handed off to another executor
    #: (``head.handed_off_to``), or a flow control holds it.
    WAITING = "waiting"
    #: A dead letter blocks the lane until an operator retries or purges the dead letter, or
    #: releases the lane.
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A snapshot of one lane."""

    queue: str
    key: str
    state: LaneState
    #: None while a flow control holds the first event, or a dead letter blocks the lane.
    ready_at: datetime | None
    #: The number of events in the lane; counting stops at 1,000.
    depth: int
    head: QueuedEvent | None
    blocked_by: uuid.UUID | None


def list(
    *,
    queue: str | None = None,
    state: LaneState | str | None = None,
    limit: int = 100,
    offset: int = 0,
    using: str | None = None,
) -> builtins.list[Lane]:
    """Return lanes, sorted by ready time. Held and blocked lanes are last."""
    store = store_for(using)
    rows = store.lanes if queue is None else store.lanes.filter(queue=queue)
    now = store.read_clock()
    if state is not None:
        rows = rows.filter(in_state(LaneState(state), now))
    found = rows.order_by(F("ready_at").asc(nulls_last=True), "id")[offset : offset + limit]
    return [described(store, row, now) for row in found]


def release(key: str, *, queue: str | None = None, using: str | None = None) -> bool:
    """Make a lane ready, although its first event waits or is held, or a dead letter blocks it.

    Returns False if there is no such lane, or if a worker owns the lane.
    """
    store = store_for(using)
    released = store.free_lane(queue or settings.QUEUE, key)
    wake_on_commit(store.using)
    return released


def skip(
    key: str, *, queue: str | None = None, reason: str = "", using: str | None = None
) -> EventLog | None:
    """Discard the first event of a lane. The event becomes a dead letter, which can be retried.

    Returns None if there is no such lane, or if a worker owns the lane.
    """
    store = store_for(using)
    error = failures.decided("Skipped", reason or "skipped by an operator", at=store.read_clock())
    skipped = store.skip_head(queue or settings.QUEUE, key, error)
    wake_on_commit(store.using)
    return skipped


def described(store: Store, row: EventLane, now: datetime) -> Lane:
    return Lane(
        queue=row.queue,
        key=row.key,
        state=state_of(row, now),
        ready_at=row.ready_at,
        depth=store.lane_depth(row.pk, at_most=COUNTED),
        head=store.lane_head(row.pk),
        blocked_by=row.blocked_by,
    )


def in_state(state: LaneState, now: datetime) -> Q:
    running, blocked = Q(claim_token__isnull=False), Q(blocked_by__isnull=False)
    ready = Q(ready_at__lte=now)
    return {
        LaneState.RUNNING: running,
        # In a blocked lane, ready_at and held_by are always NULL. These two conditions exclude no
        # row, but the database can use the index of lanes only if the query contains them.
        LaneState.BLOCKED: ~running & blocked & Q(ready_at__isnull=True, held_by__isnull=True),
        LaneState.READY: ~running & ~blocked & ready,
        LaneState.WAITING: ~running & ~blocked & ~ready,
    }[state]


def state_of(row: EventLane, now: datetime) -> LaneState:
    if row.claim_token is not None:
        return LaneState.RUNNING
    if row.blocked_by is not None:
        return LaneState.BLOCKED
    is_ready = row.ready_at is not None and row.ready_at <= now
    return LaneState.READY if is_ready else LaneState.WAITING
