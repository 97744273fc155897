"""How one handler is called: with its envelope, in its context, against its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from django_eventbus import failures
from django_eventbus.conf import settings
from django_eventbus.deadlines import Watch
from django_eventbus.events import Envelope, now_handling
from django_eventbus.exceptions import EventBusError, HandlerTimeout
from django_eventbus.failpoints import reached
from django_eventbus.progress import Progress
from django_eventbus.registry import Handler

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOOP_GRACE = 1.0
NO_ROW = -1


class AsyncLoop:
    """An event loop in a thread of its own, started when the first coroutine comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="eventbus-async", daemon=True
                )
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """A coroutine that blocks the loop for good stays behind with it."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LOOP_GRACE)
        if not self._thread.is_alive():
            self._loop.close()
        self._loop = None


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
            reached("handler.before")
            result = handler.func(envelope)
            reached("handler.after")
        finally:
            self.watch.stop()
            now_handling(None)
        if result is not None and asyncio.iscoroutine(result):
            result.close()
            raise EventBusError(
                f"{handler.name} gave a coroutine that nobody awaits: declare it with async def"
            )

    def start(
        self, progress: Progress, handler: Handler, turn: asyncio.Semaphore | None = None
    ) -> Future[BaseException | None]:
        """Start an async handler, when it has its turn; ``collect`` waits for it."""
        envelope = _envelope(progress, handler)

        async def run() -> BaseException | None:
            now_handling(progress.event.event_id)
            try:
                async with turn or contextlib.nullcontext(), asyncio.timeout(handler.deadline):
                    await handler.func(envelope)
            except BaseException as error:
                # Returned: a SystemExit that is raised would end the loop, and all that runs in it.
                return error
            return None

        return self.loop.submit(run())

    def collect(
        self, progress: Progress, handler: Handler, running: Future[BaseException | None]
    ) -> None:
        """Raises what the coroutine raised."""
        # One that blocks its loop keeps its own timeout from firing; ours is the second.
        self.watch.start(progress.event.row_id, handler.stored_name, handler.deadline + LOOP_GRACE)
        try:
            try:
                error = running.result()
            finally:
                self.watch.stop()
        except BaseException:
            running.cancel()
            raise
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
                logger.error(
                    "the on_commit callback %s of a handler failed: %s",
                    failures.one_line(repr(hook)),
                    failures.in_a_line(error),
                )

        return run


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
