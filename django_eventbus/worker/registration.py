"""The options of a worker, its registration, and the renewal of the registration."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import Error, connections

from django_eventbus.conf import settings
from django_eventbus.errors import failures
from django_eventbus.errors.text import one_line
from django_eventbus.events import uuid7
from django_eventbus.logs import about, set_worker
from django_eventbus.models import EventWorker
from django_eventbus.store import name_own_sessions, store_for
from django_eventbus.worker import deployment

if TYPE_CHECKING:
    from django_eventbus.worker.worker import Worker

logger = logging.getLogger(__name__)

#: Seconds after its deadline from which a handler counts as stuck.
STUCK_AFTER = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options of ``run_event_worker``. All values can be pickled for a worker process."""

    using: str
    queues: tuple[str, ...]
    concurrency: int = 1
    batch_size: int = 500
    poll_interval: float = 1.0
    drain: bool = False
    max_events: int | None = None
    #: The worker stops after this number of seconds, even if events are left.
    max_seconds: float | None = None
    fires_schedules: bool = True


def new_registration(options: WorkerOptions) -> EventWorker:
    return EventWorker(
        id=uuid7(),
        host=socket.gethostname()[:64],
        pid=os.getpid(),
        queues=list(options.queues),
        version=deployment.version(),
        settings_digests=deployment.settings_digests(),
        slots=options.concurrency,
    )


class Heartbeat:
    """Renews the registration of a worker that has no supervisor.

    While a handler ignores its deadline, the registration is not renewed, because no supervisor
    kills the process. So the registration expires, and other workers recover all events of this
    worker.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eventbus-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            set_worker(self.worker.worker_id)
            name_own_sessions(self.worker.options.using, "heartbeat")
            while not self._stopped.wait(settings.ABANDON_AFTER / 4):
                self._beat()
        finally:
            connections.close_all()

    def _beat(self) -> None:
        if handler := self._stuck_handler():
            logger.error(
                "the handler %s ignores its deadline, so this worker no longer renews its "
                "registration; other workers will recover all events of this worker",
                one_line(handler),
                extra=about(handler=handler),
            )
            return
        store = store_for(self.worker.options.using, clock=self.worker.clock)
        sent = time.monotonic()
        try:
            busy = {self.worker.worker_id: len(self.worker.board.running())}
            if not store.renew(busy, busy=busy):
                self.worker.evicted = True
                self.worker.stop()
        except Error as error:
            logger.warning(
                "could not renew the registration: %s",
                failures.in_a_line(error),
                extra=about(),
            )
            store.connection.close()
        else:
            self.worker.renewed = sent

    def _stuck_handler(self) -> str | None:
        """Return the name of a handler that still runs long after its deadline, or None."""
        for _, deadline, handler in self.worker.board.running():
            if time.monotonic() > deadline + STUCK_AFTER:
                return handler
        return None
