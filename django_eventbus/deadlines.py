"""How long a handler may run, and how it is stopped.

A watchdog thread interrupts a handler that runs past its deadline. What cannot be interrupted
(C code that holds the GIL, a system call in a thread) is left to the supervisor, which reads the
same board from outside and kills the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from django_eventbus.exceptions import HandlerTimeout

LOOK_EVERY = 0.05
#: psycopg looks for signals when 100 ms have passed undisturbed: do not disturb it more often.
AGAIN_AFTER = 0.5
#: Seconds after which nobody waits any longer for an answer of the database.
NO_ANSWER_AFTER = 60.0

_COUNTERS = struct.Struct("<qqqq")
_SLOT = struct.Struct("<qd200s")
_ROW_ID = struct.Struct("<q")


class Board:
    """Shared memory: what each thread of a worker runs and until when, and how much it did."""

    def __init__(self, memory: Any) -> None:
        self._memory = memoryview(memory).cast("B")

    @classmethod
    def size(cls, threads: int) -> int:
        return _COUNTERS.size + threads * _SLOT.size

    @classmethod
    def local(cls, threads: int) -> Board:
        return cls(bytearray(cls.size(threads)))

    def slot(self, thread: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """How a thread writes down (row id, deadline, handler), and the row id alone: 0 is none."""
        where = (self._memory, self._offset(thread))
        return partial(_SLOT.pack_into, *where), partial(_ROW_ID.pack_into, *where)

    def running(self) -> list[tuple[int, float, str]]:
        """(row id, deadline on the monotonic clock, handler) of every handler that runs."""
        return [
            (row_id, deadline, name.rstrip(b"\0").decode("utf-8", "replace"))
            for row_id, deadline, name in self._slots()
            if row_id
        ]

    def _slots(self) -> list[tuple[int, float, bytes]]:
        threads = (len(self._memory) - _COUNTERS.size) // _SLOT.size
        return [_SLOT.unpack_from(self._memory, self._offset(i)) for i in range(threads)]

    def expected_by(self) -> float:
        """When the next move of the last of the threads that run no handler was expected."""
        idle = [due for row_id, due, _ in self._slots() if not row_id and due]
        return min(idle, default=float("inf"))

    def count(self, handled: int, failed: int, dead: int) -> None:
        before = self.counted()
        sums = (before[0] + handled, before[1] + failed, before[2] + dead)
        _COUNTERS.pack_into(self._memory, 0, *sums, 0)

    def counted(self) -> tuple[int, int, int]:
        handled, failed, dead, _ = _COUNTERS.unpack_from(self._memory, 0)
        return handled, failed, dead

    def finish(self) -> None:
        """The worker ends because it is done, and not because a handler said exit(0)."""
        _COUNTERS.pack_into(self._memory, 0, *self.counted(), 1)

    def finished(self) -> bool:
        return bool(_COUNTERS.unpack_from(self._memory, 0)[3])

    def _offset(self, thread: int) -> int:
        return _COUNTERS.size + thread * _SLOT.size


class Watch:
    """One thread's stopwatch: ``start`` and ``stop`` around each handler, both cheap."""

    def __init__(self, board: Board, thread: int = 0) -> None:
        self._write, self._clear = board.slot(thread)
        self._ident = threading.get_ident()
        self._is_main = threading.current_thread() is threading.main_thread()
        self._lock = threading.Lock()
        self._deadline: float | None = None
        self._interrupted_at = 0.0
        #: The connection of this thread, whose query can be cancelled from outside.
        self.connection: Any = None

    def start(self, row_id: int, handler: bytes, seconds: float) -> None:
        self._deadline = deadline = time.monotonic() + seconds
        self._write(row_id, deadline, handler)

    def stop(self) -> None:
        if self._is_main:
            self._deadline = None
        else:
            with self._lock:
                self._deadline = None
                # Set, but not yet raised: it would hit our own code.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._ident), None)
        self._clear(0)

    def expect(self, seconds: float) -> None:
        """No handler runs, and the thread will be heard of again after so many seconds."""
        self._write(0, time.monotonic() + seconds, b"")

    def overdue(self) -> bool:
        deadline = self._deadline
        return deadline is not None and time.monotonic() > deadline

    def interrupt(self) -> None:
        """Called by the watchdog: make the handler's thread raise HandlerTimeout."""
        if time.monotonic() - self._interrupted_at < AGAIN_AFTER:
            return
        self._interrupted_at = time.monotonic()
        if self._is_main:
            # A signal also ends a system call; its receiver looks whether it is still overdue.
            signal.pthread_kill(self._ident, signal.SIGALRM)
            return
        with self._lock:
            if self.overdue():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._ident), ctypes.py_object(HandlerTimeout)
                )
                # Raised when Python runs again; a query it waits for has to end first.
                with contextlib.suppress(Exception):
                    self.connection.connection.cancel()

    def on_alarm(self, signum: int, frame: Any) -> None:
        if self.overdue():
            self._deadline = None
            raise HandlerTimeout


class Watchdog:
    """Looks after the watches of one process."""

    def __init__(self) -> None:
        self._watches: list[Watch] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eventbus-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def look_after(self, watch: Watch) -> None:
        if watch._is_main:
            signal.signal(signal.SIGALRM, watch.on_alarm)
        self._watches.append(watch)

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_EVERY):
            for watch in self._watches:
                if watch.overdue():
                    watch.interrupt()
