"""Retry policies, and the decision whether a failed handler is retried."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from django_eventbus.conf import settings
from django_eventbus.exceptions import LONGEST_DELAY, Discard, Retry, seconds_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The number and delays of the retries of a failed handler.

    The delay before attempt N (N >= 2) is ``min(base_delay * multiplier ** (N - 2), max_delay)``
    seconds. A random time of at most ``jitter * delay`` is added or subtracted. After
    ``max_retries + 1`` attempts the handler is dead.
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
        """Return the project's policy (``EVENTBUS["RETRY"]``) with some values replaced."""
        return cls(**{**settings.RETRY, **overrides})

    def wait_before(self, attempt: int) -> float:
        """Return the seconds between attempt N-1 and attempt N, without jitter."""
        try:
            wait = self.base_delay * self.multiplier ** (attempt - 2)
        except OverflowError:
            return self.max_delay
        return min(wait, self.max_delay)


A_CENTURY = LONGEST_DELAY

_BOUNDS = {
    "max_retries": (0, 1_000_000),
    "base_delay": (0, A_CENTURY),
    "max_delay": (0, A_CENTURY),
    "multiplier": (1, 1000),
    "jitter": (0, 1),
}


@dataclass(frozen=True, slots=True)
class RetryIn:
    """Retry after this number of seconds."""

    seconds: float


class GiveUp:
    """The handler is dead, because it has no retries left."""


class GiveUpAtOnce(GiveUp):
    """The handler is dead, because it raised Discard."""


Decision = RetryIn | GiveUp


def decide(
    policy: RetryPolicy,
    *,
    failures: int,
    error: BaseException,
    rand: Callable[[], float] = random.random,
) -> Decision:
    """Return the decision after ``failures`` failed attempts. ``error`` is the last error."""
    # isinstance() also reads __class__, which an exception may override; type() does not.
    kind = type(error)
    if issubclass(kind, Discard):
        return GiveUpAtOnce()
    if failures > policy.max_retries:
        return GiveUp()
    asked = _asked(error) if issubclass(kind, Retry) else None
    if asked is not None:
        return RetryIn(asked)
    wait = policy.wait_before(failures + 1)
    return RetryIn(wait * (1 + policy.jitter * (2 * rand() - 1)))


def _asked(error: BaseException) -> float | None:
    """Return the delay of a Retry; None if it has no delay, or a subclass has an invalid delay."""
    try:
        delay: Any = error.delay  # type: ignore[attr-defined]
        return None if delay is None else seconds_of(delay)
    except Exception:
        return None
