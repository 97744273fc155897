"""``publish()`` and its variants: validate events in Python, then insert them."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any

from asgiref.sync import sync_to_async

from django_eventbus import events
from django_eventbus.events import Event
from django_eventbus.exceptions import EventBusShutdownError, InvalidPayloadError
from django_eventbus.models import QueuedEvent
from django_eventbus.publishing.insertion import insert_many, insert_one
from django_eventbus.publishing.options import OnDuplicate, Options
from django_eventbus.publishing.transactions import choose_database
from django_eventbus.schema.names import check_name
from django_eventbus.schema.payloads import check_payload
from django_eventbus.store import INSERT_CHUNK, NewEvent, Store, store_for
from django_eventbus.tracing import spans

#: An item of ``publish_many``: an event, or a type and its payload.
Item = Event | tuple[str, Any]


def publish(
    event: str | Event,
    payload: Any = None,
    *,
    key: str | None = None,
    queue: str | None = None,
    priority: int = 0,
    delay: float | timedelta | None = None,
    at: datetime | None = None,
    dedup_key: str | None = None,
    dedup_for: timedelta | None = None,
    on_duplicate: OnDuplicate = "skip",
    headers: dict[str, Any] | None = None,
    event_id: uuid.UUID | None = None,
    using: str | None = None,
) -> QueuedEvent | None:
    """Store an event in the caller's transaction: workers handle it after the commit.

    ``event`` is a type name (then ``payload`` is its JSON) or an instance of an Event class. Events
    with the same ``key`` are handled in order. ``delay`` or ``at`` postpones the event.

    An event is a duplicate if an earlier event has the same ``event_id``, or has the same
    ``dedup_key`` and is still queued or was published within the time of ``dedup_for``. A duplicate
    is not stored: the earlier event is returned, or with ``on_duplicate="raise"`` a
    DuplicateEventError is raised. Returns None if a limit dropped the event.

    Raises InvalidPayloadError or UnknownQueueError before any SQL, so an open ``atomic()`` block
    stays usable; EventBusShutdownError after ``shutdown()``; BackpressureError if a limit refuses
    the event, or if the transaction has published too many events.
    """
    options = Options(
        queue, priority, delay, at, dedup_key, headers, event_id, dedup_for, on_duplicate
    )
    store = store_for(choose_database(using))
    _check(options, store)
    new = _new(event, payload, store.deepest_json, event_id=event_id, key=key)
    with spans.publishing(new.type, queue=options.queue_name, event_id=new.event_id) as span:
        return insert_one(store, new, options.with_headers(span.headers(headers)))


def publish_many(
    items: Iterable[Item],
    *,
    key: str | Callable[[Item], str | None] | None = None,
    queue: str | None = None,
    priority: int = 0,
    delay: float | timedelta | None = None,
    at: datetime | None = None,
    headers: dict[str, Any] | None = None,
    using: str | None = None,
) -> int:
    """Store many events with one statement per 1,000 events; return how many were stored.

    ``items`` may be a generator, which is read in pieces of 1,000 items. Outside of ``atomic()``
    each piece is its own transaction, so after an error the earlier pieces stay stored. ``key`` is
    the key of all events, or a function that returns the key of an item.
    """
    key_of = key if callable(key) else None
    common_key = None if callable(key) else key
    options = Options(queue, priority, delay, at, None, headers, None)
    store = store_for(choose_database(using))
    _check(options, store)
    published = 0
    with spans.publishing(None, queue=options.queue_name) as span:
        options = options.with_headers(span.headers(headers))
        for piece in _pieces(items):
            new = [
                _new(*_pair(item), store.deepest_json, key=key_of(item) if key_of else common_key)
                for item in piece
            ]
            span.count([each.type for each in new])
            published += insert_many(store, new, options)
    return published


async def apublish(
    event: str | Event,
    payload: Any = None,
    *,
    key: str | None = None,
    queue: str | None = None,
    priority: int = 0,
    delay: float | timedelta | None = None,
    at: datetime | None = None,
    dedup_key: str | None = None,
    dedup_for: timedelta | None = None,
    on_duplicate: OnDuplicate = "skip",
    headers: dict[str, Any] | None = None,
    event_id: uuid.UUID | None = None,
    using: str | None = None,
) -> QueuedEvent | None:
    """``publish()`` for async code, in a transaction of its own.

    Django has no async transactions. To publish together with other writes, put both into one
    function and call it through ``sync_to_async``.
    """
    return await sync_to_async(publish, thread_sensitive=True)(
        event,
        payload,
        key=key,
        queue=queue,
        priority=priority,
        delay=delay,
        at=at,
        dedup_key=dedup_key,
        dedup_for=dedup_for,
        on_duplicate=on_duplicate,
        headers=headers,
        event_id=event_id,
        using=using,
    )


def shutdown() -> None:
    """Make ``publish()`` raise EventBusShutdownError in this process from now on."""
    global _is_shut_down
    _is_shut_down = True


def reopen() -> None:
    """Undo ``shutdown()``."""
    global _is_shut_down
    _is_shut_down = False


def _check(options: Options, store: Store) -> None:
    if _is_shut_down:
        raise EventBusShutdownError("publishing is shut down in this process")
    options.check(store.deepest_json)


_is_shut_down = False


def _new(
    event: str | Event,
    payload: Any,
    deepest: int,
    *,
    event_id: uuid.UUID | None = None,
    key: str | None = None,
) -> NewEvent:
    """Validate an event and give it an id."""
    if key is not None:
        check_name(key, "the key")
    if isinstance(event, Event):
        if payload is not None:
            raise InvalidPayloadError(
                f"a typed event has its payload in its fields: remove payload={payload!r}"
            )
        payload = events.to_payload(event)
        type_name, version = str(event.event_type), event.event_version
    else:
        check_name(event, "the event type")
        if "*" in event:
            raise InvalidPayloadError(
                f"{event!r} is a pattern, which only handlers can use; publish one type, such as "
                "'order.placed'"
            )
        cls = events.class_for(event)
        type_name, version = event, cls.event_version if cls else 1
    check_payload(payload, depth=deepest)
    return NewEvent(event_id or events.uuid7(), type_name, version, payload, key)


def _pair(item: Item) -> tuple[str | Event, Any]:
    if isinstance(item, Event):
        return item, None
    try:
        type_name, payload = item
    except (TypeError, ValueError):
        raise InvalidPayloadError(
            f"publish_many takes events and (type, payload) pairs, not {item!r}"
        ) from None
    return type_name, payload


def _pieces(items: Iterable[Any]) -> Iterable[list[Any]]:
    try:
        iterator = iter(items)
    except TypeError:
        raise InvalidPayloadError(f"publish_many takes an iterable, not {items!r}") from None
    while piece := list(itertools.islice(iterator, INSERT_CHUNK)):
        yield piece
