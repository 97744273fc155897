"""Schedules: one transaction locks a schedule, publishes its events and updates the row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any

from django.db.models import Case, CharField, F, Min, Q, QuerySet, Value, When
from django.db.models.functions import Concat

from django_eventbus.conf import settings
from django_eventbus.errors.failpoints import reached
from django_eventbus.models import EventSchedule, ScheduleOrigin
from django_eventbus.store.rows import Rows, retried

#: The columns that the code declares. A new declaration does not change the other columns.
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
#: The columns that a worker writes when it fires a schedule.
PLANNED = ("planned_for", "next_at", "last_at")
DELETE_AFTER = 7 * 24 * 3600.0

#: The SQL expression of the property ``EventSchedule.plan``.
_PLAN = Case(
    When(enabled=True, then=Concat("cron", Value(" "), "tz")),
    default=Value(""),
    output_field=CharField(),
)


class Schedules(Rows):
    """Every worker fires schedules: there is no leader and no beat process."""

    @property
    def schedules(self) -> QuerySet[EventSchedule]:
        return EventSchedule.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    def schedules_for(self, declared: Collection[str]) -> QuerySet[EventSchedule]:
        """Return the schedules of a worker: created by users, or declared by the worker's code."""
        return self.schedules.filter(~Q(origin=ScheduleOrigin.CODE) | Q(name__in=list(declared)))

    def due_schedules(
        self, declared: Collection[str], *, excluding: Collection[int], at_most: int
    ) -> list[int]:
        """Return the ids of rows whose tick is due, or whose next tick has to be computed."""
        return list(
            self._due(self.schedules_for(declared))
            .exclude(id__in=list(excluding))
            .order_by(F("next_at").asc(nulls_first=True))
            .values_list("id", flat=True)[:at_most]
        )

    def _due(self, rows: QuerySet[EventSchedule]) -> QuerySet[EventSchedule]:
        """Return the rows that a worker has to fire or to plan.

        These are rows whose tick is due, rows whose plan has changed, and rows whose last tick is
        in the future. A last tick in the future was fired while the clock was wrong.
        """
        from_the_future = Q(last_at__gt=self.now, next_at__gt=F("last_at"))
        is_due = Q(enabled=True) & (Q(next_at__lte=self.now) | from_the_future)
        return rows.filter(~Q(planned_for=_PLAN) | is_due)

    def planned_schedules(
        self, declared: Collection[str], *, above: int, at_most: int
    ) -> list[EventSchedule]:
        """Return schedules that wait for a tick in the future, in the order of their row ids."""
        waiting = self.schedules_for(declared).filter(
            id__gt=above, enabled=True, next_at__gt=self.now
        )
        return list(waiting.order_by("id")[:at_most])

    def next_tick(self, declared: Collection[str], *, excluding: Collection[int]) -> float | None:
        """Return the seconds until the next tick, 0 if it is due, or None if no tick is known."""
        others = self.schedules_for(declared).exclude(id__in=list(excluding))
        at = others.aggregate(at=Min("next_at"))["at"]
        return None if at is None else max(0.0, (at - self.read_clock()).total_seconds())

    @retried
    def fire_schedules(
        self,
        ids: Collection[int],
        fire: Callable[[EventSchedule, datetime], dict[str, Any] | None],
        *,
        only_due: bool = True,
    ) -> int:
        """Lock due schedules, let ``fire`` publish their events, and write the columns it returns.

        All of this is one transaction: if the worker dies before the commit, another worker fires
        the ticks. Rows that another worker has locked, and rows for which ``fire`` returns None,
        stay unchanged. With ``only_due=False``, ``fire`` is also called for rows that are not due.
        Return the number of changed rows.
        """
        with self.atomic():
            rows = self.schedules.filter(id__in=list(ids))
            found = list(self.locked((self._due(rows) if only_due else rows).order_by("next_at")))
            now = self.read_clock() if found else None
            changes = {row.pk: now and fire(row, now) for row in found}
            changed = [row for row in found if changes[row.pk]]
            for row in changed:
                for name, value in (changes[row.pk] or {}).items():
                    setattr(row, name, value)
            if changed:
                reached("schedule.published")
                EventSchedule.objects.using(self.using).bulk_update(changed, PLANNED)
        if changed:
            reached("schedule.committed")
        return len(changed)

    @retried
    def declare_schedules(self, declared: Sequence[EventSchedule]) -> None:
        """Write declared schedules. The rows are read first, because usually none has to change."""
        rows = {row.name: row for row in self.schedules.filter(name__in=_names(declared))}
        new = [each for each in declared if each.name not in rows]
        if new:
            EventSchedule.objects.using(self.using).bulk_create(new, ignore_conflicts=True)
        for each in declared:
            row = rows.get(each.name)
            definition = {name: getattr(each, name) for name in DEFINITION}
            if row and definition != {name: getattr(row, name) for name in DEFINITION}:
                self.schedules.filter(id=row.pk).update(**definition)

    def delete_old_schedules(self, declared: Collection[str]) -> None:
        """Delete schedules that no code has declared for a week.

        Workers fire declared schedules, so a schedule whose tick is a week late is not declared any
        more. The declarations of this worker are not enough to decide this, because other workers
        may declare more schedules during a deployment.
        """
        undeclared = self.schedules.filter(
            origin=ScheduleOrigin.CODE, next_at__lt=self.after(-DELETE_AFTER)
        ).exclude(name__in=list(declared))
        if undeclared.exists():
            undeclared.delete()

    def enable_schedule(self, name: str, enabled: bool) -> bool:
        """Enable or disable a schedule; return False if no schedule has this name.

        Ticks that pass while the schedule is disabled do not count as missed.
        """
        changed = self.schedules.filter(name=name).exclude(enabled=enabled)
        changed.update(enabled=enabled, next_at=None, planned_for="")
        return self.schedules.filter(name=name).exists()


def _names(schedules: Sequence[EventSchedule]) -> list[str]:
    return [each.name for each in schedules]
