"""Checks of delayed events: EB014 to EB018."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from django_eventbus.conf import settings
from django_eventbus.diagnosis.examination import Bus, Result, check, fail, ok, warn
from django_eventbus.models import EventLog
from django_eventbus.statistics.problems import LATE
from django_eventbus.status import WAITING, in_words

#: The check of lanes warns if a lane is blocked for longer than this.
BLOCKED_FOR = timedelta(hours=1)
#: The check of lanes fails if a lane is blocked for longer than this.
BLOCKED_TOO_LONG = timedelta(days=1)
#: The largest number of blocked lanes that the check reads.
MOST_BLOCKED = 1000
PAUSED_FOR = timedelta(days=1)
OPEN_FOR = timedelta(hours=1)
UNSENT_FOR = timedelta(minutes=5)
#: Seconds that an event may wait before the check fails. It warns after ``problems.LATE`` seconds.
TOO_LATE = 3600.0


@check(
    "EB014",
    title="Lanes blocked for long",
    symptom="Events of one key are not handled, while events of other keys are.",
    cause='An event of the key became a dead letter, and EVENTBUS["DEAD_HEAD"] is "block": all '
    "later events of the key wait until an operator decides about the dead letter.",
    fix="Correct the cause of the error and retry the dead letter with manage.py dead_events retry "
    "--key and the key, or purge it. To continue without it, release the lane in the admin or with "
    "django_eventbus.lanes.release().",
    is_a_problem=True,
)
def blocked_lanes(bus: Bus) -> Iterator[Result]:
    # Like the claims, this finds lanes by the index of queue and ready_at.
    blocked = bus.store.lanes.filter(
        queue__in=list(settings.QUEUES), ready_at__isnull=True, blocked_by__isnull=False
    )
    # The results contain no keys, which may be personal data and which the overview hides.
    blocks: list[Any] = list(blocked.values_list("blocked_by", flat=True)[:MOST_BLOCKED])
    log = EventLog.objects.using(bus.store.using)
    died = dict(log.filter(event_id__in=blocks).values_list("event_id", "finished_at"))
    orphans = [blocker for blocker in blocks if blocker not in died]
    if orphans:
        yield fail(
            f"{len(orphans)} lanes are blocked by dead letters that do not exist any more",
            fix="Release the blocked lanes in the admin, or with django_eventbus.lanes.release().",
        )
    long = sorted((at, event_id) for event_id, at in died.items() if bus.now - at > BLOCKED_FOR)
    if long:
        oldest, _ = long[0]
        report = fail if bus.now - oldest > BLOCKED_TOO_LONG else warn
        yield report(
            f"{len(long)} lanes are blocked by dead letters, the longest for {_age(bus, oldest)}",
            fix="\n".join(f"manage.py dead_events retry {event_id}" for _, event_id in long[:5]),
        )
    if not orphans and not long:
        yield ok(f"no lane is blocked for more than an hour ({len(blocks)} are blocked)")


@check(
    "EB015",
    title="Pauses that were forgotten",
    symptom="Events of a queue, a type or a handler wait, but nothing fails.",
    cause="An operator paused the queue, type or handler more than a day ago and has not resumed "
    "it.",
    fix="Ask this operator for the reason, then resume it with manage.py event_pause --resume or "
    "in the admin.",
    reads_status_only=True,
    is_a_problem=True,
)
def forgotten_pauses(bus: Bus) -> Iterator[Result]:
    paused = [(each, each.paused_at) for each in bus.status.flow_controls if each.paused_at]
    long = [(each, since) for each, since in paused if bus.now - since > PAUSED_FOR]
    if not long:
        yield ok(f"no pause is older than a day ({len(paused)} are active)")
    for each, since in long:
        yield warn(
            f"the {each.kind.lower()} {each.name} has been paused for {_age(bus, since)} by "
            f"{each.paused_by or 'unknown'}",
            fix=f"manage.py event_pause {each.kind.lower()} {each.name} --resume",
        )


@check(
    "EB016",
    title="Circuit breakers open for long",
    symptom="Events of one handler wait, and the handler runs only once in a while.",
    cause="The calls of the handler failed so often that its circuit breaker opened, and each "
    "trial call since then failed too.",
    fix="Correct the handler, or the service that it calls. The breaker closes after a "
    "successful trial call; manage.py event_breakers --reset closes it at once.",
    reads_status_only=True,
    is_a_problem=True,
)
def open_breakers(bus: Bus) -> Iterator[Result]:
    opened = [(each, each.opened_at) for each in bus.status.open_breakers if each.opened_at]
    long = [(each, since) for each, since in opened if bus.now - since > OPEN_FOR]
    if not long:
        yield ok(f"no circuit breaker is open for more than an hour ({len(opened)} are open)")
    for each, since in long:
        yield warn(
            f"the circuit breaker of {each.name} has been open for {_age(bus, since)}",
            fix=f"Correct the handler, then run: manage.py event_breakers --reset {each.name}",
        )


@check(
    "EB017",
    title="Hand-offs that are not sent",
    symptom="Events of handlers with an executor, such as Celery, wait.",
    cause="The broker of the executor is unavailable, or it refuses the messages of one handler, "
    "for example because a queue or an exchange does not exist.",
    fix="Make the broker available. If it is available, correct the error that the check shows.",
    reads_status_only=True,
    is_a_problem=True,
)
def unsent_hand_offs(bus: Bus) -> Iterator[Result]:
    found = False
    for executor in bus.status.unavailable_executors:
        since = executor.unavailable_since
        if since is not None and bus.now - since > UNSENT_FOR:
            found = True
            yield fail(
                f"the broker of {executor.name} has been unavailable for {_age(bus, since)}, "
                f"{executor.held} events and lanes wait",
                fix="Start the broker, or correct its URL and credentials in the settings.",
            )
    for handler in bus.status.unsent_handlers:
        if handler.unsent_since is not None and bus.now - handler.unsent_since > UNSENT_FOR:
            found = True
            yield fail(
                f"messages of {handler.name} could not be sent for "
                f"{_age(bus, handler.unsent_since)}: {handler.send_error}",
                fix=f"Correct the options of the executor of {handler.name}.",
            )
    if not found:
        yield ok(f"{len(bus.status.executors)} executors accept messages")


@check(
    "EB018",
    title="Events that wait for long",
    symptom="Handlers run, but minutes or hours after the event was published.",
    cause="The workers are slower than the publishers, they are busy with slow handlers, or they "
    "wait for locks or for the database.",
    fix="Add workers (--processes) or threads (--concurrency), find the slow handlers in the "
    "overview, and limit the publishers (LIMITS) if they are always faster.",
    reads_status_only=True,
    is_a_problem=True,
)
def late_events(bus: Bus) -> Iterator[Result]:
    lag = max(map(bus.status.waited, WAITING))
    text = f"the oldest pending event has been waiting for {in_words(lag)}"
    fix = "manage.py run_event_worker --processes 4 --concurrency 10"
    if lag <= LATE:
        yield ok(text if lag else "no pending event is late")
    elif lag <= TOO_LATE:
        yield warn(text, fix=fix)
    else:
        yield fail(text, fix=fix)


def _age(bus: Bus, moment: datetime) -> str:
    return in_words((bus.now - moment).total_seconds())
