"""Deliver events that were handed off to a process of another executor, such as a Celery worker.

The process registers as a worker for the duration of one message. So if it dies, the event workers
recover its events in the same way as the events of an event worker.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import Error

from django_eventbus.delivery.batch import Tally
from django_eventbus.errors import failures
from django_eventbus.errors.text import one_line
from django_eventbus.exceptions import WorkerEvictedError
from django_eventbus.executors import Message
from django_eventbus.flow.controls import Snapshot
from django_eventbus.logs import about, worker_context
from django_eventbus.outcomes.assignments import Assignment
from django_eventbus.publishing.wakeup import wake
from django_eventbus.registry import Handler, registry
from django_eventbus.statistics.recorder import recorder_of_process
from django_eventbus.store import Store, is_outage, store_for
from django_eventbus.worker.message_claims import MessageClaims
from django_eventbus.worker.registration import Heartbeat, WorkerOptions, new_registration
from django_eventbus.worker.threads import Delivery
from django_eventbus.worker.worker import Worker, leave_pools

logger = logging.getLogger(__name__)

#: Seconds between the attempts to deliver a message during a database outage. Without these
#: attempts, every message that Celery takes from the broker during a short outage would be lost.
OUTAGE_WAITS = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4)


def deliver_message(message: Message, *, executor: str) -> Tally:
    """Claim the events of a message, and deliver them to the handlers of the executor.

    Events that another process has claimed or settled meanwhile are left out, so a late or repeated
    message has no effect.
    """
    store = store_for(message.using)
    handler = registry.get(message.handler)
    if handler is None or handler.executor is None:
        logger.warning(
            "a message for the unknown handler %s was ignored: this process has no such handler "
            "with an executor",
            one_line(message.handler),
            extra=about(handler=message.handler, queue=message.queue),
        )
        recorder_of_process(store.using).count_ignored(store, message.queue)
        return Tally()
    by = f"{executor} {socket.gethostname()}:{os.getpid()}"
    assignment = Assignment(executor=handler.executor, by=by)
    leave_pools()
    for wait in OUTAGE_WAITS:
        try:
            return _deliver_message(store, message, handler, assignment)
        except Error as error:
            if not is_outage(error) or store.connection.in_atomic_block:
                raise
            logger.warning(
                "database error, retrying in %.1f s: %s",
                wait,
                failures.in_a_line(error),
                extra=about(handler=message.handler, queue=message.queue),
            )
            time.sleep(wait)
    return _deliver_message(store, message, handler, assignment)


def _deliver_message(
    store: Store, message: Message, handler: Handler, assignment: Assignment
) -> Tally:
    """Deliver the events of the message that can be claimed, as a new worker."""
    options = WorkerOptions(using=message.using, queues=(message.queue,), fires_schedules=False)
    with _worker(store, options, assignment) as worker:
        claims = MessageClaims(store, message, handler, worker)
        try:
            _deliver(worker, claims)
        except WorkerEvictedError:
            worker.evicted = True
        if worker.evicted:
            _log_evicted(message)
        elif not claims.count and not claims.gave_up:
            _ignore(store, worker, message)
    _make_room(store, worker, message)
    return worker.tally


def _log_evicted(message: Message) -> None:
    """Log that the registration expired: the process was suspended, or a handler was stuck."""
    logger.warning(
        "the registration of this process has expired; the events of the message for the handler "
        "%s that were not claimed are handed off again after their hand-off deadline",
        one_line(message.handler),
        extra=about(handler=message.handler, queue=message.queue),
    )


def _ignore(store: Store, worker: Worker, message: Message) -> None:
    """Log and count a message that claims no event. Most such messages are late or repeated."""
    logger.info(
        "a message for the handler %s was ignored: all its events (%d) were already claimed, "
        "handed off again or settled",
        one_line(message.handler),
        len(message.rows),
        extra=about(handler=message.handler, queue=message.queue),
    )
    worker.statistics.count_ignored(store, message.queue)


def _make_room(store: Store, worker: Worker, message: Message) -> None:
    """Release events that wait for room in HANDOFF_WINDOW, and wake the event workers.

    The woken event workers also hand off the next event of each key that this process has handled.
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
    """Register this process as a worker for the block."""
    registration = new_registration(options)
    registration.slots = 0  # The slots of the executor are not slots of the event workers.
    worker = Worker(options, registration.pk, assignment=assignment)
    worker.statistics = recorder_of_process(options.using)
    with worker_context(worker.worker_id):
        store.register(registration)
        with _registered(store, worker):
            yield worker


@contextmanager
def _registered(store: Store, worker: Worker) -> Iterator[None]:
    """Renew the registration during the block, and delete it at the end.

    After an error, the claims of the process are released. Without an error, the process has no
    claims left at the end of the block.
    """
    worker.watchdog.start()
    try:
        with Heartbeat(worker):
            yield
    except BaseException as error:
        if is_outage(error) and not store.connection.in_atomic_block:
            # The session may be broken. The next statement opens a new connection.
            store.connection.close()
        if not worker.evicted:
            store.dismiss(worker.worker_id)
        raise
    else:
        store.unregister(worker.worker_id)
        worker.statistics.write(store)
    finally:
        worker.watchdog.stop()
        worker.async_loop.stop()


def _deliver(worker: Worker, claims: MessageClaims) -> None:
    delivery = Delivery(worker, 0)
    worker.watchdog.supervise(delivery.watch)
    for batch in claims:
        delivery.admission.upkeep()
        delivered = delivery.deliver(batch)
        delivery.admission.finish()
        # Worker.count() is not called: it would stop the delivery because of MAX_MEMORY, although
        # the bus cannot replace this process.
        worker.tally.add(delivered.tally)
        if delivered.outage is not None:
            raise delivered.outage
        # Events that were not started took no time, so they do not show the speed of the handler.
        unstarted = delivered.tally.returned + delivered.tally.held
        claims.pace.fit(batch, len(batch.events) - unstarted, delivered.seconds)
