"""How often, and when again: policies and the pure decision after a failure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from django_eventbus.conf import settings
from django_eventbus.exceptions import Discard, Retry


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When a failed handler is tried again.

    Attempt N (N >= 2) waits ``min(base_delay * multiplier ** (N - 2), max_delay)`` seconds, give
    or take ``jitter`` of that; after ``max_retries + 1`` attempts the handler is dead.
    """

    max_retries: int = 3
    base_delay: float = 1.0
    max_delay: float = 30.0
    multiplier: float = 2.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if not isinstance(value, int | float) or not least <= value <= most:
                raise ValueError(
                    f"RetryPolicy.{name} must be a number from {least:g} to {most:g}, not {value!r}"
                )

    @classmethod
    def default(cls, **overrides: Any) -> Self:
        """The project's policy (``EVENTBUS["RETRY"]``) with some values replaced."""
        return cls(**{**settings.RETRY, **overrides})

    def wait_before(self, attempt: int) -> float:
        """Seconds between attempt N-1 and attempt N, without jitter."""
        try:
            wait = self.base_delay * self.multiplier ** (attempt - 2)
        except OverflowError:
            return self.max_delay
        return min(wait, self.max_delay)


A_CENTURY = 100 * 365 * 24 * 3600.0

_BOUNDS = {
    "max_retries": (0, 1_000_000),
    "base_delay": (0, A_CENTURY),
    "max_delay": (0, A_CENTURY),
    "multiplier": (1, 1000),
    "jitter": (0, 1),
}


@dataclass(frozen=True, slots=True)
class RetryIn:
    """Try again after this many seconds."""

    seconds: float


class GiveUp:
    """The handler is dead: out of retries."""


class GiveUpAtOnce(GiveUp):
    """The handler raised Discard."""


Decision = RetryIn | GiveUp


def decide(
    policy: RetryPolicy,
    *,
    failures: int,
    error: BaseException,
    rand: Callable[[], float] = random.random,
) -> Decision:
    """What follows after ``failures`` failed attempts, of which ``error`` is the last."""
    if isinstance(error, Discard):
        return GiveUpAtOnce()
    if failures > policy.max_retries:
        return GiveUp()
    asked = error.delay if isinstance(error, Retry) else None
    if isinstance(asked, int | float) and not math.isnan(asked):
        return RetryIn(min(max(0.0, asked), A_CENTURY))
    wait = policy.wait_before(failures + 1)
    return RetryIn(wait * (1 + policy.jitter * (2 * rand() - 1)))
