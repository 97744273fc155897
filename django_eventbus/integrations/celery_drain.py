"""Handle events in a Celery task, for projects that do not run ``run_event_worker``.

The task ``django_eventbus.drain`` handles the events that are ready, up to a maximum number of
events and seconds. After a commit, the publishing process requests a run of the task from Celery. A
request may be lost, and delayed events become ready without a request, so Celery's beat must also
run the task regularly.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import uuid

from django_eventbus.conf import settings
from django_eventbus.errors import failures
from django_eventbus.errors.suggestions import check_queue
from django_eventbus.integrations import celery_broker
from django_eventbus.integrations.green_threads import refuse_green_threads
from django_eventbus.logs import about
from django_eventbus.store import default_alias
from django_eventbus.worker.registration import WorkerOptions
from django_eventbus.worker.worker import leave_pools, run_here

logger = logging.getLogger(__name__)

#: The name of the Celery task that handles the events that are ready.
DRAIN = "django_eventbus.drain"
#: The default limits of one run of the task.
MAX_EVENTS = 5000
MAX_SECONDS = 50.0
#: Seconds between two requests of one process.
REQUEST_EVERY = 1.0
#: Seconds until a request expires that no Celery worker has received.
EXPIRES_AFTER = 60.0
#: Seconds that a process waits for its last request when it exits.
EXIT_PATIENCE = 2.0


def drain(
    *,
    using: str | None = None,
    queues: list[str] | None = None,
    max_events: int = MAX_EVENTS,
    max_seconds: float = MAX_SECONDS,
) -> int:
    """Handle the events that are ready, in this process; return how many were handled.

    If a limit ends the run, another run is requested. Several runs may be active at a time. Raises
    EventBusError in a process with green threads, and for an unknown queue.
    """
    refuse_green_threads()
    for each in queues or ():
        check_queue(each)
    leave_pools()
    alias = using or default_alias()
    options = WorkerOptions(
        using=alias,
        queues=tuple(queues or settings.QUEUES),
        drain=True,
        max_events=max_events,
        max_seconds=max_seconds,
    )
    started = time.monotonic()
    tally = run_here(options)
    took = time.monotonic() - started
    if tally.handled + tally.postponed >= max_events or took >= max_seconds:
        request(alias)
    return tally.handled


class Requests:
    """The requests of one process. A thread sends them, so no caller waits for the broker.

    No commit is missed: if a transaction commits while a request is being sent, the thread sends
    another request after REQUEST_EVERY.
    """

    def __init__(self) -> None:
        self._process = 0
        self._aliases: set[str] = set()
        self._wanted = threading.Event()
        self._sent = threading.Event()
        self._ends = threading.Event()

    def request(self, alias: str) -> None:
        if self._process != os.getpid():
            self._start()
        self._sent.clear()
        self._aliases.add(alias)
        self._wanted.set()

    def _start(self) -> None:
        """Start the thread.

        A forked process has no copy of the thread, and its copies of the ``threading.Event``
        objects are in an unknown state.
        """
        self._aliases, self._process = set(), os.getpid()
        self._wanted, self._sent, self._ends = (threading.Event() for _ in range(3))
        threading.Thread(target=self._run, name="eventbus-drain-requests", daemon=True).start()
        atexit.register(self.finish)

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            for alias in tuple(self._aliases):
                self._aliases.discard(alias)
                self._send(alias)
            if not self._wanted.is_set():
                self._sent.set()
            self._ends.wait(REQUEST_EVERY)

    def _send(self, alias: str) -> None:
        try:
            celery_broker.broker.send(
                DRAIN,
                [],
                {"using": alias},
                task_id=str(uuid.uuid4()),
                options={
                    "expires": EXPIRES_AFTER,
                    "ignore_result": True,
                    "serializer": "json",
                },
            )
        except Exception as error:
            logger.warning(
                "could not ask Celery to handle new events; the next task that Celery's beat "
                "starts will handle them: %s",
                failures.in_a_line(error),
                extra=about(),
            )

    def finish(self) -> None:
        """Wait up to EXIT_PATIENCE for the last request when the process exits."""
        if self._process == os.getpid():
            self._ends.set()
            if self._wanted.is_set() or self._aliases:
                self._sent.wait(EXIT_PATIENCE)


_requests = Requests()


def request(alias: str) -> None:
    """Ask Celery to handle the events of a database. The caller does not wait for the broker."""
    _requests.request(alias)
