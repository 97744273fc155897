"""List the states of circuit breakers, and close a breaker by hand."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from django.db import transaction

from django_eventbus.conf import settings
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.exceptions import EventBusError
from django_eventbus.flow.decisions import count_calls, totals
from django_eventbus.models import FlowControl, FlowControlKind
from django_eventbus.policies import CircuitBreaker
from django_eventbus.publishing.wakeup import wake_on_commit
from django_eventbus.registry import registry
from django_eventbus.signals import breaker_closed
from django_eventbus.store import store_for


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerStatus:
    """The state of the circuit breaker of one handler.

    ``calls`` and ``failures`` count the calls of the handler in the breaker's time window. While
    the breaker is open, they are the counts at the time at which it opened.
    """

    handler: str
    state: str  # "closed", "open", or "half-open" while one delivery is tried
    calls: int = 0
    failures: int = 0
    opened_at: datetime | None = None
    probe_at: datetime | None = None


def list(*, using: str | None = None) -> builtins.list[BreakerStatus]:
    """Return the states of the circuit breakers of registered handlers, sorted by handler name."""
    store = store_for(using)
    now = store.read_clock()
    rows = {row.name: row for row in store.flow_controls.filter(kind=FlowControlKind.HANDLER)}
    declared = {name: breaker for name in names() if (breaker := _declared(name))}
    return [
        _status(name, breaker, rows.get(name), now) for name, breaker in sorted(declared.items())
    ]


def reset(handler: str, *, by: str | None = None, using: str | None = None) -> bool:
    """Close the circuit breaker of a handler and reset its counts.

    Returns False if the breaker was not open. Raises EventBusError if the handler has no breaker.
    """
    if _declared(handler) is None:
        raise EventBusError(
            f"there is no handler {handler!r} with a circuit breaker"
            f"{did_you_mean(handler, names())}"
        )
    store = store_for(using)
    was_open = store.close_breaker(handler)
    if was_open:
        facts = {"handler": handler, "by": settings.producer() if by is None else by}
        send = partial(breaker_closed.send_robust, FlowControl, **facts)
        transaction.on_commit(send, using=store.using)
        wake_on_commit(store.using)
    return was_open


def names() -> builtins.list[str]:
    """Return the names of the registered handlers that have a circuit breaker."""
    return sorted(each.name for each in registry.all() if _declared(each.name))


def _declared(name: str) -> CircuitBreaker | None:
    found = registry.get(name)
    limits = found.limits if found else None
    return limits.breaker if limits else None


def _status(
    name: str, breaker: CircuitBreaker, row: FlowControl | None, now: datetime
) -> BreakerStatus:
    if row is None:
        return BreakerStatus(handler=name, state="closed")
    in_window = count_calls(row.calls, window=breaker.window, now=now.timestamp())
    calls, failures = totals(in_window if row.opened_at is None else row.calls)
    return BreakerStatus(
        handler=name,
        state=state_of(row),
        calls=calls,
        failures=failures,
        opened_at=row.opened_at,
        probe_at=row.probe_at,
    )


def state_of(row: FlowControl | None) -> str:
    """Return "closed", "open" or "half-open"."""
    if row is None or row.opened_at is None:
        return "closed"
    return "half-open" if row.probe_by else "open"
