"""PostgreSQL: claims and settlements are single statements, and NOTIFY wakes the workers."""

from __future__ import annotations

import logging
import math
import random
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from django.db import Error, OperationalError
from django.db.models import Q

from django_eventbus.conf import settings
from django_eventbus.errors.failpoints import reached
from django_eventbus.models import QueuedEvent
from django_eventbus.schema.claims import Claim, ClaimedEvent
from django_eventbus.schema.payloads import encode
from django_eventbus.store import postgresql_sql as sql
from django_eventbus.store.claiming import ROUTE_CHUNK, order_in_queue
from django_eventbus.store.guards import GUARD, NOWHERE, Guard
from django_eventbus.store.lanes import LOCKED_WAIT
from django_eventbus.store.postgresql_inspecting import InspectingPostgreSQL
from django_eventbus.store.postgresql_notify import Notifying
from django_eventbus.store.postgresql_settling import SettlingEachRow
from django_eventbus.store.rows import LOWEST_ID, Clock, retried
from django_eventbus.store.settlements import NewEvent
from django_eventbus.store.triggers import RowTrigger
from django_eventbus.store.waits import AT_ONCE, After, Wait, holder_of, seconds_of

logger = logging.getLogger(__name__)

SWEEP_EVERY = 1.0
#: The maximum number of events of one key in a claim while other keys wait.
RUN_LENGTH = 32
ROUTED_AT_LEAST = 500
#: Seconds for which claims skip locked rows after a lock has delayed a claim.
SKIP_LOCKED_FOR = 10.0
LOCK_NOT_AVAILABLE = "55P03"

_UNLIMITED = NewEvent._fields[:-1]


@dataclass(slots=True)
class _Floor:
    """The position in the index of ready events at which claims start to read (see ABOVE_FLOOR).

    Once per SWEEP_EVERY seconds, a claim reads from the start of the index instead.
    """

    priority: int
    row_id: int
    swept_at: float


class PostgreSQLStore(InspectingPostgreSQL, SettlingEachRow, Notifying):
    #: Error codes: serialization failure, deadlock.
    conflicts: ClassVar[frozenset[Any]] = frozenset({"40001", "40P01"})
    _clock_sql: ClassVar[str] = "SELECT clock_timestamp()"
    new_uuid = "GEN_RANDOM_UUID()"

    def __init__(self, using: str, *, clock: Clock | None = None) -> None:
        super().__init__(using, clock=clock)
        self._floors: dict[str, _Floor] = {}
        #: Queues that had events with a key at the last check.
        self._keyed: set[str] = set()
        #: The average number of events that a lane of the queue contributed to the last claim.
        self._run_length: dict[str, float] = {}
        #: For each queue in which a lock delayed a claim: the time until which claims skip locked
        #: rows.
        self._skip_locked_until: dict[str, float] = {}

    def raise_guard(self) -> Guard:
        row_id = random.getrandbits(62)
        with self.connection.cursor() as cursor:
            cursor.execute(sql.RAISE_GUARD, (row_id, NOWHERE))
            return Guard(row_id, cursor.fetchone()[0])

    def lower_guard(self, guard: Guard) -> bool:
        return bool(self._run_statements([sql.NO_SEQSCAN, sql.LOWER_GUARD], {"place": guard.place}))

    def is_refused_commit(self, error: BaseException) -> bool:
        if not issubclass(type(error), (Error, self.connection.Database.Error)):
            return False  # An error class of the project may override attribute access.
        for each in (error, error.__cause__):
            if getattr(getattr(each, "diag", None), "table_name", None) == GUARD:
                return True
        return False

    def starting_with(self, column: str, start: str) -> Q:
        """Filter by a prefix. On PostgreSQL, LIKE is case-sensitive and can use an index."""
        return Q(**{f"{column}__startswith": start})

    def insert_many(self, common: QueuedEvent, items: Sequence[NewEvent]) -> None:
        """Insert events that differ only in the fields of ``NewEvent``.

        The values of these fields are sent as one JSON text, which is seven times as fast as
        bulk_create.
        """
        due_at, when = "%s::timestamptz", (common.due_at,)
        if hasattr(common.due_at, "as_sql"):  # an expression: a delay plus the database's time
            compiler = self.queued.query.get_compiler(self.using)
            due_at, when = compiler.compile(common.due_at)
        # If no event has a limit, the last field (counted_as) is omitted, and NULL is inserted.
        names = NewEvent._fields if any(item.counted_as for item in items) else _UNLIMITED
        with self.connection.cursor() as cursor:
            cursor.execute(
                sql.INSERT_MANY.format(due_at=due_at),
                (
                    common.namespace,
                    common.queue,
                    None if common.headers is None else encode(common.headers),
                    common.priority,
                    common.producer,
                    common.caused_by,
                    *when,
                    *when,
                    encode([dict(zip(names, item, strict=False)) for item in items]),
                ),
            )

    def _lock_name(self, name: str) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(sql.LOCK_NAME, {"name": name})

    @retried
    def claim(
        self, queue: str, *, limit: int, worker_id: uuid.UUID, token: uuid.UUID | None = None
    ) -> list[ClaimedEvent]:
        claim = self._new_claim(queue, worker_id, token)
        includes_keys = queue in self._keyed or limit == 1
        if includes_keys or self.connection.in_atomic_block or self._binds_on_server():
            return self._route_until_claimed(claim, self._claim_both(claim, limit), limit)
        claimed = self._claim_unkeyed(claim, limit)
        if claimed or queue not in self._keyed:
            return claimed
        return self._route_until_claimed(claim, self._claim_both(claim, limit), limit)

    def _claim_both(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        # Routing locks the lanes of all new events, so it has its own short transaction. Otherwise
        # a worker that releases one of these lanes would wait until the claim ends.
        self._route(claim, max(limit, ROUTED_AT_LEAST))
        for _ in range(2):
            with self._unless_locked(claim.queue), self._on_indexes():
                if self._keys_wait(claim.queue):
                    return self._claim_in_turn(claim, limit)
                self._keyed.discard(claim.queue)
                return self._claim_unkeyed(claim, limit)
        with self._on_indexes():
            return self._claim_unkeyed(claim, limit)

    def _route_more(self, claim: Claim) -> bool:
        if not (claim.queue in self._keyed or self.connection.in_atomic_block):
            return False
        return self._route(claim, ROUTE_CHUNK) > 0

    def _route(self, claim: Claim, many: int) -> int:
        """Route the first new events. Skip the keys whose rows another transaction has locked."""
        for _ in range(2):
            with self._unless_locked(claim.queue):
                return self._route_windows(claim, many)
        return 0

    def _route_windows(self, claim: Claim, many: int) -> int:
        """Read windows of ``many`` new events until an event is routed or no event is left."""
        self._queues_with_locks.discard(claim.queue)
        params = {**self._params_of(claim), "routed": many, "above": LOWEST_ID, "held": []}
        while True:
            routed, last, held = self._route_window(params)
            if held:
                self._note_lock(claim.queue)
            if routed or last is None:
                return routed
            params |= {"above": last, "held": held}

    def _route_window(self, params: dict[str, Any]) -> tuple[int, int | None, list[str]]:
        nested = self.connection.in_atomic_block
        ours = [] if nested else [sql.ON_INDEXES, sql.SHORT_LOCK_TIMEOUT]
        # Statements that are sent in one message form one transaction. With server-side binding,
        # each statement is a message, so a transaction is opened.
        begun = self.atomic() if self._binds_on_server() and not nested else nullcontext()
        with begun:
            ((routed, last, held),) = self._run_statements(
                [*ours, sql.LOCK_ROUTING, sql.ROUTE], params
            )
        return routed, last, held

    @contextmanager
    def _unless_locked(self, queue: str) -> Iterator[None]:
        """Suppress the error of a lock timeout; the next try skips locked rows."""
        try:
            yield
        except OperationalError as error:
            sqlstate = getattr(error.__cause__, "sqlstate", None)
            if self.connection.in_atomic_block or sqlstate != LOCK_NOT_AVAILABLE:
                raise
            self._note_lock(queue)

    def _note_lock(self, queue: str) -> None:
        self._queues_with_locks.add(queue)
        self._skip_locked_until[queue] = time.monotonic() + SKIP_LOCKED_FOR

    def _skips_locked(self, queue: str) -> bool:
        """Return whether to skip locked rows.

        Inside a transaction of the caller, locked rows are always skipped, because the claim cannot
        set a lock timeout for that transaction.
        """
        is_known = time.monotonic() < self._skip_locked_until.get(queue, 0.0)
        return is_known or bool(self.connection.in_atomic_block)

    @contextmanager
    def _on_indexes(self) -> Iterator[None]:
        """Open a transaction without table scans and sorts, and with a short lock timeout.

        Inside a transaction of the caller, these settings are not changed.
        """
        ours = not self.connection.in_atomic_block
        with self.atomic():
            if ours:
                self._run_statements([sql.ON_INDEXES, sql.SHORT_LOCK_TIMEOUT], {})
            yield

    @contextmanager
    def reading_by_index(self, *, may_sort: bool = False) -> Iterator[None]:
        """Disable table scans inside the block, and sorts unless ``may_sort``.

        If the caller has no transaction, the block has its own transaction, and the settings end
        with it. Inside a transaction of the caller, the old settings are restored at the end of the
        block. After an error, the rollback of the savepoint restores the old settings.
        """
        nested = self.connection.in_atomic_block
        with self.atomic():
            before = self._run_statements([sql.PLANNER], {}) if nested else []
            self._run_statements([sql.NO_TABLE_SCAN if may_sort else sql.ON_INDEXES], {})
            yield
            if before:
                self._run_statements([sql.RESTORE_PLANNER], {"before": list(before[0])})

    def read_row(self, statement: str, params: Sequence[Any]) -> Any:
        """Read a row with table scans disabled, in one round trip.

        Inside a transaction, or with server-side binding, the planner settings are not changed.
        """
        if self.connection.in_atomic_block or self._binds_on_server():
            return super().read_row(statement, params)
        with self.connection.cursor() as cursor:
            cursor.execute(f"{sql.ON_INDEXES}; {statement}", params)
            cursor.nextset()
            return cursor.fetchone()

    def _keys_wait(self, queue: str) -> bool:
        params = {
            "namespace": settings.NAMESPACE,
            "queue": queue,
            "now": self._injected_now(),
        }
        return bool(self._run_statements([sql.KEYS_WAIT], params)[0][0])

    def _claim_keyed(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        """Claim runs of events from ready lanes.

        A lane of which no event was claimed is released, or deleted if it is empty. A released lane
        is ready at once if the claim reached its limit, otherwise after LOCKED_WAIT. If no event
        was claimed, the next ready lanes are tried.
        """
        wanted = math.ceil(limit / self._run_length.get(claim.queue, RUN_LENGTH))
        params = {**self._params_of(claim), "lanes": wanted}
        while owned := [row[0] for row in self._run_statements([sql.OWN_LANES], params)]:
            if claimed := self._claim_runs(claim, owned, limit):
                return claimed
        return []

    def _claim_runs(self, claim: Claim, owned: list[int], limit: int) -> list[ClaimedEvent]:
        run = max(RUN_LENGTH, limit // len(owned))
        params = {**self._params_of(claim), "owned": owned, "limit": limit, "run": run}
        claimed = self._claimed(claim, self._run_statements([sql.CLAIM_RUNS], params))
        claimed.sort(key=lambda event: event.row_id)
        used = {event.lane_id for event in claimed}
        if used:
            self._run_length[claim.queue] = min(len(claimed) / len(used), RUN_LENGTH)
        wait = AT_ONCE if len(claimed) == limit else After(LOCKED_WAIT)
        if idle := {lane: wait for lane in owned if lane not in used}:
            self._free(claim.token, idle)
        return claimed

    def _params_of(self, claim: Claim) -> dict[str, Any]:
        return {
            "namespace": claim.namespace,
            "queue": claim.queue,
            "token": claim.token,
            "worker_id": claim.worker_id,
            "now": self._injected_now(),
            "skip_locked": self._skips_locked(claim.queue),
        }

    def _run_statements(
        self, statements: list[str], params: dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        """Run statements, in one round trip if possible; return the rows of the last statement."""
        at_once = not self._binds_on_server()
        with self.connection.cursor() as cursor:
            for statement in ["; ".join(statements)] if at_once else statements:
                cursor.execute(statement, params)
            while at_once and cursor.nextset():
                pass
            return list(cursor.fetchall()) if cursor.description else []

    @retried
    def release_lanes(self, token: uuid.UUID, waits: Mapping[int, Wait]) -> None:
        with self.atomic():
            self._free(token, waits)

    def _free(self, token: uuid.UUID, waits: Mapping[int, Wait]) -> None:
        params = {
            "token": token,
            "owned": list(waits),
            "waits": [seconds_of(wait) for wait in waits.values()],
            "held_by": [holder_of(wait) for wait in waits.values()],
            "now": self._injected_now(),
        }
        self._run_statements([sql.LOCK_LANES, sql.FREE_LANES], params)

    def _binds_on_server(self) -> bool:
        """Return whether the server binds parameters, so that a message has only one statement."""
        return bool(self.connection.settings_dict["OPTIONS"].get("server_side_binding"))

    def _claim_unkeyed(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        floor = self._floors.get(claim.queue)
        moment = time.monotonic()
        if floor is None or moment - floor.swept_at > SWEEP_EVERY:
            floor = None
        claimed = self._run_claim(claim, limit, floor)
        if floor is not None and len(claimed) < limit:
            # Events below the floor may have become ready after the floor was set, because
            # transactions do not commit in the order of row ids and a retried event keeps its id.
            # Only a scan from the start can show that no event is left.
            floor = None
            claimed += self._run_claim(claim, limit - len(claimed), None)
        claimed.sort(key=order_in_queue)  # RETURNING has no defined order.
        self._raise_floor(
            claim.queue, claimed, swept_at=moment if floor is None else floor.swept_at
        )
        return claimed

    def _run_claim(self, claim: Claim, limit: int, floor: _Floor | None) -> list[ClaimedEvent]:
        params = {
            **self._params_of(claim),
            "limit": limit,
            "priority": floor.priority if floor else 0,
            "floor": floor.row_id if floor else 0,
        }
        statement = sql.CLAIM_FROM_START if floor is None else sql.CLAIM_ABOVE_FLOOR
        with self.connection.cursor() as cursor:
            if self.connection.in_atomic_block:
                cursor.execute(statement, params)
            else:
                # Statements in one message form one transaction and need one round trip.
                cursor.execute(f"{sql.ON_INDEXES}; {sql.KEYS_WAIT}; {statement}", params)
                cursor.nextset()
                if cursor.fetchone()[0]:
                    self._keyed.add(claim.queue)
                cursor.nextset()
            return self._claimed(claim, cursor.fetchall())

    def _raise_floor(self, queue: str, claimed: list[ClaimedEvent], *, swept_at: float) -> None:
        if not claimed:
            self._floors.pop(queue, None)
            return
        lowest = min(event.priority for event in claimed)
        first = min(event.row_id for event in claimed if event.priority == lowest)
        self._floors[queue] = _Floor(lowest, first, swept_at)

    def late_writers(self, until: datetime) -> set[str]:
        """Return the other transactions that have written to the log and are not committed yet.

        The portable query would read the whole queue, because no index contains the status.
        """
        with self.connection.cursor() as cursor:
            cursor.execute(sql.LOG_WRITERS)
            return {transaction for (transaction,) in cursor.fetchall()}

    def renew(
        self, worker_ids: Collection[uuid.UUID], *, busy: Mapping[uuid.UUID, int] | None = None
    ) -> set[uuid.UUID]:
        """Renew the registrations and return their ids with one statement, UPDATE … RETURNING.

        The base class needs a second query for the ids. On a very slow connection, a registration
        may expire before the reply to that query arrives, and the supervisor would kill the worker
        process (see ``Child.outlived``).
        """
        if self.clock is not None:
            return super().renew(worker_ids, busy=busy)
        ids = list(worker_ids)
        counts = [(busy or {}).get(each) for each in ids]
        with self.connection.cursor() as cursor:
            cursor.execute(sql.RENEW, (settings.ABANDON_AFTER, ids, counts, settings.NAMESPACE))
            reached("renew.sent")
            return {worker_id for (worker_id,) in cursor.fetchall()}

    def trigger_sql(self, trigger: RowTrigger, *, install: bool) -> list[str]:
        return trigger.install() if install else trigger.remove()
