"""The policies of a handler: a circuit breaker, a rate, a limit on concurrency.

``flow.decisions`` applies the policies. The database stores the counts of the circuit breakers, the
tokens of the rates, and the slots, so that all workers share them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from django_eventbus.conf import settings
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.exceptions import EventBusError

A_DAY = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitBreaker:
    """The policy that stops calls of a handler that keeps failing.

    The breaker opens when at least ``min_calls`` calls within ``window`` seconds have ended and at
    least the share ``failure_rate`` of these calls has failed. While the breaker is open,
    deliveries of the handler wait, and no attempt is counted. After ``open_for`` seconds one
    delivery is tried. Success closes the breaker; failure keeps it open for ``open_for`` more
    seconds.
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
        """Return the project's breaker (``EVENTBUS["BREAKER"]``) with some values replaced."""
        return cls(**{**(settings.BREAKER or {}), **overrides})


_BOUNDS = {
    "failure_rate": (0.01, 1),
    "window": (1, A_DAY),
    "min_calls": (1, 1_000_000),
    "open_for": (0.1, A_DAY),
}


@dataclass(frozen=True, slots=True)
class Rate:
    """A maximum number of calls per second, evenly distributed.

    Calls that are not made accumulate, up to the number of calls per second plus one. The
    accumulated calls can be made at once.
    """

    per_second: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a rate such as ``100/m``; units: s, m, h, d. Raises ValueError for other texts."""
        found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*([smhd])\s*", text, flags=re.ASCII)
        if found is None or not int(found[1]):
            raise ValueError(f"a rate is a number per s, m, h or d, such as '100/m', not {text!r}")
        return cls(int(found[1]) / _UNITS[found[2]])


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The breaker, rate and limit on concurrency of one handler."""

    breaker: CircuitBreaker | None = None
    max_running: int | None = None
    rate: Rate | None = None


def check_policy(handler: str, option: str, given: object, policy: type[Any]) -> None:
    """Raise EventBusError if a handler's retry policy or breaker is neither a policy nor a dict."""
    if given is None or isinstance(given, policy):
        return
    if not isinstance(given, Mapping):
        raise EventBusError(
            f"the {option} of {handler} must be a {policy.__name__} or a dict, not {given!r}"
        )
    known = {each.name for each in fields(policy)}
    for name in given:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise EventBusError(f"the {option} of {handler} has the unknown key {name!r}{hint}")
    try:
        policy(**given)
    except ValueError as error:
        raise EventBusError(f"the {option} of {handler}: {error}") from None


def check_pace(handler: str, most: object, rate: object) -> None:
    """Raise EventBusError if the ``max_running`` or the ``rate`` of a handler is invalid."""
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise EventBusError(
            f"the max_running of {handler} must be a whole number from 1 up, not {most!r}; "
            "use pauses.pause(handler=…) to stop the handler"
        )
    if rate is None:
        return
    try:
        Rate.parse(str(rate))
    except ValueError as error:
        raise EventBusError(f"the rate of {handler}: {error}") from None
