"""Typed events (``Event``), and the object that a handler receives (``Envelope``)."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import uuid
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast, dataclass_transform

from django_eventbus.exceptions import (
    DuplicateEventError,
    InvalidPayloadError,
    UnknownEventError,
)
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.schema.names import check_name
from django_eventbus.schema.typed_payloads import as_json, from_payload

MAX_VERSION = 32767


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Event:
    """Base class of typed events::

        class OrderPlaced(Event, type="order.placed"):
            order_id: int
            total: Decimal

    Subclasses become frozen, keyword-only dataclasses. A subclass without a type name is abstract:
    it cannot be published, but a handler that subscribes to it receives events of its subclasses.
    """

    event_type: ClassVar[str | None] = None
    event_version: ClassVar[int] = 1

    def __init_subclass__(cls, *, type: str | None = None, version: int = 1) -> None:
        super().__init_subclass__()
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        cls.event_type = type
        cls.event_version = version
        if not isinstance(version, int) or not 1 <= version <= MAX_VERSION:
            raise InvalidPayloadError(f"the version of {cls.__name__} must be 1 to {MAX_VERSION}")
        if type is not None:
            check_name(type, "the event type")
            _remember(type, cls)


if TYPE_CHECKING:
    # Python before 3.13 supports the default of a type variable only in type checkers. Because of
    # the default, an annotation may be a plain ``Envelope`` without a type argument.
    from typing_extensions import TypeVar as TypeVarWithDefault

    E_co = TypeVarWithDefault("E_co", covariant=True, default=Any)
else:
    E_co = TypeVar("E_co", covariant=True)

_classes: dict[str, type[Event]] = {}


def class_for(type_name: str) -> type[Event] | None:
    """Return the event class of this type name, or None if no class declares it."""
    return _classes.get(type_name)


def classes_declared() -> int:
    """Return the number of event classes that have a type name."""
    return len(_classes)


def declared_types() -> dict[str, type[Event]]:
    """Return a dict of all declared type names and their event classes."""
    return dict(_classes)


def _remember(type_name: str, cls: type[Event]) -> None:
    known = _classes.get(type_name)
    same_source = known and (known.__module__, known.__qualname__) == (
        cls.__module__,
        cls.__qualname__,
    )
    if known is not None and not same_source:
        raise DuplicateEventError(
            f"{cls.__module__}.{cls.__qualname__} and {known.__module__}.{known.__qualname__} "
            f"both declare the event type {type_name!r}"
        )
    _classes[type_name] = cls


_UNREAD = object()


class Envelope(Generic[E_co]):
    """The object that a handler receives: the event, and data about the delivery."""

    __slots__ = ("_event", "_payload", "attempt", "handler_name")

    def __init__(self, event: ClaimedEvent, *, handler_name: str, attempt: int) -> None:
        self._event = event
        self._payload: Any = _UNREAD
        self.handler_name = handler_name
        #: The number of this attempt of the handler, starting with 1.
        self.attempt = attempt

    @property
    def id(self) -> uuid.UUID:
        return self._event.event_id

    @property
    def type(self) -> str:
        return self._event.type

    @property
    def version(self) -> int:
        return self._event.version

    @property
    def payload(self) -> Any:
        """The published payload. Each handler gets its own copy, which it may change."""
        if self._payload is _UNREAD:
            self._payload = json.loads(self._event.payload_json or "null")
        return self._payload

    @property
    def data(self) -> E_co:
        """The payload as an instance of its event class.

        Raises UnknownEventError if no class declares the type, or if the payload does not match.
        """
        cls = class_for(self.type)
        if cls is None:
            raise UnknownEventError(f"no event class is declared for the type {self.type!r}")
        return cast(E_co, from_payload(cls, self.payload))

    @property
    def headers(self) -> dict[str, Any]:
        return json.loads(self._event.headers_json) if self._event.headers_json else {}

    @property
    def key(self) -> str | None:
        return self._event.key

    @property
    def queue(self) -> str:
        return self._event.claim.queue

    @property
    def namespace(self) -> str:
        return self._event.claim.namespace

    @property
    def using(self) -> str:
        """The alias of the database that stores the event."""
        return self._event.claim.using

    @property
    def priority(self) -> int:
        return self._event.priority

    @property
    def producer(self) -> str:
        return self._event.producer

    @property
    def caused_by(self) -> uuid.UUID | None:
        """The id of the event whose handler published this event, or None."""
        return self._event.caused_by

    @property
    def created_at(self) -> datetime:
        return self._event.created_at

    @property
    def delivery_count(self) -> int:
        """The number of attempts of the event: claims that led to a delivery."""
        return self._event.attempts

    @property
    def is_replay(self) -> bool:
        """Whether a replay copied this event from the log."""
        return self._event.replay_of is not None

    @property
    def original_id(self) -> uuid.UUID:
        """The id of the event that was published: ``id``, or the id of the replayed event."""
        return self._event.replay_of or self._event.event_id

    @property
    def idempotency_key(self) -> str:
        """A key to pass to external services.

        All attempts of this handler have the same key, also when the event is replayed.
        """
        return f"{self.original_id}:{self.handler_name}"

    def __repr__(self) -> str:
        return f"<Envelope {self.type} {self.id} attempt {self.attempt} of {self.handler_name}>"


_current: ContextVar[Envelope[Any] | None] = ContextVar("eventbus_current_event", default=None)

#: Set the envelope that ``current_envelope()`` returns in the current context.
set_current_envelope = _current.set


def current_envelope() -> Envelope[Any] | None:
    """Return the envelope of the handler that runs in the current context, or None.

    Code that the handler calls, its coroutines, and threads that it starts with a copy of its
    context get the same envelope.
    """
    return _current.get()


def current_event_id() -> uuid.UUID | None:
    """Return the id of the event whose handler runs in the current context, or None.

    Events that the handler publishes store this id as ``caused_by``.
    """
    envelope = _current.get()
    return None if envelope is None else envelope.id


def uuid7() -> uuid.UUID:
    """Return a UUID version 7. Such ids sort by creation time, which keeps an index compact."""
    milliseconds = time.time_ns() // 1_000_000
    random_bits = int.from_bytes(os.urandom(10), "big")
    value = (milliseconds & (1 << 48) - 1) << 80 | random_bits
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return uuid.UUID(int=value)


def to_payload(event: Event) -> dict[str, Any]:
    """Return the fields of a typed event as a dict of JSON values."""
    if event.event_type is None:
        raise UnknownEventError(
            f"{type(event).__qualname__} is abstract: declare it with "
            f'class {type(event).__name__}(Event, type="…") to publish it'
        )
    return {
        field.name: as_json(getattr(event, field.name))
        for field in dataclasses.fields(cast(Any, event))
    }
