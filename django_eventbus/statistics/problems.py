"""Problems that need attention, derived from the status of the bus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_eventbus.conf import settings
from django_eventbus.errors.text import one_line
from django_eventbus.models import FlowControl, FlowControlKind
from django_eventbus.outcomes.event_run import NO_HANDLER
from django_eventbus.status import LATEST_DEAD, WAITING, Status, in_words, shown_count

#: Seconds after which a waiting event is a problem.
LATE = 60.0
SHOWN_GROUPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A state that needs attention, or a note about a state that an operator chose."""

    #: The part of the status that has the details: workers, dead, lanes, schedules, queue,
    #: executors, breakers or pauses.
    about: str
    text: str
    #: The fingerprint of the error that a group of dead letters has in common, if any.
    fingerprint: str = ""
    #: True for a state that an operator chose, such as a pause.
    is_note: bool = False


def find_problems(status: Status) -> list[Problem]:
    """Return the problems of a status, then the notes."""
    found = [
        *_about_workers(status),
        *_about_dead(status),
        *_about_lanes(status),
        *_about_schedules(status),
        *_about_waiting(status),
        *_about_executors(status),
        *_about_breakers(status),
        *_about_pauses(status),
    ]
    return sorted(found, key=lambda each: each.is_note)


def _about_workers(status: Status) -> Iterator[Problem]:
    if not status.living and not _drains_in_celery():
        yield Problem(about="workers", text=_no_worker(status))
        return
    for each in status.workers:
        if each.expires_at <= status.at:
            text = _("Worker %(worker)s has sent no heartbeat for %(time)s.")
            facts = {"worker": one_line(str(each)), "time": _since(status, each.renewed_at)}
            yield Problem(about="workers", text=text % facts)
    if _drains_in_celery():
        return
    served = {queue for each in status.living for queue in each.queues}
    for queue in settings.QUEUES:
        if queue not in served:
            text = _(
                "No worker serves the queue %(queue)s: run manage.py run_event_worker "
                "--queues %(queue)s"
            )
            yield Problem(about="workers", text=text % {"queue": queue})


def _drains_in_celery() -> bool:
    """Return whether Celery tasks handle events, so that no worker need be registered meanwhile."""
    return settings.CELERY_DRAIN is True


def _no_worker(status: Status) -> str:
    seen = [each.renewed_at for each in status.workers]
    if not seen:
        return _("No worker is running: run manage.py run_event_worker")
    text = _("No worker has sent a heartbeat for %(time)s: run manage.py run_event_worker")
    return text % {"time": _since(status, max(seen))}


def _about_dead(status: Status) -> Iterator[Problem]:
    is_all = len(status.latest_dead) < LATEST_DEAD
    for group, count in Counter(status.latest_dead).most_common(SHOWN_GROUPS):
        handler, error, fingerprint = group
        text = ngettext(
            "%(count)s dead letter in %(handler)s: %(error)s",
            "%(count)s dead letters in %(handler)s, same error: %(error)s",
            count,
        )
        facts = {
            "count": f"{count}" if is_all else f"{count}+",
            "handler": one_line(handler) or NO_HANDLER,
            "error": one_line(error) or "?",
        }
        yield Problem(about="dead", text=text % facts, fingerprint=fingerprint)


def _about_lanes(status: Status) -> Iterator[Problem]:
    blocked = status.depths["blocked_lanes"].total
    if blocked:
        text = ngettext(
            "%(count)s key is blocked by a dead letter: retry or purge the dead letter, or release "
            "the lane.",
            "%(count)s keys are blocked by dead letters: retry or purge the dead letters, or "
            "release the lanes.",
            blocked,
        )
        yield Problem(about="lanes", text=text % {"count": shown_count(blocked)})


def _about_schedules(status: Status) -> Iterator[Problem]:
    for each in status.late_schedules:
        assert each.next_at is not None
        text = _("The schedule %(name)s should have run %(time)s ago.")
        facts = {"name": one_line(each.name), "time": _since(status, each.next_at)}
        yield Problem(about="schedules", text=text % facts)


def _about_waiting(status: Status) -> Iterator[Problem]:
    lag = max(map(status.waited, WAITING))
    if (status.living or _drains_in_celery()) and lag > LATE:
        text = _("The oldest pending event has been waiting for %(time)s.")
        yield Problem(about="queue", text=text % {"time": in_words(lag)})


def _about_executors(status: Status) -> Iterator[Problem]:
    for each in status.unavailable_executors:
        assert each.unavailable_since is not None
        text = _(
            "The broker of %(executor)s has been unavailable for %(time)s, next attempt in "
            "%(wait)s. Held events: %(count)s (all events of a key count as one)."
        )
        facts = {
            "executor": one_line(each.name),
            "time": _since(status, each.unavailable_since),
            "wait": _until(status, each.next_attempt_at),
            "count": shown_count(each.held),
        }
        yield Problem(about="executors", text=text % facts)
    for handler in status.unsent_handlers:
        assert handler.unsent_since is not None
        text = _(
            "For %(time)s, no event of %(handler)s could be handed off, although the broker is "
            "available: %(error)s"
        )
        unsent = {
            "handler": one_line(handler.name),
            "time": _since(status, handler.unsent_since),
            "error": one_line(handler.send_error),
        }
        yield Problem(about="executors", text=text % unsent)
    waited = status.waited("handed_off")
    if (status.living or _drains_in_celery()) and waited > LATE:
        text = _(
            "The oldest handed-off event has been waiting for %(time)s: "
            "check that workers of %(executors)s are running and read the queue to which its "
            "message was sent."
        )
        names = ", ".join(each.name for each in status.executors) or _("its executor")
        yield Problem(about="queue", text=text % {"time": in_words(waited), "executors": names})


def _about_breakers(status: Status) -> Iterator[Problem]:
    for each in status.open_breakers:
        assert each.opened_at is not None
        text = _("The circuit breaker of %(handler)s has been open for %(time)s.")
        facts = {"handler": one_line(each.name), "time": _since(status, each.opened_at)}
        yield Problem(about="breakers", text=text % facts)


def _about_pauses(status: Status) -> Iterator[Problem]:
    for each in status.paused:
        yield Problem(about="pauses", text=_paused(status, each), is_note=True)


def _paused(status: Status, control: FlowControl) -> str:
    assert control.paused_at is not None
    text = _("The %(kind)s %(name)s was paused %(time)s ago by %(who)s.")
    if control.reason:
        text = _("The %(kind)s %(name)s was paused %(time)s ago by %(who)s: %(reason)s")
    return text % {
        "kind": str(FlowControlKind(control.kind).label),
        "name": one_line(control.name),
        "time": _since(status, control.paused_at),
        "who": one_line(control.paused_by),
        "reason": one_line(control.reason),
    }


def _since(status: Status, moment: datetime) -> str:
    return in_words((status.at - moment).total_seconds())


def _until(status: Status, moment: datetime | None) -> str:
    return in_words((moment - status.at).total_seconds() if moment else 0.0)
