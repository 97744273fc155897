"""The base of the store: the tables of one alias, their locks, and the clock."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

from django.db import InterfaceError, OperationalError, connections, transaction
from django.db.models import DateTimeField, Q, QuerySet, Value
from django.db.models.expressions import Combinable
from django.db.models.functions import Left
from django.db.models.lookups import Exact

from django_eventbus.conf import settings
from django_eventbus.models import (
    EventLane,
    EventLog,
    EventWorker,
    FlowControl,
    IdempotencyKey,
    LogStatus,
    QueuedEvent,
    QueuedStatus,
)
from django_eventbus.schema.clock import DatabaseNow

Clock = Callable[[], datetime]

CONFLICT_RETRIES = 10
#: Lower than every row id. Row ids may be negative: ``store.quarantine`` assigns such ids.
LOWEST_ID = -(2**63)
CONFLICT_WAIT = 0.05

#: The columns of a row that no worker has claimed.
UNCLAIMED: dict[str, Any] = {
    "status": QueuedStatus.PENDING,
    "claim_token": None,
    "claimed_by": None,
    "processing_started_at": None,
}

Verb = TypeVar("Verb", bound=Callable[..., Any])
Done = TypeVar("Done")


def retried(verb: Verb) -> Verb:
    """Retry the method after a deadlock or a serialization failure, which roll back its work."""

    @wraps(verb)
    def again(self: Rows, *args: Any, **kwargs: Any) -> Any:
        for _ in range(CONFLICT_RETRIES):
            try:
                return verb(self, *args, **kwargs)
            except OperationalError as error:
                if self.connection.in_atomic_block or not self.is_conflict(error):
                    raise
                time.sleep(random.uniform(0, CONFLICT_WAIT))
        return verb(self, *args, **kwargs)

    return cast(Verb, again)


#: The sqlstate of a write to a read-only server, for example after a failover. Django raises an
#: InternalError for it, not an OperationalError.
READ_ONLY = "25006"
#: Error codes of MariaDB: a statement is larger than max_allowed_packet of the server or client.
TOO_LARGE = frozenset({1153, 2020})


def is_outage(error: BaseException) -> bool:
    """Return whether the database is unavailable or read-only, so that a retry may succeed."""
    code = code_of(error)
    if issubclass(type(error), OperationalError | InterfaceError):
        return code not in TOO_LARGE
    return code == READ_ONLY


def is_shortage(error: BaseException) -> bool:
    """Return whether the server lacks a resource, usually disk space (sqlstate class 53)."""
    return str(code_of(error)).startswith("53")


def code_of(error: BaseException) -> str | int | None:
    """Return the code of a database error, or None.

    The code is the sqlstate of the driver's error, or else the first argument of ``error``. Both
    may be missing, because a handler may raise Django's errors with any arguments.
    """
    try:
        codes = (getattr(error.__cause__, "sqlstate", None), *error.args[:1])
    except Exception:
        return None
    return next((each for each in codes if _is_code(each)), None)


def _is_code(value: object) -> bool:
    """Return whether a value is an error number of MariaDB or a sqlstate of five characters."""
    return type(value) is int or (type(value) is str and len(value) == 5)


class Rows:
    """The tables of one database alias, filtered by the namespace of the project."""

    #: Codes of errors after which the same transaction may succeed, such as a deadlock.
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
            return DatabaseNow()
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
    def idempotency_keys(self) -> QuerySet[IdempotencyKey]:
        return IdempotencyKey.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    @property
    def workers(self) -> QuerySet[EventWorker]:
        return EventWorker.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    @property
    def flow_controls(self) -> QuerySet[FlowControl]:
        return FlowControl.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    @property
    def completed(self) -> QuerySet[EventLog]:
        return EventLog.objects.using(self.using).filter(
            status=LogStatus.COMPLETED, namespace=settings.NAMESPACE
        )

    @property
    def dead(self) -> QuerySet[EventLog]:
        return EventLog.objects.using(self.using).filter(
            ~Q(status=LogStatus.COMPLETED), namespace=settings.NAMESPACE
        )

    def atomic(self) -> Any:
        return transaction.atomic(using=self.using)

    @retried
    def in_transaction(self, work: Callable[[], Done]) -> Done:
        """Run ``work`` in one transaction. After a conflict ``work`` is called again."""
        with self.atomic():
            return work()

    def reading_by_index(self, *, may_sort: bool = False) -> AbstractContextManager[None]:
        """Disable plans that read or sort a whole table.

        The planner may choose such plans if its statistics are outdated. The caller has to fetch
        the rows inside the block. With ``may_sort``, sorts stay enabled: this is for queries that
        find few rows by an index and return them in another order.
        """
        return nullcontext()

    def is_conflict(self, error: BaseException) -> bool:
        return issubclass(type(error), OperationalError) and code_of(error) in self.conflicts

    def starting_with(self, column: str, start: str) -> Q:
        """Filter by a prefix. Django's startswith uses LIKE, which ignores case on SQLite."""
        return Q(Exact(Left(column, len(start)), start))

    def locked(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Lock rows. With SKIP LOCKED, rows that other transactions have locked are left out."""
        features = self.connection.features
        if not features.has_select_for_update:
            return rows
        return rows.select_for_update(skip_locked=features.has_select_for_update_skip_locked)

    def waiting_lock(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Lock rows in the order of the query, and wait for transactions that have locked them."""
        has_locks = self.connection.features.has_select_for_update
        return rows.select_for_update() if has_locks else rows

    def lock_of_an_update(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Lock rows with FOR NO KEY UPDATE, the lock of an UPDATE that changes no key column.

        Other transactions can still insert foreign keys to the rows. Outside a transaction, and on
        a database without row locks, the rows are not locked.
        """
        features = self.connection.features
        if not (features.has_select_for_update and self.connection.in_atomic_block):
            return rows
        return rows.select_for_update(no_key=features.has_select_for_no_key_update)

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
