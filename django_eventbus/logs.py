"""The context of log records: the event, handler, worker and queue that a record is about.

The loggers of the package are ``django_eventbus`` and its children, one for each module. Every
record of them gets its ``extra`` from ``about()``. ``EventContextFilter`` adds the same keys to the
records of all other loggers.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django_eventbus.errors.text import one_line
from django_eventbus.events import current_envelope
from django_eventbus.tracing.spans import current_trace_id

#: The stable keys of a record. Their values are one line of text.
KEYS = ("event_id", "event_type", "handler", "attempt", "worker_id", "queue", "key", "trace_id")

LOGGER = "django_eventbus"

_worker_id: ContextVar[uuid.UUID | None] = ContextVar("eventbus_worker_id", default=None)
#: Set the worker to which the current thread belongs.
set_worker = _worker_id.set

#: The header "traceparent" of W3C Trace Context. Its second field is the id of the trace.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class EventContextFilter(logging.Filter):
    """Adds ``KEYS`` to each record: the values of the event whose handler creates the record.

    Put it on the handlers in ``LOGGING``, so that all formatters can use the keys. The value of an
    unknown key is "". Values that a record already has are kept.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        # A record of the package already has all values that apply to it. If it is about an event
        # that a handler publishes, then the values of the running handler do not apply.
        is_own = record.name.partition(".")[0] == LOGGER
        known = {} if is_own else about()
        for key in KEYS:
            if key not in record.__dict__:
                setattr(record, key, known.get(key, ""))
        return True


@contextmanager
def worker_context(worker_id: uuid.UUID) -> Iterator[None]:
    """Add the id of the worker to the log records of the block."""
    token = _worker_id.set(worker_id)
    try:
        yield
    finally:
        _worker_id.reset(token)


def about(event: Any = None, **known: Any) -> dict[str, Any]:
    """Return the ``extra`` of a log record about an event, and other values that are known.

    ``event`` is a ClaimedEvent or a QueuedEvent. Without it, the record is about the event whose
    handler runs in the current context, if any, and has the trace of the current span. An unknown
    key of ``KEYS`` is left out. ``known`` may have other keys too.
    """
    values = {"worker_id": _worker_id.get(), **(_running() if event is None else _of(event))}
    values.update(known)
    taken = _set_by_factory()
    return {
        name: _value(name, value)
        for name, value in values.items()
        if name not in taken and (name not in KEYS or (value is not None and value != ""))
    }


def _set_by_factory() -> Collection[str]:
    """Return the attributes that the project's factory gives to each record.

    A log call raises KeyError if its ``extra`` would overwrite one of them, and an error in a log
    call would end the worker.
    """
    factory = logging.getLogRecordFactory()
    if factory is logging.LogRecord:
        return ()
    return vars(factory(LOGGER, logging.INFO, "", 0, "", (), None))


def _running() -> dict[str, Any]:
    envelope = current_envelope()
    known: dict[str, Any] = {}
    if envelope is not None:
        known = {
            **_of(envelope._event),
            "handler": envelope.handler_name,
            "attempt": envelope.attempt,
        }
    # With TRACE_PARENT="link", the span of a handler is in another trace than the event's header.
    if trace_id := current_trace_id():
        known["trace_id"] = trace_id
    return known


def _of(event: Any) -> dict[str, Any]:
    known = {"event_id": event.event_id, "event_type": event.type, "key": event.key}
    claim = getattr(event, "claim", None)
    if claim is None:
        return {**known, "queue": event.queue, "trace_id": trace_id_in(event.headers)}
    return {
        **known,
        "queue": claim.queue,
        "worker_id": claim.worker_id,
        "trace_id": _trace_id_in_json(event.headers_json),
    }


def _value(name: str, value: Any) -> Any:
    """Return text that cannot forge a record. Numbers under other keys stay numbers."""
    return one_line(str(value)) if name in KEYS or isinstance(value, str) else value


def _trace_id_in_json(headers_json: str | None) -> str | None:
    # Most events have no trace, so the JSON is parsed only if the header can be in it.
    if not headers_json or "traceparent" not in headers_json:
        return None
    try:
        return trace_id_in(json.loads(headers_json))
    except ValueError:
        return None


def trace_id_in(headers: Any) -> str | None:
    """Return the id of the trace that the headers of an event name, or None."""
    parent = headers.get("traceparent") if isinstance(headers, dict) else None
    found = _TRACEPARENT.match(parent) if isinstance(parent, str) else None
    return found[1] if found else None
