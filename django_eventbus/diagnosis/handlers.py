"""Checks of handlers: EB010 to EB013."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from django.db.models import Count, F, Sum

from django_eventbus.conf import settings
from django_eventbus.diagnosis.examination import (
    OLDEST_QUEUED,
    Bus,
    Result,
    check,
    fail,
    listed,
    ok,
    skipped,
    warn,
)
from django_eventbus.models import FlowControlKind
from django_eventbus.outcomes.event_run import ALL_HANDLERS, NO_HANDLER
from django_eventbus.registry import unhandled_policy
from django_eventbus.schema.deliveries import HANDED_OFF, RETRY, readable

#: The number of failed calls, without any success, from which a handler is reported.
FAILED_CALLS = 3
#: A handler is regular if it ran this often, in this many different minutes, in one hour.
REGULAR_CALLS = 10
REGULAR_MINUTES = 5
HOUR = timedelta(hours=1)
MINUTES_OF_A_DAY = 24 * 60

#: Names in deliveries and in the log that are not the name of a handler.
_NO_NAMES = {"", NO_HANDLER, ALL_HANDLERS}


@check(
    "EB010",
    title="Handlers registered nowhere",
    symptom="An event is never completed, a pause has no effect, or a retried dead letter dies "
    "again at once.",
    cause="A queued event, a dead letter, a pause or a circuit breaker names a handler that "
    "neither this process nor a live worker has. The handler was renamed or removed, or its module "
    "is not imported.",
    fix='Register the handler under its old name: @handler(..., name="old.name"). If it was '
    "removed on purpose, purge its dead letters and remove its pause.",
)
def unknown_handlers(bus: Bus) -> Iterator[Result]:
    found: dict[str, Counter[str]] = {}
    for source, name in _names_in_use(bus):
        if name not in _NO_NAMES and name not in bus.known_handlers:
            found.setdefault(name, Counter())[source] += 1
    if not found:
        yield ok(f"all handlers in use are among the {len(bus.known_handlers)} registered handlers")
    for name, sources in sorted(found.items()):
        uses = ", ".join(f"{count} {source}" for source, count in sorted(sources.items()))
        yield warn(
            f"no process registers the handler {name} ({uses})",
            fix=f'Register it again with @handler(..., name="{name}"), or run: '
            f"manage.py dead_events purge --handler {name}",
        )


def _names_in_use(bus: Bus) -> Iterator[tuple[str, str]]:
    """Yield the source and the name of each handler that events and flow controls name."""
    for event in bus.oldest_queued:
        for name, state in readable(event.deliveries).items():
            if state["state"] in (RETRY, HANDED_OFF):
                yield "queued events", name
    for control in bus.status.flow_controls:
        if control.kind == FlowControlKind.HANDLER:
            yield "flow controls", control.name
    for handler, _error, _fingerprint in bus.status.latest_dead:
        yield "dead letters", handler


@check(
    "EB011",
    title="Events without a handler",
    symptom="Events wait although workers are idle, and become dead letters with the error "
    '"no handler".',
    cause="Neither this process nor a live worker has a handler for the type: the type is "
    "misspelt, the handler was removed, or the app of the handler is not in INSTALLED_APPS.",
    fix="Add a handler for the type, or correct the type in publish(). If events of this type need "
    'no handler, set EVENTBUS["UNHANDLED"] = {"the.type": "complete"}.',
)
def unhandled_types(bus: Bus) -> Iterator[Result]:
    queued = Counter(event.type for event in bus.oldest_queued)
    unhandled = _without_handler(bus, queued)
    for type_name in unhandled:
        yield warn(
            f"no handler exists for the type {type_name}: {queued[type_name]:,} of the "
            f"{_looked_at(bus)} queued events",
            fix=f'Add @handler("{type_name}"), or set '
            f'EVENTBUS["UNHANDLED"] = {{"{type_name}": "complete"}}.',
        )
    scheduled = {each.type: each.name for each in bus.schedules if each.enabled}
    silent = [each for each in _without_handler(bus, scheduled) if each not in unhandled]
    for type_name in silent:
        yield warn(
            f"no handler exists for the type {type_name} of the schedule {scheduled[type_name]}",
            fix=f'Add @handler("{type_name}"), or run: manage.py event_schedules disable '
            f"{scheduled[type_name]}",
        )
    if not unhandled and not silent:
        yield ok(f"each type of the {_looked_at(bus)} queued events has a handler")


def _without_handler(bus: Bus, types: Iterable[str]) -> list[str]:
    return [
        each
        for each in sorted(types)
        if unhandled_policy(each) == "retry" and not bus.has_handler(each)
    ]


def _looked_at(bus: Bus) -> str:
    count = len(bus.oldest_queued)
    return f"{count:,}" if count < OLDEST_QUEUED else f"{count:,} oldest"


@check(
    "EB012",
    title="Handlers that never succeed",
    symptom="All events of one handler become dead letters.",
    cause="No call of the handler in the kept statistics succeeded. The handler has a defect, or "
    "the service that it calls is unavailable.",
    fix="Read the errors with manage.py dead_events list --handler and the name of the handler, "
    "correct the handler, and retry its dead letters.",
)
def failing_handlers(bus: Bus) -> Iterator[Result]:
    rows = bus.store.statistics.exclude(handler="").order_by("handler").values("handler")
    sums = list(rows.annotate(good=Sum("done"), bad=Sum(F("retried") + F("dead"))))
    never = [row for row in sums if not row["good"] and row["bad"] >= FAILED_CALLS]
    if not never:
        yield ok(f"{len(sums)} handlers ran, and all that failed also succeeded")
    hours = settings.STATISTICS_MINUTES / 60
    for row in never:
        yield fail(
            f"the handler {row['handler']} failed {row['bad']:,} times and never succeeded in "
            f"the last {hours:g} hours",
            fix=f"manage.py dead_events list --handler {row['handler']}",
        )


@check(
    "EB013",
    title="Handlers that went quiet",
    symptom="The effects of one handler have been missing for an hour, but nothing fails.",
    cause="The handler ran regularly at this time yesterday, and did not run in the last hour, "
    "although it is registered and not paused. The code that publishes its events may have been "
    "changed or stopped. On a day with less traffic this may be normal.",
    fix="Check that the events of the handler are still published: search the event log in the "
    "admin by type.",
)
def quiet_handlers(bus: Bus) -> Iterator[Result]:
    if settings.STATISTICS_MINUTES < MINUTES_OF_A_DAY:
        yield skipped(
            f'EVENTBUS["STATISTICS_MINUTES"] is {settings.STATISTICS_MINUTES}, so there are no '
            "statistics of yesterday"
        )
        return
    yesterday = _regular(bus)
    today = {row["handler"] for row in _calls(bus, hours_ago=1)}
    stopped = {
        each.name for each in bus.status.flow_controls if each.kind == FlowControlKind.HANDLER
    }
    quiet = [
        row
        for row in yesterday
        if row["handler"] in bus.known_handlers and row["handler"] not in today | stopped
    ]
    if not quiet:
        known = listed(row["handler"] for row in yesterday) or "no handler"
        yield ok(f"ran regularly at this time yesterday and ran since: {known}")
    for row in quiet:
        patterns = listed(bus.known_handlers[row["handler"]])
        yield warn(
            f"the handler {row['handler']} did not run in the last hour; in the same hour "
            f"yesterday it ran {row['calls']:,} times",
            fix=f"Check that events of the type {patterns} are still published.",
        )


def _regular(bus: Bus) -> list[dict[str, Any]]:
    return [
        row
        for row in _calls(bus, hours_ago=24)
        if row["calls"] >= REGULAR_CALLS and row["minutes"] >= REGULAR_MINUTES
    ]


def _calls(bus: Bus, *, hours_ago: int) -> list[dict[str, Any]]:
    """Return the calls of each handler in one hour."""
    first = bus.now - hours_ago * HOUR
    rows = bus.store.statistics.exclude(handler="").filter(
        minute__gte=first - timedelta(minutes=1), minute__lt=first + HOUR
    )
    calls = Sum(F("done") + F("retried") + F("dead") + F("discarded"))
    grouped = rows.order_by("handler").values("handler")
    found: Any = grouped.annotate(calls=calls, minutes=Count("minute", distinct=True))
    return list(found)
