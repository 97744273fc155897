"""How one handler is called: with its envelope, in its context, against its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async
from django.db import Error, close_old_connections

from django_eventbus import coroutines, failures
from django_eventbus.conf import settings
from django_eventbus.coroutines import AsyncLoop, Running
from django_eventbus.deadlines import Watch
from django_eventbus.events import Envelope, now_handling
from django_eventbus.exceptions import EventBusError, HandlerTimeout
from django_eventbus.failpoints import reached
from django_eventbus.progress import Progress
from django_eventbus.registry import Handler

logger = logging.getLogger(__name__)

NO_ROW = -1


class Caller:
    """Calls the handlers of one thread."""

    def __init__(self, watch: Watch, loop: AsyncLoop) -> None:
        self.watch = watch
        self.loop = loop

    def call(self, progress: Progress, handler: Handler) -> None:
        """Raises what the handler raises, HandlerTimeout if it takes too long."""
        event = progress.event
        progress.current = handler
        envelope = _envelope(progress, handler)
        now_handling(event.event_id)
        self.watch.start(event.row_id, handler.stored_name, handler.deadline)
        try:
            try:
                reached("handler.before")
                result = handler.func(envelope)
                reached("handler.after")
            finally:
                self.watch.stop()
                now_handling(None)
        except HandlerTimeout:
            # It may have come on the way into stop(), which then did nothing.
            self.watch.stop()
            now_handling(None)
            raise
        if result is not None and asyncio.iscoroutine(result):
            result.close()
            raise EventBusError(
                f"{handler.name} gave a coroutine that nobody awaits: declare it with async def"
            )

    def start(
        self, progress: Progress, handler: Handler, turn: asyncio.Semaphore | None = None
    ) -> Running:
        """Start an async handler, when it has its turn; ``collect`` waits for it."""
        envelope = _envelope(progress, handler)

        async def run() -> BaseException | None:
            now_handling(progress.event.event_id)
            try:
                async with turn or contextlib.nullcontext(), asyncio.timeout(handler.deadline):
                    await handler.func(envelope)
            except BaseException as error:
                # Returned: a SystemExit that is raised would end the loop, and all that runs in it.
                await _mend_connections_after(error)
                return error
            return None

        return self.loop.start(f"{handler.name} on {progress.event.event_id}", run)

    def collect(self, progress: Progress, handler: Handler, running: Running) -> None:
        """Raises what the coroutine raised, LoopBlockedError if another one was in its way."""
        # One that blocks its loop keeps its own timeout from firing; ours is the second. The
        # watch tells the supervisor what runs, and is the third.
        within = handler.deadline + coroutines.GRACE
        last = within + 2 * coroutines.GRACE
        self.watch.start(progress.event.row_id, handler.stored_name, last)
        try:
            error = self.loop.outcome(running, within=within)
        finally:
            self.watch.stop()
        if error is not None:
            raise error

    def guarded(self, hook: Callable[[], Any]) -> Callable[[], Any]:
        """An on_commit callback has a deadline too, and can only harm itself."""

        def run() -> None:
            self.watch.start(NO_ROW, b"on_commit", settings.HANDLER_TIMEOUT)
            try:
                try:
                    hook()
                finally:
                    self.watch.stop()
            except BaseException as error:
                self.watch.stop()  # see call()
                logger.error(
                    "the on_commit callback %s of a handler failed: %s",
                    failures.one_line(repr(hook)),
                    failures.in_a_line(error),
                )

        return run


async def _mend_connections_after(error: BaseException | None) -> None:
    """In the thread where coroutines meet Django's ORM, which nobody else looks after: one lost
    session would fail all that come after. Not after every handler: they share that thread."""
    while error is not None and not isinstance(error, Error):
        error = error.__cause__ or error.__context__
    if error is not None:
        await sync_to_async(close_old_connections)()


def _envelope(progress: Progress, handler: Handler) -> Envelope[Any]:
    name = handler.name
    return Envelope(progress.event, handler_name=name, attempt=progress.attempt_of(name))


def explained(error: BaseException, handler: Handler) -> BaseException:
    """The error a reader at night needs to see."""
    if isinstance(error, HandlerTimeout | TimeoutError) and not str(error):
        text = f"{handler.name} ran longer than {handler.deadline:g} s"
        return TimeoutError(text).with_traceback(error.__traceback__)
    if isinstance(error, RuntimeError) and "durable atomic block" in str(error):
        error.add_note(
            "Handlers run inside the worker's transaction; one that needs its own declares "
            "@handler(..., atomic=False)."
        )
    return error
