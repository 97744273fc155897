"""Notifications for systemd: ready, status, watchdog, stopping (see sd_notify(3))."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, MutableMapping

from django_eventbus.worker.health import Health

TICK = 0.2
STATUS_EVERY = 10.0


class Notifier:
    """Notifies systemd of the health of a worker, from a thread. Without systemd it does nothing.

    It removes the variables of systemd from the environment, because a process that a handler
    starts must not notify systemd in the name of the worker.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        self._address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        is_ours = environment.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        #: Seconds between two notifications of the watchdog: half of the time that it allows.
        self._watchdog_every = (
            int(microseconds) / 2_000_000 if is_ours and microseconds.isdecimal() else 0.0
        )
        self._is_ready = self._is_stopping = False
        self._watchdog_due = self._status_due = 0.0
        self._status = ""
        self._ended = threading.Event()

    def start(self, health: Callable[[], Health]) -> None:
        if self._address.startswith(("/", "@")):
            threading.Thread(
                target=self._run, args=(health,), name="eventbus-systemd", daemon=True
            ).start()

    def stop(self) -> None:
        self._ended.set()
        self._notify_stopping()

    def _run(self, health: Callable[[], Health]) -> None:
        while not self._ended.wait(min(TICK, self._watchdog_every or TICK)):
            self.notify(health(), time.monotonic())

    def notify(self, found: Health, now: float) -> None:
        """Send the notifications that are due."""
        if not self._is_ready and not found.not_ready:
            self._is_ready = self._send("READY=1")
            self._status_due = now
        if found.stopping:
            self._notify_stopping()
        watchdog_due = self._watchdog_every and now >= self._watchdog_due
        if watchdog_due and not found.not_live and self._send("WATCHDOG=1"):
            self._watchdog_due = now + self._watchdog_every
        status = in_a_line(found)
        if status != self._status and now >= self._status_due and self._send(f"STATUS={status}"):
            self._status, self._status_due = status, now + STATUS_EVERY

    def _notify_stopping(self) -> None:
        if not self._is_stopping and self._address:
            self._is_stopping = self._send("STOPPING=1")

    def _send(self, message: str) -> bool:
        """Send a message. Return False if systemd did not receive it; the next check repeats it."""
        # A leading "@" means an abstract socket, whose address begins with a null byte.
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.setblocking(False)
            to.sendto(message.encode(), address)
            return True
        return False


def in_a_line(found: Health) -> str:
    """Return the health as one line of text."""
    if found.stopping:
        return "Stopping: running handlers may finish."
    reasons = found.not_live or found.not_ready
    if reasons:
        return f"{'Not live' if found.not_live else 'Not ready'}: {'; '.join(reasons)}"
    ready = sum(not each.not_ready for each in found.processes)
    return f"{ready} of {len(found.processes)} worker processes claim events."
