"""Schedules: cron lines that publish exactly one event per tick.

``schedule`` declares a schedule in code; rows of EventSchedule that users create fire in the same
way. Workers write the declared schedules into the database when they start. Any worker may fire a
schedule that is due by the clock of the database.
"""

from __future__ import annotations

import json
import logging
import uuid
from datetime import datetime, timedelta, tzinfo
from itertools import islice
from typing import Any

from django.utils.timezone import get_default_timezone_name

from django_eventbus import events
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.errors.text import one_line
from django_eventbus.events import Event
from django_eventbus.exceptions import (
    EventBusError,
    InvalidScheduleError,
)
from django_eventbus.logs import about
from django_eventbus.models import EventSchedule, QueuedEvent, ScheduleOrigin
from django_eventbus.publishing.publisher import publish
from django_eventbus.scheduling.cron import SCHEDULER_HEADER, Cron, Misfire, faults
from django_eventbus.schema.names import check_name
from django_eventbus.schema.payloads import encode
from django_eventbus.store import DEFINITION, Store, default_alias, store_for

logger = logging.getLogger(__name__)

#: The maximum delay of a tick. A tick that fires later counts as missed; shorter delays are normal
#: while workers are busy.
MISSED_AFTER = timedelta(seconds=60)


def schedule(
    event: str | Event,
    *,
    cron: str,
    tz: str | tzinfo | None = None,
    payload: Any = None,
    key: str | None = None,
    queue: str | None = None,
    priority: int = 0,
    headers: dict[str, Any] | None = None,
    name: str | None = None,
    misfire: str = Misfire.FIRE_ONCE,
) -> EventSchedule:
    """Publish an event at each tick of a cron line::

        schedule("report.daily", cron="0 6 * * *", tz="Europe/Berlin")

    Call this in a module that declares handlers. ``name`` identifies the schedule in the database
    (default: the event type), ``tz`` defaults to ``TIME_ZONE``, ``misfire`` is the policy for ticks
    that passed while no worker ran: ``fire_once``, ``skip`` or ``fire_all``. ``manage.py check``
    reports invalid options. Raises InvalidScheduleError if another schedule has the same name.
    """
    type_name: Any = event
    if isinstance(event, Event):
        type_name, payload = event.event_type, events.to_payload(event)
    new = EventSchedule(
        name=type_name if name is None else name,
        origin=ScheduleOrigin.CODE,
        type=type_name,
        cron=cron,
        tz=get_default_timezone_name() if tz is None else str(tz),
        payload=payload,
        key=key,
        queue=queue,
        priority=priority,
        headers=headers,
        misfire=misfire,
    )
    return _declare(new)


def _declare(new: EventSchedule) -> EventSchedule:
    check_name(new.name, "the name of a schedule")
    known = _declared.setdefault(new.name, new)
    if _definition(known) != _definition(new):
        raise InvalidScheduleError(
            f"two schedules have the name {new.name!r}; give one of them another name="
        )
    return known


_declared: dict[str, EventSchedule] = {}


def declared() -> list[EventSchedule]:
    """Return the schedules that the code of this process declares."""
    return list(_declared.values())


def every(*, using: str | None = None) -> list[EventSchedule]:
    """Return the rows of all schedules, and declared schedules without a row, sorted by name."""
    store = store_for(using)
    rows = list(store.schedules.order_by("name"))
    names = {row.name for row in rows}
    return sorted(
        [*rows, *(each for each in declared_for(store) if each.name not in names)],
        key=lambda each: each.name,
    )


def explain(schedule: EventSchedule, count: int = 3, *, after: datetime | None = None) -> str:
    """Describe a schedule: ``at 06:00 every day, Europe/Berlin; next: 2026-03-02 06:00 CET, …``."""
    moment = store_for(schedule._state.db).read_clock() if after is None else after
    return Cron(schedule.cron, schedule.tz).explain(moment, count=count)


def coming_runs(schedule: EventSchedule, count: int, *, now: datetime) -> list[datetime]:
    """Return the next ticks that workers will fire.

    The first tick is the tick that the row stores, if the row stores one for its current cron line.
    """
    cron = Cron(schedule.cron, schedule.tz)
    if schedule.next_at is None or schedule.planned_for != schedule.plan:
        return list(islice(cron.after(now), count))
    return [schedule.next_at, *islice(cron.after(max(schedule.next_at, now)), count - 1)][:count]


def next_runs(
    schedule: EventSchedule, count: int = 3, *, after: datetime | None = None
) -> list[datetime]:
    """Return the next ticks of the cron line after a time (default: now), in UTC."""
    moment = store_for(schedule._state.db).read_clock() if after is None else after
    return list(islice(Cron(schedule.cron, schedule.tz).after(moment), count))


def enable(name: str, *, using: str | None = None) -> None:
    """Enable a schedule. Ticks that passed while it was disabled are not fired."""
    _switch(name, True, using)


def disable(name: str, *, using: str | None = None) -> None:
    """Disable a schedule until ``enable()``, even if it is declared in code."""
    _switch(name, False, using)


def _switch(name: str, enabled: bool, using: str | None) -> None:
    store = store_for(using)
    synchronize(store)
    if not store.enable_schedule(name, enabled):
        raise _unknown(name, store)


def run(name: str, *, using: str | None = None) -> QueuedEvent | None:
    """Publish the event of a schedule now, in addition to its ticks.

    This also works for a disabled schedule.
    """
    store = store_for(using)
    synchronize(store)
    row = store.schedules.filter(name=name).first()
    if row is None:
        raise _unknown(name, store)
    return publish_tick(row, store.read_clock(), event_id=None, using=store.using)


def _unknown(name: str, store: Store) -> EventBusError:
    meant = did_you_mean(name, store.schedules.values_list("name", flat=True))
    return InvalidScheduleError(f"there is no schedule {name!r}{meant}")


def declared_for(store: Store) -> list[EventSchedule]:
    """Return all declared schedules for the default database, and none for another database.

    If several databases had a schedule, each of them would publish an event for the same tick.
    """
    return declared() if store.using == default_alias() else []


def synchronize(store: Store) -> None:
    """Write the declared schedules into the database.

    Rows of schedules that were once declared, but that no code has declared for a week, are
    deleted.
    """
    valid = [each for each in declared_for(store) if _is_valid(each, store)]
    store.declare_schedules([_as_row(each) for each in valid])
    store.delete_old_schedules([each.name for each in declared_for(store)])


def _is_valid(schedule: EventSchedule, store: Store) -> bool:
    for fault in faults(schedule, deepest=store.deepest_json):
        logger.error(
            "skipped the invalid schedule %s: %s",
            one_line(schedule.name),
            one_line(str(fault)),
            extra=about_schedule(schedule),
        )
        return False
    return True


def about_schedule(schedule: EventSchedule) -> dict[str, Any]:
    """Return the ``extra`` of a log record about a schedule."""
    return about(
        event_type=schedule.type,
        queue=schedule.queue,
        key=schedule.key,
        schedule=schedule.name,
    )


def _as_row(schedule: EventSchedule) -> EventSchedule:
    """Return the schedule as a new row that can be compared with a row of the database.

    Payload and headers are encoded and parsed, so that they have the types that the database
    returns.
    """
    row = EventSchedule(**_definition(schedule))
    row.payload, row.headers = (json.loads(encode(value)) for value in (row.payload, row.headers))
    return row


def _definition(schedule: EventSchedule) -> dict[str, Any]:
    return {name: getattr(schedule, name) for name in ("name", *DEFINITION)}


def publish_tick(
    row: EventSchedule, tick: datetime, *, event_id: uuid.UUID | None, using: str
) -> QueuedEvent | None:
    """Publish the event of a schedule for a tick; a given ``event_id`` is published only once."""
    origin = {"name": row.name, "id": row.pk, "tick": tick.isoformat()}
    return publish(
        row.type,
        row.payload,
        key=row.key,
        queue=row.queue,
        priority=row.priority,
        headers={**(row.headers or {}), SCHEDULER_HEADER: origin},
        event_id=event_id,
        using=using,
    )
