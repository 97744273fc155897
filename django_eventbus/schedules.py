"""Events by the clock: cron lines that publish exactly one event per tick.

``schedule`` declares one in code; rows of EventSchedule made by hand count as well. Workers write
declared ones into the database when they start, and each of them fires what is due. The clock is
the database's.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from datetime import datetime, timedelta, tzinfo
from itertools import islice
from typing import Any

from django.utils.timezone import get_default_timezone_name

from django_eventbus import events, failures
from django_eventbus.cron import SCHEDULER_HEADER, Cron, Misfire, faults
from django_eventbus.events import Event, check_name
from django_eventbus.exceptions import EventBusError, InvalidScheduleError
from django_eventbus.failpoints import reached
from django_eventbus.models import EventSchedule, QueuedEvent, ScheduleOrigin
from django_eventbus.publishing import publish
from django_eventbus.registry import did_you_mean
from django_eventbus.store import Store, default_alias, is_trouble, store_for
from django_eventbus.store.schedules import DEFINITION

logger = logging.getLogger(__name__)

LOOK_EVERY = 1.0
TRY_BROKEN_EVERY = 60.0
#: A tick this late was missed; until then the workers were just busy.
MISSED_AFTER = timedelta(seconds=60)
#: The most that ``fire_all`` makes up for, the latest ones.
MOST_MADE_UP = 100
#: Names every tick the same for all workers, so that the database refuses a second one.
TICKS = uuid.UUID("6d1a3f6e-6a0c-5d0b-9d0e-0f3b8f7c2a41")


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
    """Publish this event whenever the cron line says so, in that time zone::

        schedule("report.daily", cron="0 6 * * *", tz="Europe/Berlin")

    Belongs where handlers are declared. ``name`` is what the database knows it by (default: the
    event type), ``tz`` defaults to the project's ``TIME_ZONE``, ``misfire`` says what becomes of
    ticks that passed while no worker ran: ``fire_once``, ``skip`` or ``fire_all``.

    What is wrong with it is told by ``manage.py check``; a name that another schedule has raises
    InvalidScheduleError at once.
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
    check_name(new.name, "the name of a schedule")
    known = _declared.setdefault(new.name, new)
    if _definition(known) != _definition(new):
        raise InvalidScheduleError(
            f"two schedules claim the name {new.name!r}; give one of them another name="
        )
    return known


_declared: dict[str, EventSchedule] = {}


def declared() -> list[EventSchedule]:
    """The schedules of this process's code."""
    return list(_declared.values())


def every(*, using: str | None = None) -> list[EventSchedule]:
    """All schedules by name: the rows, and what is declared here and no worker has written yet."""
    store = store_for(using)
    rows = list(store.schedules.order_by("name"))
    names = {row.name for row in rows}
    return sorted(
        [*rows, *(each for each in declared_for(store) if each.name not in names)],
        key=lambda each: each.name,
    )


def explain(schedule: EventSchedule, count: int = 3, *, after: datetime | None = None) -> str:
    """In words: ``at 06:00 every day, Europe/Berlin; next: 2026-03-02 06:00 CET, …``."""
    moment = store_for(schedule._state.db).read_clock() if after is None else after
    return Cron(schedule.cron, schedule.tz).explain(moment, count=count)


def next_runs(
    schedule: EventSchedule, count: int = 3, *, after: datetime | None = None
) -> list[datetime]:
    """The next ticks, in UTC."""
    moment = store_for(schedule._state.db).read_clock() if after is None else after
    return list(islice(Cron(schedule.cron, schedule.tz).after(moment), count))


def enable(name: str, *, using: str | None = None) -> None:
    """Fire again, from its next tick on: what passed while it was disabled is not made up for."""
    _switch(name, True, using)


def disable(name: str, *, using: str | None = None) -> None:
    """Do not fire until enabled again, whatever the code says."""
    _switch(name, False, using)


def _switch(name: str, enabled: bool, using: str | None) -> None:
    store = store_for(using)
    synchronise(store)
    if not store.enable_schedule(name, enabled):
        raise _unknown(name, store)


def run(name: str, *, using: str | None = None) -> QueuedEvent | None:
    """Publish its event now, beside its ticks, whether it is enabled or not."""
    store = store_for(using)
    synchronise(store)
    row = store.schedules.filter(name=name).first()
    if row is None:
        raise _unknown(name, store)
    return _publish(row, store.read_clock(), event_id=None, using=store.using)


def _unknown(name: str, store: Store) -> EventBusError:
    meant = did_you_mean(name, store.schedules.values_list("name", flat=True))
    return InvalidScheduleError(f"there is no schedule {name!r}{meant}")


def declared_for(store: Store) -> list[EventSchedule]:
    """Code schedules for one database: that of events which name none. Else each would fire it."""
    return declared() if store.using == default_alias() else []


def synchronise(store: Store) -> None:
    """Write the definitions of this process's code into the database, and forget old ones."""
    fit = [each for each in declared_for(store) if _is_fit(each, store)]
    store.declare_schedules([_as_row(each) for each in fit])
    store.forget_schedules([each.name for each in declared_for(store)])


def _is_fit(schedule: EventSchedule, store: Store) -> bool:
    for fault in faults(schedule, deepest=store.deepest_json):
        logger.error("the schedule %s is left out: %s", schedule, fault)
        return False
    return True


def _as_row(schedule: EventSchedule) -> EventSchedule:
    """As the database will give it back, so that both can be compared."""
    row = EventSchedule(**_definition(schedule))
    row.payload, row.headers = (
        json.loads(events.encode(value)) for value in (row.payload, row.headers)
    )
    return row


def _definition(schedule: EventSchedule) -> dict[str, Any]:
    return {name: getattr(schedule, name) for name in ("name", *DEFINITION)}


class Scheduler:
    """A worker's share in firing: cheap to ask, also when nothing is due."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._synchronised = False
        self._look_at = self._next_at = 0.0
        #: Rows that failed, and when to try them again.
        self._broken: dict[int, float] = {}

    def fire_due(self) -> None:
        """At most once a second, unless a tick is known to be due."""
        if time.monotonic() < self._look_at:
            return
        if not self._synchronised:
            synchronise(self.store)
            self._synchronised = True
        while self.look():
            pass  # only a look that found nothing knows when the next tick is
        self._look_at = time.monotonic() + min(LOOK_EVERY, self.wait())

    def wait(self) -> float:
        """Seconds until the next tick that is known, as far as is worth waking up for."""
        return max(0.0, self._next_at - time.monotonic())

    def look(self) -> bool:
        """Fire what is due; whether there was anything. Fails for no schedule's sake."""
        names = [each.name for each in declared_for(self.store)]
        due = self.store.due_schedules(names)
        reached("schedule.due")
        fired = [row_id for row_id in due if self._may_try(row_id) and self._fire(row_id)]
        wait = self.store.next_tick(names, besides=due)
        self._next_at = time.monotonic() + (A_LONG_TIME if wait is None else wait)
        return bool(fired)

    def _may_try(self, row_id: int) -> bool:
        return self._broken.get(row_id, 0.0) <= time.monotonic()

    def _fire(self, row_id: int) -> bool:
        try:
            return self.store.attend_schedule(row_id, self._attend)
        except Exception as error:
            if is_trouble(error):
                raise
            self._broken[row_id] = time.monotonic() + TRY_BROKEN_EVERY
            logger.error(
                "schedule %s cannot fire, tried again in a minute: %s",
                row_id,
                failures.in_a_line(error),
            )
            return False

    def _attend(self, row: EventSchedule, now: datetime) -> dict[str, Any]:
        """Publish what is due of a schedule that is locked; what to write into its row."""
        if row.planned_for != row.plan:
            return {"planned_for": row.plan, "next_at": _first_tick(row, now)}
        assert row.next_at is not None
        cron = Cron(row.cron, row.tz)
        ticks = chosen_ticks(cron, row.next_at, now, Misfire(row.misfire))
        for tick in ticks:
            _publish(row, tick, event_id=tick_id(row, tick), using=self.store.using)
        if ticks[:1] != [row.next_at]:
            logger.warning("%s missed ticks since %s: %s published", row, row.next_at, len(ticks))
        return {
            "next_at": cron.next_after(now),
            "last_at": ticks[-1] if ticks else row.last_at,
        }


A_LONG_TIME = 3600.0


def chosen_ticks(cron: Cron, first: datetime, now: datetime, misfire: Misfire) -> list[datetime]:
    """Which of the ticks from ``first`` to now get an event. Usually there is just the first."""
    if misfire == Misfire.FIRE_ALL:
        return cron.latest(first, now, most=MOST_MADE_UP)
    latest = cron.latest(first, now, most=1)
    missed = misfire == Misfire.SKIP and now - latest[0] > MISSED_AFTER
    return [] if missed else latest


def tick_id(row: EventSchedule, tick: datetime) -> uuid.UUID:
    return uuid.uuid5(TICKS, f"{row.namespace}/{row.name}/{tick.timestamp()}")


def _first_tick(row: EventSchedule, now: datetime) -> datetime | None:
    return Cron(row.cron, row.tz).next_after(now) if row.enabled else None


def _publish(
    row: EventSchedule, tick: datetime, *, event_id: uuid.UUID | None, using: str
) -> QueuedEvent | None:
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
