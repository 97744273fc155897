"""Putting events in: validate in Python, insert in the caller's transaction, wake the workers."""

from __future__ import annotations

import itertools
import uuid
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.db.models import Value
from django.db.models.functions import Now
from django.utils import timezone

from django_eventbus import events
from django_eventbus.conf import settings
from django_eventbus.events import Event, check_name, check_payload
from django_eventbus.exceptions import (
    EventBusShutdownError,
    ForeignTransactionError,
    InvalidPayloadError,
    UnknownQueueError,
)
from django_eventbus.models import QueuedEvent
from django_eventbus.registry import did_you_mean
from django_eventbus.signals import event_published
from django_eventbus.store import NewEvent, default_alias, store_for
from django_eventbus.store.base import INSERT_CHUNK

MAX_PRIORITY = 32767
LAST_YEAR = 2999


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
    headers: dict[str, Any] | None = None,
    event_id: uuid.UUID | None = None,
    using: str | None = None,
) -> QueuedEvent | None:
    """Store an event in the caller's transaction: committed means handled, rolled back means never.

    ``event`` is a type name (then ``payload`` is its JSON) or an instance of an Event class.
    Events with the same ``key`` are handled in order. ``delay`` or ``at`` postpone it. With an
    ``event_id`` of the caller's making, publishing again after a lost connection adds nothing;
    with a ``dedup_key``, nothing is added while an event with that key is queued.

    Raises InvalidPayloadError or UnknownQueueError before any SQL, so an open ``atomic()`` block
    stays usable; EventBusShutdownError after ``shutdown()``.
    """
    options = Options(key, queue, priority, delay, at, dedup_key, headers, event_id)
    store = store_for(choose_alias(using))
    options.check(store.deepest_json)
    row = _row(_new(event, payload, store.deepest_json, event_id), options)
    if event_id is not None or dedup_key is not None:
        known = store.insert_once(row)
        if known is not None:
            return known
    else:
        store.insert(row)
    _after_insert(store.using, [row])
    return row


def publish_many(
    items: Iterable[Event | tuple[str, Any]],
    *,
    key: str | None = None,
    queue: str | None = None,
    priority: int = 0,
    delay: float | timedelta | None = None,
    at: datetime | None = None,
    headers: dict[str, Any] | None = None,
    using: str | None = None,
) -> int:
    """Store many events, one statement per 1,000; returns how many.

    ``items`` may be a generator: it is read in pieces. Outside of ``atomic()`` each piece is its
    own transaction.
    """
    options = Options(key, queue, priority, delay, at, None, headers, None)
    store = store_for(choose_alias(using))
    options.check(store.deepest_json)
    published = 0
    for piece in _pieces(items):
        new = [_new(*_pair(item), store.deepest_json) for item in piece]
        store.insert_many(_row(new[0], options), new)
        _after_insert(store.using, (_row(each, options) for each in new))
        published += len(new)
    return published


async def apublish(event: str | Event, payload: Any = None, **options: Any) -> QueuedEvent | None:
    """``publish()`` from async code, always a transaction of its own.

    Django has no async transactions: to publish together with other writes, put both in one
    function and call that through ``sync_to_async``.
    """
    return await sync_to_async(publish, thread_sensitive=True)(event, payload, **options)


def shutdown() -> None:
    """Refuse to publish from this process from now on."""
    global _is_shut_down
    _is_shut_down = True


def reopen() -> None:
    """Take back ``shutdown()``."""
    global _is_shut_down
    _is_shut_down = False


_is_shut_down = False


@dataclass(frozen=True, slots=True)
class Options:
    """What may be said about an event beside its type and payload."""

    key: str | None
    queue: str | None
    priority: int
    delay: float | timedelta | None
    at: datetime | None
    dedup_key: str | None
    headers: dict[str, Any] | None
    event_id: uuid.UUID | None

    def check(self, deepest: int) -> None:
        if _is_shut_down:
            raise EventBusShutdownError("the event bus of this process has been shut down")
        if self.key is not None:
            check_name(self.key, "the key")
        if self.dedup_key is not None:
            check_name(self.dedup_key, "the dedup key")
        if self.queue is not None and self.queue not in settings.QUEUES:
            hint = did_you_mean(str(self.queue), settings.QUEUES)
            raise UnknownQueueError(f"{self.queue!r} is not in EVENTBUS['QUEUES']{hint}")
        if not isinstance(self.priority, int) or abs(self.priority) > MAX_PRIORITY:
            raise InvalidPayloadError(
                f"the priority must be an integer between -{MAX_PRIORITY} and {MAX_PRIORITY}, "
                f"not {self.priority!r}"
            )
        if self.event_id is not None and not isinstance(self.event_id, uuid.UUID):
            raise InvalidPayloadError(f"the event id must be a UUID, not {self.event_id!r}")
        if self.headers is not None:
            if not isinstance(self.headers, dict):
                raise InvalidPayloadError(f"headers must be a dict, not {self.headers!r}")
            check_payload(self.headers, "headers", depth=deepest)
        self._check_times()

    def _check_times(self) -> None:
        if self.delay is not None and self.at is not None:
            raise InvalidPayloadError("give delay or at, not both")
        if self.at is not None and (
            not isinstance(self.at, datetime) or timezone.is_naive(self.at)
        ):
            raise InvalidPayloadError(f"at must be a datetime with a time zone: {self.at!r}")
        if self.at is not None and not 1970 <= self.at.year <= LAST_YEAR:
            raise InvalidPayloadError(f"at must be between 1970 and {LAST_YEAR}: {self.at!r}")
        if self.delay is not None:
            try:
                allowed = timedelta(0) <= self.delay_time <= timedelta(days=36500)
            except (TypeError, ValueError, OverflowError):
                allowed = False
            if not allowed:
                raise InvalidPayloadError(
                    f"the delay must be seconds or a timedelta, 0 to 100 years: {self.delay!r}"
                )

    @property
    def delay_time(self) -> timedelta:
        if isinstance(self.delay, timedelta):
            return self.delay
        return timedelta(seconds=self.delay or 0)

    @property
    def available_at(self) -> Any:
        """None for now; a delay is counted by the database's clock."""
        if self.at is not None:
            return self.at
        return Now() + Value(self.delay_time) if self.delay_time else None


def choose_alias(using: str | None) -> str:
    """The database of the caller's transaction, if the bus has tables there."""
    alias = using or default_alias()
    opened = [c.alias for c in connections.all(initialized_only=True) if c.in_atomic_block]
    if not opened or alias in opened:
        return alias
    if using is None:
        at_home = [each for each in opened if each in settings.DATABASES]
        if len(at_home) == 1:
            return at_home[0]
    _warn_of_foreign_transaction(alias, opened)
    return alias


def _warn_of_foreign_transaction(alias: str, opened: list[str]) -> None:
    message = (
        f"publishing to the database {alias!r} while the open transaction is on "
        f"{', '.join(map(repr, opened))}: rolling that back will not take the event back"
    )
    if settings.FOREIGN_TRANSACTION == "error":
        raise ForeignTransactionError(message)
    if settings.FOREIGN_TRANSACTION == "warn":
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _new(
    event: str | Event, payload: Any, deepest: int, event_id: uuid.UUID | None = None
) -> NewEvent:
    """Validate, and give it an identity."""
    if isinstance(event, Event):
        if payload is not None:
            raise InvalidPayloadError("a typed event is its own payload")
        payload = events.to_payload(event)
        type_name, version = str(event.event_type), event.event_version
    else:
        check_name(event, "the event type")
        cls = events.class_for(event)
        type_name, version = event, cls.event_version if cls else 1
    check_payload(payload, depth=deepest)
    return NewEvent(event_id or events.uuid7(), type_name, version, payload)


def _row(new: NewEvent, options: Options) -> QueuedEvent:
    return QueuedEvent(
        **new._asdict(),
        namespace=settings.NAMESPACE,
        queue=options.queue or settings.QUEUE,
        headers=options.headers or None,
        key=options.key,
        priority=options.priority,
        producer=settings.producer(),
        caused_by=events.being_handled(),
        available_at=options.available_at,
        dedup_key=options.dedup_key,
    )


def _pair(item: Event | tuple[str, Any]) -> tuple[str | Event, Any]:
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


def _after_insert(alias: str, rows: Iterable[QueuedEvent]) -> None:
    if event_published.has_listeners():
        for row in rows:
            event_published.send_robust(QueuedEvent, event=row)
    wake_on_commit(alias)


def wake_on_commit(alias: str) -> None:
    """Wake the workers once per transaction, after it is safe."""
    pending = connections[alias].run_on_commit
    if pending and isinstance(pending[-1][1], _Wake):
        return
    transaction.on_commit(_Wake(alias), using=alias, robust=True)


@dataclass(frozen=True, slots=True)
class _Wake:
    alias: str

    def __call__(self) -> None:
        store_for(self.alias).wake()
