"""Run async handlers on an event loop in its own thread. Replace a loop that a handler breaks.

- Blocked loop: a coroutine that makes a blocking call stops all coroutines of its loop. Only that
  coroutine is charged. It stays on the blocked loop; the other coroutines run again on a new loop.
- Stopped loop: if a handler calls ``loop.stop()``, or a task calls ``sys.exit()``, the same loop is
  started again, and its coroutines continue.
- Closed loop: a new loop replaces it. The coroutine that closed the loop is charged; the other
  coroutines run again.

If it is unknown which coroutine blocked or closed a loop, each coroutine of that loop runs again on
a loop of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

from django_eventbus.errors import introspection
from django_eventbus.exceptions import EventBusError, HandlerTimeout
from django_eventbus.logs import about
from django_eventbus.tracing.spans import ProcessSpan

logger = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, BaseException | None]]
#: The error of a coroutine, or None.
Result = Future[BaseException | None]

#: A loop that does not run a callback within this number of seconds counts as blocked.
GRACE = 1.0
UNKNOWN = "(unknown)"

#: The name of the running coroutine. Tasks, callbacks and asyncio threads that a coroutine starts
#: inherit its name.
_coroutine: ContextVar[str] = ContextVar("eventbus_coroutine", default=UNKNOWN)


class LoopBlockedError(EventBusError):
    """A coroutine could not continue, because another coroutine blocked or closed its loop."""


class UnknownCulpritError(LoopBlockedError):
    """An unknown coroutine blocked or closed the loop, so each coroutine must run alone."""


@dataclass(frozen=True, slots=True)
class Running:
    """A coroutine that was started; ``task`` is None if the loop was already closed."""

    name: str
    loop: LoopThread
    future: Result
    task: Future[None] | None
    #: The span of the handler call, if it is traced.
    span: ProcessSpan | None = None

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class AsyncLoop:
    """The event loop of a process. It starts with the first coroutine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: LoopThread | None = None

    def start(self, name: str, work: Work, *, alone: bool = False) -> Running:
        """Call ``work`` and start its coroutine, which returns its error or None.

        The coroutine must not raise, because a SystemExit would end the loop. If ``alone`` is true,
        the coroutine gets a loop of its own, and the caller must stop that loop.
        """
        if alone:
            return LoopThread(alone=True).start(name, work)
        with self._lock:
            if self._current is None or self._current.culprit or not self._current.is_alive():
                self._current = LoopThread()
            loop = self._current
        return loop.start(name, work)

    @staticmethod
    def outcome(running: Running, *, within: float) -> BaseException | None:
        """Wait for the coroutine and return its error.

        Raises HandlerTimeout if the coroutine does not end in time, LoopBlockedError if another
        coroutine blocked or closed the loop, and UnknownCulpritError if an unknown coroutine did.
        """
        loop = running.loop
        try:
            return running.future.result(0.0 if loop.culprit else within)
        except TimeoutError:
            running.cancel()
        if not loop.is_alive():
            raise loop.error_of_closing(running.name)
        culprit = loop.find_culprit()
        if loop.alone or culprit in ("", running.name):
            raise HandlerTimeout
        raise loop.error_of_blocking()

    def stop(self) -> None:
        if self._current is not None:
            self._current.stop()
            self._current = None


class LoopThread:
    """One event loop and its thread; ``alone`` if it runs only one coroutine."""

    def __init__(self, *, alone: bool = False) -> None:
        self.alone = alone
        #: The name of the coroutine that blocks this loop, or "". No other coroutine is started on
        #: a blocked loop.
        self.culprit = ""
        self._lock = threading.Lock()
        self._pending: dict[Result, str] = {}
        self._unstarted: set[Coroutine[Any, Any, None]] = set()
        self._stopping = False
        #: The name of the coroutine that stopped the loop last. Only a stopped loop can be closed,
        #: so this coroutine is charged if the loop is closed.
        self._stopped_by = UNKNOWN
        self._loop = asyncio.new_event_loop()
        self._watch_for_stops()
        # The thread gets a copy of the context, so that its log records have the worker's id.
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run,), name="eventbus-async", daemon=True
        )
        self._thread.start()

    def _watch_for_stops(self) -> None:
        stop, close = self._loop.stop, self._loop.close

        def noted_stop() -> None:
            self._stopped_by = _coroutine.get()
            stop()

        def noted_close() -> None:
            if _coroutine.get() != UNKNOWN and not self._loop.is_running():
                self._stopped_by = _coroutine.get()
            close()

        # A project may install event loops of another class. So the methods are replaced on the
        # instance, not in a subclass.
        self._loop.stop = noted_stop  # type: ignore[method-assign]
        self._loop.close = noted_close  # type: ignore[method-assign]

    def _run(self) -> None:
        try:
            while not (self._stopping or self._loop.is_closed()):
                self._run_until_stopped()
        finally:
            self._loop.close()
            self._give_up_pending()
            for coroutine in self._unstarted.copy():
                coroutine.close()  # Otherwise Python warns that the coroutine was never awaited.

    def _run_until_stopped(self) -> None:
        """Run until the loop is stopped, or a task raises SystemExit or KeyboardInterrupt."""
        try:
            self._loop.run_forever()
        except BaseException as error:
            self._stopped_by = UNKNOWN
            logger.error(
                "a task of an async handler has ended the event loop; restarting the loop: %s",
                introspection.type_name(error),
                extra=about(),
            )

    def _give_up_pending(self) -> None:
        """Give all unfinished coroutines an error as result, because they cannot continue."""
        for future, name in list(self._pending.items()):
            _set(future, self.error_of_closing(name))

    def error_of_closing(self, name: str) -> EventBusError:
        """Return the error of a coroutine that could not continue because the loop was closed."""
        if self.culprit == name:
            return EventBusError("the handler blocked the event loop and ignored its cancellation")
        if self._stopping:
            return LoopBlockedError("the event loop was closed")
        if self.alone or self._stopped_by == name:
            return EventBusError("the handler closed the event loop that it runs on")
        if self._stopped_by == UNKNOWN:
            return UnknownCulpritError("an unknown coroutine closed the event loop")
        return LoopBlockedError(f"{self._stopped_by} closed the event loop")

    def error_of_blocking(self) -> LoopBlockedError:
        """Return the error of a coroutine that could not continue because the loop was blocked."""
        if self.culprit == UNKNOWN:
            return UnknownCulpritError("an unknown coroutine blocked the event loop")
        return LoopBlockedError(f"{self.culprit} blocked the event loop")

    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._loop.is_closed()

    def start(self, name: str, work: Work) -> Running:
        # The future of the task cannot be used. It gets its result only in the next iteration of
        # the loop, and another coroutine may block the loop before that iteration.
        future: Result = Future()

        async def run() -> None:
            self._unstarted.discard(coroutine)
            if task := asyncio.current_task():
                task.set_name(name)
            _coroutine.set(name)
            if future.done():  # _give_up_pending() or _cancel_all() has set an error.
                return
            try:
                _set(future, await work())
            except BaseException as error:
                _set(future, error)

        coroutine = run()
        self._unstarted.add(coroutine)
        self._pending[future] = name
        future.add_done_callback(lambda done: self._pending.pop(done, None))
        try:
            task = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # The loop was closed after the caller checked is_alive().
            self._unstarted.discard(coroutine)
            coroutine.close()
            self._give_up_pending()
            return Running(name, self, future, None)
        return Running(name, self, future, task)

    def find_culprit(self) -> str:
        """Return the name of the coroutine that blocks the loop, or "" if the loop is not blocked.

        Return UNKNOWN if a callback, or a task that a coroutine started, blocks the loop.
        """
        with self._lock:
            if not self.culprit and not self._runs_callbacks():
                task = asyncio.current_task(self._loop)
                name = task.get_name() if task else UNKNOWN
                self.culprit = name if name in self._pending.copy().values() else UNKNOWN
                self._call(self._cancel_all)
            return self.culprit

    def _runs_callbacks(self) -> bool:
        called = threading.Event()
        return self._call(called.set) and called.wait(GRACE)

    def _call(self, callback: Callable[[], object]) -> bool:
        """Schedule the callback in the loop. Return False if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return False
        return True

    def _cancel_all(self) -> None:
        """Cancel all tasks of this loop. The blocked loop runs this callback when it continues.

        All coroutines except the culprit run again on a new loop. Their results are set before the
        cancellation. Otherwise their handlers would be charged for the cancellation.
        """
        for future, name in list(self._pending.items()):
            if name != self.culprit:
                _set(future, self.error_of_blocking())
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_later(GRACE, self._end)

    def _end(self) -> None:
        self._stopping = True
        self._loop.stop()

    def stop(self) -> None:
        """Stop the loop. If a coroutine blocks the loop permanently, its daemon thread remains."""
        if self._call(self._end):
            self._thread.join(GRACE)


def _set(future: Result, result: BaseException | None) -> None:
    """Set the result, unless the future has a result already.

    Both the coroutine and the thread that closes its loop may set a result.
    """
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)
