"""Wake workers with LISTEN and NOTIFY."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from django.db import DatabaseError

from django_eventbus.conf import settings
from django_eventbus.errors import failures
from django_eventbus.internals.django import open_separate_session
from django_eventbus.logs import about
from django_eventbus.store import postgresql_sql as sql
from django_eventbus.store.base import LISTENER_CHECK, Store

logger = logging.getLogger(__name__)

LISTENER_ANSWER = 5.0


class Notifying(Store):
    """A store whose workers wait for a notification instead of polling often."""

    reports_wakeups: ClassVar[bool] = True

    @property
    def channel(self) -> str:
        """The name of the channel, which only projects with the same namespace and schema share."""
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT current_schema()")
            schema = cursor.fetchone()[0]
        digest = hashlib.blake2b(f"{schema}/{settings.NAMESPACE}".encode(), digest_size=8)
        return f"eventbus_{digest.hexdigest()}"

    def wake(self) -> None:
        """Send NOTIFY as a separate statement after the commit.

        In the transaction of the publisher, NOTIFY would hold an instance-wide lock until the
        commit is on disk. If NOTIFY fails, the error is only logged, because workers also poll. The
        wait for the lock is limited, because another transaction may hold the lock while that
        transaction waits for a standby.
        """
        if not settings.NOTIFY:
            return
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(f'{sql.NOTIFY_LOCK_TIMEOUT}; NOTIFY "{self._known_channel()}"')
        except DatabaseError as error:
            logger.warning(
                "could not send NOTIFY; workers will find the event at their next poll: %s",
                failures.in_a_line(error),
                extra=about(),
            )
            # The caller did not request this statement and continues to use the connection. If this
            # error broke the connection, close it, so that Django opens a new connection.
            self.connection.close_if_unusable_or_obsolete()

    def _known_channel(self) -> str:
        known = _channels.get((self.using, settings.NAMESPACE))
        if known is None:
            known = _channels[self.using, settings.NAMESPACE] = self.channel
        return known

    def listen(self, on_wakeup: Callable[[], None], stopped: threading.Event) -> None:
        if settings.NOTIFY:
            super().listen(on_wakeup, stopped)

    def _listen_once(self, on_wakeup: Callable[[], None], stopped: threading.Event) -> None:
        """Listen on a connection that is used for nothing else."""
        channel = self._known_channel()
        self.connection.close()  # _known_channel() may have opened this connection.
        raw = open_separate_session(self.connection)
        try:
            raw.autocommit = True
            raw.execute(f'LISTEN "{channel}"')
            on_wakeup()
            checked = time.monotonic()
            while not stopped.is_set():
                for _ in raw.notifies(timeout=0.5, stop_after=1):
                    on_wakeup()
                if time.monotonic() - checked > LISTENER_CHECK:
                    # A half-open socket, or an UNLISTEN by other code, stops all notifications
                    # without an error. So a query checks that the session still listens.
                    with cut_off_after(LISTENER_ANSWER, raw):
                        listens = raw.execute("SELECT 1 FROM pg_listening_channels()").fetchone()
                    if not listens:
                        return
                    checked = time.monotonic()
        finally:
            raw.close()


@contextlib.contextmanager
def cut_off_after(seconds: float, raw: Any) -> Iterator[None]:
    """Shut down the socket if the block takes more than ``seconds``.

    The driver itself has no timeout.
    """

    def shut_down() -> None:
        with socket.socket(fileno=os.dup(raw.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_channels: dict[tuple[str, str], str] = {}
