"""The store in portable SQL, through the ORM where possible.

All times come from the database's clock, except in tests that pass their own clock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from datetime import datetime
from typing import ClassVar

from django.db import NotSupportedError

from django_eventbus.errors import failures
from django_eventbus.logs import about
from django_eventbus.store.attention import Attends
from django_eventbus.store.counters import Counters
from django_eventbus.store.depths import Depths
from django_eventbus.store.erasing import Erasing
from django_eventbus.store.flow_controls import FlowControls
from django_eventbus.store.groups import Groups
from django_eventbus.store.guards import Guards
from django_eventbus.store.handing_off import HandingOff
from django_eventbus.store.inserting import Inserting
from django_eventbus.store.inspecting import Inspecting
from django_eventbus.store.lanes import LOCKED_WAIT
from django_eventbus.store.recovery import Recovery
from django_eventbus.store.replaying import Replaying
from django_eventbus.store.rows import retried
from django_eventbus.store.statistics import Statistics
from django_eventbus.store.triggers import RowTrigger

logger = logging.getLogger(__name__)

PROMOTE_CHUNK = 1000
LISTENER_CHECK = 10.0
FIRST_LISTEN_WAIT = 0.1
LONGEST_LISTEN_WAIT = 30.0


class Store(
    Inserting,
    HandingOff,
    Replaying,
    Erasing,
    FlowControls,
    Recovery,
    Attends,
    Groups,
    Guards,
    Statistics,
    Counters,
    Depths,
    Inspecting,
):
    """All reads and writes of rows.

    A method opens its own transaction, unless the docstring of the method or of its module says
    that it runs in the transaction of the caller.
    """

    #: Whether ``listen`` reports wake-ups. If this is false, workers poll more often.
    reports_wakeups: ClassVar[bool] = False
    #: The deepest nesting of JSON that this database accepts.
    deepest_json: ClassVar[int] = 1000
    #: Whether other connections can write while this connection has a transaction open.
    allows_concurrent_writes: ClassVar[bool] = True

    @retried
    def promote(self) -> int:
        """Clear ``available_at`` of a chunk of due events, so that they can be claimed.

        Return how many events were changed.
        """
        due = self.queued.filter(available_at__lte=self.now).order_by("available_at")
        if not due.exists():
            return 0
        with self.atomic():
            ids = list(self.locked(due).values_list("id", flat=True)[:PROMOTE_CHUNK])
            return self.queued.filter(id__in=ids).update(available_at=None)

    def next_due(self, queues: Collection[str]) -> float | None:
        """Return the seconds until a delayed event, or a lane of these queues, is ready, or None.

        Only ``testing.drain(until=...)`` calls this method; a worker gets the same number from
        ``attention``. If the last routing skipped keys because of a lock, the result is at most
        LOCKED_WAIT, so that the caller tries these keys again.
        """
        # first() reads one index entry. For Min() a database may read all rows.
        delayed = self.queued.filter(available_at__isnull=False).order_by("available_at")
        idle = self.lanes.filter(claim_token__isnull=True, ready_at__isnull=False)
        idle = idle.order_by("ready_at")
        moments = [
            delayed.values_list("available_at", flat=True).first(),
            *(
                idle.filter(queue=each).values_list("ready_at", flat=True).first()
                for each in queues
            ),
        ]
        known: list[datetime] = [moment for moment in moments if moment is not None]
        waits = [] if self._queues_with_locks.isdisjoint(queues) else [LOCKED_WAIT]
        if known:
            waits.append(max(0.0, (min(known) - self.read_clock()).total_seconds()))
        return min(waits, default=None)

    # -- queries

    def depth(self, queue: str | None = None, *, at_most: int | None = None) -> int:
        """Return the number of queued events; counting stops at ``at_most``."""
        rows = self.queued if queue is None else self.queued.filter(queue=queue)
        return rows.count() if at_most is None else rows.values("id")[:at_most].count()

    # -- triggers

    def trigger_sql(self, trigger: RowTrigger, *, install: bool) -> list[str]:
        """Return the statements that install a trigger, or remove it."""
        raise NotSupportedError(
            f"{self.connection.display_name} cannot publish events of {trigger.table!r} by a "
            "trigger: only PostgreSQL can. Use bridge_model() and BridgedQuerySet instead."
        )

    # -- wake-ups

    def wake(self) -> None:
        """Wake up waiting workers."""

    def listen(self, on_wakeup: Callable[[], None], stopped: threading.Event) -> None:
        """Call ``on_wakeup`` for each wake-up, until ``stopped`` is set.

        After an error this method listens again. It then also calls ``on_wakeup`` once, because a
        wake-up may have been lost meanwhile.
        """
        wait = FIRST_LISTEN_WAIT
        while self.reports_wakeups and not stopped.is_set():
            began = time.monotonic()
            try:
                self._listen_once(on_wakeup, stopped)
            except Exception as error:
                logger.warning(
                    "listening for wake-ups failed, the worker continues to poll: %s",
                    failures.in_a_line(error),
                    extra=about(),
                )
            finally:
                self.connection.close()
            if time.monotonic() - began > LISTENER_CHECK:
                # The connection worked for some time, so the next error is a new problem.
                wait = FIRST_LISTEN_WAIT
            stopped.wait(wait)
            wait = min(wait * 2, LONGEST_LISTEN_WAIT)
            on_wakeup()

    def _listen_once(self, on_wakeup: Callable[[], None], stopped: threading.Event) -> None:
        """Listen until ``stopped`` is set or an error is raised."""
