"""PostgreSQL: a claim and a settle are one statement each, and NOTIFY wakes the workers."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from django.db import DatabaseError, OperationalError
from django.db.models import Q

from django_eventbus import failures
from django_eventbus.conf import settings
from django_eventbus.events import Claim, ClaimedEvent, encode
from django_eventbus.failpoints import reached
from django_eventbus.models import EventLane, EventLog, EventWorker, QueuedEvent
from django_eventbus.store.base import (
    CLAIM_COLUMNS,
    LISTENER_CHECK,
    ROUTE_CHUNK,
    Store,
    expect,
    place,
)
from django_eventbus.store.lanes import HELD_UP_WAIT
from django_eventbus.store.log import MOVED_COLUMNS
from django_eventbus.store.rows import Clock, parked_for, retried
from django_eventbus.store.settlements import (
    Fate,
    Finished,
    NewEvent,
    Postponed,
    Progressed,
    Story,
)
from django_eventbus.store.triggers import RowTrigger

logger = logging.getLogger(__name__)

_NOW = "COALESCE(%(now)s::timestamptz, statement_timestamp())"

QUEUE = f'"{QueuedEvent._meta.db_table}"'
LANE = f'"{EventLane._meta.db_table}"'
LOG = f'"{EventLog._meta.db_table}"'
WORKER = f'"{EventWorker._meta.db_table}"'

SWEEP_EVERY = 1.0
#: So many events of a key are taken at a time while other keys wait.
RUN_LENGTH = 32
ROUTED_AT_LEAST = 500
LISTENER_ANSWER = 5.0

# The conditions are those of the index eventbus_ready, plus the status, which is in no index (a
# claim changes it, and would then have to write every index anew).
_READY = """
    SELECT id FROM {queue}
    WHERE namespace = %(namespace)s AND queue = %(queue)s
      AND key IS NULL AND available_at IS NULL AND status = 'PENDING' {bound}
    ORDER BY namespace, queue, priority DESC, id LIMIT %(limit)s FOR UPDATE SKIP LOCKED"""

_EVERYWHERE = _READY.format(queue=QUEUE, bound="")

# Deleted rows stay in the index until no snapshot can see them. While some other transaction holds
# an old snapshot they only grow in number, and a scan from the beginning walks them all; so start
# where the last claim of this priority started. (The priority is given as a range because an
# equality would let the planner take the primary key instead, and walk other queues' events.)
_ABOVE_FLOOR = " UNION ALL ".join(
    f"SELECT id FROM ({_READY.format(queue=QUEUE, bound=bound)}) AS {name}"
    for name, bound in (
        ("higher", "AND priority > %(priority)s"),
        ("same", "AND priority BETWEEN %(priority)s AND %(priority)s AND id >= %(floor)s"),
        ("lower", "AND priority < %(priority)s"),
    )
)

# Django reads timestamps in Python, numbers are read in C; date_part is float8 where EXTRACT is the
# much slower numeric.
_COLUMNS = ", ".join(
    f"date_part('epoch', {name})" if name.endswith("_at") else name for name in CLAIM_COLUMNS
)

# The CTE is evaluated once: a sub-select in its place may be run again by a nested loop and lock
# more than LIMIT rows. `ANY (ARRAY(...))` keeps the update on the primary key whatever the
# statistics of this ever-changing table say. The lock on our registration makes a recovery that
# takes this worker for dead wait for the claim, or the claim find nothing.
_UPDATE = f"""
UPDATE {QUEUE} SET status = 'PROCESSING', attempts = attempts + 1, claim_token = %(token)s,
    claimed_by = %(worker_id)s, processing_started_at = {_NOW}
WHERE id = ANY (ARRAY({{picked}})) RETURNING {_COLUMNS}"""

_ME = f"SELECT id FROM {WORKER} WHERE id = %(worker_id)s AND expires_at > {_NOW} FOR KEY SHARE"

_CLAIM = f"""
WITH me AS MATERIALIZED ({_ME}), picked AS MATERIALIZED (
    SELECT id FROM ({{ready}}) AS ready WHERE EXISTS (SELECT 1 FROM me) LIMIT %(limit)s
)
{_UPDATE.format(picked="SELECT id FROM picked")}"""

_CLAIM_FROM_START = _CLAIM.format(ready=_EVERYWHERE)
_CLAIM_ABOVE_FLOOR = _CLAIM.format(ready=_ABOVE_FLOOR)

# The statistics of a queue are always of yesterday's queue: with them a claim has been seen to
# sort the whole table. For the length of a claim's transaction that is ruled out. (A plan that must
# sort after all looks so dear then that it would be compiled first.)
_ON_INDEXES = "SELECT " + ", ".join(
    f"set_config('{way}', 'off', true)"
    for way in ("enable_seqscan", "enable_bitmapscan", "enable_sort", "jit")
)

_KEYS_WAIT = f"""
SELECT EXISTS (
    SELECT 1 FROM {QUEUE} WHERE namespace = %(namespace)s AND queue = %(queue)s
    AND key IS NOT NULL AND lane_id IS NULL AND available_at IS NULL
) OR (
    SELECT true FROM {LANE} WHERE namespace = %(namespace)s AND queue = %(queue)s
    AND claim_token IS NULL AND ready_at <= {_NOW}
    ORDER BY namespace, queue, ready_at LIMIT 1
)"""

# Routers take turns by a lock of their own. Locks on the rows would also catch those that another
# has just routed and claimed, and get into a deadlock with their settlement. What a router before
# us routed since this statement began is left alone: its row has a lane, or is gone. (Who belongs
# where is told by an object: a join is planned for one row, and then compares all with all. And the
# queue is given as a range: an equality would let the planner walk the primary key instead, and
# with it all that is delayed.)
# The conflict's update locks the lane: a release that wants to delete it waits, and then sees
# these events. By key, as a release does, or the two meet in a deadlock.
_ROUTE = f"""
WITH turn AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock(
        hashtext('django_eventbus.route'), hashtext(%(namespace)s || '/' || %(queue)s)) AS ours
), new AS MATERIALIZED (
    SELECT id, key FROM {QUEUE}
    WHERE (SELECT ours FROM turn)
      AND namespace = %(namespace)s AND queue BETWEEN %(queue)s AND %(queue)s
      AND key IS NOT NULL AND lane_id IS NULL AND available_at IS NULL
    ORDER BY namespace, queue, id LIMIT %(routed)s
), lane AS (
    INSERT INTO {LANE} AS known (namespace, queue, key, ready_at, version)
    SELECT %(namespace)s, %(queue)s, key, {_NOW}, 0
    FROM (SELECT DISTINCT key FROM new) AS keys ORDER BY key
    ON CONFLICT (namespace, queue, key) DO UPDATE SET version = known.version + 1
    RETURNING id, key
)
UPDATE {QUEUE} SET lane_id = ((SELECT jsonb_object_agg(key, id) FROM lane) ->> key)::bigint
WHERE id = ANY (ARRAY(SELECT id FROM new)) AND lane_id IS NULL"""

_NOT_FOR_LONG = "SET LOCAL lock_timeout = '1s'"
_BRIEFLY = "SET LOCAL lock_timeout = '100ms'"
LOCK_NOT_AVAILABLE = "55P03"

_OWN_LANES = f"""
WITH me AS MATERIALIZED ({_ME}), ready AS MATERIALIZED (
    SELECT id FROM {LANE} WHERE namespace = %(namespace)s AND queue = %(queue)s
      AND claim_token IS NULL AND ready_at <= {_NOW} AND EXISTS (SELECT 1 FROM me)
    ORDER BY namespace, queue, ready_at LIMIT %(lanes)s FOR UPDATE SKIP LOCKED
)
UPDATE {LANE} SET claim_token = %(token)s, claimed_by = %(worker_id)s
WHERE id = ANY (ARRAY(SELECT id FROM ready)) RETURNING id"""

# A statement of its own: what it sees of the lanes it saw after they were ours. Behind an event
# that somebody still holds all of its key must wait; and one that failed before goes alone, or
# those behind it would be claimed and given back each time it fails again. The head is ordered by
# the lane too: with the id alone a planner may walk the primary key of the whole queue.
_RUNS = f"""
    SELECT id FROM (
        SELECT lane.place, head.id,
            bool_or(head.status <> 'PENDING') OVER (lane ORDER BY head.id)
            OR bool_or(head.deliveries IS NOT NULL) OVER (lane ORDER BY head.id
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) IS TRUE AS waits
        FROM unnest(%(owned)s::bigint[]) WITH ORDINALITY AS lane (id, place)
        CROSS JOIN LATERAL (
            SELECT id, status, deliveries FROM {QUEUE} WHERE lane_id = lane.id
            ORDER BY lane_id, id LIMIT %(run)s
        ) AS head
        WINDOW lane AS (PARTITION BY lane.id)
    ) AS heads
    WHERE NOT waits ORDER BY place, id LIMIT %(limit)s"""

_CLAIM_RUNS = _UPDATE.format(picked=_RUNS)

_LOCK_LANES = f"""
SELECT id FROM {LANE}
WHERE id = ANY (ARRAY(SELECT unnest(%(owned)s::bigint[]))) AND claim_token = %(token)s
ORDER BY key FOR UPDATE"""

_FIRST_OF_LANE = f"(SELECT id FROM {QUEUE} WHERE lane_id = lane.id ORDER BY lane_id, id LIMIT 1)"

_FREE_LANES = f"""
WITH emptied AS (
    DELETE FROM {LANE} AS lane WHERE id = ANY (ARRAY(SELECT unnest(%(owned)s::bigint[])))
      AND claim_token = %(token)s AND blocked_by IS NULL AND {_FIRST_OF_LANE} IS NULL
)
UPDATE {LANE} AS lane SET claim_token = NULL, claimed_by = NULL, ready_at =
    CASE WHEN blocked_by IS NOT NULL THEN ready_at
    ELSE COALESCE(freed.parked, {_NOW} + freed.wait * interval '1 second') END
FROM unnest(%(owned)s::bigint[], %(waits)s::float8[], %(parked)s::timestamptz[])
    AS freed (id, wait, parked)
WHERE lane.id = freed.id AND claim_token = %(token)s
  AND (blocked_by IS NOT NULL OR {_FIRST_OF_LANE} IS NOT NULL)"""

_MOVED = ", ".join(MOVED_COLUMNS)

_SETTLE = f"""
WITH gone AS (
    DELETE FROM {QUEUE}
    WHERE id = ANY (ARRAY(SELECT unnest(%s::bigint[]))) AND claim_token = %s RETURNING id, {_MOVED}
)
INSERT INTO {LOG} (id, {_MOVED}, status, finished_at, dead_handler, error_type, error_fingerprint)
SELECT id, {_MOVED}, %s, COALESCE(%s::timestamptz, clock_timestamp()), %s, %s, %s FROM gone"""

# Who has which story is told by an object, for the reason given at _ROUTE; what is missing in it is
# NULL. (OFFSET 0: else each place that names the object would have a copy of it.)
_STORY = f"""
UPDATE {QUEUE} SET deliveries = told -> id::text -> 'deliveries',
    errors = told -> id::text -> 'errors'{{changes}}
FROM (SELECT %(stories)s::jsonb AS told OFFSET 0) AS given
WHERE id = ANY (ARRAY(SELECT unnest(%(ids)s::bigint[]))) AND claim_token = %(token)s"""

_TELL = _STORY.format(changes="")

# An event of a lane waits through it: its worker is about to release the lane.
_WAITS_AGAIN = f""",
    status = 'PENDING', claim_token = NULL, claimed_by = NULL, processing_started_at = NULL,
    available_at = CASE WHEN lane_id IS NULL THEN COALESCE(
        (told -> id::text ->> 'parked')::timestamptz,
        {_NOW} + (told -> id::text ->> 'wait')::float8 * interval '1 second') END"""

_POSTPONE = _STORY.format(changes=_WAITS_AGAIN)

_TURN = "SELECT pg_advisory_xact_lock(hashtext('django_eventbus.key'), hashtext(%(name)s))"

_RENEW = f"""
UPDATE {WORKER} SET renewed_at = statement_timestamp(),
    expires_at = statement_timestamp() + make_interval(secs => %s)
WHERE namespace = %s AND id = ANY (%s) RETURNING id"""

_INSERT_MANY = f"""
INSERT INTO {QUEUE} (event_id, type, version, payload, key, counted_as, namespace, queue, headers,
    priority, producer, caused_by, available_at, due_at, status, attempts, crashes)
SELECT *, %s, %s, %s::jsonb, %s, %s, %s::uuid, {{due_at}}, {{due_at}}, 'PENDING', 0, 0
FROM jsonb_to_recordset(%s::jsonb)
    AS new (event_id uuid, type text, version int, payload jsonb, key text, counted_as text)"""

_UNLIMITED = NewEvent._fields[:-1]


@dataclass(slots=True)
class _Floor:
    """Where to begin looking for ready events of one priority; from the start now and then."""

    priority: int
    row_id: int
    swept_at: float


class PostgreSQLStore(Store):
    hears: ClassVar[bool] = True
    #: Serialization failure, deadlock.
    conflicts: ClassVar[frozenset[Any]] = frozenset({"40001", "40P01"})
    _clock_sql: ClassVar[str] = "SELECT clock_timestamp()"

    def __init__(self, using: str, *, clock: Clock | None = None) -> None:
        super().__init__(using, clock=clock)
        self._floors: dict[str, _Floor] = {}
        #: Queues that had events with a key when last looked at.
        self._keyed: set[str] = set()
        #: How many events their lanes gave.
        self._run_length: dict[str, float] = {}

    def starting_with(self, column: str, start: str) -> Q:
        """LIKE is exact here, and finds an index."""
        return Q(**{f"{column}__startswith": start})

    def insert_many(self, common: QueuedEvent, items: Sequence[NewEvent]) -> None:
        """What differs travels as one JSON text: seven times as fast as bulk_create."""
        due_at, when = "%s::timestamptz", (common.due_at,)
        if hasattr(common.due_at, "as_sql"):  # a delay, counted by the database's clock
            compiler = self.queued.query.get_compiler(self.using)
            due_at, when = compiler.compile(common.due_at)
        # The last, the limit, is left out where there is none: what is not there is NULL.
        names = NewEvent._fields if any(item.counted_as for item in items) else _UNLIMITED
        with self.connection.cursor() as cursor:
            cursor.execute(
                _INSERT_MANY.format(due_at=due_at),
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

    def _wait_for_turn(self, name: str) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(_TURN, {"name": name})

    @retried
    def claim(
        self, queue: str, *, limit: int, worker_id: uuid.UUID, token: uuid.UUID | None = None
    ) -> list[ClaimedEvent]:
        claim = self._new_claim(queue, worker_id, token)
        keys_have_a_turn = queue in self._keyed or limit == 1
        if keys_have_a_turn or self.connection.in_atomic_block or self._binds_on_server():
            return self._looking_on(claim, self._claim_both(claim, limit), limit)
        claimed = self._claim_unkeyed(claim, limit)
        if claimed or queue not in self._keyed:
            return claimed
        return self._looking_on(claim, self._claim_both(claim, limit), limit)

    def _claim_both(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        # Not in the claim's transaction: it holds the lanes of all new events, and whoever wants to
        # free one of them waits for it.
        ours = [] if self.connection.in_atomic_block else [_ON_INDEXES, _BRIEFLY]
        with self._unless_held_up():
            params = {**self._params_of(claim), "routed": max(limit, ROUTED_AT_LEAST)}
            self._say([*ours, _ROUTE], params)
        with self._unless_held_up(), self._on_indexes():
            if self._keys_wait(claim.queue):
                return self._claim_in_turn(claim, limit)
            self._keyed.discard(claim.queue)
            return self._claim_unkeyed(claim, limit)
        with self._on_indexes():
            return self._claim_unkeyed(claim, limit)

    def _route_more(self, claim: Claim) -> bool:
        if not (claim.queue in self._keyed or self.connection.in_atomic_block):
            return False
        with self._unless_held_up(), self._on_indexes(), self.connection.cursor() as cursor:
            cursor.execute(_ROUTE, {**self._params_of(claim), "routed": ROUTE_CHUNK})
            return int(cursor.rowcount) > 0
        return False

    @contextmanager
    def _unless_held_up(self) -> Iterator[None]:
        """A publisher that coalesces has the row of an event with a key until it commits: others
        of that queue with a key may wait for it, but those without go on."""
        try:
            yield
        except OperationalError as error:
            sqlstate = getattr(error.__cause__, "sqlstate", None)
            if self.connection.in_atomic_block or sqlstate != LOCK_NOT_AVAILABLE:
                raise

    @contextmanager
    def _on_indexes(self) -> Iterator[None]:
        """A transaction; if it is ours and nobody else's, the planner is told what not to do."""
        ours = not self.connection.in_atomic_block
        with self.atomic():
            if ours:
                self._say([_ON_INDEXES, _BRIEFLY], {})
            yield

    def _keys_wait(self, queue: str) -> bool:
        params = {
            "namespace": settings.NAMESPACE,
            "queue": queue,
            "now": self._injected_now(),
        }
        return bool(self._say([_KEYS_WAIT], params)[0][0])

    def _claim_keyed(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        """Lanes that have nothing to give are out of the way then; others may be behind them."""
        wanted = math.ceil(limit / self._run_length.get(claim.queue, RUN_LENGTH))
        params = {**self._params_of(claim), "lanes": wanted}
        while owned := [row[0] for row in self._say([_OWN_LANES], params)]:
            if claimed := self._claim_runs(claim, owned, limit):
                return claimed
        return []

    def _claim_runs(self, claim: Claim, owned: list[int], limit: int) -> list[ClaimedEvent]:
        run = max(RUN_LENGTH, limit // len(owned))
        params = {**self._params_of(claim), "owned": owned, "limit": limit, "run": run}
        claimed = self._claimed(claim, self._say([_CLAIM_RUNS], params))
        claimed.sort(key=lambda event: event.row_id)
        used = {event.lane_id for event in claimed}
        if used:
            self._run_length[claim.queue] = min(len(claimed) / len(used), RUN_LENGTH)
        wait = 0.0 if len(claimed) == limit else HELD_UP_WAIT
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
        }

    def _say(self, statements: list[str], params: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Several statements in one round trip, or as many as it takes; the last one's rows."""
        at_once = not self._binds_on_server()
        with self.connection.cursor() as cursor:
            for statement in ["; ".join(statements)] if at_once else statements:
                cursor.execute(statement, params)
            while at_once and cursor.nextset():
                pass
            return list(cursor.fetchall()) if cursor.description else []

    @retried
    def release_lanes(self, token: uuid.UUID, waits: dict[int, float]) -> None:
        with self.atomic():
            self._free(token, waits)

    def _free(self, token: uuid.UUID, waits: dict[int, float]) -> None:
        params = {
            "token": token,
            "owned": list(waits),
            "waits": list(waits.values()),
            "parked": [parked_for(wait) for wait in waits.values()],
            "now": self._injected_now(),
        }
        self._say([_LOCK_LANES, _FREE_LANES], params)

    def _binds_on_server(self) -> bool:
        """Parameters that the server binds come with one statement at a time."""
        return bool(self.connection.settings_dict["OPTIONS"].get("server_side_binding"))

    def _claim_unkeyed(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
        floor = self._floors.get(claim.queue)
        moment = time.monotonic()
        if floor is None or moment - floor.swept_at > SWEEP_EVERY:
            floor = None
        claimed = self._run_claim(claim, limit, floor)
        if floor is not None and len(claimed) < limit:
            # Ids are committed out of order, and retried events keep theirs: only a look from the
            # start may say that nothing is left.
            floor = None
            claimed += self._run_claim(claim, limit - len(claimed), None)
        claimed.sort(key=place)  # RETURNING promises no order
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
        sql = _CLAIM_FROM_START if floor is None else _CLAIM_ABOVE_FLOOR
        with self.connection.cursor() as cursor:
            if self.connection.in_atomic_block:
                cursor.execute(sql, params)
            else:
                # Statements of one message are one transaction, and one round trip.
                cursor.execute(f"{_ON_INDEXES}; {_KEYS_WAIT}; {sql}", params)
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

    def _move_to_log(self, token: uuid.UUID, ids: Sequence[int], fate: Fate) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(
                _SETTLE,
                (
                    f"{{{','.join(map(str, ids))}}}",
                    token,
                    str(fate.status),
                    self._injected_now(),
                    fate.dead_handler,
                    fate.error_type,
                    fate.error_fingerprint,
                ),
            )
            expect(cursor.rowcount, len(ids))

    def _tell(self, token: uuid.UUID, stories: Sequence[Finished | Progressed]) -> None:
        told = {each.row_id: _story(each) for each in stories}
        self._update_told(_TELL, token, told)

    def _postpone(self, token: uuid.UUID, stories: Sequence[Postponed]) -> None:
        told = {}
        for each in stories:
            wait = {"parked": parked_for(each.delay), "wait": each.delay} if each.delay > 0 else {}
            told[each.row_id] = {**_story(each), **wait}
        self._update_told(_POSTPONE, token, told)

    def _update_told(self, sql: str, token: uuid.UUID, told: dict[int, dict[str, Any]]) -> None:
        params = {
            "token": token,
            "ids": list(told),
            "stories": encode(told),
            "now": self._injected_now(),
        }
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            expect(cursor.rowcount, len(told))

    def renew(self, worker_ids: Collection[uuid.UUID]) -> set[uuid.UUID]:
        """In one round trip: on a slow network the second one may come too late."""
        if self.clock is not None:
            return super().renew(worker_ids)
        with self.connection.cursor() as cursor:
            cursor.execute(_RENEW, (settings.ABANDON_AFTER, settings.NAMESPACE, list(worker_ids)))
            reached("renew.sent")
            return {worker_id for (worker_id,) in cursor.fetchall()}

    def _injected_now(self) -> datetime | None:
        return None if self.clock is None else self.clock()

    def trigger_sql(self, trigger: RowTrigger, *, install: bool) -> list[str]:
        return trigger.install() if install else trigger.remove()

    @property
    def channel(self) -> str:
        """One per namespace and database schema, so that projects do not wake each other."""
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT current_schema()")
            schema = cursor.fetchone()[0]
        digest = hashlib.blake2b(f"{schema}/{settings.NAMESPACE}".encode(), digest_size=8)
        return f"eventbus_{digest.hexdigest()}"

    def wake(self) -> None:
        """Its own statement after the commit: inside the transaction NOTIFY would hold an
        instance-wide lock through the fsync. A hint: it carries nothing and may fail. Nor does it
        wait long for that lock, which others may hold while they wait for a standby."""
        if not settings.NOTIFY:
            return
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(f'{_NOT_FOR_LONG}; NOTIFY "{self._known_channel()}"')
        except DatabaseError as error:
            logger.warning(
                "workers could not be notified and will see the event later: %s",
                failures.in_a_line(error),
            )
            # The caller did not ask for this statement: it must not find a broken connection.
            self.connection.close_if_unusable_or_obsolete()

    def _known_channel(self) -> str:
        known = _channels.get((self.using, settings.NAMESPACE))
        if known is None:
            known = _channels[self.using, settings.NAMESPACE] = self.channel
        return known

    def listen(self, tell: Callable[[], None], stopped: threading.Event) -> None:
        if settings.NOTIFY:
            super().listen(tell, stopped)

    def _listen_once(self, tell: Callable[[], None], stopped: threading.Event) -> None:
        """On a connection that is used for nothing else."""
        channel = self._known_channel()
        raw = self.connection.get_new_connection(self.connection.get_connection_params())
        try:
            raw.autocommit = True
            raw.execute(f'LISTEN "{channel}"')
            tell()
            checked = time.monotonic()
            while not stopped.is_set():
                for _ in raw.notifies(timeout=0.5, stop_after=1):
                    tell()
                if time.monotonic() - checked > LISTENER_CHECK:
                    # A half-open socket or a foreign UNLISTEN would stay silent for ever.
                    with _cut_off_after(LISTENER_ANSWER, raw):
                        listens = raw.execute("SELECT 1 FROM pg_listening_channels()").fetchone()
                    if not listens:
                        return
                    checked = time.monotonic()
        finally:
            raw.close()


def _story(story: Story) -> dict[str, Any]:
    told = {"deliveries": story.deliveries, "errors": story.errors or None}
    return {name: value for name, value in told.items() if value is not None}


@contextlib.contextmanager
def _cut_off_after(seconds: float, raw: Any) -> Iterator[None]:
    """The driver waits for an answer for ever; on a socket that was shut down it does not."""

    def shut_down() -> None:
        with socket.socket(fileno=os.dup(raw.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_channels: dict[tuple[str, str], str] = {}
