"""Async handlers: an event loop in a thread of its own, and what to do when one blocks it.

A coroutine that makes a blocking call stops the loop, and with it all others. It alone is to
blame: the loop is left to it, and the others are run again, on a new one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from django_eventbus.exceptions import EventBusError, HandlerTimeout

Work = Callable[[], Coroutine[Any, Any, BaseException | None]]

#: Seconds that a loop gets to say that it still turns.
GRACE = 1.0
UNKNOWN = "(unknown)"


class LoopBlockedError(EventBusError):
    """Another coroutine blocked the loop, so this one could not go on."""


@dataclass(frozen=True, slots=True)
class Running:
    """A coroutine on its way."""

    name: str
    loop: LoopThread
    future: Future[BaseException | None]
    task: Future[None]


class AsyncLoop:
    """The loop of a process, started when the first coroutine comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: LoopThread | None = None

    def start(self, name: str, work: Work) -> Running:
        """The coroutine of ``work`` returns what went wrong: a SystemExit that it raised would end
        the loop."""
        with self._lock:
            if self._current is None or self._current.culprit:
                self._current = LoopThread()
            loop = self._current
        return loop.start(name, work)

    @staticmethod
    def outcome(running: Running, *, within: float) -> BaseException | None:
        """Wait for it. Raises HandlerTimeout if it does not end, LoopBlockedError if it could not
        because of another."""
        loop = running.loop
        try:
            return running.future.result(0.0 if loop.culprit else within)
        except TimeoutError:
            running.task.cancel()
        culprit = loop.find_culprit()
        if culprit in ("", UNKNOWN, running.name):
            raise HandlerTimeout
        raise LoopBlockedError(f"{culprit} blocked the event loop")

    def stop(self) -> None:
        if self._current is not None:
            self._current.stop()
            self._current = None


class LoopThread:
    """One event loop and its thread."""

    def __init__(self) -> None:
        #: The name of the coroutine that blocks it; nobody else is to be started here then.
        self.culprit = ""
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="eventbus-async", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def start(self, name: str, work: Work) -> Running:
        # Not the task's own future: that hears of the end only when the loop turns once more, and
        # the next in line may block it.
        future: Future[BaseException | None] = Future()

        async def run() -> None:
            if task := asyncio.current_task():
                task.set_name(name)
            try:
                future.set_result(await work())
            except BaseException as error:
                future.set_result(error)

        return Running(name, self, future, asyncio.run_coroutine_threadsafe(run(), self._loop))

    def find_culprit(self) -> str:
        """Who keeps the loop from turning; empty if it turns."""
        with self._lock:
            if not self.culprit and not self._turns():
                task = asyncio.current_task(self._loop)
                self.culprit = task.get_name() if task else UNKNOWN
                self._loop.call_soon_threadsafe(self._wind_up)
            return self.culprit

    def _turns(self) -> bool:
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        return turned.wait(GRACE)

    def _wind_up(self) -> None:
        """The culprit goes on after all. The others have been started elsewhere meanwhile."""
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_later(GRACE, self._loop.stop)

    def stop(self) -> None:
        """A coroutine that blocks the loop for good stays behind with it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GRACE)
