"""Where a supervisor's child process begins.

Imports nothing of Django at the top: the function is looked up before ``django.setup()``.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import uuid
from typing import Any

EVICTED = 3
WORN_OUT = 4


def main(options: dict[str, Any], worker_id: uuid.UUID, memory: Any, lifeline: Any) -> None:
    # What a project imports stays for good. To look through it for garbage would take a tenth of
    # the start and, later, a pause in the middle of a handler.
    gc.disable()
    import django

    django.setup()

    from django_eventbus.deadlines import Board
    from django_eventbus.worker import Worker, WorkerOptions, end_of_process, leave_pools

    gc.freeze()
    gc.enable()

    leave_pools()
    worker = Worker(WorkerOptions(**options), worker_id, Board(memory))
    signal.signal(signal.SIGTERM, worker.stop)
    # Ctrl-C reaches the whole process group; the supervisor decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, args=(lifeline, worker), daemon=True).start()
    worker.run()
    end_of_process()
    worker.board.finish()
    sys.stdout.flush()
    # Not sys.exit: it would wait for the threads of handlers that outlived their welcome.
    os._exit(EVICTED if worker.evicted else WORN_OUT if worker.worn_out else 0)


def _follow_parent(lifeline: Any, worker: Any) -> None:
    """The parent never writes; the pipe ends when it does, however it died."""
    try:
        lifeline.recv()
    except (EOFError, OSError):
        worker.stop()
