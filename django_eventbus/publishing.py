"""Putting events in: validate in Python, insert in the caller's transaction, wake the workers."""

from __future__ import annotations

import itertools
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.db.models import Value
from django.utils import timezone

from django_eventbus import events
from django_eventbus.backpressure import (
    BLOCK,
    DROP,
    Limit,
    admit,
    bring,
    coalesce,
    drop,
    limit_for,
    take_back,
    tell_coalesced,
)
from django_eventbus.clock import DatabaseNow
from django_eventbus.conf import settings
from django_eventbus.events import Event, check_name, check_payload
from django_eventbus.exceptions import (
    DuplicateEventError,
    EventBusShutdownError,
    ForeignTransactionError,
    InvalidPayloadError,
    UnknownQueueError,
)
from django_eventbus.failpoints import reached
from django_eventbus.models import QueuedEvent
from django_eventbus.registry import did_you_mean
from django_eventbus.signals import event_published
from django_eventbus.store import NewEvent, Store, default_alias, store_for
from django_eventbus.store.inserting import INSERT_CHUNK

#: What ``publish_many`` takes: an event, or a type and its payload.
Item = Event | tuple[str, Any]

MAX_PRIORITY = 32767
LAST_YEAR = 2999
A_CENTURY = timedelta(days=36500)
ON_DUPLICATE = ("skip", "raise")


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
    on_duplicate: str = "skip",
    headers: dict[str, Any] | None = None,
    event_id: uuid.UUID | None = None,
    using: str | None = None,
) -> QueuedEvent | None:
    """Store an event in the caller's transaction: committed means handled, rolled back means never.

    ``event`` is a type name (then ``payload`` is its JSON) or an instance of an Event class.
    Events with the same ``key`` are handled in order. ``delay`` or ``at`` postpone it. With an
    ``event_id`` of the caller's making, publishing again after a lost connection adds nothing;
    with a ``dedup_key``, nothing is added while an event with that key is queued, nor for the
    time of ``dedup_for``. The known event is returned, or ``on_duplicate="raise"``s
    DuplicateEventError. None is returned for an event that a limit dropped.

    Raises InvalidPayloadError or UnknownQueueError before any SQL, so an open ``atomic()`` block
    stays usable; EventBusShutdownError after ``shutdown()``; BackpressureError if a limit halts
    or blocks for too long, or if this transaction has published too many.
    """
    options = Options(
        queue, priority, delay, at, dedup_key, headers, event_id, dedup_for, on_duplicate
    )
    store = store_for(choose_alias(using))
    options.check(store.deepest_json)
    row = _row(_new(event, payload, store.deepest_json, event_id=event_id, key=key), options)
    limit = limit_for(row.queue, row.key, row.type)
    if limit is not None:
        row.counted_as = limit.scope
        if options.has_identity and (known := store.known(row, window=dedup_for)):
            return options.known(known)
        if not admit(store, limit, 1):
            if limit.overflow == DROP:
                drop(limit, row)
                return None
            if standing := coalesce(store, limit, row):
                return standing
    with _in_order(store, row.queue, [key]):
        bring(store.connection, 1)
        if not options.has_identity:
            store.insert(row)
        elif known := store.insert_once(row, window=dedup_for):
            take_back(store.connection, 1)
            return options.known(known)
    reached("publish.inserted")
    _after_insert(store.using, [row])
    return row


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
    """Store many events, one statement per 1,000; returns how many were added.

    ``items`` may be a generator: it is read in pieces. Outside of ``atomic()`` each piece is its
    own transaction, and what stands before a limit halts is kept. ``key`` is that of all events,
    or a function that tells the key of an item.
    """
    key_of = key if callable(key) else None
    common_key = None if callable(key) else key
    options = Options(queue, priority, delay, at, None, headers, None)
    store = store_for(choose_alias(using))
    options.check(store.deepest_json)
    published = 0
    for piece in _pieces(items):
        new = [
            _new(*_pair(item), store.deepest_json, key=key_of(item) if key_of else common_key)
            for item in piece
        ]
        if settings.LIMITS:
            published += _Pressed(store, new, options).insert()
        else:
            published += _insert_many(store, new, options)
    return published


def _insert_many(store: Store, new: list[NewEvent], options: Options) -> int:
    if new:
        common = _row(new[0], options)
        with _in_order(store, common.queue, (each.key for each in new)):
            bring(store.connection, len(new))
            store.insert_many(common, new)
        _after_insert(store.using, (_row(each, options) for each in new))
    return len(new)


class _Pressed:
    """Many events on their way in, in their order, as far as their limits allow."""

    def __init__(self, store: Store, new: list[NewEvent], options: Options) -> None:
        queue = options.queue or settings.QUEUE
        self.store = store
        self.new = new
        self.options = options
        self.limits = [limit_for(queue, each.key, each.type) for each in new]
        self.wanted = Counter(limit for limit in self.limits if limit is not None)
        self.room = {limit: admit(store, limit, many) for limit, many in self.wanted.items()}
        self.newest = {(each.type, each.key): each for each in new}
        self.ready: list[NewEvent] = []
        self.published = 0

    def insert(self) -> int:
        for each, limit in zip(self.new, self.limits, strict=True):
            if limit is None:
                self.ready.append(each)
                continue
            counted = each._replace(counted_as=limit.scope)
            if self.room[limit] > 0 or self._is_let_in(counted, limit):
                self.ready.append(counted)
                self.room[limit] -= 1
                self.wanted[limit] -= 1
        self._flush()
        return self.published

    def _is_let_in(self, event: NewEvent, limit: Limit) -> bool:
        """There is no room: whether its policy stores it all the same."""
        row = _row(event, self.options)
        if limit.overflow == DROP:
            drop(limit, row)
            return False
        self._flush()  # what this very call has brought must be there to be replaced, or handled
        if limit.overflow == BLOCK:
            self.room[limit] = admit(self.store, limit, self.wanted[limit])
            return True
        # Of those that would replace each other only the last needs to reach the database.
        newest = self.newest[event.type, event.key]
        if newest.event_id != event.event_id:
            tell_coalesced(limit, _row(newest, self.options))
            return False
        return coalesce(self.store, limit, row) is None

    def _flush(self) -> None:
        self.published += _insert_many(self.store, self.ready, self.options)
        self.ready = []


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
    """What may be said about an event beside its type, payload and key."""

    queue: str | None
    priority: int
    delay: float | timedelta | None
    at: datetime | None
    dedup_key: str | None
    headers: dict[str, Any] | None
    event_id: uuid.UUID | None
    dedup_for: timedelta | None = None
    on_duplicate: str = "skip"

    @property
    def has_identity(self) -> bool:
        """Whether it can be a duplicate."""
        return self.event_id is not None or self.dedup_key is not None

    def known(self, event: QueuedEvent) -> QueuedEvent:
        """What to answer when the event is there already."""
        if self.on_duplicate == "raise":
            name = f"dedup key {self.dedup_key!r}" if self.dedup_key else f"id {self.event_id}"
            raise DuplicateEventError(f"an event with the {name} is known: {event}")
        return event

    def check(self, deepest: int) -> None:
        if _is_shut_down:
            raise EventBusShutdownError("the event bus of this process has been shut down")
        if self.dedup_key is not None:
            check_name(self.dedup_key, "the dedup key")
        if self.queue is not None and self.queue not in settings.QUEUES:
            hint = did_you_mean(str(self.queue), settings.QUEUES)
            raise UnknownQueueError(f"{self.queue!r} is not in EVENTBUS['QUEUES']{hint}")
        is_number = isinstance(self.priority, int) and not isinstance(self.priority, bool)
        if not is_number or abs(self.priority) > MAX_PRIORITY:
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
        if self.dedup_for is not None or self.on_duplicate != "skip":
            self._check_dedup()

    def _check_dedup(self) -> None:
        if self.on_duplicate not in ON_DUPLICATE:
            hint = did_you_mean(str(self.on_duplicate), ON_DUPLICATE)
            raise InvalidPayloadError(f"on_duplicate cannot be {self.on_duplicate!r}{hint}")
        if not self.has_identity:
            raise InvalidPayloadError("on_duplicate needs a dedup_key or an event_id")
        if self.dedup_for is None:
            return
        if self.dedup_key is None:
            raise InvalidPayloadError("dedup_for needs a dedup_key, for which it is to last")
        if not isinstance(self.dedup_for, timedelta) or not (
            timedelta(0) < self.dedup_for <= A_CENTURY
        ):
            raise InvalidPayloadError(
                "dedup_for must be a timedelta of more than 0 and at most 100 years, such as "
                f"timedelta(hours=1): {self.dedup_for!r}"
            )

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
                allowed = timedelta(0) <= self.delay_time <= A_CENTURY
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
    def due_at(self) -> Any:
        """None for now; a delay is counted by the database's clock."""
        if self.at is not None:
            return self.at
        return DatabaseNow() + Value(self.delay_time) if self.delay_time else None


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
    event: str | Event,
    payload: Any,
    deepest: int,
    *,
    event_id: uuid.UUID | None = None,
    key: str | None = None,
) -> NewEvent:
    """Validate, and give it an identity."""
    if key is not None:
        check_name(key, "the key")
    if isinstance(event, Event):
        if payload is not None:
            raise InvalidPayloadError("a typed event is its own payload")
        payload = events.to_payload(event)
        type_name, version = str(event.event_type), event.event_version
    else:
        check_name(event, "the event type")
        if "*" in event:
            raise InvalidPayloadError(
                f"{event!r} is a pattern, for handlers; an event has one type, such as order.placed"
            )
        cls = events.class_for(event)
        type_name, version = event, cls.event_version if cls else 1
    check_payload(payload, depth=deepest)
    return NewEvent(event_id or events.uuid7(), type_name, version, payload, key)


def _row(new: NewEvent, options: Options) -> QueuedEvent:
    due_at = options.due_at
    return QueuedEvent(
        **new._asdict(),
        namespace=settings.NAMESPACE,
        queue=options.queue or settings.QUEUE,
        headers=options.headers or None,
        priority=options.priority,
        producer=settings.producer(),
        caused_by=events.being_handled(),
        available_at=due_at,
        due_at=due_at,
        dedup_key=options.dedup_key,
    )


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


def _in_order(store: Store, queue: str, keys: Iterable[str | None]) -> AbstractContextManager[None]:
    if not settings.STRICT_ORDER or not (given := {each for each in keys if each is not None}):
        return nullcontext()
    return store.one_publisher_at_a_time(queue, given)


def _after_insert(alias: str, rows: Iterable[QueuedEvent]) -> None:
    if event_published.has_listeners():
        for row in rows:
            event_published.send_robust(QueuedEvent, event=row)
    wake_on_commit(alias)


def wake_on_commit(alias: str) -> None:
    """Wake the workers once per transaction, after it is safe. Who commits by hand, with
    autocommit off, has no such moment: then they look by themselves."""
    connection = connections[alias]
    if not connection.in_atomic_block and not connection.get_autocommit():
        return
    pending = connection.run_on_commit
    if pending and isinstance(pending[-1][1], _Wake):
        return
    transaction.on_commit(_Wake(alias), using=alias, robust=True)


@dataclass(frozen=True, slots=True)
class _Wake:
    alias: str

    def __call__(self) -> None:
        store_for(self.alias).wake()
