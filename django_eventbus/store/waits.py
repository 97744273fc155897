"""Waits: the time until an event, or the lane of its key, can be claimed again."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: The id that means "several flow controls". No row has this id, because ids begin at 1. An event
#: with this id does not store which flow controls hold it. So the event is released when any pause
#: ends, when any circuit breaker closes, or when a circuit breaker may try a call.
SEVERAL = 0


@dataclass(frozen=True, slots=True)
class After:
    """A wait of a number of seconds, by the database's clock."""

    seconds: float


@dataclass(frozen=True, slots=True)
class HeldBy:
    """A wait until the flow control allows the event and a worker releases the event."""

    flow_control_id: int


Wait = After | HeldBy

AT_ONCE = After(0.0)


def seconds_of(wait: Wait) -> float | None:
    """Return the seconds of a wait; None for a hold, which has no fixed end."""
    return wait.seconds if isinstance(wait, After) else None


def holder_of(wait: Wait) -> int | None:
    """Return the id of the flow control that holds the event; None for a wait of seconds."""
    return wait.flow_control_id if isinstance(wait, HeldBy) else None


def soonest(*waits: Wait) -> Wait:
    """Return the wait that ends first. A hold has no known end, so any ``After`` ends before it."""
    return min(waits, key=lambda wait: wait.seconds if isinstance(wait, After) else math.inf)
