"""Worker processes, started with ``manage.py run_event_worker``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

COMMAND = (sys.executable, "-m", "django", "run_event_worker")


def drain(*options: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a worker until the queue is empty."""
    subprocess.run(
        [*COMMAND, "--drain", *options],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        check=True,
    )


@contextmanager
def running_worker(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Run a worker until the end of the block."""
    worker = subprocess.Popen(
        COMMAND,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # the errors of failing handlers would fill the terminal
    )
    try:
        yield
    finally:
        worker.terminate()
        worker.wait()
