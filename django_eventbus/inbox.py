"""Effects that must happen once, whatever is replayed, revived or published twice."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import reduce, wraps
from typing import Any, TypeVar, cast

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.db import close_old_connections

from django_eventbus.events import Envelope, check_name
from django_eventbus.exceptions import EventBusError, InvalidPayloadError
from django_eventbus.publishing import choose_alias
from django_eventbus.registry import did_you_mean, registry
from django_eventbus.store import Store, store_for

F = TypeVar("F", bound=Callable[..., Any])
Key = str | Callable[[Envelope[Any]], Any]


def once_per(key: Key, *, keep: timedelta | None = None) -> Callable[[F], F]:
    """Let a handler pass over events whose key it has dealt with::

        @handler("payment.received")
        @once_per("payload.payment_id")
        def book(event): ...

    ``key`` is a path into the event or a function of it; it is remembered for this handler, for
    good or for as long as ``keep`` says. An atomic handler's effect and its mark are one
    transaction: exactly once. One with ``atomic=False`` is marked when it has returned: not
    again after that, but twice if its process dies in between or two such events meet.
    """
    _check_key(key)
    if keep is not None and not (isinstance(keep, timedelta) and keep > timedelta(0)):
        raise EventBusError(f"once_per keeps for a timedelta of more than 0, not {keep!r}")

    def decorate(func: F) -> F:
        if any(each.func is func for each in registry.all()):
            raise EventBusError(f"write @once_per under @handler, over {func.__qualname__}")
        wrap = _async_once if iscoroutinefunction(func) else _once
        return cast(F, wrap(func, key, keep))

    return decorate


def _check_key(key: Any) -> None:
    if callable(key):
        return
    check_name(key, "the key of once_per")
    known = [name for name in dir(Envelope) if not name.startswith("_")]
    if (first := key.partition(".")[0]) not in known:
        raise EventBusError(f"once_per: an event has no {first!r}{did_you_mean(first, known)}")


def _once(func: Any, key: Key, keep: timedelta | None) -> Any:
    @wraps(func)
    def once(event: Envelope[Any]) -> None:
        effect = _Effect(event, key, keep)
        if _is_atomic(event):
            if effect.begin():
                func(event)
        elif not effect.is_done():
            func(event)
            effect.begin()

    return once


def _async_once(func: Any, key: Key, keep: timedelta | None) -> Any:
    @wraps(func)
    async def once(event: Envelope[Any]) -> None:
        effect = _Effect(event, key, keep)
        if not await _in_thread(effect.is_done):
            await func(event)
            await _in_thread(effect.begin)

    return once


async def _in_thread(action: Callable[[], bool]) -> bool:
    """Nobody else looks after the connection of the thread in which async code meets Django."""

    def act() -> bool:
        close_old_connections()
        try:
            return action()
        finally:
            close_old_connections()

    return await sync_to_async(act)()


class _Effect:
    """What one handler does for one key."""

    def __init__(self, event: Envelope[Any], key: Key, keep: timedelta | None) -> None:
        self.event_id: uuid.UUID = event.id
        self.scope = event.handler_name
        self.key = _key_of(event, key)
        self.keep = keep

    @property
    def store(self) -> Store:
        return store_for(choose_alias(None))

    def is_done(self) -> bool:
        return self.store.standing_mark(self.scope, self.key) is not None

    def begin(self) -> bool:
        """Mark it; False if somebody else has."""
        mark = self.store.take_mark(self.scope, self.key, event_id=self.event_id, keep=self.keep)
        return mark is None


def _is_atomic(event: Envelope[Any]) -> bool:
    handler = registry.get(event.handler_name)
    return handler is not None and handler.atomic


def _key_of(event: Envelope[Any], key: Key) -> str:
    where = "its function" if callable(key) else repr(key)
    try:
        found = key(event) if callable(key) else reduce(_step, key.split("."), event)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidPayloadError(f"once_per finds no key by {where}: {error!r}") from error
    if isinstance(found, bool) or not isinstance(found, str | int | uuid.UUID):
        raise InvalidPayloadError(
            f"once_per needs a string, an integer or a UUID, but {where} gives {found!r}"
        )
    check_name(str(found), f"the key that once_per finds by {where}")
    return str(found)


def _step(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return value[name]
    return value[int(name)] if isinstance(value, list) else getattr(value, name)
