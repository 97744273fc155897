"""``once_per``: run a handler once per idempotency key.

The handler takes effect once even if an event is retried or published twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import reduce, wraps
from typing import Any, TypeVar, cast

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.db import close_old_connections

from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.events import Envelope
from django_eventbus.exceptions import EventBusError, InvalidPayloadError
from django_eventbus.publishing.transactions import choose_database
from django_eventbus.registry import registry
from django_eventbus.schema.names import check_name
from django_eventbus.store import Store, store_for

F = TypeVar("F", bound=Callable[[Envelope[Any]], Any])
Key = str | Callable[[Envelope[Any]], Any]


def once_per(key: Key, *, keep: timedelta | None = None) -> Callable[[F], F]:
    """Let a handler skip events whose idempotency key it has handled before::

        @handler("payment.received")
        @once_per("payload.payment_id")
        def book(event): ...

    ``key`` is the path of the idempotency key in the event, or a function that takes the event and
    returns the idempotency key. The idempotency key is stored for this handler, forever or for the
    time of ``keep``. For an atomic handler, the key is stored in the handler's transaction, so the
    handler takes effect exactly once. With ``atomic=False``, the key is stored after the handler
    has returned. Such a handler runs twice if its process dies before the key is stored, or if two
    events with the same idempotency key run at the same time.
    """
    _check_key(key)
    if keep is not None and not (isinstance(keep, timedelta) and keep > timedelta(0)):
        raise EventBusError(f"once_per: keep must be a timedelta of more than 0, not {keep!r}")

    def decorate(func: F) -> F:
        if any(each.func is func for each in registry.all()):
            raise EventBusError(
                f"@once_per is above @handler, so it has no effect on {func.__qualname__}: "
                "put @once_per below @handler"
            )
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
            if effect.record():
                func(event)
        elif not effect.is_done():
            func(event)
            effect.record()

    return once


def _async_once(func: Any, key: Key, keep: timedelta | None) -> Any:
    @wraps(func)
    async def once(event: Envelope[Any]) -> None:
        effect = _Effect(event, key, keep)
        if not await _in_thread(effect.is_done):
            await func(event)
            await _in_thread(effect.record)

    return once


async def _in_thread(action: Callable[[], bool]) -> bool:
    """Run database code in the thread that Django uses for async code.

    Django closes old connections of that thread only before and after a request, and a worker
    handles no requests. So this function closes old connections.
    """

    def act() -> bool:
        close_old_connections()
        try:
            return action()
        finally:
            close_old_connections()

    return await sync_to_async(act)()


class _Effect:
    """The effect of one handler for one idempotency key.

    The stored key shows that the effect has happened.
    """

    def __init__(self, event: Envelope[Any], key: Key, keep: timedelta | None) -> None:
        self.event_id: uuid.UUID = event.id
        self.scope = event.handler_name
        self.key = _key_of(event, key)
        self.keep = keep

    @property
    def store(self) -> Store:
        return store_for(choose_database(None))

    def is_done(self) -> bool:
        return self.store.find_key(self.scope, self.key) is not None

    def record(self) -> bool:
        """Store the key; return False if it was already stored."""
        existing = self.store.add_key(self.scope, self.key, event_id=self.event_id, keep=self.keep)
        return existing is None


def _is_atomic(event: Envelope[Any]) -> bool:
    handler = registry.get(event.handler_name)
    return handler is not None and handler.atomic


def _key_of(event: Envelope[Any], key: Key) -> str:
    where = "the key function" if callable(key) else repr(key)
    try:
        found = key(event) if callable(key) else reduce(_step, key.split("."), event)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidPayloadError(f"once_per found no key with {where}: {error!r}") from error
    if isinstance(found, bool) or not isinstance(found, str | int | uuid.UUID):
        raise InvalidPayloadError(
            f"once_per needs a string, an integer or a UUID, but {where} returned {found!r}"
        )
    check_name(str(found), f"the key that once_per found with {where}")
    return str(found)


def _step(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return value[name]
    return value[int(name)] if isinstance(value, list) else getattr(value, name)
