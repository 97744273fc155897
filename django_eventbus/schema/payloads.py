"""Check whether a value can be stored as JSON.

The check happens in Python, because an error of the database would break the transaction of the
publisher.
"""

from __future__ import annotations

import json
import math
import uuid
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.utils.functional import Promise

from django_eventbus.conf import settings
from django_eventbus.exceptions import InvalidPayloadError

#: The largest value that the setting MAX_PAYLOAD_BYTES may have.
LARGEST_PAYLOAD = 2**20
#: A constraint of the database refuses larger values. In the format of a database, JSON may be six
#: times as large as its text: PostgreSQL needs twelve bytes for each number of [1,1,1,…].
LARGEST_STORED = 8 * LARGEST_PAYLOAD
MAX_INTEGER_BITS = 1024


def check_payload(value: object, what: str = "payload", *, depth: int | None = None) -> None:
    """Raise InvalidPayloadError if ``value`` cannot be stored as JSON.

    The message contains the path of the invalid part.
    """
    deepest = settings.MAX_PAYLOAD_DEPTH
    if depth is not None:
        deepest = min(deepest, depth)
    try:
        size = _size(value, deepest)
    except _TooDeepError as unfit:
        where = unfit.where()
        raise InvalidPayloadError(
            f"{what}{where} is nested more than {deepest} levels deep"
        ) from None
    except _UnfitError as unfit:
        raise InvalidPayloadError(f"{what}{unfit.where()} {unfit.reason}") from None
    limit = settings.MAX_PAYLOAD_BYTES
    if size > limit:
        # ``size`` is an upper bound. Encoding is slow, so only a value that may be too large is
        # encoded to get its exact size.
        exact = len(encode(value).encode())
        if exact > limit:
            raise InvalidPayloadError(f"{what} is {exact:,} bytes as JSON, {limit:,} are allowed")


def encode(value: object) -> str:
    return json.dumps(value, cls=DjangoJSONEncoder, allow_nan=False, ensure_ascii=False)


_ESCAPED_CHARACTER_BYTES = 6
_ENCODER_TYPES = (datetime, date, time, timedelta, Decimal, uuid.UUID, Promise)


class _UnfitError(Exception):
    """A part that JSON cannot represent.

    The path is built while the error propagates, so the check of a valid value builds no path.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []

    def where(self) -> str:
        path = "".join(reversed(self.path))
        return path if len(path) <= 120 else f"{path[:100]}…"


class _TooDeepError(_UnfitError):
    """A part that is nested deeper than ``check_payload`` allows."""


def _size(value: object, depth: int) -> int:
    """Return an upper bound of the size of a value as JSON, in bytes.

    Raises _UnfitError if the value cannot be stored.
    """
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
            raise _UnfitError(f"is {value!r}, which JSON cannot represent")
        return 25
    if isinstance(value, dict | list | tuple):
        if depth <= 0:
            raise _TooDeepError("")
        return _object_size(value, depth) if isinstance(value, dict) else _array_size(value, depth)
    if isinstance(value, _ENCODER_TYPES):
        return _encoded_size(value)
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    raise _UnfitError(f"has the type {name}, which JSON cannot represent")


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
            raise _UnfitError("contains a lone surrogate, which is not a character") from None
    return len(value) * _ESCAPED_CHARACTER_BYTES + 2


def _encoded_size(value: Any) -> int:
    if isinstance(value, Promise):
        return _text_size(str(value))
    try:
        return len(encode(value))
    except ValueError as error:
        raise _UnfitError(f"is {value!r}: {error}") from None
