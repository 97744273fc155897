"""Suspects: events of which an earlier claim ended without a result (a crash or an interruption).

Each thread runs its suspects one at a time. Before a thread runs a suspect, the thread announces
it: the thread writes the row id of the suspect to the registration of the worker. If the worker
dies, the registration shows which event to charge.
"""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, field

from django_eventbus.delivery.settling import Settler


@dataclass(slots=True)
class Suspects:
    """Row ids of the suspects that the threads of this worker process run now."""

    worker_id: uuid.UUID
    rows: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Announcement:
    """The suspect that one thread runs, written to the worker's registration."""

    def __init__(self, suspects: Suspects, settler: Settler) -> None:
        self.suspects = suspects
        self.settler = settler
        self._announced: int | None = None

    def announce(self, row_id: int | None) -> None:
        """Announce the next suspect of this thread; None means that there is no further suspect.

        The announcement of a suspect remains until the next suspect is announced. Without an
        announcement, a crash between two suspects would make recovery charge every claimed event
        that is not a suspect (see ``Recovery._release_claims``).
        """
        if row_id == self._announced:
            return
        with self.suspects.lock:
            self.suspects.rows.discard(self._announced or 0)
            self.suspects.rows |= {row_id} if row_id else set()
            self._announced = row_id
            rows = sorted(self.suspects.rows)
            worker_id = self.suspects.worker_id
            self.settler.through_outage(lambda: self.settler.store.suspect(worker_id, rows))
