"""What the bus tells about itself: Django signals, and the log lines made from them.

All are sent after the facts they tell are committed (``event_published`` excepted: it is sent
inside the publisher's transaction), with ``send_robust``: a failing receiver is logged and
cannot harm an event.
"""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal, receiver

logger = logging.getLogger("django_eventbus")

#: event: QueuedEvent
event_published = Signal()
#: event: ClaimedEvent, handler: str, attempt: int, seconds: float
delivery_succeeded = Signal()
#: event: ClaimedEvent, handler: str, attempt: int, seconds: float, error: dict,
#: retry_in: float | None (None: the handler is dead)
delivery_failed = Signal()
#: event: ClaimedEvent, status: str
event_dead_lettered = Signal()


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
            "event_type": event.type,
            "handler": handler,
            "attempt": attempt,
            "error_type": error["type"],
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
        extra={"event_id": str(event.event_id), "event_type": event.type, "status": status},
    )


def one_line(text: str, limit: int = 300) -> str:
    """Text from outside as one printable line: no forged records, no terminal control."""
    printable = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return printable if len(text) <= limit else f"{printable[:limit]}…"
