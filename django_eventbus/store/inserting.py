"""Insert events in the caller's transaction: without duplicates, in order, within limits."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from django.db import transaction
from django.db.models import Q, QuerySet

from django_eventbus.conf import settings
from django_eventbus.models import EventLog, IdempotencyKey, QueuedEvent, QueuedStatus
from django_eventbus.store.idempotency_keys import PUBLISHED, IdempotencyKeys
from django_eventbus.store.settlements import NewEvent

INSERT_CHUNK = 1000

_SHARED_COLUMNS = (
    "namespace",
    "queue",
    "headers",
    "priority",
    "producer",
    "caused_by",
    "available_at",
    "due_at",
)


class Inserting(IdempotencyKeys):
    """The statements that publishers run."""

    def insert(self, event: QueuedEvent) -> None:
        """Insert one event. No savepoint is created."""
        event.save(force_insert=True, using=self.using)

    def insert_many(self, common: QueuedEvent, items: Sequence[NewEvent]) -> None:
        """Insert events that differ only in the fields of ``NewEvent``."""
        shared = {name: getattr(common, name) for name in _SHARED_COLUMNS}
        rows = [QueuedEvent(**item._asdict(), **shared) for item in items]
        QueuedEvent.objects.using(self.using).bulk_create(rows, batch_size=INSERT_CHUNK)

    def insert_once(
        self, event: QueuedEvent, *, window: timedelta | None = None
    ) -> QueuedEvent | None:
        """Insert an event and return None; for a duplicate, return the existing event.

        A duplicate has the id or the dedup key of an existing event. A dedup key is in use while
        its event is queued, and also for the time of ``window``. If the existing event has ended,
        ``event`` itself is returned, without a row id.
        """
        if window is None:
            return self._insert_once(event)
        key, event_id = str(event.dedup_key), event.event_id
        with self.atomic():
            existing = self.add_key(PUBLISHED, key, event_id=event_id, keep=window)
            known = self._insert_once(event) if existing is None else self._owner(existing, event)
            if known is not None:
                # Undo add_key(): a duplicate must not start a new deduplication window.
                transaction.set_rollback(True, using=self.using)
        return known

    def _insert_once(self, event: QueuedEvent) -> QueuedEvent | None:
        rows = QueuedEvent.objects.using(self.using)
        # The token distinguishes our row from an existing row.
        event.claim_token = token = uuid.uuid4()
        with self.atomic():
            rows.bulk_create([event], ignore_conflicts=True)
            inserted = rows.filter(event_id=event.event_id, claim_token=token)
            # The insert may have waited for the settlement of the same event, so the log is read
            # after the insert.
            if self._has_ended(event):
                inserted.delete()
                event.pk = event.claim_token = None
                return event
            if inserted.update(claim_token=None):
                event.claim_token = None
                event.pk, event.created_at = rows.values_list("pk", "created_at").get(
                    event_id=event.event_id
                )
                return None
            return self._same_as(event).first() or event

    def known(self, event: QueuedEvent, *, window: timedelta | None = None) -> QueuedEvent | None:
        """Return what ``insert_once`` would return, but insert nothing."""
        if known := self._same_as(event).first():
            return known
        if self._has_ended(event):
            return event
        existing = self.find_key(PUBLISHED, str(event.dedup_key)) if window else None
        return self._owner(existing, event) if existing else None

    def _same_as(self, event: QueuedEvent) -> QuerySet[QueuedEvent]:
        same = Q(event_id=event.event_id)
        if event.dedup_key is not None:
            same |= Q(namespace=event.namespace, dedup_key=event.dedup_key)
        return QueuedEvent.objects.using(self.using).filter(same)

    def _has_ended(self, event: QueuedEvent) -> bool:
        return EventLog.objects.using(self.using).filter(event_id=event.event_id).exists()

    def _owner(self, key: IdempotencyKey, event: QueuedEvent) -> QueuedEvent:
        """Return the event that stored the key.

        If that event has ended, return ``event`` with the id of that event.
        """
        queued = QueuedEvent.objects.using(self.using).filter(event_id=key.event_id).first()
        event.event_id = key.event_id
        return queued or event

    # -- limits

    def count_limited(self, scope: str, *, at_most: int) -> int:
        """Count the events in the scope of a limit; counting stops at ``at_most``."""
        return self._limited(scope).values("id")[:at_most].count()

    def coalesce(self, new: QueuedEvent) -> QueuedEvent | None:
        """Replace the content of the oldest waiting event of this queue, type and key.

        Events that another transaction has locked are skipped, so publishers and claims cannot
        deadlock. Events for which a handler has already run are skipped, because a handler that is
        done would never receive the new content. Return the changed event, or None if no event
        could be changed.
        """
        alike = self._limited(str(new.counted_as)).filter(
            queue=new.queue,
            type=new.type,
            key=new.key,
            status=QueuedStatus.PENDING,
            deliveries__isnull=True,
            available_at__isnull=new.available_at is None,
        )
        with transaction.atomic(using=self.using, savepoint=False):
            oldest = self.first_unlocked(alike)
            if oldest is None:
                return None
            oldest.version, oldest.payload, oldest.headers = new.version, new.payload, new.headers
            content = {"version": new.version, "payload": new.payload, "headers": new.headers}
            waiting = self.queued.filter(pk=oldest.pk, status=QueuedStatus.PENDING)
            return oldest if waiting.update(**content) else None

    def first_unlocked(self, events: QuerySet[QueuedEvent]) -> QueuedEvent | None:
        """Lock the first of these events that no other transaction has locked."""
        first: QueuedEvent | None = self.locked(events).first()
        return first

    def _limited(self, scope: str) -> QuerySet[QueuedEvent]:
        # This range and order can only use the index eventbus_counted. With an equality condition
        # and a LIMIT, PostgreSQL may scan the whole queue if its statistics are outdated.
        within = self.queued.filter(counted_as__gte=scope, counted_as__lte=scope)
        return within.order_by("counted_as", "id")

    @contextmanager
    def one_publisher_at_a_time(self, queue: str, keys: Collection[str]) -> Iterator[None]:
        """Serialize the publishers of a key, so that row ids have the order of the commits.

        Every publisher locks its keys in the same order, which avoids deadlocks. SQLite allows only
        one writer at a time, so its store takes no such lock.
        """
        with self.atomic():
            for key in sorted(keys):
                self._lock_name(f"{settings.NAMESPACE}/{queue}/{key}")
            yield

    def _lock_name(self, name: str) -> None:
        """Lock this name until the end of the transaction."""
