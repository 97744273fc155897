"""Pure functions that decide about circuit breakers, rates and limits on concurrency.

``grant`` and ``record`` get the row of a flow control, the limits of its handler and the time. They
return the new values of columns. The store writes these values while it has the lock of the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django_eventbus.models import FlowControl
from django_eventbus.policies import CircuitBreaker, Limits, Rate

#: (calls, failures) by the number of the time slice in which the calls ended. The number is stored
#: as a string, because JSON allows only strings as keys.
Slices = Mapping[str, tuple[int, int]]
#: The number of time slices in the window of a breaker. All calls of a slice expire together.
SLICES_PER_WINDOW = 10

#: The largest number of held events that are released with one statement.
RELEASED_AT_ONCE = 1000
#: The number of held events that are released for each free slot of a handler.
RELEASED_PER_SLOT = 100
#: The number of held events with which a worker tests whether a broker is available again.
RELEASED_AS_PROBE = 50
FIRST_EXECUTOR_WAIT = 1.0
LONGEST_EXECUTOR_WAIT = 30.0

Changes = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """How many deliveries to one handler a thread may make, and how many of them at a time."""

    deliveries: int = 0
    slots: int = 0
    #: Whether this is the probe: the one delivery that tests whether an open breaker may close.
    is_probe: bool = False
    changes: Changes = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Report:
    """The calls of one handler that a worker's thread made since its last report."""

    calls: int = 0
    failures: int = 0
    #: The number of deliveries that were granted and not made.
    unused: int = 0
    #: Whether the thread no longer runs the handler, so that its slots and its probe are free.
    leaves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The changes that a report caused."""

    changes: Changes
    breaker_opened: bool = False
    breaker_closed: bool = False


def grant(
    control: FlowControl,
    now: datetime,
    *,
    limits: Limits,
    holder: str,
    wanted: int,
    one_by_one: bool,
    probe_seconds: float,
) -> Grant:
    """Grant up to ``wanted`` deliveries, which the thread makes one by one or concurrently.

    If the breaker is open, one worker gets one delivery as a probe. Another worker can get the
    probe after ``probe_seconds``.
    """
    is_probe = breaker_is_open(control, limits)
    if control.paused_at is not None or (is_probe and not probe_is_due(control, now)):
        return Grant()
    others = {who: slots for who, slots in control.running.items() if who != holder}
    tokens = tokens_now(control, limits.rate, now)
    deliveries = int(min(1 if is_probe else wanted, tokens))
    slots = int(min(free_slots(limits, others), 1 if one_by_one else deliveries))
    if not deliveries or not slots:
        return Grant()
    changes: Changes = {}
    if limits.rate is not None:
        changes |= {"tokens": tokens - deliveries, "tokens_at": now}
    if limits.max_running is not None:
        changes["running"] = {**others, holder: slots}
    if is_probe:
        changes |= {"probe_by": holder, "probe_at": now + timedelta(seconds=probe_seconds)}
    return Grant(deliveries=deliveries, slots=slots, is_probe=is_probe, changes=changes)


def record(
    control: FlowControl, now: datetime, *, limits: Limits, holder: str, report: Report
) -> Recorded:
    """Count the calls of a report, free slots, put back tokens, and open or close the breaker."""
    changes: Changes = {}
    if report.leaves and holder in control.running:
        running = {who: slots for who, slots in control.running.items() if who != holder}
        changes["running"] = running
    if report.unused and control.tokens is not None:
        changes["tokens"] = control.tokens + report.unused
    if limits.breaker is not None:
        changes |= _change_breaker(control, limits.breaker, holder, report, now)
    is_open = changes.get("opened_at", control.opened_at) is not None
    was_open = control.opened_at is not None
    return Recorded(
        changes=changes,
        breaker_opened=is_open and not was_open,
        breaker_closed=was_open and not is_open,
    )


def _change_breaker(
    control: FlowControl, breaker: CircuitBreaker, holder: str, report: Report, now: datetime
) -> Changes:
    if control.probe_by == holder:
        return _end_probe(control, breaker, report, now)
    if control.opened_at is not None:
        return {}  # The calls began before the breaker opened, so they do not count.
    calls = count_calls(
        control.calls,
        window=breaker.window,
        now=now.timestamp(),
        calls=report.calls,
        failures=report.failures,
    )
    opens = _open(control, breaker, now) if should_open(breaker, *totals(calls)) else {}
    return {"calls": calls, **opens}


def _end_probe(
    control: FlowControl, breaker: CircuitBreaker, report: Report, now: datetime
) -> Changes:
    if report.failures:
        return _open(control, breaker, now)
    if report.calls:
        return {"opened_at": None, "probe_at": None, "probe_by": "", "calls": {}}
    return {"probe_at": now, "probe_by": ""} if report.leaves else {}


def _open(control: FlowControl, breaker: CircuitBreaker, now: datetime) -> Changes:
    return {
        "opened_at": control.opened_at or now,
        "probe_at": now + timedelta(seconds=breaker.open_for),
        "probe_by": "",
    }


def room_for_held(control: FlowControl, limits: Limits | None, now: datetime) -> int:
    """Return how many of the events that a flow control holds may be released now."""
    if control.paused_at is not None:
        return 0
    if limits is None:
        return RELEASED_AT_ONCE
    room: float = RELEASED_AT_ONCE
    if breaker_is_open(control, limits):
        room = 1 if probe_is_due(control, now) else 0
    if limits.max_running is not None:
        room = min(room, free_slots(limits, control.running) * RELEASED_PER_SLOT)
    if control.tokens_at is not None:
        room = min(room, tokens_now(control, limits.rate, now))
    return int(room)


# -- executors


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorState:
    """The changes after messages to an executor were sent, or could not be sent."""

    changes: Changes


def executor_failed(control: FlowControl, now: datetime) -> ExecutorState:
    """Hold the events of an executor whose broker is unavailable, longer after each failure."""
    since = control.opened_at or now
    wait = max(FIRST_EXECUTOR_WAIT, (now - since).total_seconds())
    probe_at = now + timedelta(seconds=min(wait, LONGEST_EXECUTOR_WAIT))
    return ExecutorState(changes={"opened_at": since, "probe_at": probe_at})


def executor_works(control: FlowControl, now: datetime) -> ExecutorState:
    is_open = control.opened_at is not None
    return ExecutorState(changes={"opened_at": None, "probe_at": None} if is_open else {})


def message_failed(error: str, control: FlowControl, now: datetime) -> ExecutorState:
    """Record that a message of a handler could not be sent, although the broker is available."""
    since = control.unsent_since or now
    return ExecutorState(changes={"unsent_since": since, "send_error": error})


def message_sent(control: FlowControl, now: datetime) -> ExecutorState:
    is_recorded = control.unsent_since is not None
    return ExecutorState(changes={"unsent_since": None, "send_error": ""} if is_recorded else {})


def room_for_executor(control: FlowControl, now: datetime) -> int:
    """Return how many of the events that wait for a broker may be released now."""
    if control.opened_at is None:
        return RELEASED_AT_ONCE
    return RELEASED_AS_PROBE if probe_is_due(control, now) else 0


# -- breakers


def breaker_is_open(control: FlowControl, limits: Limits | None) -> bool:
    """Return whether the breaker is open; False if the handler declares no breaker any more."""
    is_declared = limits is not None and limits.breaker is not None
    return is_declared and control.opened_at is not None


def probe_is_due(control: FlowControl, now: datetime) -> bool:
    return control.probe_at is None or control.probe_at <= now


def should_open(breaker: CircuitBreaker, calls: int, failures: int) -> bool:
    return calls >= breaker.min_calls and failures >= breaker.failure_rate * calls


def count_calls(
    slices: Slices, *, window: float, now: float, calls: int = 0, failures: int = 0
) -> dict[str, tuple[int, int]]:
    """Return the slices of the window that ends now, with the new calls in the current slice."""
    current = int(now / (window / SLICES_PER_WINDOW))
    kept = {
        number: (seen[0], seen[1])
        for number, seen in slices.items()
        if current - SLICES_PER_WINDOW < int(number) <= current
    }
    before = kept.get(str(current), (0, 0))
    return {**kept, str(current): (before[0] + calls, before[1] + failures)}


def totals(slices: Slices) -> tuple[int, int]:
    """Return (calls, failures), summed over all slices."""
    return sum(c for c, _ in slices.values()), sum(f for _, f in slices.values())


# -- rates and slots


def tokens_now(control: FlowControl, rate: Rate | None, now: datetime) -> float:
    """Return the number of tokens in the bucket now, or infinity if there is no rate."""
    if rate is None:
        return math.inf
    seconds = (now - control.tokens_at).total_seconds() if control.tokens_at else 0.0
    return refilled(rate, control.tokens, seconds=seconds)


def refilled(rate: Rate, tokens: float | None, *, seconds: float) -> float:
    """Return the number of tokens after a refill for ``seconds``.

    ``tokens`` is the number before; None means a new bucket, which is full.
    """
    full = rate.per_second + 1
    if tokens is None:
        return full
    return min(full, tokens + max(0.0, seconds) * rate.per_second)


def free_slots(limits: Limits, running: Mapping[str, int]) -> float:
    if limits.max_running is None:
        return math.inf
    return max(0, limits.max_running - sum(running.values()))
