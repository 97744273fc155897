"""PostgreSQL: a claim and a settle are one statement each, and NOTIFY wakes the workers."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from django.db import DatabaseError

from django_eventbus.conf import settings
from django_eventbus.events import Claim, ClaimedEvent, encode
from django_eventbus.models import EventLane, EventLog, EventWorker, QueuedEvent
from django_eventbus.store.base import (
    CLAIM_COLUMNS,
    MOVED_COLUMNS,
    Store,
    expect,
    keyed_share,
)
from django_eventbus.store.rows import Clock, retried
from django_eventbus.store.settlements import Finished, NewEvent

logger = logging.getLogger(__name__)

_NOW = "COALESCE(%(now)s::timestamptz, statement_timestamp())"

QUEUE = f'"{QueuedEvent._meta.db_table}"'
LANE = f'"{EventLane._meta.db_table}"'
LOG = f'"{EventLog._meta.db_table}"'
WORKER = f'"{EventWorker._meta.db_table}"'

SWEEP_EVERY = 1.0
LISTENER_CHECK = 10.0

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
_CLAIM = f"""
WITH me AS MATERIALIZED (
    SELECT id FROM {WORKER} WHERE id = %(worker_id)s AND expires_at > {_NOW} FOR KEY SHARE
), picked AS MATERIALIZED (
    SELECT id FROM ({{ready}}) AS ready WHERE EXISTS (SELECT 1 FROM me) LIMIT %(limit)s
)
UPDATE {QUEUE} SET status = 'PROCESSING', attempts = attempts + 1, claim_token = %(token)s,
    claimed_by = %(worker_id)s, processing_started_at = {_NOW}
WHERE id = ANY (ARRAY(SELECT id FROM picked))
RETURNING {_COLUMNS}"""

_CLAIM_FROM_START = _CLAIM.format(ready=_EVERYWHERE)
_CLAIM_ABOVE_FLOOR = _CLAIM.format(ready=_ABOVE_FLOOR)

# The statistics of a queue are always of yesterday's queue: with them a claim has been seen to
# sort the whole table. For the length of a claim's transaction that is ruled out.
_ON_INDEXES = "SELECT " + ", ".join(
    f"set_config('enable_{way}', 'off', true)" for way in ("seqscan", "bitmapscan", "sort")
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

_ROUTER_LOCK = "SELECT pg_try_advisory_xact_lock(hashtext('django_eventbus.route'), hashtext(%s))"

# Ordered by the lane too: with the id alone a planner may walk the primary key of the whole queue.
_HEADS = f"""
SELECT lane.id, head.id, head.status
FROM unnest(%s::bigint[]) WITH ORDINALITY AS lane (id, place)
CROSS JOIN LATERAL (
    SELECT id, status FROM {QUEUE} WHERE lane_id = lane.id ORDER BY lane_id, id LIMIT %s
) AS head
ORDER BY lane.place, head.id"""

_MOVED = ", ".join(MOVED_COLUMNS)

_SETTLE = f"""
WITH gone AS (
    DELETE FROM {QUEUE} WHERE id = ANY (%s::bigint[]) AND claim_token = %s RETURNING id, {_MOVED}
)
INSERT INTO {LOG} (id, {_MOVED}, status, finished_at, dead_handler, error_type, error_fingerprint)
SELECT id, {_MOVED}, %s, COALESCE(%s::timestamptz, clock_timestamp()), %s, %s, %s FROM gone"""

_INSERT_MANY = f"""
INSERT INTO {QUEUE} (event_id, type, version, payload, namespace, queue, headers, key, priority,
    producer, caused_by, available_at, status, attempts, crashes)
SELECT *, %s, %s, %s::jsonb, %s, %s, %s, %s::uuid, {{available_at}}, 'PENDING', 0, 0
FROM jsonb_to_recordset(%s::jsonb) AS new (event_id uuid, type text, version int, payload jsonb)"""


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

    def insert_many(self, common: QueuedEvent, items: Sequence[NewEvent]) -> None:
        """What differs travels as one JSON text: seven times as fast as bulk_create."""
        available_at, when = "%s::timestamptz", (common.available_at,)
        if hasattr(common.available_at, "as_sql"):  # a delay, counted by the database's clock
            compiler = self.queued.query.get_compiler(self.using)
            available_at, when = compiler.compile(common.available_at)
        with self.connection.cursor() as cursor:
            cursor.execute(
                _INSERT_MANY.format(available_at=available_at),
                (
                    common.namespace,
                    common.queue,
                    None if common.headers is None else encode(common.headers),
                    common.key,
                    common.priority,
                    common.producer,
                    common.caused_by,
                    *when,
                    encode([item._asdict() for item in items]),
                ),
            )

    @retried
    def claim(
        self, queue: str, *, limit: int, worker_id: uuid.UUID, token: uuid.UUID | None = None
    ) -> list[ClaimedEvent]:
        claim = self._new_claim(queue, worker_id, token)
        claimed: list[ClaimedEvent] = []
        ours = not self.connection.in_atomic_block
        with self.atomic():
            if ours:
                self._keep_planner_on_indexes()
            if self._keys_wait(queue):
                self._hold_registration(worker_id)
                claimed = self._mark_claimed(claim, self.own_lanes(claim, keyed_share(limit)))
            if len(claimed) < limit:
                claimed += self._claim_ready(claim, limit - len(claimed))
        return claimed

    def _keep_planner_on_indexes(self) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(_ON_INDEXES)

    def _keys_wait(self, queue: str) -> bool:
        params = {
            "namespace": settings.NAMESPACE,
            "queue": queue,
            "now": self._injected_now(),
        }
        with self.connection.cursor() as cursor:
            cursor.execute(_KEYS_WAIT, params)
            return bool(cursor.fetchone()[0])

    def take_unrouted(self, queue: str, limit: int) -> list[tuple[int, str | None]]:
        """One router at a time by a lock of its own. Locks on the rows would also catch those that
        another has just routed and claimed, and get into a deadlock with their settlement."""
        with self.connection.cursor() as cursor:
            cursor.execute(_ROUTER_LOCK, (f"{settings.NAMESPACE}/{queue}",))
            if not cursor.fetchone()[0]:
                return []
        return list(self.unrouted(queue).order_by("id").values_list("id", "key")[:limit])

    def heads(self, lanes: list[int], length: int) -> list[tuple[int, int, str]]:
        with self.connection.cursor() as cursor:
            cursor.execute(_HEADS, (lanes, length))
            found: list[tuple[int, int, str]] = cursor.fetchall()
            return found

    def _claim_ready(self, claim: Claim, limit: int) -> list[ClaimedEvent]:
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
        self._raise_floor(
            claim.queue, claimed, swept_at=moment if floor is None else floor.swept_at
        )
        return claimed

    def _run_claim(self, claim: Claim, limit: int, floor: _Floor | None) -> list[ClaimedEvent]:
        params = {
            "namespace": claim.namespace,
            "queue": claim.queue,
            "limit": limit,
            "token": claim.token,
            "worker_id": claim.worker_id,
            "now": self._injected_now(),
            "priority": floor.priority if floor else 0,
            "floor": floor.row_id if floor else 0,
        }
        with self.connection.cursor() as cursor:
            cursor.execute(_CLAIM_FROM_START if floor is None else _CLAIM_ABOVE_FLOOR, params)
            claimed = [ClaimedEvent(claim, *row) for row in cursor.fetchall()]
        # RETURNING promises no order.
        claimed.sort(key=lambda event: (-event.priority, event.row_id))
        return claimed

    def _raise_floor(self, queue: str, claimed: list[ClaimedEvent], *, swept_at: float) -> None:
        if not claimed:
            self._floors.pop(queue, None)
            return
        lowest = min(event.priority for event in claimed)
        first = min(event.row_id for event in claimed if event.priority == lowest)
        self._floors[queue] = _Floor(lowest, first, swept_at)

    def _move_to_log(self, token: uuid.UUID, ids: Sequence[int], fate: Finished) -> None:
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

    def _injected_now(self) -> datetime | None:
        return None if self.clock is None else self.clock()

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
        instance-wide lock through the fsync. A hint: it carries nothing and may fail."""
        if not settings.NOTIFY:
            return
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(f'NOTIFY "{self._known_channel()}"')
        except DatabaseError as error:
            logger.warning("workers could not be notified and will see the event later: %s", error)

    def _known_channel(self) -> str:
        known = _channels.get((self.using, settings.NAMESPACE))
        if known is None:
            known = _channels[self.using, settings.NAMESPACE] = self.channel
        return known

    def listen(self, tell: Callable[[], None], stopped: threading.Event) -> None:
        """Listen on a connection of its own; after each trouble begin again with a tell."""
        if not settings.NOTIFY:
            return
        wait = 0.1
        while not stopped.is_set():
            try:
                self._listen_once(tell, stopped)
            except Exception as error:
                logger.warning("listening for events failed, polling goes on: %s", error)
            stopped.wait(wait)
            wait = min(wait * 2, 30.0)
            tell()

    def _listen_once(self, tell: Callable[[], None], stopped: threading.Event) -> None:
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
                    if not raw.execute("SELECT 1 FROM pg_listening_channels()").fetchone():
                        return
                    checked = time.monotonic()
        finally:
            raw.close()
            self.connection.close()


_channels: dict[tuple[str, str], str] = {}
