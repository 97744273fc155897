"""Lanes: which keys have events waiting, and what holds them up.

An event's key is its lane. The events of a lane are handled one at a time, oldest first; while the
first waits for its retry, or is a dead letter that blocks, the others wait with it.
"""

from __future__ import annotations

import builtins
import uuid
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from django.db.models import Q

from django_eventbus import failures
from django_eventbus.conf import settings
from django_eventbus.models import EventLane, EventLog, QueuedEvent
from django_eventbus.publishing import wake_on_commit
from django_eventbus.store import Store, store_for
from django_eventbus.store.rows import NEVER

COUNTED = 1000


class LaneState(StrEnum):
    READY = "ready"
    RUNNING = "running"
    #: For the time of its first event's retry.
    WAITING = "waiting"
    #: By a dead letter: until it is retried or purged, or the lane is released.
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A key with events waiting, as it was when it was looked at."""

    queue: str
    key: str
    state: LaneState
    ready_at: datetime
    #: How many events are routed to it; counting stops at 1,000.
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
    """Those that have waited longest first."""
    store = store_for(using)
    rows = store.lanes if queue is None else store.lanes.filter(queue=queue)
    now = store.read_clock()
    if state is not None:
        rows = rows.filter(in_state(LaneState(state), now))
    found = rows.order_by("ready_at", "id")[offset : offset + limit]
    return [described(store, row, now) for row in found]


def release(key: str, *, queue: str | None = None, using: str | None = None) -> bool:
    """Let a lane go on now: its first event is retried at once, or passes the dead letter that
    blocks it. False if the lane is not there or is being handled."""
    store = store_for(using)
    released = store.free_lane(queue or settings.QUEUE, key)
    wake_on_commit(store.using)
    return released


def skip(
    key: str, *, queue: str | None = None, reason: str = "", using: str | None = None
) -> EventLog | None:
    """Discard the first event of a lane; it becomes a dead letter that can still be retried.

    None if the lane is not there or is being handled.
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
        # When it is ready is said as well because there is an index of it.
        LaneState.BLOCKED: ~running & blocked & Q(ready_at__gte=NEVER),
        LaneState.READY: ~running & ~blocked & ready,
        LaneState.WAITING: ~running & ~blocked & ~ready,
    }[state]


def state_of(row: EventLane, now: datetime) -> LaneState:
    if row.claim_token is not None:
        return LaneState.RUNNING
    if row.blocked_by is not None:
        return LaneState.BLOCKED
    return LaneState.READY if row.ready_at <= now else LaneState.WAITING
