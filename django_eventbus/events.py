"""What an event is: typed classes, what a handler receives, and what may be stored.

``Event`` is the base of typed events, ``Envelope`` is what a handler gets, and ``check_payload``
refuses in Python what a database would refuse only after it had broken the caller's transaction.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
import types
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, date, datetime, timedelta
from datetime import time as day_time
from decimal import Decimal
from enum import Enum
from functools import cache
from typing import (
    Any,
    ClassVar,
    Generic,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from django.core.serializers.json import DjangoJSONEncoder
from django.utils.dateparse import parse_date, parse_datetime, parse_duration, parse_time
from django.utils.functional import Promise

from django_eventbus.conf import settings
from django_eventbus.exceptions import (
    DuplicateEventError,
    InvalidPayloadError,
    UnknownEventError,
)

MAX_NAME_LENGTH = 200
#: The most that MAX_PAYLOAD_BYTES can be.
LARGEST_PAYLOAD = 2**20
#: What the database itself refuses to store. Its own form of JSON may take six times the text:
#: PostgreSQL needs twelve bytes for each of [1,1,1,…].
LARGEST_STORED = 8 * LARGEST_PAYLOAD
MAX_INTEGER_BITS = 1024
MAX_VERSION = 32767


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Event:
    """Base class of typed events::

        class OrderPlaced(Event, type="order.placed"):
            order_id: int
            total: Decimal

    Subclasses become frozen, keyword-only dataclasses. One without a type name is abstract: it
    can be subscribed to (and gets its subclasses) but not published.
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


E_co = TypeVar("E_co", covariant=True)

_classes: dict[str, type[Event]] = {}


def class_for(type_name: str) -> type[Event] | None:
    """The event class that owns this type name, if one was declared."""
    return _classes.get(type_name)


def classes_declared() -> int:
    return len(_classes)


def _remember(type_name: str, cls: type[Event]) -> None:
    known = _classes.get(type_name)
    same_source = known and (known.__module__, known.__qualname__) == (
        cls.__module__,
        cls.__qualname__,
    )
    if known is not None and not same_source:
        raise DuplicateEventError(
            f"{cls.__module__}.{cls.__qualname__} and {known.__module__}.{known.__qualname__} "
            f"both claim the event type {type_name!r}"
        )
    _classes[type_name] = cls


@dataclasses.dataclass(slots=True)
class Claim:
    """One act of claiming: what all its events have in common."""

    token: uuid.UUID
    worker_id: uuid.UUID
    namespace: str
    queue: str
    #: The alias of its database.
    using: str
    #: When its events were known here, by this process's stopwatch. Not when it was asked for: a
    #: clock that runs ahead of the database's would find handlers due that are not.
    answered_at: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass(slots=True)
class ClaimedEvent:
    """A row of the queue while a worker holds it.

    JSON stays text and times stay numbers until somebody looks: most handlers never do.
    """

    claim: Claim
    row_id: int
    event_id: uuid.UUID
    type: str
    version: int
    payload_json: str | None
    headers_json: str | None
    key: str | None
    lane_id: int | None
    priority: int
    attempts: int
    crashes: int
    producer: str
    caused_by: uuid.UUID | None
    created_epoch: float
    due_epoch: float | None
    started_epoch: float
    deliveries_json: str | None
    errors_json: str | None

    @property
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self.created_epoch, UTC)

    @property
    def processing_started_at(self) -> datetime:
        return datetime.fromtimestamp(self.started_epoch, UTC)

    def age(self, epoch: float) -> float:
        """Seconds since it could have been handled; the time it was published for may be past."""
        since = max(self.created_epoch, self.due_epoch or 0.0)
        return max(0.0, epoch - since)

    def database_now(self) -> datetime:
        """The database's clock, read at the claim and carried on by this process's stopwatch."""
        return datetime.fromtimestamp(self.database_epoch(), UTC)

    def database_epoch(self) -> float:
        return self.started_epoch + time.monotonic() - self.claim.answered_at


_UNREAD = object()


class Envelope(Generic[E_co]):
    """What a handler receives: the event, and which delivery of it this is."""

    __slots__ = ("_event", "_payload", "attempt", "handler_name")

    def __init__(self, event: ClaimedEvent, *, handler_name: str, attempt: int) -> None:
        self._event = event
        self._payload: Any = _UNREAD
        self.handler_name = handler_name
        #: 1 for the first try of this handler, 2 for the second …
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
        """The published payload, parsed for this handler alone: changing it harms nobody."""
        if self._payload is _UNREAD:
            self._payload = json.loads(self._event.payload_json or "null")
        return self._payload

    @property
    def data(self) -> E_co:
        """The payload as an instance of the event's class."""
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
    def priority(self) -> int:
        return self._event.priority

    @property
    def producer(self) -> str:
        return self._event.producer

    @property
    def caused_by(self) -> uuid.UUID | None:
        """The event in whose handler this one was published."""
        return self._event.caused_by

    @property
    def created_at(self) -> datetime:
        return self._event.created_at

    @property
    def delivery_count(self) -> int:
        """How often the event has been taken from the queue."""
        return self._event.attempts

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this handler at this event; give it to outside services."""
        return f"{self._event.event_id}:{self.handler_name}"

    @property
    def is_replay(self) -> bool:
        return bool(self.headers.get("replay"))

    def __repr__(self) -> str:
        return f"<Envelope {self.type} {self.id} attempt {self.attempt} of {self.handler_name}>"


_being_handled: ContextVar[uuid.UUID | None] = ContextVar("eventbus_being_handled", default=None)


def being_handled() -> uuid.UUID | None:
    """The id of the event whose handler is running here, the cause of what it publishes."""
    return _being_handled.get()


#: Takes the id of the event whose handler runs from now on, or None.
now_handling = _being_handled.set


def uuid7() -> uuid.UUID:
    """A UUID that sorts by time of making, which keeps its index compact."""
    milliseconds = time.time_ns() // 1_000_000
    random_bits = int.from_bytes(os.urandom(10), "big")
    value = (milliseconds & (1 << 48) - 1) << 80 | random_bits
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return uuid.UUID(int=value)


def check_name(value: object, what: str) -> None:
    """Refuse a type, key, queue or name that a column would refuse, or would not give back."""
    if not isinstance(value, str) or not value:
        raise InvalidPayloadError(f"{what} must be a non-empty string, not {value!r}")
    if len(value) > MAX_NAME_LENGTH:
        raise InvalidPayloadError(
            f"{what} has {len(value)} characters, {MAX_NAME_LENGTH} are allowed: {value[:40]!r}…"
        )
    if not value.isprintable() or value != value.strip():
        raise InvalidPayloadError(
            f"{what} must be printable, without spaces at its ends: {value!r}"
        )


def check_payload(value: object, what: str = "payload", *, depth: int | None = None) -> None:
    """Raise InvalidPayloadError, naming the path, if ``value`` cannot be stored as JSON."""
    deepest = settings.MAX_PAYLOAD_DEPTH
    if depth is not None:
        deepest = min(deepest, depth)
    try:
        size = _size(value, deepest)
    except _TooDeepError as unfit:
        where = unfit.where()
        raise InvalidPayloadError(f"{what}{where} is nested more than {deepest} deep") from None
    except _UnfitError as unfit:
        raise InvalidPayloadError(f"{what}{unfit.where()} {unfit.reason}") from None
    limit = settings.MAX_PAYLOAD_BYTES
    if size > limit:
        # The walk counts the worst case; only what may be too large is encoded to know.
        exact = len(encode(value).encode())
        if exact > limit:
            raise InvalidPayloadError(f"{what} is {exact:,} bytes as JSON, {limit:,} are allowed")


def encode(value: object) -> str:
    return json.dumps(value, cls=DjangoJSONEncoder, allow_nan=False, ensure_ascii=False)


_ESCAPED_CHARACTER_BYTES = 6
_ENCODER_TYPES = (datetime, date, day_time, timedelta, Decimal, uuid.UUID, Promise)


class _UnfitError(Exception):
    """Collects its path on the way out, so that values that fit cost no path."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []

    def where(self) -> str:
        path = "".join(reversed(self.path))
        return path if len(path) <= 120 else f"{path[:100]}…"


class _TooDeepError(_UnfitError):
    """How deep is allowed is known where the walk began."""


def _size(value: object, depth: int) -> int:
    """Walk the value; return the most bytes it can take as JSON."""
    if isinstance(value, str):
        return _text_size(value)
    if value is None or isinstance(value, bool):
        return 5
    if isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            raise _UnfitError(f"has more than {MAX_INTEGER_BITS} bits")
        return value.bit_length() // 3 + 2
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _UnfitError(f"is {value!r}, which JSON cannot hold")
        return 25
    if isinstance(value, dict | list | tuple):
        if depth <= 0:
            raise _TooDeepError("")
        return _object_size(value, depth) if isinstance(value, dict) else _array_size(value, depth)
    if isinstance(value, _ENCODER_TYPES):
        return _encoded_size(value)
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    raise _UnfitError(f"is a {name}, which JSON cannot hold")


def _object_size(value: dict[Any, Any], depth: int) -> int:
    size = 2
    for name, item in value.items():
        if not isinstance(name, str):
            raise _UnfitError(f"has the key {name!r}, but JSON keys are strings")
        try:
            size += 4 + _text_size(name) + _size(item, depth - 1)
        except _UnfitError as unfit:
            unfit.path.append(f".{name.encode('utf-8', 'backslashreplace').decode()}")
            raise
    return size


def _array_size(value: list[Any] | tuple[Any, ...], depth: int) -> int:
    size = 2
    for index, item in enumerate(value):
        try:
            size += 2 + _size(item, depth - 1)
        except _UnfitError as unfit:
            unfit.path.append(f"[{index}]")
            raise
    return size


def _text_size(value: str) -> int:
    if "\x00" in value:
        raise _UnfitError("contains a NUL character")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _UnfitError("contains half a surrogate pair, which is no character") from None
    return len(value) * _ESCAPED_CHARACTER_BYTES + 2


def _encoded_size(value: Any) -> int:
    if isinstance(value, Promise):
        return _text_size(str(value))
    try:
        return len(encode(value))
    except ValueError as error:
        raise _UnfitError(f"is {value!r}: {error}") from None


def to_payload(event: Event) -> dict[str, Any]:
    """The fields of a typed event, nested dataclasses included, as a plain dict."""
    if event.event_type is None:
        raise UnknownEventError(
            f"{type(event).__qualname__} is abstract: declare it with "
            f'class {type(event).__name__}(Event, type="…") to publish it'
        )
    return {
        field.name: plain(getattr(event, field.name))
        for field in dataclasses.fields(cast(Any, event))
    }


def plain(value: Any) -> Any:
    """As JSON can hold it; moments to the microsecond, which Django's encoder would cut."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime) or (isinstance(value, day_time) and value.tzinfo is None):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    return value


def from_payload(cls: type[Any], payload: Any) -> Any:
    """Build ``cls`` from a stored payload, turning strings back into the field's own types."""
    if not isinstance(payload, dict):
        raise UnknownEventError(f"{cls.__qualname__} needs an object as payload, not {payload!r}")
    hints = _hints(cast(Any, cls))
    unknown = payload.keys() - hints.keys()
    if unknown:
        raise UnknownEventError(f"{cls.__qualname__} has no field {', '.join(sorted(unknown))}")
    try:
        return cls(**{name: _restore(hints[name], value) for name, value in payload.items()})
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UnknownEventError(f"the payload does not fit {cls.__qualname__}: {error}") from error


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Django's parsers answer None to what they cannot read."""

    def strict(text: str) -> Any:
        value = parse(text)
        if value is None:
            raise ValueError(f"{text!r} cannot be read")
        return value

    return strict


_FROM_TEXT: dict[Any, Callable[[str], Any]] = {
    datetime: _parser(parse_datetime),
    date: _parser(parse_date),
    day_time: _parser(parse_time),
    timedelta: _parser(parse_duration),
    Decimal: Decimal,
    uuid.UUID: uuid.UUID,
}


def _restore(hint: Any, value: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if value is None:
        return None
    if origin in (Union, types.UnionType):
        return _restore(next(arg for arg in args if arg is not type(None)), value)
    if origin is tuple and args and args[-1] is not ...:
        return tuple(_restore(arg, item) for arg, item in zip(args, value, strict=True))
    if origin in (list, tuple, set, frozenset) and args:
        return origin(_restore(args[0], item) for item in value)
    if origin is dict and args:
        return {name: _restore(args[1], item) for name, item in value.items()}
    if isinstance(value, str) and hint in _FROM_TEXT:
        return _FROM_TEXT[hint](value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_payload(hint, value)
    return value
