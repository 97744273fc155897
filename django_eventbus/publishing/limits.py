"""Limits on waiting events by queue, key or type, and the policy when a limit is reached.

``EVENTBUS["LIMITS"]`` names what is limited as ``"queue:mail"``, ``"key:order:*"`` or
``"type:tick.*"``; a name without a prefix is a queue. A pattern is a separate limit for each queue,
key or type that it matches. An event has at most one limit: the limit of its key, or else of its
type, or else of its queue.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from django_eventbus.conf import settings
from django_eventbus.counters.process import count_publishing, write_if_due
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.exceptions import BackpressureError, InvalidPayloadError
from django_eventbus.models import QueuedEvent
from django_eventbus.retries import A_CENTURY
from django_eventbus.schema.names import OWN_TYPES, check_name
from django_eventbus.schema.patterns import by_specificity, matches
from django_eventbus.signals import event_coalesced, event_dropped
from django_eventbus.store import Store

DROP, COALESCE, BLOCK, HALT = POLICIES = ("drop", "coalesce", "block", "halt")
#: If several limits match an event, the first kind in this order applies.
KINDS = ("key", "type", "queue")
OPTIONS = ("max_size", "overflow", "timeout")

FIRST_WAIT = 0.01
LONGEST_WAIT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The maximum number of queued events in one scope, and the policy for further events."""

    #: The key in EVENTBUS["LIMITS"]. Signals send this name and not the scope, because one pattern
    #: may have any number of scopes.
    name: str
    #: The queue, key or type whose events are counted.
    scope: str
    max_size: int
    overflow: str
    timeout: float | None = None

    @property
    def patience(self) -> float:
        return settings.BLOCK_TIMEOUT if self.timeout is None else self.timeout

    def error(self, room: int, wanted: int) -> BackpressureError:
        return BackpressureError(
            f"{self.scope} has room for {room} of {wanted} events: EVENTBUS['LIMITS'] allows "
            f"{self.max_size} for {self.name!r}"
        )


def limit_for(queue: str, key: str | None, type_name: str) -> Limit | None:
    """Return the limit of an event, or None. The call is cheap if the project has no limits."""
    limits = settings.LIMITS
    if not limits or type_name.startswith(OWN_TYPES):
        return None  # The bus's own events must not be dropped or replaced.
    global _limits_cache
    if _limits_cache is None or _limits_cache.source is not limits:
        _limits_cache = _LimitsCache(limits)
    return _limits_cache.limit_for(queue, key, type_name)


def admit(store: Store, limit: Limit, wanted: int) -> int:
    """Return how many of the ``wanted`` events the limit has room for.

    With the policy "block", wait until there is room for at least one event. With the policy
    "halt", raise BackpressureError unless there is room for all events.
    """
    room = _room(store, limit)
    if room < wanted and limit.overflow == HALT:
        raise limit.error(room, wanted)
    if room == 0 and limit.overflow == BLOCK:
        room = _wait_for_room(store, limit, wanted)
    return min(room, wanted)


def drop(store: Store, limit: Limit, event: QueuedEvent) -> None:
    """Count a dropped event at once: its transaction may contain nothing that could commit."""
    count_publishing(store.using, event.queue, event.type, "dropped")
    write_if_due(store.using)
    event_dropped.send_robust(QueuedEvent, event=event, limit=limit.name)


def coalesce(store: Store, limit: Limit, event: QueuedEvent) -> QueuedEvent | None:
    """Replace the content of a waiting event; return it, or None if no event can be replaced."""
    merged = store.coalesce(event)
    if merged is not None:
        send_coalesced(limit, merged)
    return merged


def send_coalesced(limit: Limit, merged: QueuedEvent) -> None:
    event_coalesced.send_robust(QueuedEvent, event=merged, limit=limit.name)


def _room(store: Store, limit: Limit) -> int:
    return limit.max_size - store.count_limited(limit.scope, at_most=limit.max_size)


@contextmanager
def without_waiting() -> Iterator[None]:
    """Make the policy "block" raise BackpressureError at once, for a caller that must not wait."""
    token = _never_waits.set(True)
    try:
        yield
    finally:
        _never_waits.reset(token)


_never_waits: ContextVar[bool] = ContextVar("eventbus_never_waits", default=False)


def _wait_for_room(store: Store, limit: Limit, wanted: int) -> int:
    if _never_waits.get():
        raise limit.error(0, wanted)
    if store.connection.in_atomic_block and not store.allows_concurrent_writes:
        error = limit.error(0, wanted)
        error.add_note("No worker can make room while this transaction locks the database.")
        raise error
    give_up_at = time.monotonic() + limit.patience
    wait = FIRST_WAIT
    while (left := give_up_at - time.monotonic()) > 0:
        time.sleep(min(wait, left))
        wait = min(wait * 2, LONGEST_WAIT)
        if room := _room(store, limit):
            return room
    raise limit.error(0, wanted)


class _LimitsCache:
    """The limits of the settings, with a cache of the limit of each queue, key and type."""

    def __init__(self, limits: Mapping[str, Mapping[str, Any]]) -> None:
        if wrong := objection_to(limits):
            raise ImproperlyConfigured(f"EVENTBUS['LIMITS']: {wrong}")
        self.source = limits
        self._names: dict[str, list[tuple[str, str]]] = {kind: [] for kind in KINDS}
        for name in limits:
            kind, pattern = _kind_and_pattern(name)
            self._names[kind].append((pattern, name))
        for named in self._names.values():
            named.sort(key=lambda pair: by_specificity(pair[0]))
        self._known: dict[tuple[str, str | None, str], Limit | None] = {}

    def limit_for(self, queue: str, key: str | None, type_name: str) -> Limit | None:
        which = (queue, key, type_name)
        if which not in self._known:
            if len(self._known) >= _MAX_CACHED:
                self._known = {}
            self._known[which] = self._find({"queue": queue, "key": key, "type": type_name})
        return self._known[which]

    def _find(self, values: dict[str, str | None]) -> Limit | None:
        for kind in KINDS:
            value = values[kind]
            for pattern, name in self._names[kind]:
                if value is not None and matches(pattern, value):
                    return Limit(name=name, scope=f"{kind}:{value}", **self.source[name])
        return None


#: The maximum size of the cache. It is needed because a project may have any number of keys.
_MAX_CACHED = 10_000

_limits_cache: _LimitsCache | None = None


def _kind_and_pattern(name: str) -> tuple[str, str]:
    kind, colon, pattern = name.partition(":")
    return (kind, pattern) if colon and kind in KINDS else ("queue", name)


def objection_to(limits: Any) -> str | None:
    """Return what is wrong with the setting and what is allowed, or None if it is correct."""
    if not isinstance(limits, Mapping):
        return (
            "Use a dict such as {'mail': {'max_size': 1000, 'overflow': 'halt'}}, with "
            "'queue:…', 'key:…' or 'type:…' as keys"
        )
    seen: dict[tuple[str, str], str] = {}
    for name, options in limits.items():
        if wrong := _objection_to_name(name) or _objection_to_options(options):
            return f"{name!r}: {wrong}"
        if other := seen.get(_kind_and_pattern(name)):
            return f"{name!r} is the same as {other!r}: keep one of them"
        seen[_kind_and_pattern(name)] = name
    return None


def _objection_to_name(name: Any) -> str | None:
    if not isinstance(name, str):
        return "Use a string: the name of a queue, 'queue:…', 'key:…' or 'type:…'"
    kind, pattern = _kind_and_pattern(name)
    try:
        check_name(pattern, f"the text after {kind}:")
    except InvalidPayloadError as error:
        return str(error)
    if kind == "queue" and not any(matches(pattern, queue) for queue in settings.QUEUES):
        known = [*settings.QUEUES, *(f"{kind}:…" for kind in KINDS)]
        return f"There is no such queue in EVENTBUS['QUEUES']{did_you_mean(name, known)}"
    return None


def _objection_to_options(options: Any) -> str | None:
    if not isinstance(options, Mapping):
        return "Use a dict such as {'max_size': 1000, 'overflow': 'halt'}"
    for option in options:
        if option not in OPTIONS:
            return f"A limit has no option {option!r}{did_you_mean(str(option), OPTIONS)}"
    size, overflow = options.get("max_size"), options.get("overflow")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        return f"max_size must be a whole number from 1 up, not {size!r}"
    if overflow not in POLICIES:
        return f"overflow must be a policy, not {overflow!r}{did_you_mean(str(overflow), POLICIES)}"
    if "timeout" in options:
        return _objection_to_timeout(options["timeout"], overflow)
    return None


def _objection_to_timeout(timeout: Any, overflow: str) -> str | None:
    if overflow != BLOCK:
        return f"timeout is only valid with overflow 'block' (overflow is {overflow!r})"
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not number or not 0 < timeout < A_CENTURY:
        return f"timeout must be a number of seconds, more than 0, not {timeout!r}"
    return None
