"""MariaDB and MySQL: the portable store at READ COMMITTED, which Django sets by default."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from django_eventbus.conf import settings
from django_eventbus.models import EventMark, QueuedEvent
from django_eventbus.store.base import Store

READ_COMMITTED = "read committed"
#: The scope of marks that are locks, and seconds after which an unused one may go.
TURNS = "(order)"
TURN_IDS = uuid.UUID("5a6c8f0e-3d0b-4d0a-9a55-6b1f7f0c2e11")
TURN_KEPT = 300.0


class MariaDBStore(Store):
    #: JSON_VALID, which guards the columns, gives up at 32.
    deepest_json: ClassVar[int] = 31
    #: Deadlock, lock wait timeout, record changed under a snapshot.
    conflicts: ClassVar[frozenset[Any]] = frozenset({1213, 1205, 1020})
    _clock_sql: ClassVar[str] = "SELECT UTC_TIMESTAMP(6)"

    def _to_datetime(self, value: Any) -> datetime:
        assert isinstance(value, datetime)
        return value.replace(tzinfo=UTC)

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """What the bus does by itself sees what is committed, whatever the project's isolation: a
        snapshot does not show the events that others have routed to a lane meanwhile."""
        is_ours = not self.connection.in_atomic_block
        with super().atomic():
            if is_ours and not self._reads_committed():
                with self.connection.cursor() as cursor:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            yield

    def insert_once(
        self, event: QueuedEvent, *, window: timedelta | None = None
    ) -> QueuedEvent | None:
        """One after the other. InnoDB keeps the entry of a deleted row in its unique index for a
        while; two that insert the same again share a lock on it, and each then waits for the other
        to let it insert. Who is a duplicate of what is there need not wait; but a snapshot would
        know events that have long ended."""
        if self._reads_committed() and (known := self.known(event, window=window)):
            return known
        with self.atomic():
            # Two slashes, so that it is nobody's turn in a queue.
            self._wait_for_turn(f"{settings.NAMESPACE}//{event.dedup_key or event.event_id}")
            return super().insert_once(event, window=window)

    def surely_empty(self, lanes: set[int]) -> set[int]:
        """In somebody else's transaction, a test's, a snapshot may be all there is: a locking read
        sees what was routed since."""
        if not lanes or self._reads_committed():
            return lanes
        routed = self.waiting_lock(self.queued.filter(lane_id__in=lanes))
        return lanes - set(routed.values_list("lane_id", flat=True))

    def _reads_committed(self) -> bool:
        level = self.connection.settings_dict["OPTIONS"].get("isolation_level", READ_COMMITTED)
        return str(level).lower() == READ_COMMITTED

    def _wait_for_turn(self, name: str) -> None:
        """A row's lock, as named locks here do not end with the transaction. The conflict's update
        takes it alone from the start: two that share one first would get into a deadlock. And the
        conflict is one of the primary key: one of any other key locks the gap before it too, and
        with it the turns of whoever belongs there."""
        turn_id = uuid.uuid5(TURN_IDS, name)
        turn = EventMark(
            id=turn_id,
            namespace=settings.NAMESPACE,
            scope=TURNS,
            key=turn_id.hex,
            event_id=turn_id,
            expires_at=self.after(TURN_KEPT),
        )
        self.marks.bulk_create([turn], update_conflicts=True, update_fields=["expires_at"])
