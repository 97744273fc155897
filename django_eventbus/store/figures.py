"""Figures: how much waits where, by counts that stop early and never scan a table."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from django.db.models import Case, DateTimeField, F, IntegerField, Q, QuerySet, Value, When

from django_eventbus.conf import settings
from django_eventbus.models import QueuedStatus
from django_eventbus.store.rows import NEVER, PARKED, Rows


class Sample(NamedTuple):
    """What was counted of one kind of rows, before counting stopped."""

    total: int
    running: int
    #: Not running, and some handler has failed before.
    failed: int
    #: Since when the oldest could be handled that neither runs nor has failed.
    waiting_since: datetime | None


class Figures(Rows):
    """Each kind of rows has an index of its own, and is counted along it."""

    def samples(self, *, at_most: int) -> dict[str, Sample]:
        """All of them in one statement; each counts ``at_most`` rows."""
        kinds = {
            "ready": self._ready_rows(),
            "unrouted": self._unrouted_rows(),
            "laned": self._laned_rows(),
            "delayed": self._delayed_rows(),
            "parked": self._parked_rows(),
            "parked_lanes": self._lanes_from(PARKED, NEVER),
            "blocked_lanes": self._lanes_from(NEVER, None),
            "dead": self._dead_rows(),
        }
        counts, parameters = [], []
        for name, rows in kinds.items():
            select, given = rows[:at_most].query.get_compiler(using=self.using).as_sql()
            counts.append(
                "SELECT %s, COUNT(*), SUM(is_running), SUM(has_failed), MIN(waiting_since) "
                f"FROM ({select}) AS sample"
            )
            parameters += [name, *given]
        with self.connection.cursor() as cursor:
            cursor.execute(" UNION ALL ".join(counts), parameters)
            found = {name: rest for name, *rest in cursor.fetchall()}
        return {name: self._as_sample(*found[name]) for name in kinds}

    def _as_sample(self, total: int, running: Any, failed: Any, since: Any) -> Sample:
        moment = None if since is None else self._to_moment(since)
        return Sample(int(total), int(running or 0), int(failed or 0), moment)

    def _to_moment(self, value: Any) -> datetime:
        """As the ORM would read it: an aggregate of our own has no field to tell how."""
        expression = Value(None, output_field=DateTimeField())
        for convert in self.connection.ops.get_db_converters(expression):
            value = convert(value, expression, self.connection)
        assert isinstance(value, datetime)
        return value

    # The orders are those of indexes, and of them alone. Without them the planner is free to read
    # the table from its start, through all that happens to lie there, until it has enough.

    def _ready_rows(self) -> QuerySet[Any]:
        rows = self.queued.filter(key__isnull=True, available_at__isnull=True)
        return _events(rows).order_by("namespace", "queue", "-priority", "id")

    def _unrouted_rows(self) -> QuerySet[Any]:
        rows = self.queued.filter(
            key__isnull=False, lane_id__isnull=True, available_at__isnull=True
        )
        return _events(rows).order_by("namespace", "queue", "id")

    def _laned_rows(self) -> QuerySet[Any]:
        return _events(self.queued.filter(lane_id__isnull=False)).order_by("lane_id", "id")

    def _delayed_rows(self) -> QuerySet[Any]:
        rows = self.queued.filter(available_at__isnull=False, available_at__lt=PARKED)
        return _events(rows).order_by("namespace", "available_at")

    def _parked_rows(self) -> QuerySet[Any]:
        rows = self.queued.filter(available_at__isnull=False, available_at__gte=PARKED)
        return _events(rows).order_by("namespace", "available_at")

    def _lanes_from(self, first: datetime, end: datetime | None) -> QuerySet[Any]:
        rows = self.lanes.filter(queue__in=list(settings.QUEUES), ready_at__gte=first)
        return _others(rows if end is None else rows.filter(ready_at__lt=end), "ready_at")

    def _dead_rows(self) -> QuerySet[Any]:
        return _others(self.dead, "finished_at").order_by("namespace", "finished_at", "id")


def _events(rows: QuerySet[Any]) -> QuerySet[Any]:
    pending = Q(status=QueuedStatus.PENDING)
    failed = Q(deliveries__isnull=False)
    return _counted(
        rows,
        is_running=_one_if(~pending),
        has_failed=_one_if(pending & failed),
        waiting_since=Case(
            When(pending & ~failed & Q(due_at__gt=F("created_at")), then=F("due_at")),
            When(pending & ~failed, then=F("created_at")),
        ),
    )


def _others(rows: QuerySet[Any], moment: str) -> QuerySet[Any]:
    nothing = Value(0, output_field=IntegerField())
    return _counted(rows, is_running=nothing, has_failed=nothing, waiting_since=F(moment))


def _counted(rows: QuerySet[Any], **columns: Any) -> QuerySet[Any]:
    counted: QuerySet[Any] = rows.annotate(**columns).values_list(*columns)
    return counted


def _one_if(condition: Q) -> Case:
    return Case(When(condition, then=Value(1)), default=Value(0), output_field=IntegerField())
