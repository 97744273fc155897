"""MariaDB and MySQL: the portable store at READ COMMITTED, which Django sets by default."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, ClassVar

from django.db.models import QuerySet

from django_eventbus.conf import settings
from django_eventbus.errors import failures
from django_eventbus.models import EventLane, EventLog, IdempotencyKey, QueuedEvent
from django_eventbus.store.base import Store
from django_eventbus.store.mariadb_inspecting import InspectingMariaDB
from django_eventbus.store.rows import Clock
from django_eventbus.store.settlements import Settlement

READ_COMMITTED = "read committed"
#: ``_lock_name`` stores its locks as idempotency keys. These constants are the scope of such keys,
#: the UUID namespace of their ids, and the seconds until they expire.
LOCK_SCOPE = "(order)"
LOCK_IDS = uuid.UUID("5a6c8f0e-3d0b-4d0a-9a55-6b1f7f0c2e11")
LOCK_KEPT = 300.0
#: How many waiting events ``coalesce`` tries to lock before the publisher inserts a new event.
COALESCE_TRIES = 100
#: JSON up to this size is sent without a query for max_allowed_packet, whose default is 16 MiB or
#: more.
SURELY_FITS = 256 * 1024


class MariaDBStore(InspectingMariaDB, Store):
    #: The columns have a JSON_VALID constraint, which rejects 32 or more levels of nesting.
    deepest_json: ClassVar[int] = 31
    #: Error codes: deadlock, lock wait timeout, record changed since the snapshot.
    conflicts: ClassVar[frozenset[Any]] = frozenset({1213, 1205, 1020})
    _clock_sql: ClassVar[str] = "SELECT UTC_TIMESTAMP(6)"

    def __init__(self, using: str, *, clock: Clock | None = None) -> None:
        super().__init__(using, clock=clock)
        # Each thread has its own connection, so attributes of the transaction are thread-local.
        self._transaction = threading.local()

    @property
    def new_uuid(self) -> str:
        # MySQL, and MariaDB before 10.7, have no type for UUIDs: Django stores 32 digits.
        native = self.connection.features.has_native_uuid_field
        return "UUID()" if native else "LOWER(HEX(RANDOM_BYTES(16)))"

    def _to_datetime(self, value: Any) -> datetime:
        assert isinstance(value, datetime)
        return value.replace(tzinfo=UTC)

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Open a transaction, at READ COMMITTED unless it is nested in a transaction of the caller.

        At REPEATABLE READ, which a project may set, the snapshot of the transaction would hide
        events that other transactions have routed to a lane since this transaction began.
        """
        is_ours = not self.connection.in_atomic_block
        with super().atomic(), self.connection.execute_wrapper(_by_primary_key):
            if not is_ours or self._reads_committed():
                yield
                return
            with self.connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            self._transaction.is_ours = True
            try:
                yield
            finally:
                self._transaction.is_ours = False

    def settle(self, token: uuid.UUID, settlements: Iterable[Settlement]) -> None:
        with self.connection.execute_wrapper(_by_primary_key):
            super().settle(token, settlements)

    def release(self, token: uuid.UUID, ids: Collection[int]) -> int:
        with self.connection.execute_wrapper(_by_primary_key):
            return super().release(token, ids)

    def coalesce(self, new: QueuedEvent) -> QueuedEvent | None:
        with self.connection.execute_wrapper(_by_primary_key):
            return super().coalesce(new)

    def first_unlocked(self, events: QuerySet[QueuedEvent]) -> QueuedEvent | None:
        """Read the ids without locks, then try to lock one event at a time by its primary key.

        A locking read through another index may lock every row that it reads. At REPEATABLE READ it
        also locks the gaps between these rows, and publishers that insert into a gap would wait.
        """
        for row_id in list(events.values_list("id", flat=True)[:COALESCE_TRIES]):
            if found := super().first_unlocked(events.filter(id=row_id)):
                return found
        return None

    def insert_once(
        self, event: QueuedEvent, *, window: timedelta | None = None
    ) -> QueuedEvent | None:
        """Insert an event unless it exists; transactions with the same key wait for each other.

        InnoDB keeps the entry of a deleted row in its unique index for some time. Two transactions
        that insert the key of such a row would both get a shared lock on the entry, and deadlock.
        So each transaction locks the name of the key first. At READ COMMITTED, an existing event
        can be found and returned without this lock. At REPEATABLE READ, the snapshot may still show
        events that have ended meanwhile, so the lock is always needed.
        """
        if self._reads_committed() and (known := self.known(event, window=window)):
            return known
        with self.atomic():
            # one_publisher_at_a_time() locks names of the form namespace/queue/key. This name has
            # an empty queue. No real queue has an empty name, so the names are always different.
            self._lock_name(f"{settings.NAMESPACE}//{event.dedup_key or event.event_id}")
            return super().insert_once(event, window=window)

    def confirmed_empty(self, lanes: set[int]) -> set[int]:
        """Check the lanes with a locking read, which sees events routed after the snapshot.

        The read waits for every locked event, so it is used only if the snapshot is fixed. This is
        the case at REPEATABLE READ inside a transaction of the caller, for example in a test.
        """
        if not lanes or self._sees_latest_commits():
            return lanes
        routed = self.waiting_lock(self.queued.filter(lane_id__in=lanes))
        return lanes - set(routed.values_list("lane_id", flat=True))

    def blocked_lanes(self, event_ids: Collection[uuid.UUID]) -> QuerySet[EventLane]:
        """Return the blocked lanes; inside a transaction with a snapshot, do not read ids first.

        A snapshot may be older than the block of a lane, so a read of the ids could miss the lane.
        The locking read of the caller sees the latest rows.
        """
        if self._sees_latest_commits():
            return super().blocked_lanes(event_ids)
        return self.lanes.filter(blocked_by__in=list(event_ids))

    def _prepared_errors(self, errors: list[dict[str, Any]]) -> Any:
        """Return the errors as JSON, shortened if the statement would be too large.

        If a statement is much larger than max_allowed_packet, the server closes the connection. The
        client cannot distinguish this error from an outage, so the errors are shortened before the
        statement is sent.
        """
        text = super()._prepared_errors(errors)
        if text is None or len(text) <= SURELY_FITS or len(text) <= self._largest_text:
            return text
        return super()._prepared_errors(failures.shortened(errors))

    @cached_property
    def _largest_text(self) -> int:
        """The maximum size of the errors as JSON: a quarter of the maximum size of a statement.

        Escaping may double the size of a text, and the statement contains other columns too.
        """
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT @@max_allowed_packet")
            return int(cursor.fetchone()[0]) // 4

    def _reads_committed(self) -> bool:
        level = self.connection.settings_dict["OPTIONS"].get("isolation_level", READ_COMMITTED)
        return str(level).lower() == READ_COMMITTED

    def _sees_latest_commits(self) -> bool:
        """Return whether statements see the latest commits, because there is no fixed snapshot."""
        return self._reads_committed() or getattr(self._transaction, "is_ours", False)

    def _lock_name(self, name: str) -> None:
        """Lock a name until the transaction ends. The lock is the row lock of an idempotency key.

        GET_LOCK is not used, because the end of a transaction does not release its locks.

        The update on conflict takes an exclusive lock from the start: two transactions that first
        took a shared lock would deadlock. The row id is derived from the name, so the conflict is
        on the primary key. A conflict on another unique key would also lock the gap before the
        index entry, and so block unrelated names.
        """
        lock_id = uuid.uuid5(LOCK_IDS, name)
        lock = IdempotencyKey(
            id=lock_id,
            namespace=settings.NAMESPACE,
            scope=LOCK_SCOPE,
            key=lock_id.hex,
            event_id=lock_id,
            expires_at=self.after(LOCK_KEPT),
        )
        self.idempotency_keys.bulk_create(
            [lock], update_conflicts=True, update_fields=["expires_at"]
        )


_TABLES = "|".join(model._meta.db_table for model in (QueuedEvent, EventLane, EventLog))
_SELECT = r"SELECT (?:(?! FROM ).)* FROM"
_LOCKS_BY_ID = re.compile(
    rf"(?P<verb>UPDATE|DELETE FROM|(?:INSERT INTO \S+ \([^()]*\) )?{_SELECT})"
    rf" `(?P<table>{_TABLES})`"
    r"(?P<rest>.* WHERE .*`(?P=table)`\.`id` (?:IN \(|= %s).*)",
    re.DOTALL,
)


def _by_primary_key(execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
    """Force statements that lock rows by id to use the primary key.

    On a small table the optimizer may prefer another index or a table scan, even for a single id.
    A locking statement would then wait for every locked row that it reads. An UPDATE or DELETE
    through a secondary index would also lock all rows that it reads. Even at READ COMMITTED, these
    locks would remain until the transaction ends, so a publisher would delay events of other keys.
    """
    found = _LOCKS_BY_ID.fullmatch(sql)
    if found and not (found["verb"].startswith("SELECT") and " FOR UPDATE" not in sql):
        verb, table, rest = found.groups()
        verb = verb.replace("DELETE", f"DELETE `{table}`")
        sql = f"{verb} `{table}` FORCE INDEX (PRIMARY){rest}"
    return execute(sql, params, many, context)
