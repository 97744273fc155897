"""Convert the fields of a typed event to JSON and back."""

from __future__ import annotations

import dataclasses
import types
import uuid
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from django.utils.dateparse import parse_date, parse_datetime, parse_duration, parse_time

from django_eventbus.exceptions import UnknownEventError


def as_json(value: Any) -> Any:
    """Return a JSON value. Times keep their microseconds, which Django's encoder would truncate."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime) or (isinstance(value, time) and value.tzinfo is None):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: as_json(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((as_json(item) for item in value), key=repr)
    return value


def from_payload(cls: type[Any], payload: Any) -> Any:
    """Build an instance of ``cls`` from a stored payload; convert strings to the field types."""
    if not isinstance(payload, dict):
        raise UnknownEventError(
            f"{cls.__qualname__} needs a JSON object as its payload, not {payload!r}"
        )
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
    """Make a parser of Django raise ValueError for invalid text, instead of returning None."""

    def strict(text: str) -> Any:
        value = parse(text)
        if value is None:
            raise ValueError(f"{text!r} is not in the expected format")
        return value

    return strict


_FROM_TEXT: dict[Any, Callable[[str], Any]] = {
    datetime: _parser(parse_datetime),
    date: _parser(parse_date),
    time: _parser(parse_time),
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
