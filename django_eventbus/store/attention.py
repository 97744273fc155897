"""One statement that reads all data by which an idle worker decides what to do next."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Exists, Q, QuerySet, Subquery

from django_eventbus.conf import settings
from django_eventbus.exceptions import WorkerEvictedError
from django_eventbus.models import QueuedStatus
from django_eventbus.store.lanes import LOCKED_WAIT, Lanes
from django_eventbus.store.rows import Clock
from django_eventbus.store.schedules import Schedules

#: The maximum number of compiled statements in the cache. Each pair of a namespace and an
#: AttentionQuery needs its own statement.
_KEPT = 50

#: The SQL, its parameters, and the function that converts the columns of a row.
_Compiled = tuple[str, Sequence[Any], Callable[[Iterable[Any]], Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionQuery:
    """The parameters of ``attention``. The class is hashable, because instances are cache keys."""

    worker_id: uuid.UUID
    queues: tuple[str, ...]
    #: The digest of the worker's own handlers.
    digest: str = ""
    #: Names of the schedules that the worker's code declares; None if the worker does not fire
    #: schedules.
    schedules: tuple[str, ...] | None = None
    #: Row ids of schedules that failed and that the worker retries later.
    excluded_schedules: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The work that is due for a worker now, and the seconds until more work is due."""

    #: Queues with an event or a lane that can be claimed now.
    ready: frozenset[str] = frozenset()
    #: Seconds until the next delayed event, or the next lane of the queues, is ready; None if there
    #: is no such event or lane. At most LOCKED_WAIT if the last routing skipped locked keys.
    wait: float | None = None
    #: Whether a delayed event is due, so that the worker has to call ``promote``.
    promotes: bool = False
    #: Whether the registration of any worker has expired, so that this worker calls ``recover``.
    recovers: bool = False
    #: Whether an idempotency key has expired, so that the worker calls ``delete_expired_keys``.
    forgets: bool = False
    #: Whether a pause is set, a circuit breaker is open, or an event or a lane is held.
    holds: bool = False
    #: Whether another live worker has a different set of handlers.
    differs: bool = False
    #: Whether the tick of a schedule is due, or the next tick of a schedule has to be computed.
    fires: bool = False
    #: Seconds until the next tick of any schedule; None if no schedule has a next tick.
    tick: float | None = None


class Attends(Lanes, Schedules):
    """The one query with which an idle worker checks for work."""

    def __init__(self, using: str, *, clock: Clock | None = None) -> None:
        super().__init__(using, clock=clock)
        self._statements: dict[tuple[str, AttentionQuery], _Compiled] = {}

    def attention(self, query: AttentionQuery) -> Attention:
        """Return the work that is due for a worker now. Workers call this between two batches.

        Raises WorkerEvictedError if the worker is not registered any more.
        """
        row = self._row_of(self._compiled(query))
        if row is None:
            raise WorkerEvictedError(f"worker {query.worker_id} is not registered any more")
        now = row["now"] if self.clock is None else self.clock()
        lanes = {queue: row[f"lane_{n}"] for n, queue in enumerate(query.queues)}
        moments = [each for each in (row["delayed"], *lanes.values()) if each is not None]
        waits = [] if self._queues_with_locks.isdisjoint(query.queues) else [LOCKED_WAIT]
        return Attention(
            ready=frozenset(
                queue
                for n, queue in enumerate(query.queues)
                if row[f"ready_{n}"] or row[f"unrouted_{n}"] or _is_past(lanes[queue], now)
            ),
            wait=min([*waits, *(_seconds(each, now) for each in moments)], default=None),
            promotes=_is_past(row["delayed"], now),
            recovers=bool(row["recovers"]),
            forgets=bool(row["forgets"]),
            holds=any(row[name] for name in row if name.startswith("holds")),
            differs=bool(row["differs"]),
            fires=bool(row.get("fires")),
            tick=None if row.get("tick") is None else _seconds(row["tick"], now),
        )

    def _compiled(self, query: AttentionQuery) -> _Compiled:
        """Return the compiled statement, from the cache if possible.

        Compiling the statement takes longer than running it. The statement uses the database's
        clock, so its parameters are the same each time. With an injected clock, the time is a
        parameter, so the statement is not cached.
        """
        cache_key = settings.NAMESPACE, query
        compiled = self._statements.get(cache_key)
        if compiled is None:
            subqueries = self._subqueries(query)
            rows = self.workers.filter(pk=query.worker_id).values(**subqueries)
            compiler = rows.query.get_compiler(self.using)
            sql, params = compiler.as_sql()
            converters = compiler.get_converters([each for each, *_ in compiler.select])

            def convert(found: Iterable[Any]) -> Any:
                (row,) = compiler.apply_converters([found], converters)
                return dict(zip(subqueries, row, strict=True))

            compiled = sql, params, convert
            if self.clock is None:
                if len(self._statements) >= _KEPT:
                    self._statements.clear()
                self._statements[cache_key] = compiled
        return compiled

    def _row_of(self, compiled: _Compiled) -> dict[str, Any] | None:
        sql, params, convert = compiled
        found = self.read_row(sql, params)
        answer: dict[str, Any] | None = None if found is None else convert(found)
        return answer

    def read_row(self, statement: str, params: Sequence[Any]) -> Any:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, params)
            return cursor.fetchone()

    def _subqueries(self, query: AttentionQuery) -> dict[str, Any]:
        others = self.workers.filter(expires_at__gt=self.now).exclude(pk=query.worker_id)
        delayed = self.queued.filter(available_at__isnull=False)
        stopped = Q(paused_at__isnull=False) | Q(opened_at__isnull=False)
        subqueries = {
            **({"now": self.now} if self.clock is None else {}),
            "delayed": _first(delayed, "available_at"),
            "recovers": Exists(self.workers.filter(expires_at__lt=self.now)),
            "forgets": Exists(self.idempotency_keys.filter(expires_at__lte=self.now)),
            "differs": Exists(others.exclude(handlers_digest__in=("", query.digest))),
            "holds": Exists(self.flow_controls.filter(stopped)),
            "holds_events": Exists(self.queued.filter(held_by__isnull=False)),
        }
        for n, queue in enumerate(query.queues):
            lanes = self.lanes.filter(queue=queue)
            idle = lanes.filter(claim_token__isnull=True, ready_at__isnull=False)
            subqueries |= {
                f"ready_{n}": Exists(self._ready(queue)),
                f"unrouted_{n}": Exists(self.unrouted(queue)),
                f"lane_{n}": _first(idle, "ready_at"),
                f"holds_{n}": Exists(lanes.filter(ready_at__isnull=True, held_by__isnull=False)),
            }
        if query.schedules is not None:
            known = self.schedules_for(query.schedules).exclude(id__in=query.excluded_schedules)
            subqueries |= {
                "fires": Exists(self._due(known)),
                "tick": _first(known.filter(next_at__isnull=False), "next_at"),
            }
        return subqueries

    def _ready(self, queue: str) -> QuerySet[Any]:
        return self.queued.filter(
            queue=queue,
            key__isnull=True,
            available_at__isnull=True,
            held_by__isnull=True,
            status=QueuedStatus.PENDING,
        )


def _first(rows: QuerySet[Any], column: str) -> Subquery:
    """Return a subquery for the smallest value of a column.

    The subquery reads one index entry. Min() might read all rows.
    """
    return Subquery(rows.order_by(column).values(column)[:1])


def _is_past(moment: datetime | None, now: datetime) -> bool:
    return moment is not None and moment <= now


def _seconds(moment: datetime, now: datetime) -> float:
    return max(0.0, (moment - now).total_seconds())
