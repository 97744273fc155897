"""Renew the registrations of the worker processes of a supervisor, in a separate thread."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from django.db import Error, connections

from django_eventbus.conf import settings
from django_eventbus.errors import failures
from django_eventbus.store import Store
from django_eventbus.worker.child import TICK, Child

logger = logging.getLogger(__name__)


class Renewals:
    """A thread that renews registrations.

    If the database hangs, only this thread waits, and the supervisor can enforce deadlines.
    """

    def __init__(
        self,
        store: Store,
        children: Callable[[], Sequence[Child]],
        report: Callable[[], None],
    ) -> None:
        self.store = store
        self.children = children
        #: The thread calls this about every TICK seconds.
        self.report = report
        #: The workers whose registrations other workers have removed.
        self.evicted: set[uuid.UUID] = set()
        self._thread: threading.Thread | None = None
        self._began = 0.0

    def start(self) -> None:
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="eventbus-renewal", daemon=True)
        self._thread.start()

    def watch(self) -> None:
        """Start another thread, with another connection, if a renewal gets no reply."""
        if time.monotonic() - self._began > settings.ABANDON_AFTER * 0.75 + TICK:
            logger.warning(
                "a renewal of the registrations got no reply; retrying with a new connection"
            )
            self.start()

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread:
            thread.join(TICK * 2)

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while self._thread is threading.current_thread():
                if time.monotonic() >= due:
                    self._began = time.monotonic()
                    due = self._began + settings.ABANDON_AFTER / 4
                    self._renew()
                self.report()
                time.sleep(TICK)
        finally:
            connections.close_all()

    def _renew(self) -> None:
        sent = time.monotonic()
        children = {each.registration.pk: each for each in self.children()}
        if not children:
            return
        try:
            busy = {worker_id: len(each.board.running()) for worker_id, each in children.items()}
            renewed = self.store.renew(children, busy=busy)
        except Error as error:
            logger.warning("could not renew the registrations: %s", failures.in_a_line(error))
            self.store.connection.close()
            return
        for worker_id, child in children.items():
            if worker_id in renewed:
                child.renewed = max(child.renewed, sent)
            else:
                self.evicted.add(worker_id)
