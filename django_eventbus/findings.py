"""What needs attention, in plain words: read off the figures of one look at the bus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_eventbus.conf import settings
from django_eventbus.failures import one_line
from django_eventbus.models import EventGate, GateKind
from django_eventbus.progress import NO_HANDLER
from django_eventbus.status import LATEST_DEAD, Status, in_words, shown_count

#: Seconds that an event may wait before somebody should know.
LATE = 60.0
SHOWN_GROUPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that needs attention."""

    #: Where to look: workers, dead, lanes, schedules, queue, breakers or pauses.
    about: str
    text: str
    #: Of dead letters: the error they have in common.
    fingerprint: str = ""
    #: Work is not being done, or not as it should; otherwise somebody may want it so.
    is_problem: bool = True


def of(status: Status) -> list[Finding]:
    """Problems first."""
    found = [
        *_about_workers(status),
        *_about_dead(status),
        *_about_lanes(status),
        *_about_schedules(status),
        *_about_waiting(status),
        *_about_breakers(status),
        *_about_pauses(status),
    ]
    return sorted(found, key=lambda each: not each.is_problem)


def _about_workers(status: Status) -> Iterator[Finding]:
    if not status.living:
        yield Finding(about="workers", text=_nobody_works(status))
        return
    for each in status.workers:
        if each.expires_at <= status.at:
            text = _("Worker %(worker)s has not been seen for %(time)s.")
            said = {"worker": one_line(str(each)), "time": _since(status, each.renewed_at)}
            yield Finding(about="workers", text=text % said)
    served = {queue for each in status.living for queue in each.queues}
    for queue in settings.QUEUES:
        if queue not in served:
            text = _(
                "No worker serves the queue %(queue)s: run manage.py run_event_worker "
                "--queues %(queue)s"
            )
            yield Finding(about="workers", text=text % {"queue": queue})


def _nobody_works(status: Status) -> str:
    seen = [each.renewed_at for each in status.workers]
    if not seen:
        return _("No worker is running: run manage.py run_event_worker")
    text = _("No worker seen for %(time)s: run manage.py run_event_worker")
    return text % {"time": _since(status, max(seen))}


def _about_dead(status: Status) -> Iterator[Finding]:
    is_all = len(status.latest_dead) < LATEST_DEAD
    for group, count in Counter(status.latest_dead).most_common(SHOWN_GROUPS):
        handler, error, fingerprint = group
        text = ngettext(
            "%(count)s dead in %(handler)s: %(error)s",
            "%(count)s dead in %(handler)s, same error: %(error)s",
            count,
        )
        said = {
            "count": f"{count}" if is_all else f"{count}+",
            "handler": one_line(handler) or NO_HANDLER,
            "error": one_line(error) or "?",
        }
        yield Finding(about="dead", text=text % said, fingerprint=fingerprint)


def _about_lanes(status: Status) -> Iterator[Finding]:
    blocked = status.samples["blocked_lanes"].total
    if blocked:
        text = ngettext(
            "%(count)s key is held up by a dead letter: retry or purge it, or release its lane.",
            "%(count)s keys are held up by dead letters: retry or purge them, or release lanes.",
            blocked,
        )
        yield Finding(about="lanes", text=text % {"count": shown_count(blocked)})


def _about_schedules(status: Status) -> Iterator[Finding]:
    for each in status.late_schedules:
        assert each.next_at is not None
        text = _("The schedule %(name)s should have run %(time)s ago.")
        said = {"name": one_line(each.name), "time": _since(status, each.next_at)}
        yield Finding(about="schedules", text=text % said)


def _about_waiting(status: Status) -> Iterator[Finding]:
    if status.living and status.lag > LATE:
        text = _("The oldest pending event has been waiting for %(time)s.")
        yield Finding(about="queue", text=text % {"time": in_words(status.lag)})


def _about_breakers(status: Status) -> Iterator[Finding]:
    for each in status.open_breakers:
        assert each.opened_at is not None
        text = _("The circuit breaker of %(handler)s has been open for %(time)s.")
        said = {"handler": one_line(each.name), "time": _since(status, each.opened_at)}
        yield Finding(about="breakers", text=text % said)


def _about_pauses(status: Status) -> Iterator[Finding]:
    for each in status.paused:
        yield Finding(about="pauses", text=_paused(status, each), is_problem=False)


def _paused(status: Status, gate: EventGate) -> str:
    assert gate.paused_at is not None
    text = _("The %(kind)s %(name)s has been paused for %(time)s by %(who)s.")
    if gate.reason:
        text = _("The %(kind)s %(name)s has been paused for %(time)s by %(who)s: %(reason)s")
    return text % {
        "kind": str(GateKind(gate.kind).label),
        "name": one_line(gate.name),
        "time": _since(status, gate.paused_at),
        "who": one_line(gate.paused_by),
        "reason": one_line(gate.reason),
    }


def _since(status: Status, moment: datetime) -> str:
    return in_words((status.at - moment).total_seconds())
