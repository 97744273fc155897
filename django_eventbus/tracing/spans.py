"""The places where the engine creates spans, and the interface that a tracing library implements.

The engine imports no tracing library. If OpenTelemetry is installed, the app configuration installs
the tracer of ``integrations.opentelemetry``. Without a tracer, a handler call costs one more check
for None.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol
from uuid import UUID

from django_eventbus.schema.claims import ClaimedEvent

#: Seconds that a process that ends waits for the export of its last spans.
FLUSH_SECONDS = 5.0


class PublishSpan:
    """The span of one ``publish()`` or ``publish_many()`` call. This class records nothing."""

    def headers(self, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the headers of the event, with the context of this span."""
        return given

    def count(self, types: Sequence[str]) -> None:
        """Note the types of events that ``publish_many()`` has read."""


class ProcessSpan(Protocol):
    """The span of one handler call."""

    @property
    def is_recording(self) -> bool:
        """Whether the span has begun and the sampler has chosen it."""

    def begin(self) -> None:
        """Start the span and make it the current span. An ended span does not start."""

    def leave(self) -> None:
        """Note the time, and make the previous span the current span again."""

    def end(self, error: Mapping[str, Any] | None = None) -> None:
        """End the span at the time of ``leave``. ``error`` is a record of ``errors.failures``."""


class Tracer(Protocol):
    """Creates the spans. Its methods must not raise, because tracing must not fail an event."""

    def is_on(self) -> bool:
        """Return whether spans can be recorded now."""

    def publishing(
        self, type_name: str | None, *, queue: str, event_id: UUID | None
    ) -> AbstractContextManager[PublishSpan]:
        """Return the span of a ``publish()`` call, or of ``publish_many()`` without a type."""

    def process(self, event: ClaimedEvent, handler: str, attempt: int) -> ProcessSpan:
        """Return the span of a handler call, which has not begun yet."""

    def settled(
        self, events: Sequence[ClaimedEvent], called: Sequence[ProcessSpan], started: int
    ) -> None:
        """Record that events were settled together, since ``started`` (in Unix nanoseconds)."""

    def sending(
        self, executor: str, handler: str, events: Sequence[ClaimedEvent]
    ) -> AbstractContextManager[object]:
        """Return the span of a message to an executor."""

    def message_headers(self) -> dict[str, str]:
        """Return the current context as headers of a message."""

    def continued(self, headers: Mapping[str, Any]) -> AbstractContextManager[object]:
        """Continue, in a block, the trace of a message. The headers are not trusted."""

    def current_trace_id(self) -> str:
        """Return the id of the current trace as 32 hexadecimal digits, or ""."""

    def flush(self) -> None:
        """Export all recorded spans."""


_installed: Tracer | None = None


def install(tracer: Tracer | None) -> Tracer | None:
    """Use this tracer in this process; return the previous tracer."""
    global _installed
    previous, _installed = _installed, tracer
    return previous


def tracer() -> Tracer | None:
    """Return the tracer, or None if no span can be recorded."""
    return _installed if _installed is not None and _installed.is_on() else None


def publishing(
    type_name: str | None, *, queue: str, event_id: UUID | None = None
) -> AbstractContextManager[PublishSpan]:
    used = tracer()
    if used is None:
        return _NOT_PUBLISHING
    return used.publishing(type_name, queue=queue, event_id=event_id)


def sending(
    executor: str, handler: str, events: Sequence[ClaimedEvent]
) -> AbstractContextManager[object]:
    used = tracer()
    return nullcontext() if used is None else used.sending(executor, handler, events)


def message_headers() -> dict[str, str]:
    used = tracer()
    return {} if used is None else used.message_headers()


def continued(headers: Mapping[str, Any]) -> AbstractContextManager[object]:
    used = tracer()
    return nullcontext() if used is None else used.continued(headers)


def current_trace_id() -> str:
    """Return the id of the current trace as 32 hexadecimal digits, or "" if there is none."""
    return "" if _installed is None else _installed.current_trace_id()


def flush() -> None:
    """Export all recorded spans, but wait for at most FLUSH_SECONDS.

    A worker process ends with ``os._exit()``, which runs none of the exit functions that would
    export the last spans. The export runs in a thread, because a collector that does not answer
    would block it.
    """
    used = tracer()
    if used is not None:
        thread = threading.Thread(target=used.flush, name="eventbus-flush-spans", daemon=True)
        thread.start()
        thread.join(FLUSH_SECONDS)


_NOT_PUBLISHING = nullcontext(PublishSpan())
