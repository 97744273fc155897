"""Set aside claimed events that cannot be read, or whose result cannot be written.

Such an event must not stop its worker or delay other events. If the log contains the event
already, the event has ended and is removed from the queue. If another event in the log has the same
row id, the event gets a new row id. Any other event is tried again after increasing waits, with the
error in its row, and becomes a dead letter after too many attempts.
"""

from __future__ import annotations

import uuid
from enum import Enum
from typing import Any

from django.db.models import F, Min

from django_eventbus.errors.failures import with_record
from django_eventbus.exceptions import UnsettleableError
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.store.base import Store
from django_eventbus.store.rows import UNCLAIMED
from django_eventbus.store.settlements import Finished

#: Row ids of renumbered events are negative. They start at -2, because workers record -1 as
#: "no row".
_HIGHEST_NEW_ID = -2


class SetAside(Enum):
    """The result of ``set_aside``."""

    LOST = "not claimed by this worker any more"
    DUPLICATE = "removed: the log shows that it ended before"
    RENUMBERED = "renumbered: another event in the log has its row id"
    WAITING = "left in the queue until its next try"
    DEAD = "dead-lettered"


def set_aside(
    store: Store,
    token: uuid.UUID,
    row_id: int,
    *,
    error: dict[str, Any],
    delay: float,
    verdict: Finished | None,
) -> SetAside:
    """Set one event aside, in a transaction of its own.

    The event is tried again after ``delay`` seconds. If ``verdict`` is given, the event becomes a
    dead letter instead, unless the log rejects its row.
    """
    with store.atomic():
        mine = store.queued.filter(id=row_id, claim_token=token)
        event = store.waiting_lock(mine).first()
        if event is None:
            return SetAside.LOST
        logged = EventLog.objects.using(store.using)
        if logged.filter(event_id=event.event_id).exists():
            mine.delete()
            return SetAside.DUPLICATE
        if logged.filter(id=row_id).exists():
            mine.update(id=_free_id(store), **UNCLAIMED, attempts=F("attempts") - 1)
            return SetAside.RENUMBERED
        if verdict and _dead_lettered(store, token, verdict):
            return SetAside.DEAD
        _wait(store, event, error, delay)
        return SetAside.WAITING


def _free_id(store: Store) -> int:
    """Return a row id below all existing ids.

    An id from the sequence of the table might exist in the log already.
    """
    models = (QueuedEvent, EventLog)
    lowest = [model.objects.using(store.using).aggregate(id=Min("id"))["id"] for model in models]
    return min(_HIGHEST_NEW_ID, *(int(row_id) - 1 for row_id in lowest if row_id is not None))


def _dead_lettered(store: Store, token: uuid.UUID, verdict: Finished) -> bool:
    """Move the event to the log; return False if the log rejects the row of the event."""
    try:
        with store.atomic():
            store.settle(token, [verdict])
    except UnsettleableError:
        return False
    return True


def _wait(store: Store, event: QueuedEvent, record: dict[str, Any], delay: float) -> None:
    """Put the event back into the queue.

    For an event in a lane, the wait is stored in the lane, when the worker releases the lane.
    """
    ready_at = store.after(delay) if event.lane_id is None else None
    store.queued.filter(id=event.pk).update(
        **UNCLAIMED,
        interruptions=F("interruptions") + 1,
        errors=with_record(event.errors, record),
        available_at=ready_at,
    )
