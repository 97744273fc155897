"""For people who write their own loop::

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

Each polled event is leased for ``EVENTBUS["ABANDON_AFTER"]`` seconds; not finalized by then, it
is given to the next who asks. No registered handler runs here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

from django_eventbus import failures
from django_eventbus.admission import Gates
from django_eventbus.conf import settings
from django_eventbus.events import ClaimedEvent, Envelope, uuid7
from django_eventbus.exceptions import ClaimLostError
from django_eventbus.models import EventWorker, LogStatus
from django_eventbus.progress import Progress, crashed
from django_eventbus.signals import event_dead_lettered
from django_eventbus.store import Clock, Finished, Held, store_for, until_opened


def poll(
    queue: str | None = None, *, using: str | None = None, clock: Clock | None = None
) -> Envelope[Any] | None:
    """Claim the next event, or return None at once. ``clock`` replaces the database's in tests."""
    store = store_for(using, clock=clock)
    store.promote()
    store.recover()
    gates = Gates(settings.QUEUES)
    gates.keep_up(store)
    if gates.is_paused(queue or settings.QUEUE):
        return None
    while (event := _claim_one(store, queue or settings.QUEUE)) is not None:
        if (gate_id := gates.gate_before(event.type)) is not None:
            _settle(store, event, Held(event.row_id, until_opened(gate_id)))
        elif event.crashes < settings.MAX_CRASHES:
            return Envelope(event, handler_name="", attempt=event.attempts)
        else:
            fate = crashed(event)
            if _settle(store, event, fate):
                event_dead_lettered.send_robust(poll, event=event, status=fate.status)
    return None


def finalize(
    event: Envelope[Any],
    errors: Iterable[BaseException | str] = (),
    *,
    failed: bool = False,
    clock: Clock | None = None,
) -> bool:
    """Move a polled event to the log: COMPLETED, with errors COMPLETED_WITH_ERRORS, or FAILED.

    Returns False, and changes nothing, if it was finalized before or its lease has passed to
    somebody else.
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
    unexplained = {"handler": event.handler_name, "type": ""} if failed else None
    last = records[-1] if records else unexplained
    before = Progress(claimed)
    fate = Finished(
        row_id=claimed.row_id,
        status=LogStatus.FAILED if failed else status,
        deliveries=before.states or None,
        errors=[*before.errors, *records],
        error_type=last["type"] if last else "",
        error_fingerprint=failures.fingerprint(last) if last else "",
    )
    return _settle(store_for(claimed.claim.using, clock=clock), claimed, fate)


def _claim_one(store: Any, queue: str) -> ClaimedEvent | None:
    """The lease of one event is a registration of its own: it ends with the event."""
    lease = EventWorker(id=uuid7(), host=socket.gethostname()[:64], pid=os.getpid(), queues=[queue])
    store.register(lease)
    claimed: list[ClaimedEvent] = store.claim(queue, limit=1, worker_id=lease.pk)
    if not claimed:
        store.unregister(lease.pk)
        return None
    if claimed[0].crashes:
        store.suspect(lease.pk, [claimed[0].row_id])
    return claimed[0]


def _settle(store: Any, event: ClaimedEvent, fate: Finished | Held) -> bool:
    try:
        with store.atomic():
            store.settle(event.claim.token, [fate])
    except ClaimLostError:
        return False
    if event.lane_id is not None:
        wait = fate.delay if isinstance(fate, Held) else 0.0
        store.release_lanes(event.claim.token, {event.lane_id: wait})
    store.unregister(event.claim.worker_id)
    return True
