"""The state of the bus: backlog, throughput, failures, workers.

The cost does not depend on the size of the tables: counts stop at a maximum, durations come from
the statistics of the workers, and no statement scans the queue or the log. The overview in the
admin and ``manage.py event_status`` show the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from django.db.models import F, Q, Sum
from django.utils.formats import number_format
from django.utils.translation import gettext as _

from django_eventbus.models import EventWorker, FlowControl, FlowControlKind
from django_eventbus.registry import registry
from django_eventbus.schedules import MISSED_AFTER
from django_eventbus.schema.histograms import COLUMNS, percentile
from django_eventbus.store import Clock, Depth, Store, store_for

#: The largest exact count. Counting stops at one row more, and the count is shown as "10,000+".
COUNTED_UP_TO = 10_000
SHOWN_MINUTES = 60
#: Complete minutes that the averages cover.
RECENT_MINUTES = 5
#: The number of latest dead letters that are grouped by their error.
LATEST_DEAD = 1000
MOST_LATE_SCHEDULES = 20
#: The names in ``Status.depths`` of events that are ready, or wait for an earlier event of their
#: key.
WAITING = ("ready", "unrouted", "laned")
#: The names in ``Status.depths`` of events whose waiting time is the lag.
LAGGING = (*WAITING, "handed_off")

_STATES = ("done", "retried", "dead", "discarded", "handed_off", "ignored_messages")

#: The names in ``Status.metrics``, in the order in which they are shown.
METRICS = (
    "pending",
    "running",
    "handed_off",
    "retrying",
    "scheduled",
    "held",
    "dead",
    "lag",
    "events_per_minute",
    "failure_rate",
    "p50",
    "p95",
    "workers",
    "paused",
    "open_breakers",
    "broker_outages",
    "ignored_messages",
    "blocked_keys",
    "late_schedules",
)


@dataclass(frozen=True, slots=True)
class Counts:
    """The outcomes of events, or of the runs of a handler, in a period."""

    done: int = 0
    retried: int = 0
    dead: int = 0
    discarded: int = 0
    #: The number of hand-offs to another executor. They are no outcomes, so totals exclude them.
    handed_off: int = 0
    #: The number of messages to an executor that were ignored. They are no outcomes either.
    ignored_messages: int = 0
    histogram: tuple[int, ...] = (0,) * len(COLUMNS)

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.done + other.done,
            self.retried + other.retried,
            self.dead + other.dead,
            self.discarded + other.discarded,
            self.handed_off + other.handed_off,
            self.ignored_messages + other.ignored_messages,
            tuple(map(int.__add__, self.histogram, other.histogram)),
        )

    @property
    def total(self) -> int:
        return self.done + self.retried + self.dead + self.discarded

    @property
    def ended(self) -> int:
        return self.total - self.retried

    @property
    def failed(self) -> int:
        """The number of failures. A discard is the decision of a handler, not a failure."""
        return self.retried + self.dead

    @property
    def failure_rate(self) -> float | None:
        """The failure rate in per cent, or None if nothing was counted."""
        return 100.0 * self.failed / self.total if self.total else None

    @property
    def p50(self) -> float | None:
        return percentile(self.histogram, 0.5)

    @property
    def p95(self) -> float | None:
        return percentile(self.histogram, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerCounts:
    """The runs of one handler in the last hour, and its state."""

    name: str
    runs: Counts
    is_registered: bool
    paused: bool
    breaker_open: bool
    #: The executor that the handler declares; None for the event workers.
    executor: str | None = None
    executor_unavailable: bool = False
    #: The number of events that wait for the executor of the handler now.
    handed_off: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStatus:
    """The state of an executor, such as Celery."""

    name: str
    #: Since when the broker of the executor is unavailable; None if it is available.
    unavailable_since: datetime | None = None
    #: The earliest time of the next attempt to send a message.
    next_attempt_at: datetime | None = None
    #: The number of events, and of keys with events, that wait until the broker is available.
    held: int = 0


class Status:
    """A snapshot of the bus."""

    def __init__(self, store: Store) -> None:
        self.at = store.read_clock()
        with store.reading_by_index():
            self.depths = store.depths(at_most=COUNTED_UP_TO + 1)
            self.latest_dead = list(
                store.dead.order_by("-finished_at", "-id").values_list(
                    "dead_handler", "error_type", "error_fingerprint"
                )[:LATEST_DEAD]
            )
        #: The counts of each of the last 60 minutes; the last minute is not complete.
        self.last_hour = _last_hour(store, self.at)
        #: The counts of each handler in the last hour.
        self.runs = _runs(store, self.at)
        self.workers = list(store.workers.order_by("started_at", "pk")[:COUNTED_UP_TO])
        stops = Q(paused_at__isnull=False) | Q(opened_at__isnull=False)
        active = stops | Q(unsent_since__isnull=False)
        self.flow_controls = list(store.flow_controls.filter(active).order_by("kind", "name"))
        self.executors = _executors(store, self.flow_controls)
        #: The number of events that wait for the executor of each handler.
        self.handed_off = count_handed_off(store, sorted(executors_of_handlers()))
        late = store.schedules.filter(enabled=True, next_at__lt=self.at - MISSED_AFTER)
        self.late_schedules = list(late.order_by("next_at")[:MOST_LATE_SCHEDULES])

    @cached_property
    def metrics(self) -> dict[str, int | float | None]:
        """The value of each name in ``METRICS``. Counts are at most ``COUNTED_UP_TO + 1``."""
        depths, recent = self.depths, self.recent
        states = {name: _capped(count) for name, count in events_by_state(depths).items()}
        values: dict[str, int | float | None] = {
            **states,
            "held": _capped(depths["held"].total, depths["held_lanes"].total),
            "dead": depths["dead"].total,
            "lag": self.lag,
            "events_per_minute": sum(each.ended for each in self._recent_whole) / RECENT_MINUTES,
            "failure_rate": recent.failure_rate,
            "p50": recent.p50,
            "p95": recent.p95,
            "workers": len(self.living),
            "paused": len(self.paused),
            "open_breakers": len(self.open_breakers),
            "broker_outages": len(self.unavailable_executors),
            "ignored_messages": _capped(*(each.ignored_messages for each in self.last_hour)),
            "blocked_keys": depths["blocked_lanes"].total,
            "late_schedules": len(self.late_schedules),
        }
        assert tuple(values) == METRICS
        return values

    @property
    def lag(self) -> float:
        """The waiting time, in seconds, of the oldest due event that no worker has tried yet."""
        return max(self.waited(name) for name in LAGGING)

    def waited(self, name: str) -> float:
        """Return the lag of one kind of events in ``depths``."""
        return waited(self.depths[name], self.at)

    @property
    def recent(self) -> Counts:
        """The sum of the counts of the last ``RECENT_MINUTES`` and the current minute."""
        return sum((*self._recent_whole, self.last_hour[-1]), start=Counts())

    @property
    def _recent_whole(self) -> Sequence[Counts]:
        return self.last_hour[-RECENT_MINUTES - 1 : -1]

    @property
    def living(self) -> list[EventWorker]:
        return [each for each in self.workers if each.expires_at > self.at]

    @property
    def paused(self) -> list[FlowControl]:
        return [each for each in self.flow_controls if each.paused_at]

    @property
    def open_breakers(self) -> list[FlowControl]:
        handlers = (each for each in self.flow_controls if each.kind == FlowControlKind.HANDLER)
        return [each for each in handlers if each.opened_at]

    @property
    def unavailable_executors(self) -> list[ExecutorStatus]:
        return [each for each in self.executors if each.unavailable_since]

    @property
    def unsent_handlers(self) -> list[FlowControl]:
        """The handlers with an executor whose messages cannot be sent to an available broker."""
        handlers = (each for each in self.flow_controls if each.kind == FlowControlKind.HANDLER)
        known = executors_of_handlers()
        return [each for each in handlers if each.unsent_since and each.name in known]

    @cached_property
    def handlers(self) -> list[HandlerCounts]:
        """The handlers of this process, and all that ran in the last hour, sorted by name."""
        known = {each.name for each in registry.all()}
        executor_of = executors_of_handlers()
        unavailable = {each.name for each in self.unavailable_executors}
        controls = {
            each.name: each for each in self.flow_controls if each.kind == FlowControlKind.HANDLER
        }
        return [
            HandlerCounts(
                name=name,
                runs=self.runs.get(name, Counts()),
                is_registered=name in known,
                paused=name in controls and controls[name].paused_at is not None,
                breaker_open=name in controls and controls[name].opened_at is not None,
                executor=executor_of.get(name),
                executor_unavailable=executor_of.get(name) in unavailable,
                handed_off=self.handed_off.get(name, 0),
            )
            for name in sorted(known | self.runs.keys())
        ]


def look(*, using: str | None = None, clock: Clock | None = None) -> Status:
    """Return a snapshot of the bus.

    This runs eight queries, and on PostgreSQL also statements that change settings of the planner.
    If handlers have an executor, one more query runs. If an executor is unavailable, another query
    runs.
    """
    return Status(store_for(using, clock=clock))


def events_by_state(depths: Mapping[str, Depth]) -> dict[str, int]:
    """Return the number of queued events in each state."""
    ready, unrouted, laned, delayed = (depths[name] for name in (*WAITING, "delayed"))
    return {
        # A failed event without a key counts as pending when its retry is due. A failed event with
        # a key counts as retrying, because its lane may still wait until the retry is due.
        "pending": (
            (ready.total - ready.running)
            + (unrouted.total - unrouted.running)
            + (laned.total - laned.running - laned.failed - laned.handed_off)
        ),
        "running": ready.running + unrouted.running + laned.running,
        "handed_off": depths["handed_off"].total,
        "retrying": laned.failed + delayed.failed,
        "scheduled": delayed.total - delayed.failed - delayed.handed_off,
        "held": depths["held"].total,
    }


def waited(depth: Depth, now: datetime) -> float:
    """Return the seconds that the oldest pending event without a failure has waited."""
    since = depth.waiting_since
    return 0.0 if since is None else max(0.0, (now - since).total_seconds())


def shown_count(count: int, *, up_to: int | None = None) -> str:
    """Return a count as text, such as ``10,000+`` if the count is larger than ``up_to``."""
    most = COUNTED_UP_TO if up_to is None else up_to
    number = number_format(min(count, most), force_grouping=True)
    return _("%(number)s+") % {"number": number} if count > most else number


def in_words(seconds: float) -> str:
    """Return a duration as text: ``40 s``, ``4 min``, ``3 h``, ``2 d``."""
    if seconds < 1:
        return _("%(number)d ms") % {"number": max(0, round(seconds * 1000))}
    if seconds < 10:
        return _("%(number)s s") % {"number": number_format(seconds, 1)}
    if seconds < 120:
        return _("%(number)d s") % {"number": seconds}
    if seconds < 2 * 3600:
        return _("%(number)d min") % {"number": seconds // 60}
    if seconds < 48 * 3600:
        return _("%(number)d h") % {"number": seconds // 3600}
    return _("%(number)d d") % {"number": seconds // 86400}


def executors_of_handlers() -> dict[str, str]:
    """Return the name of the executor of each handler of this process that has one."""
    return {each.name: each.executor.name for each in registry.all() if each.executor}


def _executors(store: Store, controls: Sequence[FlowControl]) -> list[ExecutorStatus]:
    """Return the executors of this process, and all that are unavailable, sorted by name."""
    is_open = {each.name: each for each in controls if each.kind == FlowControlKind.EXECUTOR}
    held = count_held(store, is_open.values())
    return [
        executor_status(name, is_open.get(name), held)
        for name in sorted({*executors_of_handlers().values(), *is_open})
    ]


def executor_status(
    name: str, control: FlowControl | None, held: Mapping[str, int]
) -> ExecutorStatus:
    if control is None or control.opened_at is None:
        return ExecutorStatus(name=name)
    return ExecutorStatus(
        name=name,
        unavailable_since=control.opened_at,
        next_attempt_at=control.probe_at,
        held=held.get(str(control.pk), 0),
    )


def count_held(store: Store, controls: Iterable[FlowControl]) -> dict[str, int]:
    """Return how many events and lanes each flow control holds, by its id as a text."""
    ids = [each.pk for each in controls]
    if not ids:
        return {}
    with store.reading_by_index():
        return store.held_by_each(ids, at_most=COUNTED_UP_TO + 1)


def count_handed_off(store: Store, handlers: Sequence[str]) -> dict[str, int]:
    """Return how many events wait for the executor of each handler."""
    if not handlers:
        return {}
    with store.reading_by_index():
        return store.handed_off_by_handler(handlers, at_most=COUNTED_UP_TO + 1)


def _capped(*counts: int) -> int:
    return min(sum(counts), COUNTED_UP_TO + 1)


def _last_hour(store: Store, now: datetime) -> list[Counts]:
    """Return the counts of all events for each minute; the current minute is the last."""
    last = now.replace(second=0, microsecond=0)
    wanted = [last - timedelta(minutes=ago) for ago in reversed(range(SHOWN_MINUTES))]
    rows = _summed(store, now, by="minute", of_events=True)
    found = {row.pop("minute").astimezone(UTC): _counts(row) for row in rows}
    return [found.get(minute.astimezone(UTC), Counts()) for minute in wanted]


def _runs(store: Store, now: datetime) -> dict[str, Counts]:
    """Return the counts of the last hour by handler."""
    rows = _summed(store, now, by="handler", of_events=False)
    return {row.pop("handler"): _counts(row) for row in rows}


def _summed(store: Store, now: datetime, *, by: str, of_events: bool) -> Iterable[dict[str, Any]]:
    first = now.replace(second=0, microsecond=0) - timedelta(minutes=SHOWN_MINUTES - 1)
    rows = store.statistics.filter(minute__gte=first)
    rows = rows.filter(handler="") if of_events else rows.exclude(handler="")
    sums = {f"sum_{name}": Sum(F(name)) for name in (*_STATES, *COLUMNS)}
    return list(rows.order_by(by).values(by).annotate(**sums))


def _counts(row: Mapping[str, Any]) -> Counts:
    summed = {name: int(row[f"sum_{name}"]) for name in _STATES}
    return Counts(**summed, histogram=tuple(int(row[f"sum_{name}"]) for name in COLUMNS))
