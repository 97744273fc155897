"""The store's verbs in portable SQL, by the ORM where it can say them.

Every write after a claim names the claim's token and counts its rows, so a worker that lost its
claim changes nothing. The database's clock decides; tests inject another.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime, timedelta
from itertools import repeat
from typing import Any, ClassVar

from django.db import NotSupportedError
from django.db.models import Case, F, QuerySet, TextField, Value, When
from django.db.models.functions import Cast

from django_eventbus import failures
from django_eventbus.conf import settings
from django_eventbus.events import Claim, ClaimedEvent
from django_eventbus.exceptions import ClaimLostError, WorkerEvictedError
from django_eventbus.failures import fingerprint
from django_eventbus.models import EventLog, LogStatus, QueuedEvent, QueuedStatus
from django_eventbus.store.figures import Figures
from django_eventbus.store.gates import Gates
from django_eventbus.store.groups import Groups
from django_eventbus.store.inserting import Inserting
from django_eventbus.store.log import Log
from django_eventbus.store.minutes import Minutes
from django_eventbus.store.recovery import Recovery
from django_eventbus.store.rows import UNCLAIMED, Clock, parked_for, retried, unless_blocked
from django_eventbus.store.schedules import Schedules
from django_eventbus.store.settlements import (
    Completed,
    Fate,
    Finished,
    Postponed,
    Progressed,
    Settlement,
    Story,
)
from django_eventbus.store.triggers import RowTrigger

logger = logging.getLogger(__name__)

PROMOTE_CHUNK = 1000
ROUTE_CHUNK = 1000
LISTENER_CHECK = 10.0
FIRST_LISTEN_WAIT = 0.1
LONGEST_LISTEN_WAIT = 30.0

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
    "due_at",
    "processing_started_at",
    "deliveries",
    "errors",
)
#: What nobody needs who moves an event by hand.
_HEAVY = ("payload", "headers", "edits")
_JSON_COLUMNS = ("payload", "headers", "deliveries", "errors")


class Store(Inserting, Log, Gates, Recovery, Schedules, Groups, Minutes, Figures):
    """All that happens to rows. Verbs open their own transaction unless they say otherwise."""

    #: Whether ``listen`` tells of news; without it a worker looks more often.
    hears: ClassVar[bool] = False
    #: How deep JSON may be nested here.
    deepest_json: ClassVar[int] = 1000
    #: Whether others can go on, and be seen to, while a transaction is open here.
    lets_others_work: ClassVar[bool] = True

    def __init__(self, using: str, *, clock: Clock | None = None) -> None:
        super().__init__(using, clock=clock)
        # Whoever claims one event, and asks anew for the next, must not always get the same kind.
        self._turn = random.getrandbits(1)

    # -- claiming

    @retried
    def claim(
        self, queue: str, *, limit: int, worker_id: uuid.UUID, token: uuid.UUID | None = None
    ) -> list[ClaimedEvent]:
        """Take up to ``limit`` events of the queue, in order, for this worker alone.

        Whoever gives a fresh token of its own can take the claim back if its answer is lost.
        """
        claim = self._new_claim(queue, worker_id, token)
        return self._looking_on(claim, self._claim_both(claim, limit), limit)

    def _claim_both(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        """Events with a key and without, in one transaction."""
        with self.atomic():
            self._hold_registration(claim.worker_id)
            # First of all: it waits for rows that others hold, so it must not hold any itself.
            self.route(claim.queue, limit)
            return self._claim_in_turn(claim, limit)

    def _looking_on(
        self, claim: Claim, claimed: list[ClaimedEvent], limit: int
    ) -> list[ClaimedEvent]:
        """A claim is empty only if nothing is ready. A key that waits may have a long tail of new
        events, with those of other keys behind it: it is routed in pieces, each for itself."""
        while not claimed and self._route_more(claim):
            claimed = self._claim_both(claim, limit)
        return claimed

    def _route_more(self, claim: Claim) -> bool:
        with self.atomic():
            return self.route(claim.queue, ROUTE_CHUNK) > 0

    def _claim_in_turn(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        """Half of a claim each to events with a key and without, so that neither can starve; what
        one leaves the other takes. Of a single event, every other time."""
        self._turn = 1 - self._turn
        share = (limit + self._turn) // 2
        unkeyed = self._claim_unkeyed(claim, share) if share else []
        room = limit - len(unkeyed)
        keyed = self._claim_keyed(claim, room) if room else []
        if len(unkeyed) == share and len(keyed) < room:
            unkeyed += self._claim_unkeyed(claim, room - len(keyed))
            unkeyed.sort(key=place)
        return keyed + unkeyed

    def may_claim_ahead(self) -> bool:
        """Whether another connection can claim while this one works."""
        connection = self.connection
        skips = connection.features.has_select_for_update_skip_locked
        return skips and not connection.in_atomic_block

    def _new_claim(self, queue: str, worker_id: uuid.UUID, token: uuid.UUID | None) -> Claim:
        return Claim(token or uuid.uuid4(), worker_id, settings.NAMESPACE, queue, self.using)

    def _hold_registration(self, worker_id: uuid.UUID) -> None:
        """A recovery that takes this worker for dead waits for the claim, or the claim for it."""
        alive = self.workers.filter(pk=worker_id, expires_at__gt=self.now)
        if not self.waiting_lock(alive).values_list("pk"):
            raise WorkerEvictedError(f"worker {worker_id} is not registered any more")

    def _claim_keyed(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        return self._mark_claimed(claim, self.own_lanes(claim, limit))

    def _claim_unkeyed(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        ready = self.queued.filter(
            queue=claim.queue,
            key__isnull=True,
            available_at__isnull=True,
            status=QueuedStatus.PENDING,
        ).order_by("-priority", "id")
        ids = list(self.locked(ready).values_list("id", flat=True)[:limit])
        return self._mark_claimed(claim, ids)

    @staticmethod
    def _claimed(claim: Claim, rows: Iterable[Iterable[Any]]) -> list[ClaimedEvent]:
        claim.answered_at = time.monotonic()
        return [ClaimedEvent(claim, *row) for row in rows]

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
        claimed = self._claimed(claim, [map(_as_number, row) for row in found])
        return sorted(claimed, key=lambda event: position[event.row_id])

    # -- settling: inside the transaction of the handlers' own work

    def settle(self, token: uuid.UUID, settlements: Iterable[Settlement]) -> None:
        """Write what became of claimed events. Raises ClaimLostError: then roll back."""
        completed: list[int] = []
        finished: list[Finished] = []
        postponed: list[Postponed] = []
        progressed: list[Progressed] = []
        held: dict[float, list[int]] = {}
        for each in settlements:
            if isinstance(each, Completed):
                completed.append(each.row_id)
            elif isinstance(each, Finished):
                finished.append(each)
            elif isinstance(each, Postponed):
                postponed.append(each)
            elif isinstance(each, Progressed):
                progressed.append(each)
            else:
                held.setdefault(each.delay, []).append(each.row_id)
        if completed:
            self._move_to_log(token, completed, _SMOOTHLY)
        if finished:
            self._finish(token, finished)
        if postponed:
            self._postpone(token, postponed)
        if progressed:
            self._tell(token, progressed)
        for delay, ids in held.items():
            self._hold(token, ids, delay)

    def _finish(self, token: uuid.UUID, finished: Sequence[Finished]) -> None:
        """When something breaks, many events end alike: those go to the log together."""
        self._tell(token, finished)
        alike: dict[Fate, list[int]] = {}
        for each in finished:
            if each.blocks_lane is not None:
                self.block_lane(each.blocks_lane, each.row_id)
            alike.setdefault(each.fate, []).append(each.row_id)
        for fate, ids in alike.items():
            self._move_to_log(token, ids, fate)

    def _tell(self, token: uuid.UUID, stories: Sequence[Finished | Progressed]) -> None:
        """Into their rows, which stay ours."""
        self._update_each(_TELL, token, stories)

    def _postpone(self, token: uuid.UUID, stories: Sequence[Postponed]) -> None:
        now = self.read_clock()
        ready = [(self._prepared("available_at", _ready_at(each, now)),) for each in stories]
        self._update_each(_POSTPONE, token, stories, ready)

    def _update_each(
        self,
        statement: str,
        token: uuid.UUID,
        stories: Sequence[Story],
        others: Iterable[tuple[Any, ...]] = repeat(()),
    ) -> None:
        """Not by the ORM: to put the same statement together for each took longer than to run it,
        and failures come by the hundred."""
        ours = self._prepared("claim_token", token)
        rows = [
            (
                self._prepared("deliveries", each.deliveries),
                self._prepared("errors", each.errors or None),
                *more,
                each.row_id,
                ours,
            )
            for each, more in zip(stories, others, strict=False)
        ]
        with self.connection.cursor() as cursor:
            cursor.executemany(statement, rows)
            expect(cursor.rowcount, len(rows))

    def _prepared(self, column: str, value: Any) -> Any:
        return _FIELDS[column].get_db_prep_save(value, self.connection)

    def _hold(self, token: uuid.UUID, ids: Sequence[int], delay: float) -> None:
        held = self.queued.filter(id__in=ids, claim_token=token).update(
            **UNCLAIMED,
            attempts=F("attempts") - 1,
            available_at=_unless_laned(self.after(delay)),
        )
        expect(held, len(ids))

    def _move_to_log(self, token: uuid.UUID, ids: Sequence[int], fate: Fate) -> None:
        self._copy_to_log(token, ids, fate)
        deleted, _ = self.queued.filter(id__in=ids, claim_token=token).delete()
        expect(deleted, len(ids))

    def _copy_to_log(self, token: uuid.UUID, ids: Sequence[int], fate: Fate) -> None:
        mine = self.queued.filter(id__in=ids, claim_token=token)
        constants = {name: Value(value) for name, value in fate._asdict().items()}
        expect(self._copy(mine, EventLog, {**constants, "finished_at": self.now}), len(ids))

    # -- after trouble

    def still_held(self, token: uuid.UUID, ids: Collection[int]) -> dict[int, Any]:
        """Which of these rows are still ours, with their deliveries: what was settled or taken
        away is not. Waits for a transaction of ours that lost its client, but may yet commit."""
        held = self.queued.filter(id__in=list(ids), claim_token=token).order_by("id")
        with self.atomic():
            return dict(self.waiting_lock(held).values_list("id", "deliveries"))

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
        # The first by an index, not the least of all: for Min databases may read all of them.
        delayed = self.queued.filter(available_at__isnull=False).order_by("available_at")
        idle = self.lanes.filter(claim_token__isnull=True).order_by("ready_at")
        moments = [
            delayed.values_list("available_at", flat=True).first(),
            *(
                idle.filter(queue=each).values_list("ready_at", flat=True).first()
                for each in queues
            ),
        ]
        known: list[datetime] = [moment for moment in moments if moment is not None]
        if not known:
            return None
        return max(0.0, (min(known) - self.read_clock()).total_seconds())

    @retried
    def skip_head(self, queue: str, key: str, error: dict[str, Any]) -> EventLog | None:
        """Discard the first event of an idle lane, and let the next one go."""
        with self.atomic():
            idle = self.lanes.filter(queue=queue, key=key, claim_token__isnull=True)
            lane = self.waiting_lock(idle).first()
            head = lane and self.lane_head(lane.pk)
            if not lane or not head:
                return None
            self._discard([head], error)
            self.lanes.filter(pk=lane.pk).update(ready_at=unless_blocked(self.now))
            return EventLog.objects.using(self.using).get(pk=head.pk)

    def _discard(self, events: Sequence[QueuedEvent], error: dict[str, Any]) -> None:
        """End pending events that this transaction has locked, or whose lane it has."""
        token = uuid.uuid4()
        ids = [event.pk for event in events]
        pending = self.queued.filter(id__in=ids, status=QueuedStatus.PENDING)
        expect(pending.update(claim_token=token), len(ids))
        ends = [
            Finished(
                row_id=event.pk,
                status=LogStatus.DISCARDED,
                deliveries=event.deliveries,
                errors=[*(event.errors or []), error],
                error_type=error["type"],
                error_fingerprint=fingerprint(error),
            )
            for event in events
        ]
        self.settle(token, ends)

    # -- an operator's hand on what waits

    @retried
    def cancel(self, ids: Collection[int], error: dict[str, Any]) -> int:
        """Discard events that nobody handles at the moment; return how many."""
        with self.atomic():
            pending = self._pending(ids)
            # Lanes before rows, as in a claim.
            laned = [lane_id for lane_id, _ in self._laned(pending)]
            lanes = self.lanes.filter(id__in=laned, claim_token__isnull=True).order_by("id")
            idle = [lane.pk for lane in self.waiting_lock(lanes)]
            firsts = {head.pk: lane for lane in idle if (head := self.lane_head(lane))}
            cancelled = list(self.locked(pending.order_by("id")).defer(*_HEAVY))
            self._discard(cancelled, error)
            freed = [firsts[event.pk] for event in cancelled if event.pk in firsts]
            self.lanes.filter(id__in=freed).update(ready_at=unless_blocked(self.now))
        return len(cancelled)

    @retried
    def hasten(self, ids: Collection[int]) -> int:
        """Make events ready that wait for their time; of a key, only the first can be."""
        with self.atomic():
            pending = self._pending(ids)
            hastened = sum(self._hasten_head(*each) for each in self._laned(pending))
            waiting = pending.filter(lane_id__isnull=True, available_at__isnull=False)
            rows = list(self.locked(waiting.order_by("id")).defer(*_HEAVY))
            for event in rows:
                self.make_due(event)
            self.queued.filter(id__in=[event.pk for event in rows]).update(available_at=None)
        return hastened + len(rows)

    def _hasten_head(self, lane_id: int, row_id: int) -> bool:
        idle = self.lanes.filter(
            id=lane_id, claim_token__isnull=True, blocked_by__isnull=True, ready_at__gt=self.now
        )
        lane = self.waiting_lock(idle).first()
        head = lane and self.lane_head(lane_id)
        if not head or head.pk != row_id:
            return False
        self.make_due(head)
        return bool(idle.update(ready_at=self.now))

    def _pending(self, ids: Collection[int]) -> QuerySet[QueuedEvent]:
        return self.queued.filter(id__in=list(ids), status=QueuedStatus.PENDING)

    @staticmethod
    def _laned(events: QuerySet[QueuedEvent]) -> list[tuple[int, int]]:
        rows = events.values_list("lane_id", "id")
        return [(lane_id, row_id) for lane_id, row_id in rows if lane_id is not None]

    # -- looking

    def depth(self, queue: str | None = None, *, at_most: int | None = None) -> int:
        """How many events are queued; counting stops at ``at_most``."""
        rows = self.queued if queue is None else self.queued.filter(queue=queue)
        return rows.count() if at_most is None else rows.values("id")[:at_most].count()

    # -- triggers

    def trigger_sql(self, trigger: RowTrigger, *, install: bool) -> list[str]:
        """The statements that install a trigger, or remove it."""
        raise NotSupportedError(
            f"{self.connection.display_name} has no trigger for events of {trigger.table!r}: only "
            "PostgreSQL has. Bridge the model by bridge_model() and BridgedQuerySet."
        )

    # -- news

    def wake(self) -> None:
        """Tell waiting workers that there is something to do."""

    def listen(self, tell: Callable[[], None], stopped: threading.Event) -> None:
        """Call ``tell`` whenever there may be something to do, until stopped. After each trouble
        it begins again, with a tell."""
        wait = FIRST_LISTEN_WAIT
        while self.hears and not stopped.is_set():
            began = time.monotonic()
            try:
                self._listen_once(tell, stopped)
            except Exception as error:
                logger.warning(
                    "listening for events failed, polling goes on: %s", failures.in_a_line(error)
                )
            finally:
                self.connection.close()
            if time.monotonic() - began > LISTENER_CHECK:
                wait = FIRST_LISTEN_WAIT  # it went well for a while
            stopped.wait(wait)
            wait = min(wait * 2, LONGEST_LISTEN_WAIT)
            tell()

    def _listen_once(self, tell: Callable[[], None], stopped: threading.Event) -> None:
        """Until stopped, or until there is trouble."""


_FIELDS = {field.name: field for field in QueuedEvent._meta.local_fields}

_SMOOTHLY = Fate(LogStatus.COMPLETED)

_QUEUE = QueuedEvent._meta.db_table
_STORY = f"UPDATE {_QUEUE} SET deliveries = %s, errors = %s"
_OURS = " WHERE id = %s AND claim_token = %s"
_TELL = _STORY + _OURS
# An event of a lane waits through it: its worker is about to release the lane.
_POSTPONE = f"""{_STORY}, status = 'PENDING', claim_token = NULL, claimed_by = NULL,
    processing_started_at = NULL, available_at = CASE WHEN lane_id IS NULL THEN %s END{_OURS}"""


def _as_number(value: Any) -> Any:
    return value.timestamp() if isinstance(value, datetime) else value


def _unless_laned(moment: Any) -> Any:
    return Case(When(lane_id__isnull=True, then=moment), default=None)


def _ready_at(postponed: Postponed, now: datetime) -> datetime | None:
    if postponed.delay <= 0:
        return None
    return parked_for(postponed.delay) or now + timedelta(seconds=postponed.delay)


def place(event: ClaimedEvent) -> tuple[int, int]:
    """Of an event without a key, in its queue."""
    return -event.priority, event.row_id


def expect(count: int, expected: int) -> None:
    if count != expected:
        raise ClaimLostError(
            f"{expected - count} of {expected} claims now belong to another worker"
        )
