"""The store's verbs in portable SQL, by the ORM where it can say them.

Every write after a claim names the claim's token and counts its rows, so a worker that lost its
claim changes nothing. The database's clock decides; tests inject another.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import wraps
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from django.db import OperationalError, connections, transaction
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
from django.db.models.functions import Cast, Now

from django_eventbus.conf import settings
from django_eventbus.events import Claim, ClaimedEvent
from django_eventbus.exceptions import ClaimLostError, WorkerEvictedError
from django_eventbus.models import (
    EventFields,
    EventLane,
    EventLog,
    EventWorker,
    LogStatus,
    QueuedEvent,
    QueuedStatus,
)

Clock = Callable[[], datetime]

INSERT_CHUNK = 1000
PROMOTE_CHUNK = 1000
WORKERS_PER_RECOVERY = 10
CONFLICT_RETRIES = 10
CONFLICT_WAIT = 0.05


class NewEvent(NamedTuple):
    """What tells one event of a ``publish_many`` from the next."""

    event_id: uuid.UUID
    type: str
    version: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Completed:
    """Every handler did it at the first try: into the log, nothing to tell."""

    row_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The event ended, and there is a story: into the log with both."""

    row_id: int
    status: str = LogStatus.COMPLETED
    deliveries: dict[str, Any] | None
    errors: list[dict[str, Any]]
    dead_handler: str = ""
    error_type: str = ""
    error_fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Postponed:
    """Something is still owed: back into the queue, to be ready after ``delay`` seconds."""

    row_id: int
    deliveries: dict[str, Any]
    errors: list[dict[str, Any]]
    delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """Some handlers are done and others are next: remember it, keep the claim."""

    row_id: int
    deliveries: dict[str, Any]
    errors: list[dict[str, Any]]


Settlement = Completed | Finished | Postponed | Progressed

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
_MOVED_COLUMNS = tuple(field.attname for field in EventFields._meta.local_fields)
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
_UNCLAIMED: dict[str, Any] = {
    "status": QueuedStatus.PENDING,
    "claim_token": None,
    "claimed_by": None,
    "processing_started_at": None,
}


Verb = TypeVar("Verb", bound=Callable[..., Any])


def retried(verb: Verb) -> Verb:
    """Again after a deadlock or a failed serialization: the loser's transaction is rolled back."""

    @wraps(verb)
    def again(self: Store, *args: Any, **kwargs: Any) -> Any:
        for _ in range(CONFLICT_RETRIES):
            try:
                return verb(self, *args, **kwargs)
            except OperationalError as error:
                if self.connection.in_atomic_block or not self.is_conflict(error):
                    raise
                time.sleep(random.uniform(0, CONFLICT_WAIT))
        return verb(self, *args, **kwargs)

    return cast(Verb, again)


class Store:
    """All that happens to rows. Verbs open their own transaction unless they say otherwise."""

    #: Whether ``listen`` tells of news; without it a worker looks more often.
    hears: ClassVar[bool] = False

    #: How deep JSON may be nested here.
    deepest_json: ClassVar[int] = 1000
    #: Codes of errors that mean "somebody else was first, try again".
    conflicts: ClassVar[frozenset[Any]] = frozenset()

    def __init__(self, using: str, *, clock: Clock | None = None) -> None:
        self.using = using
        self.clock = clock

    @property
    def connection(self) -> Any:
        return connections[self.using]

    @property
    def now(self) -> Combinable:
        if self.clock is None:
            return Now()
        return Value(self.clock(), output_field=DateTimeField())

    def after(self, seconds: float) -> Any:
        return self.now + Value(timedelta(seconds=seconds))

    @property
    def queued(self) -> QuerySet[QueuedEvent]:
        return QueuedEvent.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    @property
    def lanes(self) -> QuerySet[EventLane]:
        return EventLane.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    @property
    def workers(self) -> QuerySet[EventWorker]:
        return EventWorker.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    @property
    def dead(self) -> QuerySet[EventLog]:
        return EventLog.objects.using(self.using).filter(
            ~Q(status=LogStatus.COMPLETED), namespace=settings.NAMESPACE
        )

    def atomic(self) -> Any:
        return transaction.atomic(using=self.using)

    def is_conflict(self, error: OperationalError) -> bool:
        code = getattr(error.__cause__, "sqlstate", None) or (error.args and error.args[0])
        return code in self.conflicts

    def locked(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Lock rows that nobody else holds, where the database can pass over the others."""
        features = self.connection.features
        if not features.has_select_for_update:
            return rows
        return rows.select_for_update(skip_locked=features.has_select_for_update_skip_locked)

    def _waiting_lock(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Lock rows, in their order, waiting for those who hold them."""
        has_locks = self.connection.features.has_select_for_update
        return rows.select_for_update() if has_locks else rows

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
        # The producer of this very insert, to tell our row from one that was there before.
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
                event.pk = rows.values_list("pk", flat=True).get(event_id=event.event_id)
                return None
            same = Q(event_id=event.event_id)
            if event.dedup_key is not None:
                same |= Q(namespace=event.namespace, dedup_key=event.dedup_key)
            return rows.filter(same).first() or event

    # -- claiming

    @retried
    def claim(self, queue: str, *, limit: int, worker_id: uuid.UUID) -> list[ClaimedEvent]:
        """Take up to ``limit`` events of the queue, in order, for this worker alone."""
        claim = self._new_claim(queue, worker_id)
        with self.atomic():
            self._hold_registration(worker_id)
            claimed = self._claim_lanes(claim, limit)
            if len(claimed) < limit:
                claimed += self._claim_ready(claim, limit - len(claimed))
        return claimed

    @staticmethod
    def _new_claim(queue: str, worker_id: uuid.UUID) -> Claim:
        return Claim(uuid.uuid4(), worker_id, settings.NAMESPACE, queue)

    def _hold_registration(self, worker_id: uuid.UUID) -> None:
        """A recovery that takes this worker for dead waits for the claim, or the claim for it."""
        alive = self.workers.filter(pk=worker_id, expires_at__gt=self.now)
        if not self._waiting_lock(alive).values_list("pk"):
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

    def _claim_lanes(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        """Own ready lanes and take a run of consecutive events from each."""
        self._route(claim.queue, limit)
        ready = self._ready_lanes(claim.queue).order_by("ready_at", "id")
        lanes = list(self.locked(ready).values_list("id", flat=True)[:limit])
        if not lanes:
            return []
        run_length = max(1, limit // len(lanes))
        ids: list[int] = []
        empty: list[int] = []
        for lane_id in lanes:
            run = list(self._waiting_in(lane_id)[: min(run_length, limit - len(ids))])
            if not run:
                empty.append(lane_id)
            in_order = itertools.takewhile(lambda row: row[1] == QueuedStatus.PENDING, run)
            ids += [row_id for row_id, _ in in_order]
            if len(ids) >= limit:
                break
        self.lanes.filter(id__in=empty).delete()
        owned = self._lanes_of(self.queued.filter(id__in=ids))
        self.lanes.filter(id__in=owned).update(claim_token=claim.token, claimed_by=claim.worker_id)
        return self._mark_claimed(claim, ids)

    def _waiting_in(self, lane_id: int) -> QuerySet[Any]:
        # Given as an equality, a planner may walk the primary key, which has the order too.
        lane = self.queued.filter(lane_id__gte=lane_id, lane_id__lte=lane_id)
        return lane.order_by("lane_id", "id").values_list("id", "status")

    @staticmethod
    def _lanes_of(rows: QuerySet[QueuedEvent]) -> set[int]:
        lanes = rows.order_by().values_list("lane_id", flat=True).distinct()
        return {lane_id for lane_id in lanes if lane_id is not None}

    def _ready_lanes(self, queue: str) -> QuerySet[EventLane]:
        return self.lanes.filter(queue=queue, claim_token__isnull=True, ready_at__lte=self.now)

    def _unrouted(self, queue: str) -> QuerySet[QueuedEvent]:
        return self.queued.filter(
            queue=queue, key__isnull=False, lane_id__isnull=True, available_at__isnull=True
        )

    def _route(self, queue: str, limit: int) -> None:
        """Give new keyed events their lane, oldest first.

        Routers wait for each other: one that passed over the rows another holds would put later
        events of a key into its lane before earlier ones. Holding the lanes' rows makes a release
        that wants to delete one wait, and then see these events.
        """
        unrouted = self._unrouted(queue).order_by("id")
        found = list(self._waiting_lock(unrouted).values_list("id", "key")[:limit])
        if not found:
            return
        keys = sorted({key for _, key in found})
        EventLane.objects.using(self.using).bulk_create(
            [
                EventLane(namespace=settings.NAMESPACE, queue=queue, key=key, ready_at=self.now)
                for key in keys
            ],
            ignore_conflicts=True,
        )
        lanes = self.lanes.filter(queue=queue, key__in=keys)
        held = list(self._waiting_lock(lanes.order_by("id")).values_list("id", "key"))
        lanes.update(version=F("version") + 1)
        for lane_id, key in held:
            members = [row_id for row_id, its_key in found if its_key == key]
            self.queued.filter(id__in=members).update(lane_id=lane_id)

    @retried
    def release_lanes(self, token: uuid.UUID, waits: dict[int, float]) -> None:
        """Give back lanes owned under this token: gone if empty, else ready after their wait."""
        with self.atomic():
            mine = self._waiting_lock(
                self.lanes.filter(id__in=waits, claim_token=token).order_by("id")
            )
            owned = set(mine.values_list("id", flat=True))
            waiting = self._lanes_of(self.queued.filter(lane_id__in=owned))
            self.lanes.filter(id__in=owned - waiting).delete()
            for lane_id in waiting:
                self.lanes.filter(id=lane_id).update(
                    claim_token=None, claimed_by=None, ready_at=self.after(waits[lane_id])
                )

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
            changes |= _UNCLAIMED
            if settlement.delay > 0:
                # A laned event waits through its lane, which its worker is about to release.
                changes["available_at"] = _unless_laned(self.after(settlement.delay))
        claimed = self.queued.filter(id=settlement.row_id, claim_token=token)
        _expect(claimed.update(**changes), 1)

    def _move_to_log(self, token: uuid.UUID, ids: Sequence[int], fate: Finished) -> None:
        self._copy_to_log(token, ids, fate)
        deleted, _ = self.queued.filter(id__in=ids, claim_token=token).delete()
        _expect(deleted, len(ids))

    def _copy_to_log(self, token: uuid.UUID, ids: Sequence[int], fate: Finished) -> None:
        ends = {
            "status": fate.status,
            "dead_handler": fate.dead_handler,
            "error_type": fate.error_type,
            "error_fingerprint": fate.error_fingerprint,
        }
        mine = self.queued.filter(id__in=ids, claim_token=token)
        constants = {name: Value(value) for name, value in ends.items()}
        _expect(self._copy(mine, EventLog, {**constants, "finished_at": self.now}), len(ids))

    def _copy(
        self, source: QuerySet[Any], target: type[Model], values: dict[str, Combinable]
    ) -> int:
        """INSERT … SELECT: the moved columns as they are, the others from expressions."""
        names = ["id", *(name for name in _MOVED_COLUMNS if name not in values)]
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
        return held.update(**_UNCLAIMED, attempts=F("attempts") - 1)

    @retried
    def promote(self) -> int:
        """Make delayed events ready whose time has come."""
        due = self.queued.filter(available_at__lte=self.now).order_by("available_at")
        if not due.exists():
            return 0
        with self.atomic():
            ids = list(self.locked(due).values_list("id", flat=True)[:PROMOTE_CHUNK])
            return self.queued.filter(id__in=ids).update(available_at=None)

    def next_due(self) -> float | None:
        """Seconds until a delayed event or a waiting lane is ready; None if there is none."""
        delayed = self.queued.filter(available_at__gt=self.now)
        waiting = self.lanes.filter(ready_at__gt=self.now, claim_token__isnull=True)
        moments = [
            delayed.aggregate(at=Min("available_at"))["at"],
            waiting.aggregate(at=Min("ready_at"))["at"],
        ]
        known: list[datetime] = [moment for moment in moments if moment is not None]
        if not known:
            return None
        return max(0.0, (min(known) - self.read_clock()).total_seconds())

    def read_clock(self) -> datetime:
        if self.clock is not None:
            return self.clock()
        with self.connection.cursor() as cursor:
            cursor.execute(self._clock_sql)
            return self._to_datetime(cursor.fetchone()[0])

    _clock_sql: ClassVar[str] = "SELECT CURRENT_TIMESTAMP"

    def _to_datetime(self, value: Any) -> datetime:
        assert isinstance(value, datetime)
        return value

    # -- workers: claims are good as long as their worker is

    def register(self, worker: EventWorker) -> None:
        worker.namespace = settings.NAMESPACE
        with self.atomic():
            worker.expires_at = self.after(settings.ABANDON_AFTER)
            worker.save(force_insert=True, using=self.using)

    def note_pid(self, worker: EventWorker) -> None:
        self.workers.filter(pk=worker.pk).update(pid=worker.pid)

    def renew(self, worker_ids: Collection[uuid.UUID]) -> set[uuid.UUID]:
        """Prolong the claims of these workers; return those that are still registered."""
        mine = self.workers.filter(pk__in=list(worker_ids))
        if mine.update(renewed_at=self.now, expires_at=self.after(settings.ABANDON_AFTER)):
            return set(mine.values_list("pk", flat=True))
        return set()

    def unregister(self, worker_id: uuid.UUID) -> None:
        """Forget a worker that holds nothing any more."""
        self.workers.filter(pk=worker_id).delete()

    def suspect(self, worker_id: uuid.UUID, row_ids: Sequence[int]) -> None:
        """Write down which events a worker runs that may kill it: only they are to blame then."""
        self.workers.filter(pk=worker_id).update(suspects=list(row_ids))

    @retried
    def recover(self) -> int:
        """Give the events of dead workers to the living. Every worker does it on every poll."""
        expired = self.workers.filter(expires_at__lt=self.now)
        if not expired.exists():
            return 0
        recovered = 0
        with self.atomic():
            for worker in list(self.locked(expired)[:WORKERS_PER_RECOVERY]):
                recovered += self._take_back(
                    Q(claimed_by=worker.pk),
                    blamed=set(worker.suspects) or None,
                    error=_lost(f"worker {worker} ({worker.pk}) gave no sign of life"),
                )
                worker.delete(using=self.using)
        return recovered

    def recover_orphans(self) -> int:
        """The same for events whose worker's registration is gone: a look at the whole queue."""
        registered = EventWorker.objects.using(self.using).values("pk")
        orphaned = Q(claimed_by__isnull=False) & ~Q(claimed_by__in=registered)
        if not self.queued.filter(orphaned).exists():
            return 0
        with self.atomic():
            return self._take_back(
                orphaned, blamed=None, error=_lost("the registration of its worker is gone")
            )

    @retried
    def recover_worker(
        self,
        worker_id: uuid.UUID,
        *,
        blamed: Collection[int],
        error: dict[str, Any],
        crashed: bool = True,
    ) -> int:
        """A worker is known to have ended: blame what it was running, return the rest uncharged."""
        with self.atomic():
            recovered = self._take_back(
                Q(claimed_by=worker_id), blamed=set(blamed), error=error, crashed=crashed
            )
            self.workers.filter(pk=worker_id).delete()
        return recovered

    @retried
    def recover_claim(
        self, token: uuid.UUID, *, error: dict[str, Any], ids: Collection[int] | None = None
    ) -> int:
        """Take back what is still held under one claim (or some of it), and blame all of it."""
        held = Q(claim_token=token)
        with self.atomic():
            if ids is not None:
                held &= Q(id__in=list(ids))
            return self._take_back(held, blamed=None, error=error)

    def _take_back(
        self,
        whose: Q,
        *,
        blamed: set[int] | None,
        error: dict[str, Any],
        crashed: bool = True,
    ) -> int:
        """Unclaim rows and lanes; ``blamed`` rows (None: all) are charged and get the error."""
        held = self.queued.filter(whose, status=QueuedStatus.PROCESSING)
        rows = list(self.locked(held).values_list("id", "claim_token", "attempts", "errors"))
        innocent = [row_id for row_id, *_ in rows if blamed is not None and row_id not in blamed]
        self.queued.filter(whose, id__in=innocent).update(**_UNCLAIMED, attempts=F("attempts") - 1)
        for row_id, token, attempt, errors in rows:
            if blamed is None or row_id in blamed:
                record = {**error, "attempt": attempt, "at": self.read_clock().isoformat()}
                self.queued.filter(id=row_id, claim_token=token).update(
                    **_UNCLAIMED,
                    crashes=F("crashes") + int(crashed),
                    errors=[*(errors or []), record],
                )
        self.lanes.filter(whose).update(claim_token=None, claimed_by=None, ready_at=self.now)
        return len(rows)

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


def _done(states: dict[str, Any] | None) -> dict[str, Any]:
    return {name: state for name, state in (states or {}).items() if state["state"] == "done"}


_SMOOTHLY = Finished(row_id=0, deliveries=None, errors=[])


def _as_number(value: Any) -> Any:
    return value.timestamp() if isinstance(value, datetime) else value


def _unless_laned(moment: Any) -> Any:
    return Case(When(lane_id__isnull=True, then=moment), default=None)


def _expect(count: int, expected: int) -> None:
    if count != expected:
        raise ClaimLostError(
            f"{expected - count} of {expected} claims now belong to another worker"
        )


def _lost(message: str) -> dict[str, Any]:
    return {"handler": "", "type": "WorkerLost", "message": message, "traceback": ""}
