"""Checks of schedules: EB023 to EB025."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from django_eventbus.diagnosis.examination import Bus, Result, check, fail, ok, warn
from django_eventbus.models import ScheduleOrigin
from django_eventbus.schedules import declared_for
from django_eventbus.status import in_words

#: How late a tick may be before the check fails.
TOO_LATE = timedelta(hours=1)
DISABLED_FOR = timedelta(days=30)


@check(
    "EB023",
    title="Late schedules",
    symptom="A scheduled event is published minutes or hours after its time.",
    cause="No live worker fires schedules: no worker is running, all were started without the "
    "extra cron, or publishing the event of the schedule fails.",
    fix="Read the log of the workers for the name of the schedule, and start a worker if none is "
    "running.",
    reads_status_only=True,
    is_a_problem=True,
)
def late_schedules(bus: Bus) -> Iterator[Result]:
    late = [(each, each.next_at) for each in bus.status.late_schedules if each.next_at]
    if not late:
        yield ok("no schedule is late")
    for each, next_at in late:
        late_for = bus.now - next_at
        report = fail if late_for > TOO_LATE else warn
        yield report(
            f"the schedule {each.name} is {in_words(late_for.total_seconds())} late",
            fix=f"Read the log of the workers, then run: manage.py event_schedules run {each.name}",
        )


@check(
    "EB024",
    title="Schedules that never fire",
    symptom="A schedule exists in code or in the admin, but its event is never published.",
    cause="The row of the schedule has no next run: no worker with the current code has started, "
    "the cron line cannot fire, or no code declares the schedule any more.",
    fix="Restart the workers with the current code, or correct the cron line. A schedule that no "
    "code declares any more needs no fix: a worker that starts deletes its row when its tick is "
    "a week late.",
)
def schedules_that_never_fire(bus: Bus) -> Iterator[Result]:
    declared = {each.name for each in declared_for(bus.store)}
    known = {each.name for each in bus.schedules}
    enabled = [each for each in bus.schedules if each.enabled]
    undeclared = {
        each.name
        for each in enabled
        if each.origin == ScheduleOrigin.CODE and each.name not in declared
    }
    unplanned = {each.name for each in enabled if each.next_at is None} - undeclared
    for name in sorted(declared - known):
        yield warn(
            f"no worker has stored the schedule {name}, which the code declares",
            fix="Restart the workers with the current code: manage.py run_event_worker",
        )
    for name in sorted(unplanned):
        yield warn(
            f"the schedule {name} has no next run",
            fix=f"Check its cron line with: manage.py event_schedules list ({name})",
        )
    for name in sorted(undeclared):
        yield warn(
            f"the code of this process does not declare the schedule {name}; only a worker whose "
            "code declares it fires it",
            fix="Declare it again with schedule(). If it is not needed any more, wait: a worker "
            "that starts deletes its row when its tick is a week late. To keep the row without "
            f"this warning, run: manage.py event_schedules disable {name}",
        )
    if not undeclared and not unplanned and declared <= known:
        yield ok(f"{len(enabled)} enabled schedules have a next run")


@check(
    "EB025",
    title="Schedules disabled for long",
    symptom="A scheduled event has not been published for weeks.",
    cause="An operator disabled the schedule and has not enabled it again.",
    fix="Enable it with manage.py event_schedules enable. If it is not needed and was not declared "
    "in code, delete it in the admin.",
)
def disabled_schedules(bus: Bus) -> Iterator[Result]:
    off = [(each, each.last_at) for each in bus.schedules if not each.enabled]
    long = [(each, last) for each, last in off if last and bus.now - last > DISABLED_FOR]
    if not long:
        yield ok(f"no schedule has been disabled for more than {DISABLED_FOR.days} days")
    for each, last in long:
        silent = in_words((bus.now - last).total_seconds())
        yield warn(
            f"the schedule {each.name} is disabled and last ran {silent} ago",
            fix=f"manage.py event_schedules enable {each.name}",
        )
