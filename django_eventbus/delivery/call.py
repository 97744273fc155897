"""Call one handler with its envelope, in its context and with its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asgiref.sync import sync_to_async
from django.db import Error, close_old_connections

from django_eventbus.conf import settings
from django_eventbus.delivery import event_loop
from django_eventbus.delivery.deadlines import Watch
from django_eventbus.delivery.event_loop import AsyncLoop, Running
from django_eventbus.errors import failures, introspection
from django_eventbus.errors.failpoints import reached
from django_eventbus.errors.text import one_line
from django_eventbus.events import Envelope, set_current_envelope
from django_eventbus.exceptions import EventBusError, HandlerTimeout
from django_eventbus.flow.admission import Turns
from django_eventbus.logs import about
from django_eventbus.outcomes.event_run import EventRun
from django_eventbus.registry import Handler
from django_eventbus.tracing import spans
from django_eventbus.tracing.spans import ProcessSpan, Tracer

logger = logging.getLogger(__name__)

NO_ROW = -1
#: Seconds that the code of the project may take to describe an error for a span. The error is
#: described again, with the handler's deadline, for the ``errors`` column.
DESCRIBE_SECONDS = 1.0


class NotStartedError(EventBusError):
    """A coroutine did not begin, because the worker was stopped or the queue was paused."""


class Caller:
    """Calls the handlers of one thread."""

    def __init__(self, watch: Watch, loop: AsyncLoop) -> None:
        self.watch = watch
        self.loop = loop
        self.tracer: Tracer | None = None

    def begin_batch(self) -> None:
        self.tracer = spans.tracer()

    def call(self, progress: EventRun, handler: Handler) -> None:
        """Call a handler. Raises the error of the handler, or HandlerTimeout at its deadline."""
        if self.tracer is None:
            self._call(progress, handler)
            return
        # The span begins before the deadline and ends after it, so that HandlerTimeout can
        # interrupt neither.
        span = self.tracer.process(progress.event, handler.name, progress.attempt_of(handler.name))
        span.begin()
        try:
            self._call(progress, handler)
        except BaseException as error:
            span.leave()
            self._end_span(span, progress, handler, error)
            raise
        span.leave()
        self._end_span(span, progress, handler)

    def _call(self, progress: EventRun, handler: Handler) -> None:
        event = progress.event
        progress.current = handler
        envelope = _envelope(progress, handler)
        try:
            try:
                set_current_envelope(envelope)
                self.watch.start(event.row_id, handler.stored_name, handler.deadline)
                reached("handler.before")
                result = handler.func(envelope)
                reached("handler.after")
            finally:
                self.watch.stop()
                set_current_envelope(None)
        except HandlerTimeout:
            # HandlerTimeout may have interrupted the first stop() before stop() did anything.
            self.watch.stop()
            set_current_envelope(None)
            raise
        if result is not None and asyncio.iscoroutine(result):
            result.close()
            raise EventBusError(
                f"{handler.name} returned a coroutine, which is never awaited: "
                "declare the handler with async def"
            )

    def start(
        self,
        progress: EventRun,
        handler: Handler,
        turns: Turns | None = None,
        *,
        stopped: Callable[[], bool] = lambda: False,
        alone: bool = False,
    ) -> Running:
        """Start an async handler when ``turns`` allows it; ``collect`` waits for the result.

        If ``stopped()`` is true before the handler begins, ``collect`` raises NotStartedError. If
        ``alone`` is true, the handler gets an event loop that no other handler uses.
        """
        envelope = _envelope(progress, handler)
        span = (
            self.tracer.process(progress.event, handler.name, envelope.attempt)
            if self.tracer is not None
            else None
        )

        async def run() -> BaseException | None:
            set_current_envelope(envelope)
            turn = turns.here() if turns else contextlib.nullcontext()
            try:
                async with turn, asyncio.timeout(handler.deadline):
                    if stopped():
                        return NotStartedError("the worker was stopped, or the queue was paused")
                    await _traced(span, handler, envelope)
            except BaseException as error:
                # Return the error instead of raising it: a SystemExit would end the event loop and
                # all its coroutines.
                await _close_lost_connections(error)
                return error
            return None

        name = f"{handler.name} on {progress.event.event_id}"
        running = self.loop.start(name, run, alone=alone)
        return running if span is None else replace(running, span=span)

    def cancel(self, running: Running) -> None:
        """Cancel a coroutine whose result is not needed."""
        running.cancel()
        if running.span is not None:
            running.span.end(_unexplained(asyncio.CancelledError()))

    def collect(self, progress: EventRun, handler: Handler, running: Running) -> None:
        """Wait until a coroutine ends. Raises its error if it failed.

        Raises LoopBlockedError if another coroutine blocked or closed the event loop.
        """
        if running.span is None:
            self._collect(progress, handler, running)
            return
        # The error is described in this thread and not by the coroutine: a __str__ that hangs would
        # block the event loop.
        try:
            self._collect(progress, handler, running)
        except BaseException as error:
            self._end_span(running.span, progress, handler, error)
            raise
        self._end_span(running.span, progress, handler)

    def _collect(self, progress: EventRun, handler: Handler, running: Running) -> None:
        # asyncio.timeout() cannot end a coroutine that blocks its event loop. So outcome() stops
        # waiting after ``within`` seconds, and the watch interrupts this thread after ``last``
        # seconds. The watch also shows the supervisor which handler runs.
        within = handler.deadline + event_loop.GRACE
        last = within + 2 * event_loop.GRACE
        self.watch.start(progress.event.row_id, handler.stored_name, last)
        try:
            try:
                error = self.loop.outcome(running, within=within)
            finally:
                self.watch.stop()
        except HandlerTimeout:
            self.watch.stop()  # HandlerTimeout may have interrupted the first stop().
            raise
        if error is not None:
            raise error

    def blame(
        self, progress: EventRun, handler: Handler, error: BaseException, seconds: float
    ) -> None:
        """Record that the handler failed.

        To describe an error, the worker runs code of the project (``__str__``, ``REDACT_ERRORS``).
        The handler's deadline applies to that code. If the code hangs or raises, its failure is
        recorded for this event, and no other event is affected.
        """
        known = len(progress.outcomes)
        policy = handler.retry_policy
        self.watch.start(progress.event.row_id, handler.stored_name, handler.deadline)
        try:
            try:
                progress.fail(handler.name, explained(error, handler), policy, seconds)
            finally:
                self.watch.stop()
        except BaseException as broken:
            self.watch.stop()  # HandlerTimeout may have interrupted the first stop().
            del progress.outcomes[known:]
            unfit = _description_failed(error, handler, broken)
            record = failures.decided(
                introspection.type_name(unfit),
                str(unfit),
                handler=handler.name,
                attempt=progress.attempt_of(handler.name),
                at=progress.event.database_now(),
            )
            progress.fail(handler.name, unfit, policy, seconds, record)

    def _end_span(
        self,
        span: ProcessSpan,
        progress: EventRun,
        handler: Handler,
        error: BaseException | None = None,
    ) -> None:
        if not span.is_recording:
            span.end()
            return
        progress.spans += (span,)
        span.end(None if error is None else self._described(progress, handler, error))

    def _described(
        self, progress: EventRun, handler: Handler, error: BaseException
    ) -> dict[str, Any]:
        """Return the record of an error for its span: redacted, and within a deadline."""
        seconds = min(handler.deadline, DESCRIBE_SECONDS)
        self.watch.start(progress.event.row_id, handler.stored_name, seconds)
        try:
            try:
                return failures.describe(
                    _with_timeout_named(error, handler),
                    handler=handler.name,
                    attempt=progress.attempt_of(handler.name),
                    at=progress.event.database_now(),
                )
            finally:
                self.watch.stop()
        except BaseException:
            self.watch.stop()  # HandlerTimeout may have interrupted the first stop().
            return _unexplained(error)

    def guarded(self, hook: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap an on_commit callback: it gets a deadline, and its error stops no other callback."""

        def run() -> None:
            self.watch.start(NO_ROW, b"on_commit", settings.HANDLER_TIMEOUT)
            try:
                try:
                    _run_and_log(hook)
                finally:
                    self.watch.stop()
            except BaseException as error:
                self.watch.stop()  # HandlerTimeout may have interrupted the first stop().
                logger.error(
                    "an on_commit callback failed: %s",
                    introspection.type_name(error),
                    extra=about(),
                )

        return run


async def _traced(span: ProcessSpan | None, handler: Handler, envelope: Envelope[Any]) -> None:
    """Await an async handler in its span. ``Caller.collect`` ends the span."""
    if span is None:
        await handler.func(envelope)
        return
    span.begin()
    try:
        await handler.func(envelope)
    finally:
        span.leave()


def _unexplained(error: BaseException) -> dict[str, Any]:
    """Return the part of an error's record that no code of the project can change."""
    return {"type": introspection.type_name(error), "message": "", "traceback": ""}


def _run_and_log(hook: Callable[[], Any]) -> None:
    """Run the callback and log its error.

    The log call runs ``__repr__`` and ``__str__`` of the project. These methods may hang like the
    callback itself, so the caller must set a deadline.
    """
    try:
        hook()
    except BaseException as error:
        logger.error(
            "the on_commit callback %s of a handler failed: %s",
            one_line(introspection.exact(repr(hook))),
            failures.in_a_line(error),
            extra=about(),
        )


async def _close_lost_connections(error: BaseException) -> None:
    """Close connections whose session is lost, after a database error of a coroutine.

    The ORM calls of all coroutines run in one thread and share its connections. So a lost session
    would make all later coroutines fail. Connections are not closed after every handler, because
    another coroutine may be using them.
    """
    if any(issubclass(type(each), Error) for each in introspection.chain(error)):
        await sync_to_async(close_old_connections)()


def _envelope(progress: EventRun, handler: Handler) -> Envelope[Any]:
    name = handler.name
    return Envelope(progress.event, handler_name=name, attempt=progress.attempt_of(name))


def explained(error: BaseException, handler: Handler) -> BaseException:
    """Return the error, with a hint for the developer if there is one."""
    error = _with_timeout_named(error, handler)
    is_runtime_error = issubclass(type(error), RuntimeError)
    if is_runtime_error and "durable atomic block" in introspection.message(error):
        BaseException.add_note(
            error,
            "Handlers run inside the worker's transaction. Declare a handler that needs its own "
            "transaction with @handler(..., atomic=False).",
        )
    return error


def _with_timeout_named(error: BaseException, handler: Handler) -> BaseException:
    """Return the error; for a timeout without a message, return one that names the deadline."""
    is_timeout = issubclass(type(error), HandlerTimeout | TimeoutError)
    if not is_timeout or introspection.message(error):
        return error
    text = f"{handler.name} ran longer than {handler.deadline:g} s"
    return TimeoutError(text).with_traceback(introspection.traceback_of(error))


def _description_failed(error: BaseException, handler: Handler, broken: BaseException) -> Exception:
    kind = introspection.type_name(error)
    if issubclass(type(broken), HandlerTimeout):
        return TimeoutError(
            f"{handler.name} raised {kind}, and the description of this error took longer than "
            f"{handler.deadline:g} s"
        )
    return EventBusError(
        f"{handler.name} raised {kind}, and the description of this error raised "
        f"{introspection.type_name(broken)}"
    )
