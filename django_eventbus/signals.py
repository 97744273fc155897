"""What the bus tells about itself: Django signals, and the log lines made from them.

All are sent after the facts they tell are committed (those about publishing excepted: they are
sent inside the publisher's transaction), with ``send_robust``: a failing receiver is logged and
cannot harm an event.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.dispatch import Signal, receiver

from django_eventbus.failures import one_line

logger = logging.getLogger("django_eventbus")

#: event: QueuedEvent
event_published = Signal()
#: event: QueuedEvent (not stored), limit: str (its name in the settings)
event_dropped = Signal()
#: event: QueuedEvent (with the payload that stands), limit: str
event_coalesced = Signal()
#: event: ClaimedEvent, handler: str, attempt: int, seconds: float
delivery_succeeded = Signal()
#: event: ClaimedEvent, handler: str, attempt: int, seconds: float, error: dict,
#: exception: BaseException, retry_in: float | None (None: the handler is dead)
delivery_failed = Signal()
#: event: ClaimedEvent, status: str
event_dead_lettered = Signal()
#: kind: "queue", "type" or "handler", name: str, by: str, reason: str
gate_paused = Signal()
#: kind: "queue", "type" or "handler", name: str, by: str
gate_resumed = Signal()
#: handler: str, calls: int, failures: int
breaker_opened = Signal()
#: handler: str, by: str (empty: its probe succeeded)
breaker_closed = Signal()


class Sparingly:
    """Says a thing at once; what follows within ``every`` seconds it says together, at their end
    or with the process. Nothing that happened stays unsaid."""

    def __init__(
        self,
        say: Callable[[str, int, str], None],
        every: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] | None = None,
    ) -> None:
        self._say = say
        self._every = every
        self._clock = clock
        self._later = later or _in_a_thread
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        atexit.register(self.flush)

    def note(self, what: str, last: str) -> None:
        """It has happened once more, and ``last`` is what tells this time from others."""
        with self._lock:
            now, held = self._clock(), self._held.get(what)
            if held is not None and now < held.until:
                held.times, held.last = held.times + 1, last
                if held.times == 1:
                    self._later(held.until - now, self.flush)
                return
            # A process that was forked meanwhile has what was held, but no thread to say it.
            times = 1 + (held.times if held else 0)
            self._held[what] = _Held(now + self._every)
        self._say(what, times, last)

    def flush(self) -> None:
        """Say all that is held."""
        with self._lock:
            unsaid = [(what, held) for what, held in self._held.items() if held.times]
            for what, _held in unsaid:
                self._held[what] = _Held(self._clock() + self._every)
        for what, held in unsaid:
            self._say(what, held.times, held.last)


@dataclass(slots=True)
class _Held:
    until: float
    times: int = 0
    last: str = ""


def _in_a_thread(seconds: float, action: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def _say_dropped(limit: str, times: int, last: str) -> None:
    _log_pressure(logging.WARNING, "dropped", limit, times, last)


def _say_coalesced(limit: str, times: int, last: str) -> None:
    _log_pressure(logging.INFO, "coalesced", limit, times, last)


def _log_pressure(level: int, done: str, limit: str, times: int, last: str) -> None:
    logger.log(
        level,
        "%s %s %s under the limit %s, the last a %s",
        times,
        "event" if times == 1 else "events",
        done,
        limit,
        one_line(last),
        extra={"limit": limit, "event_type": last, done: times},
    )


LOG_PRESSURE_EVERY = 10.0
_drops = Sparingly(_say_dropped, LOG_PRESSURE_EVERY)
_merges = Sparingly(_say_coalesced, LOG_PRESSURE_EVERY)


@receiver(event_dropped)
def log_dropped(sender: Any, *, event: Any, limit: str, **kwargs: Any) -> None:
    _drops.note(limit, event.type)


@receiver(event_coalesced)
def log_coalesced(sender: Any, *, event: Any, limit: str, **kwargs: Any) -> None:
    _merges.note(limit, event.type)


@receiver(delivery_failed)
def log_failed_delivery(
    sender: Any,
    *,
    event: Any,
    handler: str,
    attempt: int,
    error: dict[str, Any],
    retry_in: float | None,
    **kwargs: Any,
) -> None:
    then = "gave up" if retry_in is None else f"retry in {retry_in:.1f} s"
    logger.warning(
        "%s failed on %s %s, attempt %s: %s: %s; %s",
        handler,
        one_line(event.type),
        event.event_id,
        attempt,
        one_line(error["type"]),
        one_line(error["message"]),
        then,
        extra={
            "event_id": str(event.event_id),
            "event_type": one_line(event.type),
            "handler": handler,
            "attempt": attempt,
            "error_type": one_line(error["type"]),
            "retry_in": retry_in,
        },
    )


@receiver(event_dead_lettered)
def log_dead_letter(sender: Any, *, event: Any, status: str, **kwargs: Any) -> None:
    logger.error(
        "%s %s is a dead letter: %s after %s attempts",
        one_line(event.type),
        event.event_id,
        status,
        event.attempts,
        extra={
            "event_id": str(event.event_id),
            "event_type": one_line(event.type),
            "status": status,
        },
    )


@receiver(gate_paused)
def log_pause(sender: Any, *, kind: str, name: str, by: str, reason: str, **kwargs: Any) -> None:
    logger.warning(
        "the %s %s is paused by %s: %s",
        kind,
        one_line(name),
        one_line(by),
        one_line(reason) or "no reason given",
        extra={"gate": kind, "gate_name": name, "by": by, "reason": reason},
    )


@receiver(gate_resumed)
def log_resumption(sender: Any, *, kind: str, name: str, by: str, **kwargs: Any) -> None:
    logger.warning(
        "the %s %s is resumed by %s",
        kind,
        one_line(name),
        one_line(by),
        extra={"gate": kind, "gate_name": name, "by": by},
    )


@receiver(breaker_opened)
def log_opened_breaker(
    sender: Any, *, handler: str, calls: int, failures: int, **kwargs: Any
) -> None:
    logger.error(
        "the circuit breaker of %s is open: %s of %s calls failed",
        handler,
        failures,
        calls,
        extra={"handler": handler, "calls": calls, "failures": failures},
    )


@receiver(breaker_closed)
def log_closed_breaker(sender: Any, *, handler: str, by: str, **kwargs: Any) -> None:
    logger.warning(
        "the circuit breaker of %s is closed: %s",
        handler,
        f"reset by {one_line(by)}" if by else "its probe succeeded",
        extra={"handler": handler, "by": by},
    )
