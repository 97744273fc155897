"""The records of errors that the ``errors`` column stores, and their fingerprints.

Recording an error must not fail, whatever methods its class overrides. A record must not contain
the values of a row, which the text of a database error may quote. Only ``HandlerTimeout`` is
raised: ``__str__`` of an error may hang, so the deadline of the handler also applies while its
error is described.
"""

from __future__ import annotations

import hashlib
import traceback
from datetime import datetime
from typing import Any

from django_eventbus.conf import settings
from django_eventbus.errors.introspection import chain, message, traceback_of, type_name
from django_eventbus.errors.redaction import MAX_MESSAGE, redacted
from django_eventbus.errors.text import clean, one_line
from django_eventbus.exceptions import HandlerTimeout

MAX_FRAMES = 30
#: How many of the first and of the last errors of an event are stored. The last error of each
#: handler is always stored.
FIRST_KEPT = 5
LAST_KEPT = 15


def describe(error: BaseException, *, handler: str, attempt: int, at: datetime) -> dict[str, Any]:
    """Return the record of one failed attempt. Raises only HandlerTimeout."""
    for each in chain(error):
        # Call __str__ before the traceback module calls it. If __str__ hangs, the deadline raises
        # HandlerTimeout, which the traceback module would suppress.
        message(each)
    most = settings.MAX_ERROR_BYTES
    return {
        "handler": handler,
        "attempt": attempt,
        "at": at.isoformat(),
        "type": type_name(error),
        "message": clean(redacted(error, message(error)), MAX_MESSAGE),
        "where": clean(_where(error), MAX_MESSAGE),
        "traceback": clean(redacted(error, _traceback(error), most), most),
    }


def decided(
    kind: str, message: str, *, handler: str = "", attempt: int = 0, at: datetime
) -> dict[str, Any]:
    """Return an error record for a decision, such as a cancellation by an operator."""
    return {
        "handler": handler,
        "attempt": attempt,
        "at": at.isoformat(),
        "type": kind,
        "message": clean(message, MAX_MESSAGE),
        "where": "",
        "traceback": "",
    }


def bounded(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the errors that are stored for an event: the first and the last errors.

    The errors in between are replaced by one record with their number under "omitted". The last
    error of each handler is always kept, because dead letters are grouped by its fingerprint.
    """
    records = recorded(errors)
    middle = records[FIRST_KEPT:-LAST_KEPT]
    last_of = {each.get("handler"): each for each in records}
    kept = [each for each in middle if last_of[each.get("handler")] is each]
    if len(kept) == len(middle):
        return errors
    dropped = [each for each in middle if last_of[each.get("handler")] is not each]
    count = len(dropped) + sum(each.get("omitted", 0) for each in errors)
    return [
        *records[:FIRST_KEPT],
        {**_EMPTY, "at": dropped[-1].get("at", ""), "message": f"{count} errors", "omitted": count},
        *kept,
        *records[-LAST_KEPT:],
    ]


def recorded(errors: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the errors without the record that counts omitted errors."""
    return [each for each in readable(errors) if "omitted" not in each]


def readable(errors: Any) -> list[dict[str, Any]]:
    """Return the records that this version can read; a newer version may write other records."""
    return [each for each in errors if is_record(each)] if isinstance(errors, list) else []


def is_record(record: Any) -> bool:
    return isinstance(record, dict) and record.keys() >= _RECORD


def shortened(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return short records: the beginning of each message, no tracebacks."""
    return [{**each, "message": clean(each["message"], 200), "traceback": ""} for each in errors]


_RECORD = {"handler", "type", "message", "attempt", "at"}
#: Values of the record that counts omitted errors. The record has all keys of an error record, so
#: the same code can display both.
_EMPTY = {"handler": "", "attempt": 0, "type": "omitted", "where": "", "traceback": ""}


def in_a_line(error: BaseException) -> str:
    """Return type and message of an error for a log line, redacted."""
    return one_line(f"{type_name(error)}: {clean(redacted(error, message(error)), MAX_MESSAGE)}")


def with_record(errors: Any, record: dict[str, Any]) -> list[Any]:
    """Return ``errors`` plus ``record``; only ``record`` if ``errors`` is not a list.

    A newer version of the package may have stored another format.
    """
    return bounded([*(errors if isinstance(errors, list) else []), record])


def fingerprint(record: dict[str, Any]) -> str:
    """Return a value that errors of the same handler, type and line of code have in common."""
    seen = "\n".join((record["handler"], record["type"], record.get("where", "")))
    return hashlib.blake2b(seen.encode(), digest_size=8).hexdigest()


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(traceback_of(error), limit=-1)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _traceback(error: BaseException) -> str:
    try:
        lines = traceback.TracebackException.from_exception(error, limit=-MAX_FRAMES)
        return "".join(lines.format())
    except HandlerTimeout:
        raise
    except BaseException as broken:
        frames = traceback.format_tb(traceback_of(error), limit=-MAX_FRAMES)
        return "".join([*frames, f"<formatting the error raised {type_name(broken)}>\n"])
