"""The store's verbs in portable SQL, by the ORM where it can say them.

Every write after a claim names the claim's token and counts its rows, so a worker that lost its
claim changes nothing. The database's clock decides; tests inject another.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from typing import Any, ClassVar

from django.db.models import (
    Case,
    DateTimeField,
    F,
    Min,
    Model,
    Q,
    QuerySet,
    TextField,
    Value,
    When,
)
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast

from django_eventbus.conf import settings
from django_eventbus.events import Claim, ClaimedEvent
from django_eventbus.exceptions import ClaimLostError, WorkerEvictedError
from django_eventbus.models import EventFields, EventLog, QueuedEvent, QueuedStatus
from django_eventbus.store.lanes import Lanes
from django_eventbus.store.recovery import Recovery
from django_eventbus.store.rows import UNCLAIMED, retried
from django_eventbus.store.settlements import (
    Completed,
    Finished,
    NewEvent,
    Postponed,
    Progressed,
    Settlement,
)

INSERT_CHUNK = 1000
PROMOTE_CHUNK = 1000

#: The columns a claim brings, in the order of ClaimedEvent's fields after ``claim``.
CLAIM_COLUMNS = (
    "id",
    "event_id",
    "type",
    "version",
    "payload",
    "headers",
    "key",
    "lane_id",
    "priority",
    "attempts",
    "crashes",
    "producer",
    "caused_by",
    "created_at",
    "processing_started_at",
    "deliveries",
    "errors",
)
_JSON_COLUMNS = ("payload", "headers", "deliveries", "errors")
MOVED_COLUMNS = tuple(field.attname for field in EventFields._meta.local_fields)
_SHARED_COLUMNS = (
    "namespace",
    "queue",
    "headers",
    "key",
    "priority",
    "producer",
    "caused_by",
    "available_at",
)


class Store(Lanes, Recovery):
    """All that happens to rows. Verbs open their own transaction unless they say otherwise."""

    #: Whether ``listen`` tells of news; without it a worker looks more often.
    hears: ClassVar[bool] = False
    #: How deep JSON may be nested here.
    deepest_json: ClassVar[int] = 1000

    # -- publishing: part of the caller's transaction

    def insert(self, event: QueuedEvent) -> None:
        """One INSERT, no savepoint."""
        event.save(force_insert=True, using=self.using)

    def insert_many(self, common: QueuedEvent, items: Sequence[NewEvent]) -> None:
        """Events that differ only in what ``NewEvent`` says."""
        shared = {name: getattr(common, name) for name in _SHARED_COLUMNS}
        rows = [QueuedEvent(**item._asdict(), **shared) for item in items]
        QueuedEvent.objects.using(self.using).bulk_create(rows, batch_size=INSERT_CHUNK)

    def insert_once(self, event: QueuedEvent) -> QueuedEvent | None:
        """Insert unless the event id or dedup key is known; then return the event that stands.

        An event that has already ended is returned as it was given, without a row id.
        """
        rows = QueuedEvent.objects.using(self.using)
        # A mark of this very insert, to tell our row from one that was there before.
        event.claim_token = mark = uuid.uuid4()
        with self.atomic():
            rows.bulk_create([event], ignore_conflicts=True)
            inserted = rows.filter(event_id=event.event_id, claim_token=mark)
            if EventLog.objects.using(self.using).filter(event_id=event.event_id).exists():
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
            same = Q(event_id=event.event_id)
            if event.dedup_key is not None:
                same |= Q(namespace=event.namespace, dedup_key=event.dedup_key)
            return rows.filter(same).first() or event

    # -- claiming

    @retried
    def claim(
        self, queue: str, *, limit: int, worker_id: uuid.UUID, token: uuid.UUID | None = None
    ) -> list[ClaimedEvent]:
        """Take up to ``limit`` events of the queue, in order, for this worker alone.

        Whoever gives a fresh token of its own can take the claim back if its answer is lost.
        """
        claim = self._new_claim(queue, worker_id, token)
        with self.atomic():
            self._hold_registration(worker_id)
            claimed = self._mark_claimed(claim, self.own_lanes(claim, keyed_share(limit)))
            if len(claimed) < limit:
                claimed += self._claim_ready(claim, limit - len(claimed))
        return claimed

    @staticmethod
    def _new_claim(queue: str, worker_id: uuid.UUID, token: uuid.UUID | None) -> Claim:
        return Claim(token or uuid.uuid4(), worker_id, settings.NAMESPACE, queue)

    def _hold_registration(self, worker_id: uuid.UUID) -> None:
        """A recovery that takes this worker for dead waits for the claim, or the claim for it."""
        alive = self.workers.filter(pk=worker_id, expires_at__gt=self.now)
        if not self.waiting_lock(alive).values_list("pk"):
            raise WorkerEvictedError(f"worker {worker_id} is not registered any more")

    def _claim_ready(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        ready = self.queued.filter(
            queue=claim.queue,
            key__isnull=True,
            available_at__isnull=True,
            status=QueuedStatus.PENDING,
        ).order_by("-priority", "id")
        ids = list(self.locked(ready).values_list("id", flat=True)[:limit])
        return self._mark_claimed(claim, ids)

    def _mark_claimed(self, claim: Claim, ids: Sequence[int]) -> list[ClaimedEvent]:
        if not ids:
            return []
        self.queued.filter(id__in=ids).update(
            status=QueuedStatus.PROCESSING,
            attempts=F("attempts") + 1,
            claim_token=claim.token,
            claimed_by=claim.worker_id,
            processing_started_at=self.now,
        )
        as_text = {f"{name}_json": Cast(name, TextField()) for name in _JSON_COLUMNS}
        columns = [f"{name}_json" if name in _JSON_COLUMNS else name for name in CLAIM_COLUMNS]
        found = self.queued.filter(id__in=ids).annotate(**as_text).values_list(*columns)
        position = {row_id: index for index, row_id in enumerate(ids)}
        claimed = [ClaimedEvent(claim, *map(_as_number, row)) for row in found]
        return sorted(claimed, key=lambda event: position[event.row_id])

    # -- lanes: order per key

    # -- settling: inside the transaction of the handlers' own work

    def settle(self, token: uuid.UUID, settlements: Iterable[Settlement]) -> None:
        """Write what became of claimed events. Raises ClaimLostError: then roll back."""
        completed: list[int] = []
        for each in settlements:
            if isinstance(each, Completed):
                completed.append(each.row_id)
                continue
            self._write(token, each)
            if isinstance(each, Finished):
                self._move_to_log(token, [each.row_id], each)
        if completed:
            self._move_to_log(token, completed, _SMOOTHLY)

    def _write(self, token: uuid.UUID, settlement: Finished | Postponed | Progressed) -> None:
        changes: dict[str, Any] = {
            "deliveries": settlement.deliveries,
            "errors": settlement.errors or None,
        }
        if isinstance(settlement, Postponed):
            changes |= UNCLAIMED
            if settlement.delay > 0:
                # A laned event waits through its lane, which its worker is about to release.
                changes["available_at"] = _unless_laned(self.after(settlement.delay))
        claimed = self.queued.filter(id=settlement.row_id, claim_token=token)
        expect(claimed.update(**changes), 1)

    def _move_to_log(self, token: uuid.UUID, ids: Sequence[int], fate: Finished) -> None:
        self._copy_to_log(token, ids, fate)
        deleted, _ = self.queued.filter(id__in=ids, claim_token=token).delete()
        expect(deleted, len(ids))

    def _copy_to_log(self, token: uuid.UUID, ids: Sequence[int], fate: Finished) -> None:
        ends = {
            "status": fate.status,
            "dead_handler": fate.dead_handler,
            "error_type": fate.error_type,
            "error_fingerprint": fate.error_fingerprint,
        }
        mine = self.queued.filter(id__in=ids, claim_token=token)
        constants = {name: Value(value) for name, value in ends.items()}
        expect(self._copy(mine, EventLog, {**constants, "finished_at": self.now}), len(ids))

    def _copy(
        self, source: QuerySet[Any], target: type[Model], values: dict[str, Combinable]
    ) -> int:
        """INSERT … SELECT: the moved columns as they are, the others from expressions."""
        names = ["id", *(name for name in MOVED_COLUMNS if name not in values)]
        columns = [*names, *values]
        chosen = source.annotate(**{f"new_{name}": value for name, value in values.items()})
        query = chosen.values_list(*names, *(f"new_{name}" for name in values)).query
        select, params = query.get_compiler(self.using).as_sql()
        quote = self.connection.ops.quote_name
        into = ", ".join(map(quote, columns))
        with self.connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {quote(target._meta.db_table)} ({into}) {select}",
                params,
            )
            return int(cursor.rowcount)

    # -- after trouble

    def still_held(self, token: uuid.UUID, ids: Collection[int]) -> set[int]:
        """Which of these rows are still ours: what was settled or taken away is not."""
        held = self.queued.filter(id__in=list(ids), claim_token=token)
        return set(held.values_list("id", flat=True))

    @retried
    def release(self, token: uuid.UUID, ids: Collection[int]) -> int:
        """Give back events that were never started, uncharged."""
        held = self.queued.filter(id__in=list(ids), claim_token=token)
        return held.update(**UNCLAIMED, attempts=F("attempts") - 1)

    @retried
    def promote(self) -> int:
        """Make delayed events ready whose time has come."""
        due = self.queued.filter(available_at__lte=self.now).order_by("available_at")
        if not due.exists():
            return 0
        with self.atomic():
            ids = list(self.locked(due).values_list("id", flat=True)[:PROMOTE_CHUNK])
            return self.queued.filter(id__in=ids).update(available_at=None)

    def next_due(self, queues: Collection[str]) -> float | None:
        """Seconds until a delayed event or a lane of these queues is ready; None if there is none.

        0 for what has become due since the last look: a wait must not begin in between.
        """
        delayed = self.queued.filter(available_at__isnull=False)
        waiting = self.lanes.filter(queue__in=list(queues), claim_token__isnull=True)
        moments = [
            delayed.aggregate(at=Min("available_at"))["at"],
            waiting.aggregate(at=Min("ready_at"))["at"],
        ]
        known: list[datetime] = [moment for moment in moments if moment is not None]
        if not known:
            return None
        return max(0.0, (min(known) - self.read_clock()).total_seconds())

    # -- the log

    @retried
    def revive(self, ids: Collection[int], *, delay: float | None = None) -> int:
        """Move dead letters back into the queue as if new; handlers that were done stay done."""
        with self.atomic():
            dead = self.dead.filter(id__in=list(ids))
            rows = list(self.locked(dead).values_list("id", "deliveries"))
            if not rows:
                return 0
            partly = {row_id: done for row_id, states in rows if (done := _done(states))}
            for row_id, done in partly.items():
                self.dead.filter(id=row_id).update(deliveries=done)
            others = [row_id for row_id, _ in rows if row_id not in partly]
            self.dead.filter(id__in=others).update(deliveries=None)
            moved = self.dead.filter(id__in=[row_id for row_id, _ in rows])
            fresh: dict[str, Any] = {
                "attempts": Value(0),
                "crashes": Value(0),
                "errors": Value(None, output_field=TextField()),
                "claimed_by": Value(None, output_field=TextField()),
                "processing_started_at": Value(None, output_field=DateTimeField()),
                "status": Value(QueuedStatus.PENDING.value),
                "available_at": self.after(delay)
                if delay
                else Value(None, output_field=DateTimeField()),
            }
            revived = self._copy(moved, QueuedEvent, fresh)
            moved.delete()
        return revived

    @retried
    def purge(self, rows: QuerySet[EventLog], *, limit: int = 1000) -> int:
        """Delete up to ``limit`` rows of a query on the log, oldest first."""
        with self.atomic():
            ids = list(
                self.locked(rows.order_by("finished_at")).values_list("id", flat=True)[:limit]
            )
            deleted, _ = EventLog.objects.using(self.using).filter(id__in=ids).delete()
        return deleted

    # -- looking

    def depth(self, queue: str | None = None, *, at_most: int | None = None) -> int:
        """How many events are queued; counting stops at ``at_most``."""
        rows = self.queued if queue is None else self.queued.filter(queue=queue)
        return rows.count() if at_most is None else rows.values("id")[:at_most].count()

    # -- news

    def wake(self) -> None:
        """Tell waiting workers that there is something to do."""

    def listen(self, tell: Callable[[], None], stopped: threading.Event) -> None:
        """Call ``tell`` whenever there may be something to do, until stopped."""


def keyed_share(limit: int) -> int:
    """Half of a claim, so that neither keyed nor other events can starve the rest."""
    return (limit + 1) // 2


def _done(states: dict[str, Any] | None) -> dict[str, Any]:
    return {name: state for name, state in (states or {}).items() if state["state"] == "done"}


_SMOOTHLY = Finished(row_id=0, deliveries=None, errors=[])


def _as_number(value: Any) -> Any:
    return value.timestamp() if isinstance(value, datetime) else value


def _unless_laned(moment: Any) -> Any:
    return Case(When(lane_id__isnull=True, then=moment), default=None)


def expect(count: int, expected: int) -> None:
    if count != expected:
        raise ClaimLostError(
            f"{expected - count} of {expected} claims now belong to another worker"
        )
