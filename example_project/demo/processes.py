"""The shop's web server and workers as child processes that never outlive the demo.

Each child has its own process group. Ctrl-C in the terminal therefore reaches only the demo, which
then stops its children in order. Killing the group of the worker also kills its supervisor. Each
child also reads from a pipe that the demo holds open. If the demo is killed, the pipe is closed,
and the child ends (``child.py``).
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
    """A process of the demo ended unexpectedly."""


class Child:
    """A command of the shop, of ``manage.py`` or Celery, that writes its output to a file."""

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
        """Send SIGKILL to the process and all processes that it started, without clean-up."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()  # Wait for the end of the process, and close the pipe.

    def stop(self) -> None:
        """Stop it gracefully; kill it if that takes too long or Ctrl-C is pressed."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        finally:
            self.kill()


class Children:
    """Stop all started processes at the end of the ``with`` block, also after an error."""

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


def reserve_port(preferred: int = 8000) -> socket.socket:
    """Return a UDP socket on a port that is free for the web server: the default one, or any.

    Keep the socket open. It takes the UDP port and leaves the TCP port to the web server, so two
    demos that start at the same time get different ports.
    """
    for port in (preferred, *[0] * 10):
        reservation = socket.socket(type=socket.SOCK_DGRAM)
        try:
            reservation.bind(("127.0.0.1", port))
            with socket.socket() as candidate:
                candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                candidate.bind(reservation.getsockname())
        except OSError:
            reservation.close()
        else:
            return reservation
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
