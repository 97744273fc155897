"""Errors as they are stored: cleaned, cut, and with a fingerprint to group them by.

Storing a failure must not fail on the failure's own text, whatever is in it.
"""

from __future__ import annotations

import hashlib
import traceback
from datetime import datetime
from typing import Any

from django_eventbus.conf import settings
from django_eventbus.events import MAX_NAME_LENGTH

MAX_FRAMES = 30
MAX_MESSAGE = 1000


def describe(error: BaseException, *, handler: str, attempt: int, at: datetime) -> dict[str, Any]:
    """The record of one failed attempt."""
    return {
        "handler": handler,
        "attempt": attempt,
        "at": at.isoformat(),
        "type": type_name(error),
        "message": clean(_message(error), MAX_MESSAGE),
        "where": clean(_where(error), MAX_MESSAGE),
        "traceback": clean(_traceback(error), settings.MAX_ERROR_BYTES),
    }


def type_name(error: BaseException) -> str:
    return clean(_full_name(type(error)), MAX_NAME_LENGTH)


def _full_name(cls: type) -> str:
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


def clean(text: str, limit: int) -> str:
    """Text that every database takes: no NUL, no half surrogates, at most ``limit`` bytes."""
    data = text[:limit].replace("\x00", "\\x00").encode("utf-8", "backslashreplace")
    if len(data) <= limit and len(text) <= limit:
        return data.decode()
    return data[: max(0, limit - 3)].decode("utf-8", "ignore") + "…"


def fingerprint(record: dict[str, Any]) -> str:
    """The same for errors of one handler, one type and one line of code."""
    seen = "\n".join((record["handler"], record["type"], record.get("where", "")))
    return hashlib.blake2b(seen.encode(), digest_size=8).hexdigest()


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:
        return f"<no message: its __str__ raised {type(broken).__name__}>"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _traceback(error: BaseException) -> str:
    try:
        lines = traceback.TracebackException.from_exception(error, limit=-MAX_FRAMES)
        return "".join(lines.format())
    except BaseException as broken:
        return f"<no traceback: formatting it raised {type(broken).__name__}>"
