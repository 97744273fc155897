"""The ground the store stands on: the tables of one alias, their locks, and the clock."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

from django.db import InterfaceError, OperationalError, connections, transaction
from django.db.models import Case, DateTimeField, F, Q, QuerySet, Value, When
from django.db.models.expressions import Combinable
from django.db.models.functions import Left
from django.db.models.lookups import Exact

from django_eventbus.clock import DatabaseNow
from django_eventbus.conf import settings
from django_eventbus.models import (
    EventGate,
    EventLane,
    EventLog,
    EventMark,
    EventWorker,
    LogStatus,
    QueuedEvent,
    QueuedStatus,
)

Clock = Callable[[], datetime]

CONFLICT_RETRIES = 10
CONFLICT_WAIT = 0.05

#: A row that nobody holds.
UNCLAIMED: dict[str, Any] = {
    "status": QueuedStatus.PENDING,
    "claim_token": None,
    "claimed_by": None,
    "processing_started_at": None,
}

#: When a lane is ready that only a person can open.
NEVER = datetime(9000, 1, 1, tzinfo=UTC)


def unless_blocked(moment: Any) -> Case:
    """For a lane's ``ready_at``."""
    return Case(When(blocked_by__isnull=True, then=moment), default=F("ready_at"))


#: After all moments that a publisher may name. What waits for a gate to open waits here, each gate
#: a second of its own: an index finds what one of them holds up, and no claim comes across it.
PARKED = datetime(3000, 1, 1, tzinfo=UTC)
_UNTIL_OPENED = 1e12


def until_opened(gate_id: int) -> float:
    """A delay longer than any other: as long as this gate is shut."""
    return _UNTIL_OPENED + gate_id


def parked_at(gate_id: int) -> datetime:
    return PARKED + timedelta(seconds=gate_id)


def parked_for(delay: float) -> datetime | None:
    """Where what is so delayed is parked; None for a delay that simply passes."""
    return parked_at(int(delay - _UNTIL_OPENED)) if delay >= _UNTIL_OPENED else None


Verb = TypeVar("Verb", bound=Callable[..., Any])
Done = TypeVar("Done")


def retried(verb: Verb) -> Verb:
    """Again after a deadlock or a failed serialization: the loser's transaction is rolled back."""

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


#: A failover leaves a server that only reads: PostgreSQL calls that an internal error.
READ_ONLY = "25006"


def is_trouble(error: BaseException) -> bool:
    """The database is away, or not itself: wait for it, nobody is to blame."""
    if isinstance(error, OperationalError | InterfaceError):
        return True
    return getattr(error.__cause__, "sqlstate", None) == READ_ONLY


def is_shortage(error: BaseException) -> bool:
    """The server has run out of something, most likely of disk: no handler is to blame."""
    return str(getattr(error.__cause__, "sqlstate", "")).startswith("53")


class Rows:
    """The tables behind one database alias, as one project sees them."""

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
            return DatabaseNow()
        return Value(self.clock(), output_field=DateTimeField())

    def after(self, seconds: float) -> Any:
        if moment := parked_for(seconds):
            return Value(moment, output_field=DateTimeField())
        return self.now + Value(timedelta(seconds=seconds))

    @property
    def queued(self) -> QuerySet[QueuedEvent]:
        return QueuedEvent.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    @property
    def lanes(self) -> QuerySet[EventLane]:
        return EventLane.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    @property
    def marks(self) -> QuerySet[EventMark]:
        return EventMark.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    @property
    def workers(self) -> QuerySet[EventWorker]:
        return EventWorker.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    @property
    def gates(self) -> QuerySet[EventGate]:
        return EventGate.objects.using(self.using).filter(namespace=settings.NAMESPACE)

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
        """Verbs and what belongs to them, together or not at all. ``work`` may be called again."""
        with self.atomic():
            return work()

    def is_conflict(self, error: BaseException) -> bool:
        if not isinstance(error, OperationalError):
            return False
        code = getattr(error.__cause__, "sqlstate", None) or (error.args and error.args[0])
        return code in self.conflicts

    def starting_with(self, column: str, start: str) -> Q:
        """Not startswith: SQLite's LIKE takes "Order" and "order" for the same."""
        return Q(Exact(Left(column, len(start)), start))

    def locked(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Lock rows that nobody else holds, where the database can pass over the others."""
        features = self.connection.features
        if not features.has_select_for_update:
            return rows
        return rows.select_for_update(skip_locked=features.has_select_for_update_skip_locked)

    def waiting_lock(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Lock rows, in their order, waiting for those who hold them."""
        has_locks = self.connection.features.has_select_for_update
        return rows.select_for_update() if has_locks else rows

    def lock_of_an_update(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Lock rows as an UPDATE that leaves their keys alone will: others may still refer to
        them. Only inside a transaction, and where there are row locks."""
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
