"""The ``history`` column: what a retry of a dead letter keeps about the event's earlier lives.

A life begins when the event is published or retried, and ends when the event moves to the log.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django_eventbus.errors.failures import recorded, shortened
from django_eventbus.errors.text import clean
from django_eventbus.models import EventLog
from django_eventbus.schema.deliveries import DONE, is_state
from django_eventbus.schema.payloads import encode

#: How many of the first and of the last lives are stored. The other lives are only counted.
FIRST_LIVES = 2
LAST_LIVES = 8
#: A larger history is stored without tracebacks, because databases limit the size of a statement.
MAX_HISTORY_BYTES = 1024 * 1024
MAX_NAME = 200

#: The columns of a dead letter that a retry reads, most of them for the history.
LIFE_COLUMNS = (
    "event_id",
    "status",
    "attempts",
    "crashes",
    "interruptions",
    "deliveries",
    "errors",
    "history",
    "dead_handler",
    "error_type",
    "error_fingerprint",
    "finished_at",
)


def retry_of(handler: str | None, by: str, edited: bool, *, at: datetime) -> dict[str, Any]:
    """Return the record of a retry: its time, operator and handler."""
    return {
        "retried_at": at.isoformat(),
        "retried_by": clean(by, MAX_NAME),
        "retried_handler": handler or "",
        "edited": edited,
    }


def carried_over(letter: EventLog, handler: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the deliveries and errors that a retry does not change.

    Handlers that were done stay done. If only one handler is retried, all other handlers keep their
    state. A state that only a newer version of the code can read stays unchanged.
    """
    states = letter.deliveries if isinstance(letter.deliveries, dict) else {}
    kept = {
        name: state
        for name, state in states.items()
        if not is_state(state) or state["state"] == DONE or (handler and name != handler)
    }
    if not handler:
        return kept, []
    return kept, [each for each in recorded(letter.errors) if each["handler"] in kept]


def history_of(
    letter: EventLog, carried: list[dict[str, Any]], retry: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the history of a dead letter that is retried.

    The history consists of the earlier lives and of the life that ends now. The errors in
    ``carried`` stay with the event, so the record of the ending life does not contain them.
    """
    life = {
        "life": letter.life,
        "status": letter.status,
        "attempts": letter.attempts,
        "crashes": letter.crashes,
        "interruptions": letter.interruptions,
        "dead_handler": letter.dead_handler,
        "error_type": letter.error_type,
        "error_fingerprint": letter.error_fingerprint,
        "finished_at": letter.finished_at.isoformat(),
        "errors": [each for each in letter.errors or () if each not in carried],
        **retry,
    }
    return _fitting(_bounded([*(letter.history or ()), life]))


def _bounded(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lives = [each for each in history if "omitted" not in each]
    omitted = lives[-1]["life"] - FIRST_LIVES - LAST_LIVES
    if omitted <= 0:
        return lives
    return [*lives[:FIRST_LIVES], {"omitted": omitted}, *lives[-LAST_LIVES:]]


def _fitting(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(encode(history)) <= MAX_HISTORY_BYTES:
        return history
    return [
        each if "omitted" in each else {**each, "errors": shortened(each["errors"])}
        for each in history
    ]
