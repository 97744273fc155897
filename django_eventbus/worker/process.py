"""The entry point of a worker process.

This module does not import Django at the top, because it is imported before ``django.setup()``.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import uuid
from typing import Any

from django_eventbus.delivery.deadlines import Board

EVICTED = 3
WORN_OUT = 4
#: Signals that make a worker stop. The supervisor blocks them while it starts a worker process. The
#: process inherits the blocked signals, so a signal stays pending until the process can handle it.
STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


def main(options: dict[str, Any], worker_id: uuid.UUID, memory: Any, lifeline: Any) -> None:
    board = Board(memory)
    _exit_on_signal(board)
    # Imported modules are never freed, so the garbage collector need not scan them. The scans would
    # take a tenth of the start time and later cause pauses while handlers run.
    gc.disable()
    import django

    django.setup()

    from django_eventbus.store import name_own_sessions, name_sessions
    from django_eventbus.tracing import spans
    from django_eventbus.worker.registration import WorkerOptions
    from django_eventbus.worker.worker import Worker, end_of_process, leave_pools

    gc.freeze()
    gc.enable()

    leave_pools()
    name_sessions("deliver")
    worker = Worker(WorkerOptions(**options), worker_id, board)
    if worker.options.concurrency > 1:
        name_own_sessions(worker.options.using, "dispatcher")
    signal.signal(signal.SIGTERM, worker.stop)
    threading.Thread(target=_follow_parent, args=(lifeline, worker), daemon=True).start()
    worker.run()
    end_of_process()
    worker.board.finish()
    spans.flush()
    sys.stdout.flush()
    # sys.exit would wait for the threads of handlers that did not end at their deadline.
    os._exit(EVICTED if worker.evicted else WORN_OUT if worker.worn_out else 0)


def _exit_on_signal(board: Board) -> None:
    """Make SIGTERM end this process with code 0 during the start, before it claims events."""

    def leave(*_: Any) -> None:
        board.finish()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    # Ctrl-C sends SIGINT to the whole process group. This process ignores it: the supervisor gets
    # the same signal and sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _follow_parent(lifeline: Any, worker: Any) -> None:
    """Stop the worker when the supervisor ends.

    The supervisor never sends anything through the pipe. When the supervisor ends, the pipe is
    closed, and ``recv`` raises EOFError.
    """
    try:
        lifeline.recv()
    except (EOFError, OSError):
        worker.stop()
