"""Depths: the number of events in each state.

Each count stops at a maximum and finds its rows through an index.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.db.models import Case, DateTimeField, F, IntegerField, Q, QuerySet, Value, When

from django_eventbus.conf import settings
from django_eventbus.models import QueuedStatus
from django_eventbus.store.rows import Rows

#: The largest number of counts in one statement. SQLite allows 500 terms in a compound SELECT.
COUNTS_AT_ONCE = 100


class Depth(NamedTuple):
    """The counts of one kind of rows, up to a maximum."""

    total: int
    running: int
    #: The number of pending events with a handler that has failed, except handed-off events.
    failed: int
    #: The number of events that are handed off to another executor.
    handed_off: int
    #: For queued events: the time at which the oldest pending event without a failure was due. For
    #: dead letters: the time at which the oldest dead letter ended. For lanes: None.
    waiting_since: datetime | None


NOTHING = Depth(total=0, running=0, failed=0, handed_off=0, waiting_since=None)


class Depths(Rows):
    """Counts of rows. Each kind of rows has its own index, which the count reads."""

    def depths(self, *, at_most: int) -> dict[str, Depth]:
        """Count each kind of rows, up to ``at_most``, in one statement."""
        kinds = {
            "ready": self._ready_rows(),
            "unrouted": self._unrouted_rows(),
            "laned": self._laned_rows(),
            "delayed": self._delayed_rows(),
            "handed_off": self._handed_off_rows(),
            "held": self._held_rows(),
            "held_lanes": self._held_lanes(),
            "blocked_lanes": self._blocked_lanes(),
            "dead": self._dead_rows(),
        }
        counts, parameters = [], []
        for name, rows in kinds.items():
            select, given = rows[:at_most].query.get_compiler(using=self.using).as_sql()
            counts.append(
                "SELECT %s, COUNT(*), SUM(is_running), SUM(has_failed), SUM(is_handed_off), "
                f"MIN(waiting_since) FROM ({select}) AS counted"
            )
            parameters += [name, *given]
        with self.connection.cursor() as cursor:
            cursor.execute(" UNION ALL ".join(counts), parameters)
            found = {name: rest for name, *rest in cursor.fetchall()}
        return {name: self._as_depth(*found[name]) for name in kinds}

    def depths_by_queue(self, *, at_most: int) -> dict[str, dict[str, Depth]]:
        """Count each kind of rows of each queue; return the counts by queue and kind.

        Each kind is counted up to ``at_most``. Where an index begins with the queue, the maximum
        applies to each queue.
        """
        of_queue = [
            (name, rows.filter(queue=queue))
            for queue in settings.QUEUES
            for name, rows in (("ready", self._ready_rows()), ("unrouted", self._unrouted_rows()))
        ]
        of_all = [
            ("laned", self._laned_rows()),
            ("delayed", self._delayed_rows()),
            ("handed_off", self._handed_off_rows()),
            ("held", self._held_rows()),
            ("held_lanes", self._held_lanes()),
            ("blocked_lanes", self._blocked_lanes()),
            ("dead", self._dead_rows()),
        ]
        found: dict[str, dict[str, Depth]] = {}
        kinds = of_queue + of_all
        for start in range(0, len(kinds), COUNTS_AT_ONCE):
            counts, parameters = [], []
            for name, rows in kinds[start : start + COUNTS_AT_ONCE]:
                query = rows.annotate(of_queue=F("queue"))[:at_most].query
                select, given = query.get_compiler(using=self.using).as_sql()
                counts.append(
                    "SELECT %s, of_queue, COUNT(*), SUM(is_running), SUM(has_failed), "
                    f"SUM(is_handed_off), MIN(waiting_since) FROM ({select}) AS counted "
                    "GROUP BY of_queue"
                )
                parameters += [name, *given]
            with self.connection.cursor() as cursor:
                cursor.execute(" UNION ALL ".join(counts), parameters)
                for name, queue, *numbers in cursor.fetchall():
                    found.setdefault(queue, {})[name] = self._as_depth(*numbers)
        return found

    def _as_depth(
        self, total: int, running: Any, failed: Any, handed_off: Any, since: Any
    ) -> Depth:
        return Depth(
            total=int(total),
            running=int(running or 0),
            failed=int(failed or 0),
            handed_off=int(handed_off or 0),
            waiting_since=None if since is None else self._to_moment(since),
        )

    def _to_moment(self, value: Any) -> datetime:
        """Convert a time from raw SQL to a datetime, with the converters that the ORM uses."""
        expression = Value(None, output_field=DateTimeField())
        for convert in self.connection.ops.get_db_converters(expression):
            value = convert(value, expression, self.connection)
        assert isinstance(value, datetime)
        return value

    def handed_off_by_handler(self, names: Collection[str], *, at_most: int) -> dict[str, int]:
        """Return the number of handed-off events of each handler, up to ``at_most``."""
        return self._count_each(
            [(name, self._between(self._handed_off(), "handed_off_to", name)) for name in names],
            at_most,
        )

    def held_by_each(self, ids: Collection[int], *, at_most: int) -> dict[str, int]:
        """Return the number of events and lanes that each flow control holds, up to ``at_most``.

        The keys are the ids as texts.
        """
        kinds = (self._held_events(), self._held_lanes_of_all())
        each = [(str(pk), self._between(rows, "held_by", pk)) for pk in ids for rows in kinds]
        return self._count_each(each, at_most)

    def waiting_copies_by_replay(self, ids: Collection[int], *, at_most: int) -> dict[str, int]:
        """Return the number of copies of each replay in the queue, by its id as a text."""
        rows = self.queued.order_by("replay_id", "id")
        each = [(str(pk), self._between(rows, "replay_id", pk)) for pk in ids]
        return self._count_each(each, at_most)

    def dead_copies_by_replay(self, ids: Collection[int], *, at_most: int) -> dict[str, int]:
        """Return the number of dead copies of each replay, by its id as a text."""
        rows = self.dead.order_by("replay_id", "status")
        each = [(str(pk), self._between(rows, "replay_id", pk)) for pk in ids]
        return self._count_each(each, at_most)

    @staticmethod
    def _between(rows: QuerySet[Any], column: str, value: Any) -> QuerySet[Any]:
        """Return the rows with this value, by a range.

        With an equality condition, a scan of the primary key would also return the rows in the
        requested order, and PostgreSQL might choose that scan instead of the index on the column.
        """
        return rows.filter(**{f"{column}__gte": value, f"{column}__lte": value})

    def _count_each(
        self, each: Sequence[tuple[str, QuerySet[Any]]], at_most: int
    ) -> dict[str, int]:
        """Count the rows of each query, up to ``at_most``, and sum the counts by name."""
        found: dict[str, int] = {}
        for start in range(0, len(each), COUNTS_AT_ONCE):
            counts, parameters = [], []
            for name, rows in each[start : start + COUNTS_AT_ONCE]:
                query = rows.values("id")[:at_most].query
                select, given = query.get_compiler(using=self.using).as_sql()
                counts.append(f"SELECT %s, COUNT(*) FROM ({select}) AS counted")
                parameters += [name, *given]
            with self.connection.cursor() as cursor:
                cursor.execute(" UNION ALL ".join(counts), parameters)
                for name, count in cursor.fetchall():
                    found[name] = min(at_most, found.get(name, 0) + int(count))
        return found

    # Each ORDER BY matches exactly one index. Without an ORDER BY, the planner may scan the table
    # from its start until it has found enough rows.

    def _ready_rows(self) -> QuerySet[Any]:
        rows = self.queued.filter(key__isnull=True, available_at__isnull=True, held_by__isnull=True)
        return _events(rows).order_by("namespace", "queue", "-priority", "id")

    def _unrouted_rows(self) -> QuerySet[Any]:
        rows = self.queued.filter(
            key__isnull=False, lane_id__isnull=True, available_at__isnull=True
        )
        return _events(rows).order_by("namespace", "queue", "id")

    def _laned_rows(self) -> QuerySet[Any]:
        return _events(self.queued.filter(lane_id__isnull=False)).order_by("lane_id", "id")

    def _delayed_rows(self) -> QuerySet[Any]:
        rows = self.queued.filter(available_at__isnull=False)
        return _events(rows).order_by("namespace", "available_at")

    def _handed_off_rows(self) -> QuerySet[Any]:
        # The deliveries of a handed-off event are never NULL, so they do not show whether a handler
        # has failed. A handed-off event without errors waits for its first attempt.
        return _events(self._handed_off(), failed=Q(errors__isnull=False))

    def _handed_off(self) -> QuerySet[Any]:
        rows = self.queued.filter(handed_off_to__isnull=False)
        return rows.order_by("namespace", "handed_off_to", "id")

    def _held_rows(self) -> QuerySet[Any]:
        return _events(self._held_events())

    def _held_events(self) -> QuerySet[Any]:
        rows = self.queued.filter(held_by__isnull=False)
        return rows.order_by("namespace", "held_by", "id")

    def _held_lanes(self) -> QuerySet[Any]:
        return _not_events(self._lanes_not_ready().filter(held_by__isnull=False), "ready_at")

    def _blocked_lanes(self) -> QuerySet[Any]:
        return _not_events(self._lanes_not_ready().filter(held_by__isnull=True), "ready_at")

    def _held_lanes_of_all(self) -> QuerySet[Any]:
        lanes = self._lanes_not_ready().filter(held_by__isnull=False)
        return lanes.order_by("namespace", "queue", "ready_at", "held_by")

    def _lanes_not_ready(self) -> QuerySet[Any]:
        return self.lanes.filter(queue__in=list(settings.QUEUES), ready_at__isnull=True)

    def _dead_rows(self) -> QuerySet[Any]:
        return _not_events(self.dead, "finished_at").order_by("namespace", "finished_at", "id")


_CALLED = Q(deliveries__isnull=False)


def _events(rows: QuerySet[Any], *, failed: Q = _CALLED) -> QuerySet[Any]:
    pending = Q(status=QueuedStatus.PENDING)
    handed_off = Q(handed_off_to__isnull=False)
    return _annotated(
        rows,
        is_running=_one_if(~pending),
        has_failed=_one_if(pending & failed & ~handed_off),
        is_handed_off=_one_if(handed_off),
        waiting_since=Case(
            When(pending & ~failed & Q(due_at__gt=F("created_at")), then=F("due_at")),
            When(pending & ~failed, then=F("created_at")),
        ),
    )


def _not_events(rows: QuerySet[Any], moment: str) -> QuerySet[Any]:
    nothing = Value(0, output_field=IntegerField())
    return _annotated(
        rows,
        is_running=nothing,
        has_failed=nothing,
        is_handed_off=nothing,
        waiting_since=F(moment),
    )


def _annotated(rows: QuerySet[Any], **columns: Any) -> QuerySet[Any]:
    annotated: QuerySet[Any] = rows.annotate(**columns).values_list(*columns)
    return annotated


def _one_if(condition: Q) -> Case:
    return Case(When(condition, then=Value(1)), default=Value(0), output_field=IntegerField())
