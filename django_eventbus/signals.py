"""Django signals about events, and the log lines that are written for them.

Signals about publishing are sent inside the publisher's transaction, all other signals after the
commit. All signals are sent with ``send_robust``: if a receiver raises an error, Django logs the
error, and the event is not affected.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from django.dispatch import Signal, receiver

from django_eventbus.errors.text import one_line
from django_eventbus.logs import about

logger = logging.getLogger("django_eventbus")
T = TypeVar("T")

#: event: QueuedEvent
event_published = Signal()
#: event: QueuedEvent (not stored), limit: str (the name of the limit in the settings)
event_dropped = Signal()
#: event: QueuedEvent (with the new payload), limit: str
event_coalesced = Signal()
#: event: ClaimedEvent, handler: str, attempt: int, seconds: float
delivery_succeeded = Signal()
#: event: ClaimedEvent, handler: str, attempt: int, seconds: float, error: dict,
#: exception: BaseException, retry_in: float | None (None: the handler is dead)
delivery_failed = Signal()
#: event: ClaimedEvent, status: str
event_dead_lettered = Signal()
#: kind: "queue", "type" or "handler", name: str, by: str, reason: str
flow_paused = Signal()
#: kind: "queue", "type" or "handler", name: str, by: str
flow_resumed = Signal()
#: handler: str, calls: int, failures: int
breaker_opened = Signal()
#: handler: str, by: str (empty if a successful probe closed the breaker)
breaker_closed = Signal()


class RateLimitedLog(Generic[T]):
    """A log that writes at most one line per ``every`` seconds for similar events.

    The first event is logged at once. Events of the next ``every`` seconds are counted, and one
    line reports their number. Lines that are still delayed are written when the process exits.
    """

    def __init__(
        self,
        write: Callable[[str, int, T], None],
        every: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] | None = None,
    ) -> None:
        self._write = write
        self._every = every
        self._clock = clock
        self._later = later or _in_a_thread
        self._lock = threading.Lock()
        self._delayed: dict[str, _Delayed[T]] = {}
        atexit.register(self.flush)

    def add(self, what: str, last: T) -> None:
        """Log an event of the kind ``what``, now or later. ``last`` describes this event."""
        with self._lock:
            now, line = self._clock(), self._delayed.get(what)
            if line is not None and now < line.until:
                line.times, line.last = line.times + 1, last
                if line.times == 1:
                    self._later(line.until - now, self.flush)
                return
            # A forked process inherits delayed lines, but not the thread that would write them. So
            # this line also reports the events that the delayed line has counted.
            times = 1 + (line.times if line else 0)
            self._delayed[what] = _Delayed(now + self._every, last)
        self._write(what, times, last)

    def flush(self) -> None:
        """Write all delayed log lines."""
        with self._lock:
            delayed = [(what, line) for what, line in self._delayed.items() if line.times]
            for what, line in delayed:
                self._delayed[what] = _Delayed(self._clock() + self._every, line.last)
        for what, line in delayed:
            self._write(what, line.times, line.last)


@dataclass(slots=True)
class _Delayed(Generic[T]):
    until: float
    last: T
    times: int = 0


def _in_a_thread(seconds: float, action: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


#: The ``extra`` of a record about the last event.
_About = dict[str, Any]


def _write_dropped(limit: str, times: int, last: _About) -> None:
    _log_pressure(logging.WARNING, "dropped", limit, times, last)


def _write_coalesced(limit: str, times: int, last: _About) -> None:
    _log_pressure(logging.INFO, "coalesced", limit, times, last)


def _log_pressure(level: int, done: str, limit: str, times: int, last: _About) -> None:
    logger.log(
        level,
        "%s %s %s by the limit %s, the last of type %s",
        done,
        times,
        "event" if times == 1 else "events",
        one_line(limit),
        last["event_type"],
        extra={**last, "limit": one_line(limit), done: times},
    )


LOG_PRESSURE_EVERY = 10.0
_drops = RateLimitedLog(_write_dropped, LOG_PRESSURE_EVERY)
_merges = RateLimitedLog(_write_coalesced, LOG_PRESSURE_EVERY)


@receiver(event_dropped)
def log_dropped(sender: Any, *, event: Any, limit: str, **kwargs: Any) -> None:
    _drops.add(limit, about(event))


@receiver(event_coalesced)
def log_coalesced(sender: Any, *, event: Any, limit: str, **kwargs: Any) -> None:
    _merges.add(limit, about(event))


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
        one_line(handler),
        one_line(event.type),
        event.event_id,
        attempt,
        one_line(error["type"]),
        one_line(error["message"]),
        then,
        extra=about(
            event, handler=handler, attempt=attempt, error_type=error["type"], retry_in=retry_in
        ),
    )


@receiver(event_dead_lettered)
def log_dead_letter(sender: Any, *, event: Any, status: str, **kwargs: Any) -> None:
    logger.error(
        "%s %s is a dead letter: %s after %s attempts",
        one_line(event.type),
        event.event_id,
        status,
        event.attempts,
        extra=about(event, attempt=event.attempts, status=status),
    )


@receiver(flow_paused)
def log_pause(sender: Any, *, kind: str, name: str, by: str, reason: str, **kwargs: Any) -> None:
    logger.warning(
        "the %s %s is paused by %s: %s",
        kind,
        one_line(name),
        one_line(by),
        one_line(reason) or "no reason given",
        extra=_about_flow_control(kind, name, by=by, reason=reason),
    )


@receiver(flow_resumed)
def log_resumption(sender: Any, *, kind: str, name: str, by: str, **kwargs: Any) -> None:
    logger.warning(
        "the %s %s is resumed by %s",
        kind,
        one_line(name),
        one_line(by),
        extra=_about_flow_control(kind, name, by=by),
    )


def _about_flow_control(kind: str, name: str, **known: str) -> dict[str, Any]:
    """Return the ``extra`` of a record about a pause of a queue, an event type or a handler."""
    key = {"type": "event_type"}.get(kind, kind)
    return about(**{key: name}, flow_control=kind, flow_control_name=name, **known)


@receiver(breaker_opened)
def log_opened_breaker(
    sender: Any, *, handler: str, calls: int, failures: int, **kwargs: Any
) -> None:
    logger.error(
        "the circuit breaker of %s is open: %s of %s calls failed",
        one_line(handler),
        failures,
        calls,
        extra=about(handler=handler, calls=calls, failures=failures),
    )


@receiver(breaker_closed)
def log_closed_breaker(sender: Any, *, handler: str, by: str, **kwargs: Any) -> None:
    logger.warning(
        "the circuit breaker of %s is closed: %s",
        one_line(handler),
        f"reset by {one_line(by)}" if by else "its probe succeeded",
        extra=about(handler=handler, by=by),
    )
