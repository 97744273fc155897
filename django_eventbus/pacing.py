"""How fast a handler may go: what it declares, and the pure decisions about it.

The counts, tokens and slots themselves stand in the database, where all workers agree on them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from django_eventbus.conf import settings

A_DAY = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitBreaker:
    """When a handler is left alone for a while.

    Opens when at least ``min_calls`` calls within ``window`` seconds have ended and
    ``failure_rate`` of them failed. Its deliveries then wait, uncharged. After ``open_for``
    seconds one of them is tried: success closes the breaker, failure opens it again.
    """

    failure_rate: float = 0.5
    window: float = 60.0
    min_calls: int = 10
    open_for: float = 30.0

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            kind = int if name == "min_calls" else int | float
            if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= most:
                what = "whole number" if name == "min_calls" else "number"
                raise ValueError(
                    f"CircuitBreaker.{name} must be a {what} from {least:g} to {most:g}, "
                    f"not {value!r}"
                )

    @classmethod
    def default(cls, **overrides: Any) -> Self:
        """The project's breaker (``EVENTBUS["BREAKER"]``) with some values replaced."""
        return cls(**{**(settings.BREAKER or {}), **overrides})

    def opens_at(self, calls: int, failures: int) -> bool:
        return calls >= self.min_calls and failures >= self.failure_rate * calls


_BOUNDS = {
    "failure_rate": (0.01, 1),
    "window": (1, A_DAY),
    "min_calls": (1, 1_000_000),
    "open_for": (0.1, A_DAY),
}

#: (calls, failures) by the number of the slice of time they ended in; JSON has no other keys.
Slices = Mapping[str, tuple[int, int]]

#: A window is counted in so many slices; with each that passes, its calls are forgotten.
SLICES = 10


def counted(
    slices: Slices, *, window: float, now: float, calls: int = 0, failures: int = 0
) -> dict[str, tuple[int, int]]:
    """The slices of the window that ends now, with these calls added to the last."""
    current = int(now / (window / SLICES))
    kept = {
        number: (seen[0], seen[1])
        for number, seen in slices.items()
        if current - SLICES < int(number) <= current
    }
    before = kept.get(str(current), (0, 0))
    return {**kept, str(current): (before[0] + calls, before[1] + failures)}


def totals(slices: Slices) -> tuple[int, int]:
    """(calls, failures)."""
    return sum(c for c, _ in slices.values()), sum(f for _, f in slices.values())


@dataclass(frozen=True, slots=True)
class Rate:
    """So many calls per second, evenly: unused ones are kept for a second, not longer."""

    per_second: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """``100/m``; the units are s, m, h and d. Raises ValueError."""
        found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*([smhd])\s*", text, flags=re.ASCII)
        if found is None or not int(found[1]):
            raise ValueError(f"a rate is a number per s, m, h or d, such as '100/m', not {text!r}")
        return cls(int(found[1]) / _UNITS[found[2]])

    def tokens(self, left: float | None, *, seconds: float) -> float:
        """What is in the bucket, ``seconds`` after there was ``left``; None: never used yet."""
        full = self.per_second + 1
        if left is None:
            return full
        return min(full, left + max(0.0, seconds) * self.per_second)


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All that a handler declares about its pace."""

    breaker: CircuitBreaker | None = None
    max_running: int | None = None
    rate: Rate | None = None

    def free_slots(self, running: Mapping[str, int] | None) -> float:
        if self.max_running is None:
            return math.inf
        return max(0, self.max_running - sum((running or {}).values()))
