"""Schedules: who fires a tick holds the row, and moves it in the transaction of its event."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any

from django.db.models import Case, CharField, F, Min, Q, QuerySet, Value, When
from django.db.models.functions import Concat

from django_eventbus.conf import settings
from django_eventbus.failpoints import reached
from django_eventbus.models import EventSchedule, ScheduleOrigin
from django_eventbus.store.rows import Rows, retried

#: What the code says about a schedule; all else belongs to the row.
DEFINITION = (
    "type",
    "cron",
    "tz",
    "payload",
    "key",
    "queue",
    "priority",
    "headers",
    "misfire",
    "origin",
)
FORGET_AFTER = 7 * 24 * 3600.0

#: ``EventSchedule.plan`` in SQL.
_PLAN = Case(
    When(enabled=True, then=Concat("cron", Value(" "), "tz")),
    default=Value(""),
    output_field=CharField(),
)


class Schedules(Rows):
    """Every worker looks after them: no leader, no beat process."""

    @property
    def schedules(self) -> QuerySet[EventSchedule]:
        return EventSchedule.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    def schedules_for(self, declared: Collection[str]) -> QuerySet[EventSchedule]:
        """Those that a worker fires whose code declares these: the others of code are not its."""
        return self.schedules.filter(~Q(origin=ScheduleOrigin.CODE) | Q(name__in=list(declared)))

    def due_schedules(self, declared: Collection[str]) -> list[int]:
        """Rows whose tick has come, or whose next tick is not known (any more)."""
        return list(
            self._due(self.schedules_for(declared))
            .order_by(F("next_at").asc(nulls_first=True))
            .values_list("id", flat=True)
        )

    def _due(self, rows: QuerySet[EventSchedule]) -> QuerySet[EventSchedule]:
        return rows.filter(~Q(planned_for=_PLAN) | Q(enabled=True, next_at__lte=self.now))

    def next_tick(self, declared: Collection[str], *, besides: Collection[int]) -> float | None:
        """Seconds until the next one, 0 if it came since the last look; None if there is none."""
        others = self.schedules_for(declared).exclude(id__in=list(besides))
        at = others.aggregate(at=Min("next_at"))["at"]
        return None if at is None else max(0.0, (at - self.read_clock()).total_seconds())

    @retried
    def attend_schedule(
        self, row_id: int, attend: Callable[[EventSchedule, datetime], dict[str, Any]]
    ) -> bool:
        """Lock a schedule that is due, let ``attend`` publish its events, write what it returns.

        All in one transaction: dying before its commit leaves the tick to the next who looks,
        after it the row has moved on. False if somebody else is at it, or was.
        """
        with self.atomic():
            row = self.locked(self._due(self.schedules.filter(id=row_id))).first()
            if row is None:
                return False
            changes = attend(row, self.read_clock())
            reached("schedule.published")
            self.schedules.filter(id=row_id).update(**changes)
        reached("schedule.committed")
        return True

    @retried
    def declare_schedules(self, declared: Sequence[EventSchedule]) -> None:
        """Write what code says. Looks first: usually every row is as it should be."""
        rows = {row.name: row for row in self.schedules.filter(name__in=_names(declared))}
        new = [each for each in declared if each.name not in rows]
        if new:
            EventSchedule.objects.using(self.using).bulk_create(new, ignore_conflicts=True)
        for each in declared:
            row = rows.get(each.name)
            definition = {name: getattr(each, name) for name in DEFINITION}
            if row and definition != {name: getattr(row, name) for name in DEFINITION}:
                self.schedules.filter(id=row.pk).update(**definition)

    def forget_schedules(self, declared: Collection[str]) -> None:
        """Delete what was declared in code and has been nobody's for long.

        Whoever still declares it fires it, so it would not be overdue. The code of this worker
        alone proves nothing: during a deployment old workers start too.
        """
        nobodys = self.schedules.filter(
            origin=ScheduleOrigin.CODE, next_at__lt=self.after(-FORGET_AFTER)
        ).exclude(name__in=list(declared))
        if nobodys.exists():
            nobodys.delete()

    def enable_schedule(self, name: str, enabled: bool) -> bool:
        """False if there is none. Ticks that pass while it is disabled are not missed ones."""
        changed = self.schedules.filter(name=name).exclude(enabled=enabled)
        changed.update(enabled=enabled, next_at=None, planned_for="")
        return self.schedules.filter(name=name).exists()


def _names(schedules: Sequence[EventSchedule]) -> list[str]:
    return [each.name for each in schedules]
