"""The shop's web server and worker as child processes that never outlive the demo.

Each child leads a process group of its own: Ctrl-C in the terminal reaches only the demo, which
then stops them in order, and killing a group kills the worker with its supervisor. Each also holds
the end of a pipe; should the demo die without a word, the pipe ends and so does the child
(``child.py``).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

STOP_SECONDS = 15
START_SECONDS = 60


class ChildDiedError(Exception):
    """A child ended that should not have."""


class Child:
    """A management command of the shop, its output in a file."""

    def __init__(self, name: str, *command: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._command = [sys.executable, "-m", "demo.child", *command]
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self._command,
                cwd=Path(__file__).resolve().parent.parent,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def require_alive(self) -> None:
        code = self.process.poll()
        if code is not None:
            raise ChildDiedError(
                f"the {self.name} ended with exit code {code}:\n{self.last_words()}"
            )

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def kill(self) -> None:
        """SIGKILL for the child and everything it started: no goodbye, no clean-up."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()  # waits, and closes the pipe

    def stop(self) -> None:
        """Ask it to finish what it does; insist if that takes too long, or Ctrl-C is pressed."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        finally:
            self.kill()


class Children:
    """Stops whatever was started when the ``with`` block ends, however it ends."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.all: list[Child] = []

    def start(self, name: str, *command: str) -> Child:
        child = Child(name, *command, log=self.directory / f"{name}.log")
        self.all.append(child)
        return child

    def require_alive(self) -> None:
        for child in self.all:
            child.require_alive()

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self.all):  # the worker first: its handlers call the web server
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                child.stop()


def free_port(preferred: int = 8000) -> int:
    """The usual port if nobody uses it, else any."""
    for port in (preferred, 0):
        with socket.socket() as candidate, suppress(OSError):
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            candidate.bind(("127.0.0.1", port))
            return int(candidate.getsockname()[1])
    raise OSError("no free port on 127.0.0.1")


def wait_until_open(port: int, server: Child) -> None:
    give_up_at = time.monotonic() + START_SECONDS
    while True:
        server.require_alive()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.05)
        else:
            return
