"""The ``deliveries`` column of the queue and the log: the state of each handler of an event.

The column is NULL if no handler of the event was called or handed off yet, and if all its handlers
succeeded at the first attempt.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

State = dict[str, Any]

DONE, RETRY, DEAD, DISCARDED = "done", "retry", "dead", "discarded"
#: The delivery was handed off to another executor at the time ``at``, and has no outcome yet.
HANDED_OFF = "handed_off"
GIVEN_UP = (DEAD, DISCARDED)


def readable(deliveries: Any) -> dict[str, State]:
    """Return the states that this version can read; a newer version may write other states."""
    if not isinstance(deliveries, dict):
        return {}
    return {name: state for name, state in deliveries.items() if is_state(state)}


def is_state(state: Any) -> bool:
    if not isinstance(state, dict) or not isinstance(state.get("failures"), int):
        return False
    if state.get("state") == RETRY:
        return _is_moment(state.get("due"))
    if state.get("state") == HANDED_OFF:
        return _is_moment(state.get("at"))
    return state.get("state") in (DONE, DEAD, DISCARDED)


def _is_moment(text: Any) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except (TypeError, ValueError):
        return False
