"""Enforce the deadlines of handlers.

A watchdog thread interrupts a handler that runs past its deadline. Some code cannot be interrupted:
C code that keeps the GIL, or a system call in a thread other than the main thread. The supervisor
therefore reads the deadlines from shared memory (``Board``), and kills a process that does not
enforce them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import signal
import struct
import threading
import time
import uuid
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any

from django_eventbus.errors import failures
from django_eventbus.exceptions import HandlerTimeout
from django_eventbus.logs import about, set_worker

logger = logging.getLogger(__name__)

CHECK_EVERY = 0.05
#: A handler that still runs is interrupted again after this number of seconds. psycopg checks for
#: signals only after 100 ms without a signal, so signals in quick succession would have no effect.
INTERRUPT_AGAIN_AFTER = 0.5
#: Seconds after which a reply of the database counts as lost.
NO_ANSWER_AFTER = 60.0
#: If a thread reports this number of seconds late, its process is not live. The supervisor kills
#: the process later, because the thread may only wait for a slow reply of the database.
LATE_AFTER = 20.0

_COUNTERS = struct.Struct("<qqqq")
#: The phase of the dispatcher, and the monotonic time of its last progress.
_DISPATCHER = struct.Struct("<qd")
_PHASE = struct.Struct("<q")
#: The slot of one thread: row id, deadline, handler, and the row id again. If the process is killed
#: or stopped while it writes the slot, the row ids differ. Such a slot shows no running handler.
_SLOT = struct.Struct("<qd200sq")
_ROW_ID = struct.Struct("<q")
_SLOTS_BEGIN = _COUNTERS.size + _DISPATCHER.size


class Phase(IntEnum):
    """What the dispatcher of a worker process does. New shared memory contains zeros."""

    STARTING = 0
    CLAIMING = 1
    OUTAGE = 2
    STOPPING = 3


class Board:
    """Shared memory with counts of results, the dispatcher's phase, and one slot for each thread.

    The slot of a thread shows its running handler and the deadline of that handler. These slots are
    not related to the slots of flow control.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memoryview(memory).cast("B")

    @classmethod
    def size(cls, threads: int) -> int:
        return _SLOTS_BEGIN + threads * _SLOT.size

    @classmethod
    def local(cls, threads: int) -> Board:
        return cls(bytearray(cls.size(threads)))

    def slot(self, thread: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return two functions with which a thread writes to its slot.

        The first function writes the row id, the deadline, the handler and the row id again. The
        second function writes only the first row id. Row id 0 means that no handler runs.
        """
        where = (self._memory, self._offset(thread))
        return partial(_SLOT.pack_into, *where), partial(_ROW_ID.pack_into, *where)

    def running(self) -> list[tuple[int, float, str]]:
        """Return (row id, deadline on the monotonic clock, handler) of every running handler."""
        return [
            (row_id, deadline, name.rstrip(b"\0").decode("utf-8", "replace"))
            for row_id, deadline, name, row_id_again in self._slots()
            if row_id and row_id == row_id_again
        ]

    def _slots(self) -> list[tuple[int, float, bytes, int]]:
        threads = (len(self._memory) - _SLOTS_BEGIN) // _SLOT.size
        return [_SLOT.unpack_from(self._memory, self._offset(i)) for i in range(threads)]

    def expected_by(self) -> float:
        """Return the earliest time by which a thread that runs no handler has to report."""
        idle = [due for row_id, due, *_ in self._slots() if not row_id and due]
        return min(idle, default=float("inf"))

    def count(self, handled: int, failed: int, dead: int) -> None:
        before = self.counted()
        sums = (before[0] + handled, before[1] + failed, before[2] + dead)
        _COUNTERS.pack_into(self._memory, 0, *sums, 0)

    def counted(self) -> tuple[int, int, int]:
        handled, failed, dead, _ = _COUNTERS.unpack_from(self._memory, 0)
        return handled, failed, dead

    def finish(self) -> None:
        """Record that the worker ends normally, and not because a handler called exit(0)."""
        _COUNTERS.pack_into(self._memory, 0, *self.counted(), 1)

    def finished(self) -> bool:
        return bool(_COUNTERS.unpack_from(self._memory, 0)[3])

    def _offset(self, thread: int) -> int:
        return _SLOTS_BEGIN + thread * _SLOT.size

    def progress(self) -> None:
        """Record that the database answered the dispatcher, and that the dispatcher continues."""
        _DISPATCHER.pack_into(self._memory, _COUNTERS.size, Phase.CLAIMING, time.monotonic())

    def enter(self, phase: Phase) -> None:
        """Record another phase of the dispatcher. The time of its last progress stays."""
        _PHASE.pack_into(self._memory, _COUNTERS.size, phase)

    def dispatcher(self) -> tuple[Phase, float]:
        """Return the phase of the dispatcher and the time of its last progress, at first 0."""
        phase, progressed = _DISPATCHER.unpack_from(self._memory, _COUNTERS.size)
        return Phase(phase), progressed


class Watch:
    """The deadline of the handler that one thread runs.

    The thread calls ``start`` before each handler and ``stop`` after it.
    """

    def __init__(self, board: Board, thread: int = 0) -> None:
        self._write, self._clear = board.slot(thread)
        self._ident = threading.get_ident()
        self._is_main = threading.current_thread() is threading.main_thread()
        self._lock = threading.Lock()
        self._deadline: float | None = None
        self._report_due = 0.0
        self._interrupted_at = 0.0
        #: Whether the watchdog has sent HandlerTimeout to this thread since the last ``stop``.
        self._interrupted = False
        #: The connection of this thread. The watchdog can cancel its query.
        self.connection: Any = None

    def start(self, row_id: int, handler: bytes, seconds: float) -> None:
        self._deadline = deadline = time.monotonic() + seconds
        self._write(row_id, deadline, handler, row_id)

    def stop(self) -> None:
        """End the deadline. Afterwards the watchdog does not interrupt this thread any more."""
        if self._is_main:
            self._deadline = None
        else:
            with self._lock:
                self._deadline = None
                if self._interrupted:
                    self._interrupted = False
                    self._absorb_interrupt()
        self._clear(0)

    def _absorb_interrupt(self) -> None:
        """Ensure that no HandlerTimeout is pending.

        A pending HandlerTimeout would be raised later, in the worker's own code.

        It is unknown whether the last HandlerTimeout is still pending. So this method sends another
        HandlerTimeout, which replaces a pending one, and suppresses it. The alternative
        PyThreadState_SetAsyncExc(ident, NULL) leaves the interpreter's flag for asynchronous
        exceptions set. With that flag, CPython 3.11 loops forever when it calls a traced function
        (coverage, debuggers).
        """
        with contextlib.suppress(HandlerTimeout):
            self._send_timeout()
            while True:  # The exception ends this loop.
                pass

    def _send_timeout(self) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._ident), ctypes.py_object(HandlerTimeout)
        )

    def expect(self, seconds: float) -> None:
        """Record that no handler runs, and that the thread will report again within ``seconds``."""
        self._report_due = time.monotonic() + seconds
        self._write(0, self._report_due, b"", 0)

    def report_after(
        self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any
    ) -> Any:
        """Execute a statement, then report if a report is due and no handler runs.

        This is an execute wrapper for the connection of this thread. A thread that receives replies
        is not stuck, however slow the network is.
        """
        result = execute(sql, params, many, context)
        if self._deadline is None and time.monotonic() > self._report_due:
            self.expect(0)
        return result

    def overdue(self) -> bool:
        deadline = self._deadline
        return deadline is not None and time.monotonic() > deadline

    def interrupt(self) -> None:
        """Make the handler's thread raise HandlerTimeout. The watchdog calls this."""
        if time.monotonic() - self._interrupted_at < INTERRUPT_AGAIN_AFTER:
            return
        self._interrupted_at = time.monotonic()
        if self._is_main:
            # A signal also interrupts a system call. Before on_alarm() raises HandlerTimeout, it
            # checks the deadline again.
            signal.pthread_kill(self._ident, signal.SIGALRM)
            return
        with self._lock:
            if self.overdue():
                self._interrupted = True
                self._send_timeout()
                # HandlerTimeout is raised only when the thread runs Python code. A running query
                # would delay it, so the query is cancelled.
                with contextlib.suppress(Exception):
                    self.connection.connection.cancel()

    def on_alarm(self, signum: int, frame: Any) -> None:
        if self.overdue():
            self._deadline = None
            raise HandlerTimeout


class Watchdog:
    """The thread that checks all watches of one process."""

    def __init__(self, worker_id: uuid.UUID | None = None) -> None:
        self.worker_id = worker_id
        self._watches: list[tuple[Watch, Callable[[], None]]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eventbus-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def supervise(self, watch: Watch, on_check: Callable[[], None] = lambda: None) -> None:
        """Enforce the deadlines of the watch's thread, and call ``on_check`` regularly."""
        if watch._is_main:
            signal.signal(signal.SIGALRM, watch.on_alarm)
        self._watches.append((watch, on_check))

    def _run(self) -> None:
        set_worker(self.worker_id)
        while not self._stopped.wait(CHECK_EVERY):
            for watch, on_check in self._watches:
                if watch.overdue():
                    watch.interrupt()
                try:
                    on_check()
                except Exception as error:
                    # The watchdog must continue to enforce deadlines after an error of on_check.
                    logger.error(
                        "the check for slow batches failed; the watchdog continues: %s",
                        failures.in_a_line(error),
                        extra=about(),
                    )
