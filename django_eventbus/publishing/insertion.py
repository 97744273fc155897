"""Insert validated events: within their limits, without duplicates, in order per key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

from django_eventbus import events
from django_eventbus.conf import settings
from django_eventbus.errors.failpoints import reached
from django_eventbus.models import QueuedEvent
from django_eventbus.publishing.limits import (
    BLOCK,
    DROP,
    Limit,
    admit,
    coalesce,
    drop,
    limit_for,
    send_coalesced,
)
from django_eventbus.publishing.options import Options
from django_eventbus.publishing.transactions import count_published, uncount_published
from django_eventbus.publishing.wakeup import Counted, wake_on_commit
from django_eventbus.signals import event_published
from django_eventbus.store import NewEvent, Store

PUBLISHED, COALESCED = "published", "coalesced"


def insert_one(store: Store, new: NewEvent, options: Options) -> QueuedEvent | None:
    """Insert an event and return it.

    Return the existing event if the new event is a duplicate, or if the content of the new event
    has replaced the content of a waiting event. Return None if a limit dropped the event.
    """
    row = _row(new, options)
    limit = limit_for(row.queue, row.key, row.type)
    if limit is not None:
        row.counted_as = limit.scope
        if options.has_identity and (known := store.known(row, window=options.dedup_for)):
            return options.known(known)
        if not admit(store, limit, 1):
            if limit.overflow == DROP:
                drop(store, limit, row)
                return None
            if merged := coalesce(store, limit, row):
                # This transaction has locked the row, and claims skip locked rows, so workers need
                # a wake-up after the commit.
                wake_on_commit(store.using, {(row.queue, row.type, COALESCED): 1})
                return merged
    with _in_order(store, row.queue, [row.key]):
        count_published(store.connection, 1)
        if not options.has_identity:
            store.insert(row)
        elif known := store.insert_once(row, window=options.dedup_for):
            uncount_published(store.connection, 1)
            return options.known(known)
    reached("publish.inserted")
    _after_insert(store.using, [row], {(row.queue, row.type, PUBLISHED): 1})
    return row


def insert_many(store: Store, new: list[NewEvent], options: Options) -> int:
    """Insert the events that their limits allow; return how many were inserted."""
    if settings.LIMITS:
        return _LimitedInsert(store, new, options).insert()
    return _insert_all(store, new, options)


def _insert_all(store: Store, new: list[NewEvent], options: Options) -> int:
    if new:
        common = _row(new[0], options)
        with _in_order(store, common.queue, (each.key for each in new)):
            count_published(store.connection, len(new))
            store.insert_many(common, new)
        types = Counter(each.type for each in new)
        counted = {(common.queue, each, PUBLISHED): number for each, number in types.items()}
        _after_insert(store.using, (_row(each, options) for each in new), counted)
    return len(new)


class _LimitedInsert:
    """Insert, in their order, the events that their limits allow."""

    def __init__(self, store: Store, new: list[NewEvent], options: Options) -> None:
        queue = options.queue_name
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
            if self.room[limit] > 0 or self._is_stored_without_room(counted, limit):
                self.ready.append(counted)
                self.room[limit] -= 1
                self.wanted[limit] -= 1
        self._flush()
        return self.published

    def _is_stored_without_room(self, event: NewEvent, limit: Limit) -> bool:
        """Apply the policy of a full limit; return whether to insert the event."""
        row = _row(event, self.options)
        if limit.overflow == DROP:
            drop(self.store, limit, row)
            return False
        # Insert the earlier events first. Workers make room only by handling stored events, and a
        # later event can replace only a stored event.
        self._flush()
        if limit.overflow == BLOCK:
            self.room[limit] = admit(self.store, limit, self.wanted[limit])
            return True
        # If several new events would replace each other, only the last of them is written.
        newest = self.newest[event.type, event.key]
        if newest.event_id != event.event_id:
            send_coalesced(limit, _row(newest, self.options))
        elif coalesce(self.store, limit, row) is None:
            return True
        wake_on_commit(self.store.using, {(row.queue, row.type, COALESCED): 1})
        return False

    def _flush(self) -> None:
        self.published += _insert_all(self.store, self.ready, self.options)
        self.ready = []


def _row(new: NewEvent, options: Options) -> QueuedEvent:
    due_at = options.due_at
    return QueuedEvent(
        **new._asdict(),
        namespace=settings.NAMESPACE,
        queue=options.queue_name,
        headers=options.headers or None,
        priority=options.priority,
        producer=settings.producer(),
        caused_by=events.current_event_id(),
        available_at=due_at,
        due_at=due_at,
        dedup_key=options.dedup_key,
    )


def _in_order(store: Store, queue: str, keys: Iterable[str | None]) -> AbstractContextManager[None]:
    if not settings.STRICT_ORDER or not (given := {each for each in keys if each is not None}):
        return nullcontext()
    return store.one_publisher_at_a_time(queue, given)


def _after_insert(alias: str, rows: Iterable[QueuedEvent], counted: Mapping[Counted, int]) -> None:
    if event_published.has_listeners():
        for row in rows:
            event_published.send_robust(QueuedEvent, event=row)
    wake_on_commit(alias, counted)
