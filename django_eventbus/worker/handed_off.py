"""Deliver events that were handed off to a process of another executor, such as a Celery worker.

The process registers as a worker for the duration of one message. So if it dies, the event workers
recover its events as the events of any other worker.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from django_eventbus.delivery.batch import Tally
from django_eventbus.errors.failpoints import reached
from django_eventbus.executors import Message
from django_eventbus.flow.controls import Snapshot
from django_eventbus.outcomes.assignments import Assignment
from django_eventbus.publishing.wakeup import wake
from django_eventbus.registry import Handler, registry
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.store import Store, store_for
from django_eventbus.worker.claiming import ClaimedBatch
from django_eventbus.worker.registration import Heartbeat, WorkerOptions, new_registration
from django_eventbus.worker.threads import Delivery
from django_eventbus.worker.worker import Worker, leave_pools

logger = logging.getLogger(__name__)

#: Seconds between two searches of a process for interrupted events of other handlers.
SEARCH_EVERY = 1.0
_searched_at = float("-inf")
#: Seconds between the claims of events that other transactions have locked. The claim itself does
#: not wait for locks, so it cannot be part of a deadlock.
LOCK_WAITS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


def deliver_message(message: Message, *, executor: str) -> Tally:
    """Claim the events of a message, and deliver them to the handlers of the executor.

    Events that another process has claimed or settled meanwhile are left out, so a message may
    arrive late, twice or never.
    """
    handler = registry.get(message.handler)
    if handler is None or handler.executor is None:
        logger.warning("a message for the unknown handler %r was ignored", message.handler)
        return Tally()
    store = store_for(message.using)
    by = f"{executor} {socket.gethostname()}:{os.getpid()}"
    options = WorkerOptions(using=message.using, queues=(message.queue,), fires_schedules=False)
    leave_pools()
    with _worker(store, options, Assignment(executor=handler.executor, by=by)) as worker:
        _deliver(worker, _claims(store, message, handler, worker))
    _make_room(store, worker, message)
    return worker.tally


def _claims(
    store: Store, message: Message, handler: Handler, worker: Worker
) -> Iterator[list[ClaimedEvent]]:
    """Claim the events of a message; yield the events of each claim.

    The first claim usually takes all events. Events that another transaction had locked are claimed
    later. Otherwise a lock of a millisecond would delay an event until HANDOFF_DEADLINE.
    """
    rows: Collection[int] = message.rows
    for wait in (None, *LOCK_WAITS):
        if wait is not None:
            reached("handed_off.locked")
            worker.bell.wait(wait)
        events, rows = store.claim_handed_off(
            message.queue,
            rows,
            handlers=_handlers_to_search(handler),
            token=message.token,
            worker_id=worker.worker_id,
        )
        if events:
            reached("handed_off.claimed")
            yield events
        if not rows or worker.evicted:
            return
    logger.info(
        "%s of %s events of a message to the handler %s are locked by other transactions; "
        "they are handed off again after their deadline",
        len(rows),
        len(message.rows),
        message.handler,
    )


def _handlers_to_search(handler: Handler) -> list[str]:
    """Return the handlers among whose events to search for interrupted events.

    Once per SEARCH_EVERY, these are all handlers with the same executor, because the messages of
    one handler may wait behind many messages of another handler.
    """
    global _searched_at
    if time.monotonic() - _searched_at < SEARCH_EVERY:
        return [handler.name]
    _searched_at = time.monotonic()
    return [each.name for each in registry.all() if each.executor == handler.executor]


def _make_room(store: Store, worker: Worker, message: Message) -> None:
    """Release events that wait for room in HANDOFF_WINDOW, and wake the event workers.

    The event workers also hand off the next event of each key that this process has handled.
    """
    known = worker.flow_controls.snapshot
    control_id = known.handler_ids.get(message.handler)
    if control_id is not None and not _is_stopped_or_limited(known, message.handler):
        store.release_held(control_id, limit=len(message.rows), queues=(message.queue,))
    wake(message.using)


def _is_stopped_or_limited(known: Snapshot, handler: str) -> bool:
    """Return whether events of the handler may be held for another reason than the window."""
    limits = known.limits.get(handler)
    is_limited = limits is not None and (limits.max_running or limits.rate) is not None
    return is_limited or handler in known.stopped_handlers


@contextmanager
def _worker(store: Store, options: WorkerOptions, assignment: Assignment) -> Iterator[Worker]:
    """Register this process as a worker for the block.

    After an error, the claims of the process are released. Otherwise it has no claims any more.
    """
    registration = new_registration(options)
    worker = Worker(options, registration.pk, assignment=assignment)
    store.register(registration)
    worker.watchdog.start()
    try:
        with Heartbeat(worker):
            yield worker
    except BaseException:
        if not worker.evicted:
            store.dismiss(worker.worker_id)
        raise
    else:
        store.unregister(worker.worker_id)
        worker.statistics.write(store)
    finally:
        worker.watchdog.stop()
        worker.async_loop.stop()


def _deliver(worker: Worker, claims: Iterator[list[ClaimedEvent]]) -> None:
    delivery = Delivery(worker, 0)
    worker.watchdog.supervise(delivery.watch)
    for events in claims:
        delivery.admission.upkeep()
        delivered = delivery.deliver(ClaimedBatch(events, len(events)))
        delivery.admission.finish()
        worker.count(delivered.tally)
        if delivered.outage is not None:
            raise delivered.outage
