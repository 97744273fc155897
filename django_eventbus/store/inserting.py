"""Putting events in: once, in order, within limits, and in the caller's transaction."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from django.db import transaction
from django.db.models import Q, QuerySet

from django_eventbus.conf import settings
from django_eventbus.models import EventLog, EventMark, QueuedEvent, QueuedStatus
from django_eventbus.store.marks import PUBLISHED, Marks
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


class Inserting(Marks):
    """What publishers ask of the store."""

    def insert(self, event: QueuedEvent) -> None:
        """One INSERT, no savepoint."""
        event.save(force_insert=True, using=self.using)

    def insert_many(self, common: QueuedEvent, items: Sequence[NewEvent]) -> None:
        """Events that differ only in what ``NewEvent`` says."""
        shared = {name: getattr(common, name) for name in _SHARED_COLUMNS}
        rows = [QueuedEvent(**item._asdict(), **shared) for item in items]
        QueuedEvent.objects.using(self.using).bulk_create(rows, batch_size=INSERT_CHUNK)

    def insert_once(
        self, event: QueuedEvent, *, window: timedelta | None = None
    ) -> QueuedEvent | None:
        """Insert unless the event id or dedup key is known; then return the event that stands.

        The dedup key is known while its event is queued, and for the window. An event that has
        already ended is returned as it was given, without a row id.
        """
        if window is None:
            return self._insert_once(event)
        key, event_id = str(event.dedup_key), event.event_id
        with self.atomic():
            mark = self.take_mark(PUBLISHED, key, event_id=event_id, keep=window)
            known = self._insert_once(event) if mark is None else self._marked(mark, event)
            if known is not None:
                transaction.set_rollback(True, using=self.using)  # no new window for a duplicate
        return known

    def _insert_once(self, event: QueuedEvent) -> QueuedEvent | None:
        rows = QueuedEvent.objects.using(self.using)
        # A mark of this very insert, to tell our row from one that was there before.
        event.claim_token = mark = uuid.uuid4()
        with self.atomic():
            rows.bulk_create([event], ignore_conflicts=True)
            inserted = rows.filter(event_id=event.event_id, claim_token=mark)
            if self._has_ended(event):
                # Asked after the insert: one that waited for a settle to commit sees its log.
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
        """What ``insert_once`` would return, but nothing is inserted."""
        if known := self._same_as(event).first():
            return known
        if self._has_ended(event):
            return event
        mark = self.standing_mark(PUBLISHED, str(event.dedup_key)) if window else None
        return self._marked(mark, event) if mark else None

    def _same_as(self, event: QueuedEvent) -> QuerySet[QueuedEvent]:
        same = Q(event_id=event.event_id)
        if event.dedup_key is not None:
            same |= Q(namespace=event.namespace, dedup_key=event.dedup_key)
        return QueuedEvent.objects.using(self.using).filter(same)

    def _has_ended(self, event: QueuedEvent) -> bool:
        return EventLog.objects.using(self.using).filter(event_id=event.event_id).exists()

    def _marked(self, mark: EventMark, event: QueuedEvent) -> QueuedEvent:
        """The event that made the mark; if it has ended, the given one with its id."""
        queued = QueuedEvent.objects.using(self.using).filter(event_id=mark.event_id).first()
        event.event_id = mark.event_id
        return queued or event

    # -- limits

    def counted(self, scope: str, *, at_most: int) -> int:
        """How many events count for a limit; counting stops at ``at_most``."""
        return self._counted_as(scope).values("id")[:at_most].count()

    def coalesce(self, new: QueuedEvent) -> QueuedEvent | None:
        """Let the oldest waiting event of this queue, type and key carry what ``new`` says.

        Waits for nobody, so that publishers and claims cannot deadlock: what another transaction
        holds is passed over. None if nothing is left; also an event that some handler has done
        with is not taken, because that handler would never see what is new.
        """
        alike = self._counted_as(str(new.counted_as)).filter(
            queue=new.queue,
            type=new.type,
            key=new.key,
            status=QueuedStatus.PENDING,
            deliveries__isnull=True,
            available_at__isnull=new.available_at is None,
        )
        with transaction.atomic(using=self.using, savepoint=False):
            oldest = self.locked(alike).first()
            if oldest is None:
                return None
            oldest.version, oldest.payload, oldest.headers = new.version, new.payload, new.headers
            said = {"version": new.version, "payload": new.payload, "headers": new.headers}
            waiting = self.queued.filter(pk=oldest.pk, status=QueuedStatus.PENDING)
            return oldest if waiting.update(**said) else None

    def _counted_as(self, scope: str) -> QuerySet[QueuedEvent]:
        # A range and an order that only the index eventbus_counted has: for an equality and a
        # LIMIT, statistics of another day let PostgreSQL walk the whole queue for the first few.
        within = self.queued.filter(counted_as__gte=scope, counted_as__lte=scope)
        return within.order_by("counted_as", "id")

    @contextmanager
    def one_publisher_at_a_time(self, queue: str, keys: Collection[str]) -> Iterator[None]:
        """Ids of a key are drawn in the order of commits: who is second waits for the first's end.

        Several keys are taken in one order by everybody. A database with one writer does all
        this by itself.
        """
        with self.atomic():
            for key in sorted(keys):
                self._wait_for_turn(f"{settings.NAMESPACE}/{queue}/{key}")
            yield

    def _wait_for_turn(self, name: str) -> None:
        """Hold a lock of this name until the transaction ends."""
