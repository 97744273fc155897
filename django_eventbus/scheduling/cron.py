"""Cron arithmetic: the ticks of a cron line, its description, and the validation of schedules.

No function reads a clock: times are parameters. Ticks are in UTC. The library ``cronsim`` parses
cron lines and follows Debian's cron. docs/howto/schedules.md explains how schedules fire when
daylight saving time begins or ends.
"""

from __future__ import annotations

import difflib
import zoneinfo
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import islice, takewhile
from types import ModuleType
from typing import Any, NamedTuple

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _

from django_eventbus.conf import settings
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.exceptions import EventBusError, InvalidScheduleError, MissingLibraryError
from django_eventbus.schema.names import MAX_NAME_LENGTH, check_name
from django_eventbus.schema.payloads import check_payload

FIRST_LOOK_BACK = timedelta(minutes=1)
MAX_PRIORITY = 32767
#: The header with the name and tick of the schedule. Schedules may set any other header.
SCHEDULER_HEADER = "scheduler"


class Misfire(TextChoices):
    """The policy for ticks that passed while no worker ran."""

    FIRE_ONCE = "fire_once", _("fire the latest")
    SKIP = "skip", _("skip them")
    FIRE_ALL = "fire_all", _("fire them all")


class Cron:
    """A cron line in a time zone.

    Raises InvalidScheduleError for an invalid line, a line that can never fire, and an unknown time
    zone.
    """

    def __init__(self, line: str, tz: str) -> None:
        self.line = line
        self.zone = zone_of(tz)
        _check_line(line)
        if self.next_after(SOME_DAY) is None:
            raise InvalidScheduleError(
                f"the cron line {line!r} can never fire: no day fits all its fields"
            )

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Yield the ticks later than ``moment``, in UTC."""
        # When clocks go back, an hour occurs twice, and its ticks fire only in the first
        # occurrence. cronsim ignores ``fold``, so for a time in the second occurrence it yields the
        # same ticks again. They are filtered by a comparison in UTC, because Python ignores
        # ``fold`` when it compares times of one time zone.
        moment = moment.astimezone(UTC)
        for tick in library().CronSim(self.line, moment.astimezone(self.zone)):
            if (in_utc := tick.astimezone(UTC)) > moment:
                yield in_utc

    def next_after(self, moment: datetime) -> datetime | None:
        return next(self.after(moment), None)

    def latest(self, first: datetime, now: datetime, *, most: int) -> list[datetime]:
        """Return the last ``most`` ticks between ``first`` (itself a tick) and ``now``.

        The search goes back from now in growing steps, so a year of missed ticks costs no more than
        an hour of missed ticks.
        """
        back = FIRST_LOOK_BACK
        while True:
            start = max(first, now - back)
            ticks = list(takewhile(lambda tick: tick <= now, self.after(start)))
            if start == first:
                return [first, *ticks][-most:]
            if len(ticks) >= most:
                return ticks[-most:]
            back *= 4

    @cached_property
    def words(self) -> str:
        """The schedule in words, such as ``at 06:00 every day, Europe/Berlin``."""
        said = library().CronSim(self.line, SOME_DAY).explain()
        return f"{said[0].lower()}{said[1:]}, {self.zone.key}"

    def explain(self, moment: datetime, *, count: int) -> str:
        """Return the description, and the next ticks in local time."""
        runs = [in_local_time(tick, self.zone) for tick in islice(self.after(moment), count)]
        return f"{self.words}; next: {', '.join(runs)}" if runs else self.words


SOME_DAY = datetime(2026, 1, 1, tzinfo=UTC)


def in_local_time(moment: datetime, zone: zoneinfo.ZoneInfo) -> str:
    local = moment.astimezone(zone)
    return f"{local:%Y-%m-%d %H:%M:%S %Z}" if local.second else f"{local:%Y-%m-%d %H:%M %Z}"


def zone_of(tz: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(tz)
    except (KeyError, ValueError, TypeError, OSError):
        raise InvalidScheduleError(f"there is no time zone {tz!r}{_suggested_zone(tz)}") from None


def _suggested_zone(tz: Any) -> str:
    """Suggest a time zone for the name of a city, or for a misspelled name."""
    word = str(tz).strip().replace(" ", "_").casefold()
    by_fold = {name.casefold(): name for name in sorted(zoneinfo.available_timezones())}
    cities = [name for fold, name in by_fold.items() if fold.rpartition("/")[2] == word]
    close = cities or [by_fold[each] for each in difflib.get_close_matches(word, by_fold, n=1)]
    return (
        f"; did you mean {close[0]!r}?"
        if close
        else "; use a name such as 'Europe/Berlin' or 'UTC'"
    )


def _check_line(line: Any) -> None:
    if not isinstance(line, str):
        raise InvalidScheduleError(f"the cron line must be a string, not {line!r}")
    reason = _objection_to(line)
    if reason is None:
        return
    # cronsim reports the same error for day 99 of any month and for day 31 of February.
    if "day-of-month" in reason and _objection_to(_in_any_month(line)) is None:
        raise InvalidScheduleError(
            f"the cron line {line!r} can never fire: its months have no such day"
        )
    raise InvalidScheduleError(f"{line!r} is not a cron line ({reason.lower()})")


def _in_any_month(line: str) -> str:
    *before, _, weekday = line.split()
    return " ".join([*before, "*", weekday])


def _objection_to(line: str) -> str | None:
    try:
        library().CronSim(line, SOME_DAY)
    except library().CronSimError as error:
        return str(error)
    return None


def library() -> ModuleType:
    """Return the module ``cronsim``, which only projects with schedules have to install."""
    try:
        import cronsim
    except ImportError:
        raise MissingLibraryError(
            "schedules need the library cronsim: pip install 'django-durable-events[cron]'"
        ) from None
    return cronsim


class Fault(NamedTuple):
    """An invalid field of a schedule, and what is allowed."""

    field: str
    wrong: str
    right: str

    def __str__(self) -> str:
        return f"{self.wrong}{'' if self.wrong.endswith('?') else '.'} {self.right}"


def faults(schedule: Any, *, deepest: int | None = None) -> Iterator[Fault]:
    """Yield the reasons why an EventSchedule cannot fire.

    ``deepest`` is the maximum number of JSON levels that the database accepts.
    """
    for field, check, right in _RULES:
        try:
            check(getattr(schedule, field), deepest)
        except MissingLibraryError:
            raise
        except EventBusError as error:
            yield Fault(field, str(error), right)


def _check_cron(line: Any, deepest: int | None) -> None:
    Cron(line, "UTC")
    if len(line) > MAX_NAME_LENGTH:
        raise InvalidScheduleError(f"the cron line is longer than {MAX_NAME_LENGTH} characters")


def _check_zone(tz: Any, deepest: int | None) -> None:
    zone_of(tz)


def _check_key(key: Any, deepest: int | None) -> None:
    if key is not None:
        check_name(key, "the key")


def _check_queue(queue: Any, deepest: int | None) -> None:
    if queue is not None and queue not in settings.QUEUES:
        meant = did_you_mean(str(queue), settings.QUEUES)
        raise InvalidScheduleError(f"{queue!r} is not in EVENTBUS['QUEUES']{meant}")


def _check_priority(priority: Any, deepest: int | None) -> None:
    is_number = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_number or abs(priority) > MAX_PRIORITY:
        raise InvalidScheduleError(f"{priority!r} is not a priority")


def _check_headers(headers: Any, deepest: int | None) -> None:
    if headers is None:
        return
    if not isinstance(headers, dict) or SCHEDULER_HEADER in headers:
        raise InvalidScheduleError(f"invalid headers: {headers!r}")
    check_payload(headers, "headers", depth=deepest)


def _check_misfire(misfire: Any, deepest: int | None) -> None:
    if misfire not in Misfire.values:
        meant = did_you_mean(str(misfire), Misfire.values)
        raise InvalidScheduleError(f"there is no misfire policy {misfire!r}{meant}")


_A_NAME = (
    f"Use 1 to {MAX_NAME_LENGTH} printable characters, without leading or trailing whitespace."
)

#: For each field: its name, the function that checks its value, and a text about valid values.
_RULES: tuple[tuple[str, Callable[[Any, int | None], None], str], ...] = (
    ("name", lambda name, deepest: check_name(name, "the name"), _A_NAME),
    ("type", lambda name, deepest: check_name(name, "the event type"), _A_NAME),
    (
        "cron",
        _check_cron,
        "Use five fields: minute (0-59), hour (0-23), day of month (1-31), month (1-12) and day "
        "of week (0-7 or SUN-SAT), such as '0 6 * * *'; a sixth field before them is the second.",
    ),
    ("tz", _check_zone, "Use a name of the IANA time zone database, such as 'Europe/Berlin'."),
    (
        "payload",
        lambda payload, deepest: check_payload(payload, depth=deepest),
        "Use a value that JSON can represent.",
    ),
    ("key", _check_key, _A_NAME),
    ("queue", _check_queue, "Use one of EVENTBUS['QUEUES'], or none for EVENTBUS['QUEUE']."),
    ("priority", _check_priority, f"Use a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}."),
    (
        "headers",
        _check_headers,
        f"Use a dict that JSON can represent, without the key {SCHEDULER_HEADER!r}.",
    ),
    ("misfire", _check_misfire, f"Use one of {', '.join(map(repr, Misfire.values))}."),
)
