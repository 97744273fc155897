"""Record the spans of the engine with OpenTelemetry. Only its API is needed, not the SDK.

Names and attributes follow the semantic conventions for messaging, in the version of SCHEMA_URL.
The context of the span that published an event is stored in the headers of the event.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    ProxyTracerProvider,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    TracerProvider,
)
from opentelemetry.util.types import AttributeValue

from django_eventbus import __version__
from django_eventbus.conf import settings
from django_eventbus.errors import failures
from django_eventbus.errors.introspection import message, type_name
from django_eventbus.errors.redaction import MAX_MESSAGE, redacted
from django_eventbus.errors.text import clean
from django_eventbus.logs import about
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.tracing import spans

logger = logging.getLogger(__name__)

#: The version of the semantic conventions that the names in this module follow.
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
NAME = "django_eventbus"
#: The largest number of links of one span. A group or a message may have more events.
MOST_LINKS = 100
#: The header of an event that becomes ``messaging.message.conversation_id``.
CORRELATION_HEADER = "correlation_id"

Attributes = dict[str, AttributeValue]
P = ParamSpec("P")
T = TypeVar("T")


def install(provider: TracerProvider | None = None) -> spans.Tracer | None:
    """Record spans from now on; return the previous tracer.

    Without a provider, spans are recorded when the project has configured the global provider.
    """
    return spans.install(OpenTelemetryTracer(provider))


def _harmless(method: Callable[P, T]) -> Callable[P, T | None]:
    """Log the error of a method, which then returns None: tracing must not fail an event."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            _log_once(error)
            return None

    return call


def _log_once(error: Exception) -> None:
    kind = type_name(error)
    if kind not in _logged:
        _logged.add(kind)
        logger.warning(
            "OpenTelemetry raised an error, so spans are missing; events are not affected. This "
            "warning is not repeated in this process: %s",
            failures.in_a_line(error),
            extra=about(),
        )


_logged: set[str] = set()


class OpenTelemetryTracer:
    """Creates the spans of the engine, if the project has configured OpenTelemetry's SDK."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer: Tracer | None = None

    def is_on(self) -> bool:
        if self._tracer is None:
            provider = self._provider or trace.get_tracer_provider()
            if isinstance(provider, ProxyTracerProvider):
                return False  # The project has not configured the SDK, or not yet.
            self._provider = provider
            self._tracer = provider.get_tracer(NAME, __version__, schema_url=SCHEMA_URL)
        return True

    def start(
        self, name: str, kind: SpanKind, attributes: Attributes, **options: Any
    ) -> Span | None:
        """Start a span. Return None if OpenTelemetry raised an error."""
        return self._start(name, kind=kind, attributes=attributes, **options)

    @_harmless
    def _start(self, name: str, **options: Any) -> Span:
        return self.tracer.start_span(name, **options)

    @property
    def tracer(self) -> Tracer:
        assert self._tracer is not None, "call is_on() first"
        return self._tracer

    # -- publish

    @contextmanager
    def publishing(
        self, type_name: str | None, *, queue: str, event_id: uuid.UUID | None
    ) -> Iterator[spans.PublishSpan]:
        attributes = _attributes("publish", "send", queue)
        if type_name is not None:
            attributes["messaging.destination.name"] = type_name
        if event_id is not None:
            attributes["messaging.message.id"] = str(event_id)
        name = "publish" if type_name is None else f"publish {type_name}"
        with self._current(self.start(name, SpanKind.PRODUCER, attributes)) as span:
            published = _PublishSpan(span)
            yield published
            published.finish()

    @contextmanager
    def _current(self, span: Span | None) -> Iterator[Span]:
        """Make the span current in a block, record an error of the block, and end the span."""
        if span is None:
            yield trace.INVALID_SPAN
            return
        token = contexts.attach(trace.set_span_in_context(span))
        try:
            yield span
        except BaseException as error:
            if span.is_recording():
                text = clean(redacted(error, message(error)), MAX_MESSAGE)
                _record_error(span, {"type": type_name(error), "message": text})
            raise
        finally:
            contexts.detach(token)
            _end(span)

    # -- process

    def process(self, event: ClaimedEvent, handler: str, attempt: int) -> spans.ProcessSpan:
        return _ProcessSpan(self.tracer, event, handler, attempt)

    # -- settle

    @_harmless
    def settled(
        self,
        events: Sequence[ClaimedEvent],
        called: Sequence[spans.ProcessSpan],
        started: int,
    ) -> None:
        attributes = _attributes("settle", "settle", events[0].claim.queue)
        attributes["messaging.batch.message_count"] = len(events)
        attributes["messaging.client.id"] = str(events[0].claim.worker_id)
        origins = [each.context for each in called if isinstance(each, _ProcessSpan)]
        if not called:
            origins = [_published(each.headers_json) for each in events[:MOST_LINKS]]
        if related := _related(origins):
            span = self.start("settle", SpanKind.CLIENT, attributes, start_time=started, **related)
            if span is not None:
                span.end()

    # -- messages to executors

    @contextmanager
    def sending(
        self, executor: str, handler: str, events: Sequence[ClaimedEvent]
    ) -> Iterator[object]:
        related = _related(_published(each.headers_json) for each in events[:MOST_LINKS])
        if not related:  # No event has a trace that the message could continue.
            yield None
            return
        attributes = _attributes("send", "send", events[0].claim.queue)
        attributes["messaging.destination.name"] = executor
        attributes["messaging.consumer.group.name"] = handler
        attributes["messaging.batch.message_count"] = len(events)
        attributes["messaging.client.id"] = str(events[0].claim.worker_id)
        span = self.start(f"send {executor}", SpanKind.PRODUCER, attributes, **related)
        with self._current(span):
            yield None

    def message_headers(self) -> dict[str, str]:
        return _injected(None) or {}

    @contextmanager
    def continued(self, headers: Mapping[str, Any]) -> Iterator[object]:
        # If Celery is instrumented, its span has continued the trace already.
        found = None if _valid(trace.get_current_span()) else _extracted(headers)
        token = None if found is None else contexts.attach(found)
        try:
            yield None
        finally:
            if token is not None:
                contexts.detach(token)

    # -- the process

    def current_trace_id(self) -> str:
        current = _valid(trace.get_current_span())
        return "" if current is None else trace.format_trace_id(current.trace_id)

    @_harmless
    def flush(self) -> None:
        # The API has no method to flush; the provider of the SDK has one.
        force_flush = getattr(self._provider, "force_flush", None)
        if force_flush is not None:
            force_flush()


class _PublishSpan(spans.PublishSpan):
    def __init__(self, span: Span) -> None:
        self._span = span
        self._count = 0
        self._types: set[str] = set()

    def headers(self, given: dict[str, Any] | None) -> dict[str, Any] | None:
        added = _injected(trace.set_span_in_context(self._span))
        if not added or (given and added.keys() & given.keys()):
            return given  # The caller passed the context of a trace, which is kept.
        return {**added, **(given or {})}

    def count(self, types: Sequence[str]) -> None:
        self._count += len(types)
        self._types.update(types)

    @_harmless
    def finish(self) -> None:
        """Set the attributes that are known after ``publish_many()`` has read all items."""
        if self._count:
            self._span.set_attribute("messaging.batch.message_count", self._count)
        if len(self._types) == 1:
            (name,) = self._types
            self._span.update_name(f"publish {name}")
            self._span.set_attribute("messaging.destination.name", name)


class _ProcessSpan:
    """The span of a handler call. An async handler begins it in the thread of the event loop."""

    __slots__ = (
        "_attempt",
        "_event",
        "_handler",
        "_has_ended",
        "_left_at",
        "_span",
        "_token",
        "_tracer",
    )

    def __init__(self, tracer: Tracer, event: ClaimedEvent, handler: str, attempt: int) -> None:
        self._tracer = tracer
        self._event = event
        self._handler = handler
        self._attempt = attempt
        self._span: Span | None = None
        self._token: Any = None
        self._left_at: int | None = None
        self._has_ended = False

    @property
    def is_recording(self) -> bool:
        return self._span is not None and self._span.is_recording()

    @property
    def context(self) -> SpanContext | None:
        return _valid(self._span)

    @_harmless
    def begin(self) -> None:
        if self._has_ended:
            return
        event = self._event
        around: Context | None = None
        links: list[Link] = []
        is_child = settings.TRACE_PARENT == "parent" and event.headers_json is not None
        if is_child:
            around, links = _around(_extracted(_read(event.headers_json)))
        common = _process_attributes(event.claim.queue, event.type, self._handler)
        self._span = span = self._tracer.start_span(
            f"process {event.type}",
            context=around,
            kind=SpanKind.CONSUMER,
            attributes={**common, "eventbus.attempt": self._attempt},
            links=links,
        )
        self._token = contexts.attach(trace.set_span_in_context(span, around))
        # The rest costs more than the span itself, and only a recorded span needs it.
        if span.is_recording():
            self._complete(span, is_linked=not is_child)

    def _complete(self, span: Span, *, is_linked: bool) -> None:
        event = self._event
        attributes: Attributes = {
            "messaging.message.id": str(event.event_id),
            "messaging.client.id": str(event.claim.worker_id),
        }
        if event.headers_json:
            headers = _read(event.headers_json)
            if isinstance(conversation := headers.get(CORRELATION_HEADER), str):
                attributes["messaging.message.conversation_id"] = conversation
            if is_linked and (origin := _origin(_extracted(headers))) is not None:
                span.add_link(origin)
        span.set_attributes(attributes)

    @_harmless
    def leave(self) -> None:
        self._left_at = time.time_ns()
        token, self._token = self._token, None
        if token is not None:
            contexts.detach(token)

    @_harmless
    def end(self, error: Mapping[str, Any] | None = None) -> None:
        self._has_ended = True
        if self._span is None:
            return
        if error is not None and self._span.is_recording():
            _record_error(self._span, error)
        self._span.end(self._left_at)


def _attributes(name: str, operation: str, queue: str) -> Attributes:
    return {
        "messaging.system": NAME,
        "messaging.operation.name": name,
        "messaging.operation.type": operation,
        "eventbus.queue": queue,
    }


@lru_cache
def _process_attributes(queue: str, type_name: str, handler: str) -> Attributes:
    """Return the attributes of all calls of a handler with a type: a shared dict, read only."""
    return {
        **_attributes("process", "process", queue),
        "messaging.destination.name": type_name,
        "messaging.consumer.group.name": handler,
    }


@_harmless
def _record_error(span: Span, error: Mapping[str, Any]) -> None:
    kind, text, stack = error["type"], error["message"], error.get("traceback")
    attributes: Attributes = {"exception.type": kind, "exception.message": text}
    if stack:
        attributes["exception.stacktrace"] = stack
    span.set_attribute("error.type", kind)
    span.add_event("exception", attributes)
    span.set_status(Status(StatusCode.ERROR, f"{kind}: {text}" if text else kind))


@_harmless
def _end(span: Span) -> None:
    span.end()


# -- contexts


def _around(published: Context | None) -> tuple[Context | None, list[Link]]:
    """Return the parent context (None: the current context) and the links of a child.

    The current context has a span if a Celery task or a test runs the handler.
    """
    if _origin(published) is None:
        return None, []
    current = _valid(trace.get_current_span())
    return published, [Link(current)] if current is not None else []


def _related(origins: Iterable[SpanContext | None]) -> dict[str, Any]:
    """Return how a span refers to other spans, as options of ``start_span``.

    With TRACE_PARENT="parent", a span that refers to one other span is its child.
    """
    known = {each.span_id: each for each in origins if each is not None}
    if not known:
        return {}
    if len(known) == 1 and settings.TRACE_PARENT == "parent":
        (only,) = known.values()
        return {"context": trace.set_span_in_context(trace.NonRecordingSpan(only))}
    return {"links": [Link(each) for each in list(known.values())[:MOST_LINKS]]}


def _published(headers_json: str | None) -> SpanContext | None:
    """Return the context of the span that published an event."""
    return _origin(_extracted(_read(headers_json))) if headers_json else None


def _origin(published: Context | None) -> SpanContext | None:
    """Return the span of an extracted context, unless it is the current span."""
    if published is None:
        return None
    origin = _valid(trace.get_current_span(published))
    return None if origin == _valid(trace.get_current_span()) else origin


def _read(headers_json: str | None) -> dict[str, Any]:
    """Return the headers of an event. Another program may have written anything into the row."""
    try:
        headers = json.loads(headers_json or "{}")
    except (ValueError, RecursionError):
        return {}
    return headers if isinstance(headers, dict) else {}


@_harmless
def _extracted(headers: Mapping[str, Any]) -> Context:
    # The propagators expect strings; headers may have any JSON value.
    texts = {name: value for name, value in headers.items() if isinstance(value, str)}
    return propagate.extract(texts, contexts.get_current())


@_harmless
def _injected(context: Context | None) -> dict[str, str]:
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    return carrier


def _valid(span: Span | None) -> SpanContext | None:
    found = None if span is None else span.get_span_context()
    return found if found is not None and found.is_valid else None
