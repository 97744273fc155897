"""Errors as they are stored and logged: redacted, cleaned, cut, and with a fingerprint.

Storing a failure must not fail on the failure's own text, whatever is in it; and what is in it must
not be the contents of somebody's row.
"""

from __future__ import annotations

import hashlib
import re
import traceback
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from django.utils.module_loading import import_string

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
        "message": clean(redacted(error, _message(error)), MAX_MESSAGE),
        "where": clean(_where(error), MAX_MESSAGE),
        "traceback": clean(redacted(error, _traceback(error)), settings.MAX_ERROR_BYTES),
    }


def decided(kind: str, message: str, *, at: datetime) -> dict[str, Any]:
    """The record of an end that a person chose, and no handler."""
    return {
        "handler": "",
        "attempt": 0,
        "at": at.isoformat(),
        "type": kind,
        "message": clean(message, MAX_MESSAGE),
        "where": "",
        "traceback": "",
    }


def in_a_line(error: BaseException) -> str:
    """For the log: type and message, redacted, on one printable line."""
    return one_line(f"{type_name(error)}: {clean(redacted(error, _message(error)), MAX_MESSAGE)}")


def one_line(text: str, limit: int = 300) -> str:
    """Text from outside as one printable line: no forged records, no terminal control."""
    printable = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return printable if len(text) <= limit else f"{printable[:limit]}…"


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


def redacted(error: BaseException, text: str) -> str:
    """A message or traceback of the error, without the values that database drivers quote in it,
    without credentials, and as the project's own function leaves it."""
    try:
        text = _CREDENTIALS.sub(_without_password, _without_values(error, text))
        hook = settings.REDACT_ERRORS
        return str(import_string(hook)(text)) if hook else text
    except BaseException as broken:
        # Nobody knows what is in it, so it is not kept.
        return f"<withheld: redacting it raised {type(broken).__name__}>"


#: The password of a URL, of a connection string, or of keyword arguments.
_CREDENTIALS = re.compile(
    r"(://[^\s:/@]*:)[^\s@]+(?=@)"
    r"|(\b(?:password|passwd|pwd)['\"]?\s*[=:]\s*)(?:'[^']*'|\"[^\"]*\"|[^\s,;&)]+)",
    re.IGNORECASE,
)


def _without_password(found: re.Match[str]) -> str:
    return f"{found[1] or found[2]}…"


#: Where the first line of a database's error quotes a value, and not a name of the schema.
_QUOTED_VALUE = re.compile(
    r"(?P<before>Duplicate entry |near |value:? |: )"
    r"(?P<quote>['\"]).*?(?:(?P=quote)(?= for | at | is out of | of type )|(?P=quote)?\)?$)"
)


def _without_values(error: BaseException, text: str) -> str:
    """Of the text of a database's error only the first line is kept: DETAIL, CONTEXT and the
    statement come after it, and repeat what is in the row."""
    hidden: set[str] = set()
    for each in _chain(error):
        if _is_of_a_database(each):
            first, *rest = _message(each).splitlines() or [""]
            hidden.update(line.strip() for line in rest)
            text = text.replace(first, _QUOTED_VALUE.sub(r"\g<before>…", first))
    if not hidden:
        return text
    # Lines of a group's exceptions stand behind a margin.
    lines = (line for line in text.splitlines() if line.strip(" |\t") not in hidden - {""})
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error with its causes, contexts and members, each once."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


def _is_of_a_database(error: BaseException) -> bool:
    """By the names that PEP 249 gives the errors of every driver, and Django to its own."""
    return any(cls.__name__ in ("DatabaseError", "InterfaceError") for cls in type(error).__mro__)


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
