"""Is there room for one more? Limits by queue, key or type, and what to do when they are reached.

``EVENTBUS["LIMITS"]`` names what is limited as ``"queue:mail"``, ``"key:order:*"`` or
``"type:tick.*"``; a bare name is a queue. A pattern limits each queue, key or type it matches by
itself. An event is under one limit: its key's, else its type's, else its queue's.

Apart from these, a transaction may bring ``EVENTBUS["MAX_EVENTS_PER_TRANSACTION"]`` events.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.base.base import BaseDatabaseWrapper

from django_eventbus.conf import settings
from django_eventbus.events import being_handled, check_name
from django_eventbus.exceptions import BackpressureError, InvalidPayloadError
from django_eventbus.models import QueuedEvent
from django_eventbus.registry import did_you_mean, matches
from django_eventbus.retries import A_CENTURY
from django_eventbus.signals import event_coalesced, event_dropped
from django_eventbus.store import Store

DROP, COALESCE, BLOCK, HALT = POLICIES = ("drop", "coalesce", "block", "halt")
#: The first that has a limit decides.
KINDS = ("key", "type", "queue")
OPTIONS = ("max_size", "overflow", "timeout")

FIRST_WAIT = 0.01
LONGEST_WAIT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How many events may be queued in one scope, and what becomes of more."""

    #: As the settings call it: few, where scopes may be as many as keys.
    name: str
    #: What is counted together: one queue, one key or one type.
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
            f"{self.max_size} under {self.name!r}"
        )


def limit_for(queue: str, key: str | None, type_name: str) -> Limit | None:
    """The limit that an event is under. Costs next to nothing where there are none."""
    limits = settings.LIMITS
    if not limits:
        return None
    global _book
    if _book is None or _book.source is not limits:
        _book = _Book(limits)
    return _book.limit_for(queue, key, type_name)


def admit(store: Store, limit: Limit, wanted: int) -> int:
    """How many of so many events there is room for.

    Waits for room for one if the policy is to block, raises BackpressureError unless there is
    room for all if it is to halt.
    """
    room = _room(store, limit)
    if room < wanted and limit.overflow == HALT:
        raise limit.error(room, wanted)
    if room == 0 and limit.overflow == BLOCK:
        room = _wait_for_room(store, limit, wanted)
    return min(room, wanted)


def drop(limit: Limit, event: QueuedEvent) -> None:
    event_dropped.send_robust(QueuedEvent, event=event, limit=limit.name)


def coalesce(store: Store, limit: Limit, event: QueuedEvent) -> QueuedEvent | None:
    """The waiting event that now says what this one does; None if there is no such event."""
    standing = store.coalesce(event)
    if standing is not None:
        tell_coalesced(limit, standing)
    return standing


def tell_coalesced(limit: Limit, standing: QueuedEvent) -> None:
    event_coalesced.send_robust(QueuedEvent, event=standing, limit=limit.name)


def _room(store: Store, limit: Limit) -> int:
    return limit.max_size - store.counted(limit.scope, at_most=limit.max_size)


def _wait_for_room(store: Store, limit: Limit, wanted: int) -> int:
    if store.connection.in_atomic_block and not store.lets_others_work:
        error = limit.error(0, wanted)
        error.add_note("Nobody can make room while this transaction holds the database.")
        raise error
    give_up_at = time.monotonic() + limit.patience
    wait = FIRST_WAIT
    while (left := give_up_at - time.monotonic()) > 0:
        time.sleep(min(wait, left))
        wait = min(wait * 2, LONGEST_WAIT)
        if room := _room(store, limit):
            return room
    raise limit.error(0, wanted)


def bring(connection: BaseDatabaseWrapper, many: int) -> None:
    """Refuse what is more than one transaction may publish.

    A loop that does not end shows nothing of itself to anybody until it commits, or until the
    disk is full. Workers commit several events together: there each of them counts for itself.
    """
    if not connection.in_atomic_block:
        return  # each statement is a transaction of its own
    cause = being_handled()
    brought = _brought.get(connection)
    if brought is None or not brought.belongs_to(connection, cause):
        brought = _brought[connection] = _Brought(connection.run_on_commit, cause)
    most = settings.MAX_EVENTS_PER_TRANSACTION
    if brought.count + many > most:
        raise BackpressureError(
            f"this transaction has published {brought.count:,} events and wants {many:,} more: "
            f"EVENTBUS['MAX_EVENTS_PER_TRANSACTION'] allows {most:,}; commit before, or raise it"
        )
    brought.count += many


def take_back(connection: BaseDatabaseWrapper, many: int) -> None:
    """They were known already. To find out, the store may have rolled back to a savepoint."""
    if connection.in_atomic_block:
        brought = _brought[connection]
        brought.count -= many
        brought.hooks = connection.run_on_commit


@dataclass(slots=True)
class _Brought:
    """What a transaction has published, known by Django's list of what to do on its commit: each
    transaction has a list of its own. So has what follows the rollback of a savepoint, where
    counting begins anew."""

    hooks: list[Any]
    cause: UUID | None
    count: int = 0

    def belongs_to(self, connection: BaseDatabaseWrapper, cause: UUID | None) -> bool:
        return self.hooks is connection.run_on_commit and self.cause == cause


_brought: WeakKeyDictionary[BaseDatabaseWrapper, _Brought] = WeakKeyDictionary()


class _Book:
    """The limits of the settings, and a memory of who is under which."""

    def __init__(self, limits: Mapping[str, Mapping[str, Any]]) -> None:
        if wrong := objection_to(limits):
            raise ImproperlyConfigured(f"EVENTBUS['LIMITS']: {wrong}")
        self.source = limits
        self._names: dict[str, list[tuple[str, str]]] = {kind: [] for kind in KINDS}
        for name in limits:
            kind, pattern = _kind_and_pattern(name)
            self._names[kind].append((pattern, name))
        for named in self._names.values():
            named.sort(key=lambda pair: _vagueness(pair[0]))
        self._known: dict[tuple[str, str | None, str], Limit | None] = {}

    def limit_for(self, queue: str, key: str | None, type_name: str) -> Limit | None:
        who = (queue, key, type_name)
        if who not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known = {}
            self._known[who] = self._find({"queue": queue, "key": key, "type": type_name})
        return self._known[who]

    def _find(self, values: dict[str, str | None]) -> Limit | None:
        for kind in KINDS:
            value = values[kind]
            for pattern, name in self._names[kind]:
                if value is not None and matches(pattern, value):
                    return Limit(name=name, scope=f"{kind}:{value}", **self.source[name])
        return None


#: Keys are many, so the memory of them must have an end.
_REMEMBERED = 10_000

_book: _Book | None = None


def _kind_and_pattern(name: str) -> tuple[str, str]:
    kind, colon, pattern = name.partition(":")
    return (kind, pattern) if colon and kind in KINDS else ("queue", name)


def _vagueness(pattern: str) -> tuple[bool, int]:
    """A name comes before a pattern, a long pattern before a short one."""
    return "*" in pattern, -len(pattern.replace("*", ""))


def objection_to(limits: Any) -> str | None:
    """What would be right instead, or None if it is right."""
    if not isinstance(limits, Mapping):
        return (
            "Give a dict such as {'mail': {'max_size': 1000, 'overflow': 'halt'}}, with "
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
        check_name(pattern, f"what comes after {kind}:")
    except InvalidPayloadError as error:
        return str(error)
    if kind == "queue" and not any(matches(pattern, queue) for queue in settings.QUEUES):
        known = [*settings.QUEUES, *(f"{kind}:…" for kind in KINDS)]
        return f"There is no such queue in EVENTBUS['QUEUES']{did_you_mean(name, known)}"
    return None


def _objection_to_options(options: Any) -> str | None:
    if not isinstance(options, Mapping):
        return "Give a dict such as {'max_size': 1000, 'overflow': 'halt'}"
    for option in options:
        if option not in OPTIONS:
            return f"A limit has no {option!r}{did_you_mean(str(option), OPTIONS)}"
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
        return f"only overflow 'block' waits: remove timeout, or {overflow!r}"
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not number or not 0 < timeout < A_CENTURY:
        return f"timeout must be a number of seconds, more than 0, not {timeout!r}"
    return None
