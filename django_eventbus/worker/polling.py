"""Poll events in your own loop::

    while True:
        event = poll()
        if event is None:
            time.sleep(1)
            continue
        errors = []
        try:
            handle(event)
        except Exception as error:
            errors.append(error)
        finalize(event, errors)

Each polled event is leased for ``EVENTBUS["ABANDON_AFTER"]`` seconds. If it is not finalized by
then, another call of ``poll()`` may return it. No registered handler runs here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

from django_eventbus.conf import settings
from django_eventbus.delivery.batch import Batch
from django_eventbus.delivery.settling import Settler
from django_eventbus.errors import failures
from django_eventbus.events import Envelope, uuid7
from django_eventbus.exceptions import UnsettleableError
from django_eventbus.flow.controls import FlowControls
from django_eventbus.models import EventWorker, LogStatus
from django_eventbus.outcomes.endings import blocked_lane, exhausted
from django_eventbus.outcomes.event_run import EventRun
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.store import (
    Clock,
    Finished,
    Held,
    HeldBy,
    SetAside,
    Settlement,
    Store,
    store_for,
)


def poll(
    queue: str | None = None, *, using: str | None = None, clock: Clock | None = None
) -> Envelope[Any] | None:
    """Claim and return the next event. If no event may be handled now, return None at once.

    Tests pass another ``clock``.
    """
    store = store_for(using, clock=clock)
    store.promote()
    store.recover()
    controls = FlowControls(settings.QUEUES, searches_at_once=True)
    controls.keep_up(store)
    if controls.is_paused(queue or settings.QUEUE):
        return None
    settler = Settler(store)
    while (event := _claim_one(store, queue or settings.QUEUE)) is not None:
        if _may_be_handled(settler, controls, event):
            return Envelope(event, handler_name="", attempt=event.attempts)
    return None


def finalize(
    event: Envelope[Any],
    errors: Iterable[BaseException | str] = (),
    *,
    failed: bool = False,
    clock: Clock | None = None,
) -> bool:
    """Move a polled event to the log: COMPLETED, COMPLETED_WITH_ERRORS, or FAILED.

    With EVENTBUS["DEAD_HEAD"] = "block", an event that is not COMPLETED blocks its key.
    Returns False, and changes nothing, if the event was finalized before or another caller has its
    lease now. Raises UnsettleableError if the database refuses the result. In that case ``poll()``
    returns the event again later; after EVENTBUS["MAX_INTERRUPTIONS"] refusals, the event becomes a
    dead letter.
    """
    claimed = event._event
    records = [
        failures.describe(
            error if isinstance(error, BaseException) else Exception(error),
            handler=event.handler_name,
            attempt=claimed.attempts,
            at=claimed.database_now(),
        )
        for error in errors
    ]
    status = LogStatus.COMPLETED_WITH_ERRORS if records else LogStatus.COMPLETED
    status = LogStatus.FAILED if failed else status
    unexplained = {"handler": event.handler_name, "type": ""} if failed else None
    last = records[-1] if records else unexplained
    before = EventRun(claimed)
    verdict = Finished(
        row_id=claimed.row_id,
        status=status,
        deliveries=before.states or None,
        errors=failures.bounded([*before.errors, *records]),
        error_type=last["type"] if last else "",
        error_fingerprint=failures.fingerprint(last) if last else "",
        blocks_lane=None if status == LogStatus.COMPLETED else blocked_lane(claimed),
    )
    return _settle(store_for(claimed.claim.using, clock=clock), claimed, verdict)


def _claim_one(store: Store, queue: str) -> ClaimedEvent | None:
    """Claim one event, with a lease: a registration for this event only.

    ``_release`` deletes the registration.
    """
    lease = EventWorker(id=uuid7(), host=socket.gethostname()[:64], pid=os.getpid(), queues=[queue])
    store.register(lease)
    claimed = store.claim(queue, limit=1, worker_id=lease.pk)
    if not claimed:
        store.unregister(lease.pk)
        return None
    # If the lease expires, the caller died or hangs while it handled this event. The event is
    # announced as a suspect, so that recovery charges it with a crash.
    store.suspect(lease.pk, [claimed[0].row_id])
    return claimed[0]


def _may_be_handled(settler: Settler, controls: FlowControls, event: ClaimedEvent) -> bool:
    """Return whether the caller gets the event. If not, settle the event or set it aside."""
    batch = Batch.of([event])
    with settler.guarded(batch, event):
        verdict = _verdict_before(controls, event)
        if verdict is None:
            return True
        settler.end(batch, event, verdict)
    _release(settler.store, event, batch)
    return False


def _verdict_before(controls: FlowControls, event: ClaimedEvent) -> Settlement | None:
    """Return the settlement of an event that must not be handled now, or None if it may be.

    Raises UnreadableEventError for an event that ``finalize()`` could not read.
    """
    if (pause_id := controls.pause_of_type(event.type)) is not None:
        return Held(event.row_id, HeldBy(pause_id))
    verdict = exhausted(event)
    if verdict is None:
        EventRun(event)
    return verdict


def _settle(store: Store, event: ClaimedEvent, verdict: Settlement) -> bool:
    """Settle a polled event; return whether it was settled.

    If the database refuses the result, the event is set aside and UnsettleableError is raised. It
    is not raised for a duplicate of an event that has ended, which is deleted from the queue.
    """
    settler, batch = Settler(store), Batch.of([event])
    try:
        settled = settler.end(batch, event, verdict)
    except UnsettleableError as error:
        became = settler.set_aside(batch, event, error)
        _release(store, event, batch)
        if became in (SetAside.WAITING, SetAside.DEAD):
            raise
        return False
    _release(store, event, batch)
    return settled


def _release(store: Store, event: ClaimedEvent, batch: Batch) -> None:
    """End the lease, unless the claim was lost: in that case the lease has ended already."""
    if batch.tally.lost:
        return
    if batch.lanes:
        store.release_lanes(batch.token, batch.lane_waits())
    store.unregister(event.claim.worker_id)
