"""Replays: copy ended events from the log into the queue, in the order in which they ended."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import (
    CharField,
    DateTimeField,
    F,
    Func,
    JSONField,
    Q,
    QuerySet,
    TextField,
    UUIDField,
    Value,
)

from django_eventbus.conf import settings
from django_eventbus.models import (
    EventLog,
    EventReplay,
    LogStatus,
    QueuedEvent,
    QueuedStatus,
)
from django_eventbus.schema.names import OWN_TYPES
from django_eventbus.store.operating import Operating
from django_eventbus.store.rows import retried

#: The largest number of events that one statement copies.
COPY_CHUNK = 1000
#: The status that selects all dead letters.
DEAD = "dead"


class Replaying(Operating):
    """Select events of the log for a replay, and copy them into the queue."""

    @property
    def new_uuid(self) -> str:
        """An SQL expression that returns a different UUID for each row."""
        raise NotImplementedError

    @property
    def replays(self) -> QuerySet[EventReplay]:
        return EventReplay.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    def start_replay(self, replay: EventReplay) -> None:
        """Insert a replay. The caller also publishes the event of its first step."""
        replay.namespace = settings.NAMESPACE
        replay.created_at = self.read_clock()
        replay.save(using=self.using, force_insert=True)

    def lock_replay(self, replay_id: int) -> EventReplay | None:
        """Lock a replay in the caller's transaction; return None if it does not exist."""
        return self.waiting_lock(self.replays.filter(pk=replay_id)).first()

    def save_replay(self, replay: EventReplay, *columns: str) -> None:
        replay.save(using=self.using, update_fields=columns)

    def selected(self, replay: EventReplay) -> QuerySet[EventLog]:
        """Return the events of the log that a replay selects.

        Copies of other replays and the bus's own events are left out.
        """
        rows = EventLog.objects.using(self.using).filter(
            namespace=settings.NAMESPACE, replay_id__isnull=True
        )
        rows = rows.filter(~self.starting_with("type", OWN_TYPES), finished_at__lt=replay.until)
        if replay.since is not None:
            rows = rows.filter(finished_at__gte=replay.since)
        if replay.event_ids is not None:
            rows = rows.filter(event_id__in=replay.event_ids)
        if replay.key:
            rows = rows.filter(key=replay.key)
        if replay.handler_types is not None:
            of_handler = (self._of_type(each) for each in replay.handler_types)
            rows = rows.filter(reduce(or_, of_handler))
        return rows.filter(self._of_type(replay.type), _of_status(replay.status))

    def _of_type(self, pattern: str) -> Q:
        if not pattern.endswith("*"):
            return Q(type=pattern) if pattern else Q()
        return self.starting_with("type", pattern[:-1]) if pattern != "*" else Q()

    def ended_after(self, at: datetime, row_id: int) -> Q:
        """Return the filter of the events after a position in the order of the log."""
        # The first condition is redundant. With it, the index on finished_at can be used.
        return Q(finished_at__gte=at) & (Q(finished_at__gt=at) | Q(id__gt=row_id))

    def copy_to_queue(self, replay: EventReplay, limit: int) -> int:
        """Copy the next events of a locked replay in the caller's transaction; return how many.

        The position moves in the same transaction. So after a rollback or a crash, no event is
        copied twice, and none is left out.
        """
        copied = 0
        while copied < limit:
            size = min(limit - copied, COPY_CHUNK)
            page = self._page(replay, size)
            if page:
                self._copy_events(replay, [row_id for row_id, _ in page])
                copied += len(page)
                replay.position_id, replay.position_at = page[-1]
            if len(page) < size:
                break
        replay.copied += copied
        self.save_replay(replay, "copied", "position_at", "position_id")
        return copied

    def _page(self, replay: EventReplay, size: int) -> list[tuple[int, datetime]]:
        rows = self.selected(replay)
        if replay.position_at is not None and replay.position_id is not None:
            rows = rows.filter(self.ended_after(replay.position_at, replay.position_id))
        ordered = rows.order_by("finished_at", "id").values_list("id", "finished_at")
        return list(ordered[:size])

    def _copy_events(self, replay: EventReplay, ids: Collection[int]) -> None:
        rows = EventLog.objects.using(self.using).filter(id__in=list(ids))
        nothing = Value(None, output_field=TextField())
        no_json = Value(None, output_field=JSONField())
        no_time = Value(None, output_field=DateTimeField())
        values: dict[str, Any] = {
            "event_id": Func(template=self.new_uuid, output_field=UUIDField()),
            "replay_of": F("event_id"),
            "replay_id": Value(replay.pk),
            "only_handler": Value(replay.handler or None, output_field=CharField()),
            "queue": Value(replay.queue) if replay.queue else F("queue"),
            "status": Value(QueuedStatus.PENDING.value),
            # ``created_at`` is copied. The waiting time is measured from ``due_at``.
            "due_at": self.now,
            **dict.fromkeys(("attempts", "crashes", "interruptions"), Value(0)),
            **dict.fromkeys(("deliveries", "errors", "history", "edits"), no_json),
            **dict.fromkeys(("processing_started_at", "first_dead_at"), no_time),
            **dict.fromkeys(("claimed_by", "first_dead_of"), nothing),
        }
        ordered = rows.order_by("finished_at", "id")
        self._copy(ordered, QueuedEvent, values, keeps_id=False)

    def waiting_copies(self, replay_id: int, *, at_most: int) -> int:
        """Count the copies that are still in the queue; counting stops at ``at_most``."""
        return self._copies(replay_id).values("id")[:at_most].count()

    def _copies(self, replay_id: int) -> QuerySet[QueuedEvent]:
        # This range and order can only use the index eventbus_replayed (see ``_limited``).
        within = self.queued.filter(replay_id__gte=replay_id, replay_id__lte=replay_id)
        return within.order_by("replay_id", "id")

    def dead_copies(self, replay_id: int, *, at_most: int) -> int:
        return self.dead.filter(replay_id=replay_id).values("id")[:at_most].count()

    @retried
    def delete_copies(self, replay_id: int, *, limit: int) -> int:
        """Delete copies that no worker is handling; return how many.

        The original events are in the log, so nothing is lost. Deleted copies do not count as
        copied. A lane without events is deleted by the next worker that claims it.
        """
        with self.atomic():
            idle = self._copies(replay_id).filter(status=QueuedStatus.PENDING)
            ids = list(self.locked(idle).values_list("id", flat=True)[:limit])
            deleted, _ = self.queued.filter(id__in=ids, status=QueuedStatus.PENDING).delete()
            self.replays.filter(pk=replay_id).update(copied=F("copied") - deleted)
        return deleted

    def late_writers(self, until: datetime) -> set[str]:
        """Return the claims that may still add an event that ended before ``until`` to the log.

        An event is claimed before it ends, and its row in the queue disappears when its settlement
        is committed.
        """
        running = self.queued.filter(
            status=QueuedStatus.PROCESSING, processing_started_at__lte=until
        )
        tokens = running.order_by().values_list("claim_token", flat=True).distinct()
        return {str(each) for each in tokens}


def _of_status(status: str) -> Q:
    if not status:
        return Q()
    return ~Q(status=LogStatus.COMPLETED) if status == DEAD else Q(status=status.upper())
