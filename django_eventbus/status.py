"""How the bus is doing: the figures an operator looks at.

Cheap however much there is: counts stop early, times come from the workers' minutes, and nothing
scans the queue or the log. The admin's overview and ``manage.py event_status`` show the same.
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

from django_eventbus.histograms import COLUMNS, percentile
from django_eventbus.models import EventGate, EventWorker, GateKind
from django_eventbus.registry import registry
from django_eventbus.schedules import MISSED_AFTER
from django_eventbus.store import Clock, Store, store_for

#: Counting stops here: one more means "and more".
COUNTED_UP_TO = 10_000
SHOWN_MINUTES = 60
#: The tiles tell of so many minutes before the one that runs.
RECENT_MINUTES = 5
#: Dead letters that are looked at for what they have in common, the latest.
LATEST_DEAD = 1000
MOST_LATE_SCHEDULES = 20
#: Samples of events that are ready, or wait for others of their key.
WAITING = ("ready", "unrouted", "laned")

_STATES = ("done", "retried", "dead", "discarded")

#: What ``Status.figures`` has, in the order in which people read it.
NAMES = (
    "pending",
    "running",
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
    "blocked_keys",
    "late_schedules",
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What was counted in some minutes, of events or of the runs of a handler."""

    done: int = 0
    retried: int = 0
    dead: int = 0
    discarded: int = 0
    histogram: tuple[int, ...] = (0,) * len(COLUMNS)

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.done + other.done,
            self.retried + other.retried,
            self.dead + other.dead,
            self.discarded + other.discarded,
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
        """A discard is a handler's own verdict, not a failure."""
        return self.retried + self.dead

    @property
    def failure_rate(self) -> float | None:
        """In per cent; None if there was nothing to fail."""
        return 100.0 * self.failed / self.total if self.total else None

    @property
    def p50(self) -> float | None:
        return percentile(self.histogram, 0.5)

    @property
    def p95(self) -> float | None:
        return percentile(self.histogram, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerFigures:
    """One handler in the last hour."""

    name: str
    runs: Figures
    is_registered: bool
    paused: bool
    breaker_open: bool


class Status:
    """Everything as it was when it was looked at."""

    def __init__(self, store: Store) -> None:
        self.at = store.read_clock()
        self.samples = store.samples(at_most=COUNTED_UP_TO + 1)
        self.minutes = _last_hour(store, self.at)
        self.runs = _runs(store, self.at)
        self.workers = list(store.workers.order_by("started_at", "pk")[:COUNTED_UP_TO])
        self.gates = list(
            store.gates.filter(Q(paused_at__isnull=False) | Q(opened_at__isnull=False)).order_by(
                "kind", "name"
            )
        )
        late = store.schedules.filter(enabled=True, next_at__lt=self.at - MISSED_AFTER)
        self.late_schedules = list(late.order_by("next_at")[:MOST_LATE_SCHEDULES])
        self.latest_dead = list(
            store.dead.order_by("-finished_at", "-id").values_list(
                "dead_handler", "error_type", "error_fingerprint"
            )[:LATEST_DEAD]
        )

    @cached_property
    def figures(self) -> dict[str, int | float | None]:
        """By name, see ``NAMES``. Counts stop at ``COUNTED_UP_TO``, and are one more then."""
        samples, recent = self.samples, self.recent
        ready, unrouted, laned, delayed = (samples[name] for name in (*WAITING, "delayed"))
        values: dict[str, int | float | None] = {
            # One that has failed and is ready again is pending; in its lane it may still wait.
            "pending": _capped(
                ready.total - ready.running,
                unrouted.total - unrouted.running,
                laned.total - laned.running - laned.failed,
            ),
            "running": _capped(ready.running, unrouted.running, laned.running),
            "retrying": _capped(laned.failed, delayed.failed),
            "scheduled": delayed.total - delayed.failed,
            "held": _capped(samples["parked"].total, samples["parked_lanes"].total),
            "dead": samples["dead"].total,
            "lag": self.lag,
            "events_per_minute": sum(each.ended for each in self._recent_whole) / RECENT_MINUTES,
            "failure_rate": recent.failure_rate,
            "p50": recent.p50,
            "p95": recent.p95,
            "workers": len(self.living),
            "paused": len(self.paused),
            "open_breakers": len(self.open_breakers),
            "blocked_keys": samples["blocked_lanes"].total,
            "late_schedules": len(self.late_schedules),
        }
        assert tuple(values) == NAMES
        return values

    @property
    def lag(self) -> float:
        """Seconds that the oldest event waits, from when it was due, that nobody has tried yet."""
        since = [moment for name in WAITING if (moment := self.samples[name].waiting_since)]
        return max(0.0, (self.at - min(since)).total_seconds()) if since else 0.0

    @property
    def recent(self) -> Figures:
        """The last few minutes, with the one that runs."""
        return sum((*self._recent_whole, self.minutes[-1]), start=Figures())

    @property
    def _recent_whole(self) -> Sequence[Figures]:
        return self.minutes[-RECENT_MINUTES - 1 : -1]

    @property
    def living(self) -> list[EventWorker]:
        return [each for each in self.workers if each.expires_at > self.at]

    @property
    def paused(self) -> list[EventGate]:
        return [each for each in self.gates if each.paused_at]

    @property
    def open_breakers(self) -> list[EventGate]:
        return [each for each in self.gates if each.opened_at]

    @cached_property
    def handlers(self) -> list[HandlerFigures]:
        """Those known here and those that ran in the last hour, by name."""
        known = {each.name for each in registry.all()}
        gates = {each.name: each for each in self.gates if each.kind == GateKind.HANDLER}
        return [
            HandlerFigures(
                name=name,
                runs=self.runs.get(name, Figures()),
                is_registered=name in known,
                paused=name in gates and gates[name].paused_at is not None,
                breaker_open=name in gates and gates[name].opened_at is not None,
            )
            for name in sorted(known | self.runs.keys())
        ]


def look(*, using: str | None = None, clock: Clock | None = None) -> Status:
    """In eight statements, whatever there is."""
    return Status(store_for(using, clock=clock))


def shown_count(count: int, *, up_to: int | None = None) -> str:
    """``10,000+`` for what was counted up to one more than that."""
    most = COUNTED_UP_TO if up_to is None else up_to
    number = number_format(min(count, most), force_grouping=True)
    return _("%(number)s+") % {"number": number} if count > most else number


def in_words(seconds: float) -> str:
    """``40 s``, ``4 min``, ``3 h``, ``2 d``: as exact as anybody asks."""
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


def _capped(*counts: int) -> int:
    return min(sum(counts), COUNTED_UP_TO + 1)


def _last_hour(store: Store, now: datetime) -> list[Figures]:
    """Of all events, one entry for each minute, the one that runs last."""
    last = now.replace(second=0, microsecond=0)
    wanted = [last - timedelta(minutes=ago) for ago in reversed(range(SHOWN_MINUTES))]
    rows = _summed(store, now, by="minute", of_events=True)
    found = {row.pop("minute").astimezone(UTC): _figures(row) for row in rows}
    return [found.get(minute.astimezone(UTC), Figures()) for minute in wanted]


def _runs(store: Store, now: datetime) -> dict[str, Figures]:
    """By handler, of the same hour."""
    rows = _summed(store, now, by="handler", of_events=False)
    return {row.pop("handler"): _figures(row) for row in rows}


def _summed(store: Store, now: datetime, *, by: str, of_events: bool) -> Iterable[dict[str, Any]]:
    first = now.replace(second=0, microsecond=0) - timedelta(minutes=SHOWN_MINUTES - 1)
    rows = store.minutes.filter(minute__gte=first)
    rows = rows.filter(handler="") if of_events else rows.exclude(handler="")
    sums = {f"sum_{name}": Sum(F(name)) for name in (*_STATES, *COLUMNS)}
    return list(rows.order_by(by).values(by).annotate(**sums))


def _figures(row: Mapping[str, Any]) -> Figures:
    summed = {name: int(row[f"sum_{name}"]) for name in _STATES}
    return Figures(**summed, histogram=tuple(int(row[f"sum_{name}"]) for name in COLUMNS))
