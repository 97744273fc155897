"""How often, and when again: policies and the pure decision after a failure."""

from __future__ import annotations

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
        for name in ("max_retries", "base_delay", "max_delay"):
            if getattr(self, name) < 0:
                raise ValueError(f"RetryPolicy.{name} must not be negative")
        if self.multiplier < 1:
            raise ValueError("RetryPolicy.multiplier must be at least 1")
        if not 0 <= self.jitter <= 1:
            raise ValueError("RetryPolicy.jitter must be between 0 and 1")

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
    if isinstance(error, Retry) and error.delay is not None:
        return RetryIn(max(0.0, error.delay))
    wait = policy.wait_before(failures + 1)
    return RetryIn(wait * (1 + policy.jitter * (2 * rand() - 1)))
