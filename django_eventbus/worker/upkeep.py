"""Regular duties, which every worker performs: there is no leader process."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from django_eventbus.conf import settings
from django_eventbus.logs import about
from django_eventbus.store import Attention, AttentionQuery, Store
from django_eventbus.worker.claiming import Claims
from django_eventbus.worker.firing import Scheduler

if TYPE_CHECKING:
    from django_eventbus.worker.worker import Worker

logger = logging.getLogger(__name__)

#: Seconds between two checks for due duties while events are delivered.
CHECK_EVERY = 0.5
PROMOTE_EVERY = 0.1
RECOVER_EVERY = 1.0
SEARCH_ORPHANS_EVERY = 60.0
NEVER = float("-inf")


class Upkeep:
    """Finds out with one statement which duties are due, and performs them."""

    def __init__(self, worker: Worker, store: Store, claims: Claims) -> None:
        self.worker = worker
        self.store = store
        self.claims = claims
        self.scheduler = Scheduler(store)
        self.attention = Attention()
        #: Whether ``attention`` is up to date.
        self.is_current = False
        self._checked = self._promoted = self._recovered = NEVER
        self._orphans_searched_at = self._forgotten_searched_at = NEVER
        self._session: Any = None

    def keep_up(self) -> None:
        """Check for duties every CHECK_EVERY seconds.

        Between two checks, make delayed events ready every PROMOTE_EVERY seconds, if they are due.
        """
        now = time.monotonic()
        if now - self._checked >= CHECK_EVERY:
            self.check()
        elif now - self._promoted >= PROMOTE_EVERY:
            self.promote()

    def check(self) -> None:
        self._checked = time.monotonic()
        self.attention = found = self.store.attention(self._attention_query())
        self.is_current = True
        self.claims.ready.update(found.ready)
        self._keep_up_with_flow_controls(found)
        if found.promotes:
            self.promote()
        if self.worker.options.fires_schedules:
            self._fire(found)
        self.worker.statistics.write_if_due(self.store)
        if self._checked - self._recovered >= RECOVER_EVERY:
            self._recovered = self._checked
            self._recover(found)

    def _attention_query(self) -> AttentionQuery:
        fires = self.worker.options.fires_schedules
        return AttentionQuery(
            worker_id=self.worker.worker_id,
            queues=self.claims.served(),
            digest=self.worker.other_workers.digest,
            schedules=self.scheduler.declared() if fires else None,
            excluded_schedules=self.scheduler.rows_to_retry() if fires else frozenset(),
        )

    def _keep_up_with_flow_controls(self, found: Attention) -> None:
        controls, others = self.worker.flow_controls, self.worker.other_workers
        if not found.holds:
            controls.confirm()
        if not found.differs:
            others.confirm()
        if controls.keep_up(self.store):
            # Held events were released, or a queue was resumed, after ``attention`` was read.
            self.claims.expect_events()
            self.is_current = False
        others.keep_up(self.store)

    def promote(self) -> int:
        self._promoted = time.monotonic()
        promoted = self.store.promote()
        if promoted:
            self.claims.expect_events()
        return promoted

    def _fire(self, found: Attention) -> None:
        if found.fires:
            self.claims.expect_events()
        if found.fires or self.scheduler.has_other_duties(found.tick):
            self.scheduler.fire_due()
        else:
            self.scheduler.expect(found.tick)

    def _recover(self, found: Attention) -> None:
        now, recovered = self._checked, 0
        self.claims.release_late()
        if found.forgets:
            self.store.delete_expired_keys()
        if found.recovers:
            recovered += self.store.recover()
        if now - self._orphans_searched_at >= SEARCH_ORPHANS_EVERY:
            self._orphans_searched_at = now
            recovered += self.store.recover_orphans()
        if now - self._forgotten_searched_at >= settings.ABANDON_AFTER and self._is_reconnected():
            self._forgotten_searched_at = now
            recovered += self.claims.release_forgotten()
        if recovered:
            self.claims.expect_events()
            logger.warning("returned %s abandoned events to the queue", recovered, extra=about())

    def _is_reconnected(self) -> bool:
        before, self._session = self._session, self.store.connection.connection
        return before is not self._session

    def other_duties(self) -> Iterator[float | None]:
        """Yield the seconds until each duty other than a claim is due, if known."""
        if self.attention.holds or self.worker.flow_controls.snapshot.stops_anything:
            yield self.worker.flow_controls.next_read()
        if self.worker.options.fires_schedules:
            yield self.scheduler.wait()
