"""What the bus tells about itself: Django signals, and the log lines made from them.

All are sent after the facts they tell are committed (those about publishing excepted: they are
sent inside the publisher's transaction), with ``send_robust``: a failing receiver is logged and
cannot harm an event.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
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
    """Lets a thing be said at once, and then only now and then, with how often it happened."""

    def __init__(self, every: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._clock = clock
        self._lock = threading.Lock()
        self._quiet_until: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def times(self, what: str) -> int:
        """How often it has happened since it was last said; 0 if it is not to be said now."""
        with self._lock:
            self._unsaid[what] += 1
            now = self._clock()
            if now < self._quiet_until.get(what, now):
                return 0
            self._quiet_until[what] = now + self._every
            return self._unsaid.pop(what)


LOG_PRESSURE_EVERY = 10.0
_drops, _merges = Sparingly(LOG_PRESSURE_EVERY), Sparingly(LOG_PRESSURE_EVERY)


@receiver(event_dropped)
def log_dropped(sender: Any, *, event: Any, limit: str, **kwargs: Any) -> None:
    if times := _drops.times(limit):
        logger.warning(
            "%s events dropped under the limit %s, the last a %s",
            times,
            limit,
            one_line(event.type),
            extra={"limit": limit, "event_type": event.type, "dropped": times},
        )


@receiver(event_coalesced)
def log_coalesced(sender: Any, *, event: Any, limit: str, **kwargs: Any) -> None:
    if times := _merges.times(limit):
        logger.info(
            "%s events coalesced under the limit %s, the last a %s",
            times,
            limit,
            one_line(event.type),
            extra={"limit": limit, "event_type": event.type, "coalesced": times},
        )


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
