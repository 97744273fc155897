"""A worker process as its supervisor sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from django_eventbus.conf import settings
from django_eventbus.delivery import deadlines
from django_eventbus.delivery.deadlines import Board
from django_eventbus.logs import about
from django_eventbus.models import EventWorker
from django_eventbus.store import Charge

#: Seconds between two checks of the worker processes by the supervisor.
TICK = 0.2
#: If a handler still runs this number of seconds after its deadline, its process is killed.
KILL_GRACE = 5.0


@dataclass(slots=True)
class Child:
    """A worker process, its registration and its board."""

    process: BaseProcess
    registration: EventWorker
    board: Board
    lifeline: Connection
    #: The monotonic time at which the last successful renewal of the registration was sent.
    renewed: float
    started: float = field(default_factory=time.monotonic)
    #: The reason why the supervisor killed the process. Empty if it did not kill the process.
    verdict: str = ""
    #: The row id and the handler, if the process was killed because of a handler's deadline.
    guilty: tuple[int, str] | None = None
    #: How the end of the process is counted for the events that were running.
    charge: Charge = Charge.CRASH

    def about(self, handler: str = "") -> dict[str, Any]:
        """Return the ``extra`` of a log record about this process."""
        return about(worker_id=self.registration.pk, handler=handler)

    def overdue(self) -> tuple[int, str] | None:
        """Return the row id and name of a handler that the process could not interrupt in time."""
        now = time.monotonic()
        for row_id, deadline, handler in self.board.running():
            if now > deadline + KILL_GRACE:
                return row_id, handler
        return None

    def outlived(self) -> bool:
        """Return whether a handler runs although the registration of its process expires soon.

        When the registration has expired, other workers may recover the event and run the handler a
        second time.
        """
        safe_until = self.renewed + settings.ABANDON_AFTER - TICK
        return time.monotonic() > safe_until and bool(self.board.running())

    def stuck(self) -> bool:
        """Return whether a thread that runs no handler has not reported for too long.

        The thread may wait for the database, so the limit is longer than any reply should take.
        """
        patience = max(settings.ABANDON_AFTER, deadlines.NO_ANSWER_AFTER)
        return time.monotonic() > self.board.expected_by() + patience
