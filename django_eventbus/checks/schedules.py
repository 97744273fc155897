"""Check the schedules that code declares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.checks import CheckMessage, Error, register

from django_eventbus import schedules
from django_eventbus.checks.messages import TAG, check_id, closed
from django_eventbus.errors.text import one_line
from django_eventbus.exceptions import MissingLibraryError
from django_eventbus.models import EventSchedule
from django_eventbus.scheduling import cron
from django_eventbus.store import store_for

#: For each field of a schedule, the number of the check that reports an invalid value.
SCHEDULE_FIELDS = {
    "name": "E201",
    "type": "E202",
    "cron": "E203",
    "tz": "E204",
    "payload": "E205",
    "key": "E206",
    "queue": "E207",
    "priority": "E208",
    "headers": "E209",
    "misfire": "E210",
}


@register(TAG)
def check_schedules(**kwargs: Any) -> list[CheckMessage]:
    declared = schedules.declared()
    try:
        return [message for each in declared for message in _schedule_faults(each)]
    except MissingLibraryError as error:
        wrong = f"Schedules such as {declared[0].name!r} need a library that is not installed."
        return [Error(wrong, hint=f"{error}.", id=check_id("E200"))]


def _schedule_faults(schedule: EventSchedule) -> Iterator[CheckMessage]:
    for field, wrong, right in cron.faults(schedule, deepest=store_for().deepest_json):
        yield Error(
            f"The schedule {schedule.name!r} cannot fire: {closed(one_line(wrong))}",
            hint=right,
            id=check_id(SCHEDULE_FIELDS[field]),
        )
