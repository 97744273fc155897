"""Fire schedules: each worker looks for due ticks, and one worker publishes the event of a tick."""

from __future__ import annotations

import logging
import time
import uuid
from datetime import datetime
from itertools import takewhile
from typing import Any

from django_eventbus.errors import failures
from django_eventbus.errors.failpoints import reached
from django_eventbus.errors.text import one_line
from django_eventbus.exceptions import BackpressureError, EventBusError
from django_eventbus.logs import about
from django_eventbus.models import EventSchedule
from django_eventbus.publishing.limits import without_waiting
from django_eventbus.schedules import (
    MISSED_AFTER,
    about_schedule,
    declared_for,
    publish_tick,
    synchronize,
)
from django_eventbus.scheduling.cron import Cron, Misfire
from django_eventbus.store import Store, is_outage

logger = logging.getLogger(__name__)

QUERY_EVERY = 1.0
RETRY_FAILED_EVERY = 60.0
#: A worker fires schedules for at most this number of seconds, then claims events again.
FIRE_FOR = 0.25
#: The largest number of schedules that are fired in one transaction.
CHUNK = 50
#: Seconds between two reviews of planned ticks, and the number of rows of one review.
REVIEW_EVERY = 10.0
REVIEW_CHUNK = 200
#: With the misfire policy ``fire_all``, only this number of missed ticks is fired: the latest ones.
MAX_MISSED_TICKS = 100
#: The first argument of uuid5() for the event id of a tick. All workers derive the same event id
#: from a tick, so the database refuses a second event for the tick.
TICK_IDS = uuid.UUID("6d1a3f6e-6a0c-5d0b-9d0e-0f3b8f7c2a41")
#: Seconds to wait if no tick is known.
NO_TICK = 3600.0


class Scheduler:
    """Fires due schedules for one worker. ``fire_due`` is cheap if no schedule is due.

    ``fire_due`` does not wait if a queue is full, and its duration is limited, because the worker
    claims no events meanwhile.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._synchronized = False
        self._query_at = self._next_at = self._review_at = 0.0
        #: Row ids of schedules that failed or whose queue is full, with the time of the next try.
        self._retry_at: dict[int, float] = {}
        #: Row ids of schedules whose queue is full. For each of them, one warning is logged.
        self._full: set[int] = set()
        #: The id of the last row that was reviewed.
        self._reviewed = 0

    def fire_due(self) -> None:
        """Fire due schedules. Queries the database at most once a second, unless a tick is due."""
        now = time.monotonic()
        if now < self._query_at:
            return
        if not self._synchronized:
            synchronize(self.store)
            self._synchronized = True
        if now >= self._review_at:
            self._review_at = now + REVIEW_EVERY
            self.review()
        until = now + FIRE_FOR
        while self.fire_some(until):
            if time.monotonic() > until:
                # More schedules may be due, so the dispatcher must call again without a wait.
                self._next_at = 0.0
                return
        self._query_at = time.monotonic() + min(QUERY_EVERY, self.wait())

    def declared(self) -> tuple[str, ...]:
        """Return the names of the schedules that the code of this process declares."""
        return tuple(each.name for each in declared_for(self.store))

    def rows_to_retry(self) -> frozenset[int]:
        """Return the row ids of schedules that failed or whose queue is full."""
        return frozenset(self._retry_at)

    def has_other_duties(self, tick: float | None) -> bool:
        """Return whether ``fire_due`` has work although no schedule is due.

        Such work is: write declared schedules, try failed schedules again, review planned ticks.
        """
        now = time.monotonic()
        is_late = any(at <= now for at in self._retry_at.values())
        return not self._synchronized or is_late or (tick is not None and now >= self._review_at)

    def expect(self, tick: float | None) -> None:
        """Record the result of a query: the next tick is in ``tick`` seconds, or unknown (None)."""
        now = time.monotonic()
        self._query_at = now
        self._next_at = min([now + (NO_TICK if tick is None else tick), *self._retry_at.values()])

    def wait(self) -> float:
        """Return the seconds until the next known tick, or until a schedule is tried again."""
        return max(0.0, self._next_at - time.monotonic())

    def fire_some(self, until: float = float("inf")) -> bool:
        """Fire some due schedules; return whether any was fired. Errors are logged."""
        names = self.declared()
        self._retry_at = {pk: at for pk, at in self._retry_at.items() if at > time.monotonic()}
        due = self.store.due_schedules(names, excluding=self._retry_at, at_most=CHUNK)
        reached("schedule.due")
        fired = self._fire(due, until) if due else 0
        wait = self.store.next_tick(names, excluding={*due, *self._retry_at})
        self._next_at = time.monotonic() + (NO_TICK if wait is None else wait)
        if self._retry_at:
            self._next_at = min(self._next_at, *self._retry_at.values())
        return bool(fired)

    def review(self) -> None:
        """Correct planned ticks that were computed while the clock was wrong."""
        names = self.declared()
        rows = self.store.planned_schedules(names, above=self._reviewed, at_most=REVIEW_CHUNK)
        self._reviewed = rows[-1].pk if len(rows) == REVIEW_CHUNK else 0
        now = self.store.read_clock()
        wrong = [row.pk for row in rows if _allowed(row, now) != row.next_at]
        if wrong:
            self.store.fire_schedules(wrong, self._replan, only_due=False)

    def _fire(self, due: list[int], until: float) -> int:
        started = False

        def fire(row: EventSchedule, now: datetime) -> dict[str, Any] | None:
            nonlocal started
            if started and time.monotonic() > until:
                return None
            started = True
            return self._fire_row(row, now)

        try:
            with without_waiting():
                return self.store.fire_schedules(due, fire)
        except Exception as error:
            if is_outage(error):
                raise
            if len(due) > 1:
                # One schedule failed, so the transaction of all schedules was rolled back. Fire
                # each schedule again in its own transaction, so that the others can succeed.
                return sum(self._fire([row_id], until) for row_id in due)
            self._retry_at[due[0]] = time.monotonic() + RETRY_FAILED_EVERY
            logger.error(
                "the schedule with the row id %s failed, retrying in a minute: %s",
                due[0],
                failures.in_a_line(error),
                extra=about(),
            )
            return 0

    def _fire_row(self, row: EventSchedule, now: datetime) -> dict[str, Any] | None:
        """Publish the due ticks of a locked schedule; return the columns to update."""
        if row.planned_for != row.plan:
            return {"planned_for": row.plan, "next_at": _first_tick(row, now)}
        assert row.next_at is not None
        if row.next_at > now:
            return self._replan(row, now)
        cron = Cron(row.cron, row.tz)
        ticks = chosen_ticks(cron, row.next_at, now, Misfire(row.misfire))
        done = list(takewhile(lambda tick: self._fire_tick(row, tick, now), ticks))
        if len(done) < len(ticks) and not done:
            return None
        if ticks[:1] != [row.next_at]:
            logger.warning(
                "schedule %s missed ticks since %s; events published: %s",
                one_line(row.name),
                row.next_at,
                len(done),
                extra=about_schedule(row),
            )
        return {
            "next_at": cron.next_after(now) if len(done) == len(ticks) else ticks[len(done)],
            "last_at": done[-1] if done else row.last_at,
        }

    def _fire_tick(self, row: EventSchedule, tick: datetime, now: datetime) -> bool:
        """Publish a tick; return False if the queue is full, which leaves the tick due."""
        if row.last_at is not None and tick <= row.last_at <= now:
            return True  # This tick was fired before the clock was set back.
        try:
            publish_tick(row, tick, event_id=tick_id(row, tick), using=self.store.using)
        except BackpressureError as error:
            self._retry_at[row.pk] = time.monotonic() + QUERY_EVERY
            if row.pk not in self._full:
                self._full.add(row.pk)
                logger.warning(
                    "schedule %s waits because the queue is full: %s",
                    one_line(row.name),
                    failures.in_a_line(error),
                    extra=about_schedule(row),
                )
            return False
        self._full.discard(row.pk)
        return True

    @staticmethod
    def _replan(row: EventSchedule, now: datetime) -> dict[str, Any] | None:
        """Return the columns to update, or None if the planned tick is right.

        A tick that was planned while the clock was wrong may be too late.
        """
        allowed = _allowed(row, now)
        if allowed == row.next_at:
            return None
        logger.warning(
            "schedule %s was planned for %s while the clock was wrong; its next tick is %s",
            one_line(row.name),
            row.next_at,
            allowed,
            extra=about_schedule(row),
        )
        return {"next_at": allowed}


def _allowed(row: EventSchedule, now: datetime) -> datetime | None:
    """Return the next tick of the cron line, or the planned tick if that is earlier.

    An earlier planned tick is kept, because an operator may have set it.
    """
    try:
        first = Cron(row.cron, row.tz).next_after(now)
    except EventBusError:
        return row.next_at
    return min((each for each in (first, row.next_at) if each is not None), default=None)


def chosen_ticks(cron: Cron, first: datetime, now: datetime, misfire: Misfire) -> list[datetime]:
    """Return the ticks from ``first`` to now that need an event. Usually there is one."""
    if misfire == Misfire.FIRE_ALL:
        return cron.latest(first, now, most=MAX_MISSED_TICKS)
    latest = cron.latest(first, now, most=1)
    missed = misfire == Misfire.SKIP and now - latest[0] > MISSED_AFTER
    return [] if missed else latest


def tick_id(row: EventSchedule, tick: datetime) -> uuid.UUID:
    return uuid.uuid5(TICK_IDS, f"{row.namespace}/{row.name}/{tick.timestamp()}")


def _first_tick(row: EventSchedule, now: datetime) -> datetime | None:
    return Cron(row.cron, row.tz).next_after(now) if row.enabled else None
