"""SQLite: one writer at a time, so look before taking the write lock, and hear news for free."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ClassVar

from django.utils import timezone

from django_eventbus.events import ClaimedEvent
from django_eventbus.models import QueuedStatus
from django_eventbus.store.base import Store

LOOK_EVERY = 0.01


class SQLiteStore(Store):
    hears: ClassVar[bool] = True
    lets_others_work: ClassVar[bool] = False

    def claim(
        self, queue: str, *, limit: int, worker_id: uuid.UUID, token: uuid.UUID | None = None
    ) -> list[ClaimedEvent]:
        unkeyed = self.queued.filter(
            queue=queue,
            key__isnull=True,
            available_at__isnull=True,
            status=QueuedStatus.PENDING,
        )
        idle = not (
            unkeyed.exists() or self.unrouted(queue).exists() or self.ready_lanes(queue).exists()
        )
        return [] if idle else super().claim(queue, limit=limit, worker_id=worker_id, token=token)

    def read_clock(self) -> datetime:
        # The database has no clock but this machine's.
        return self.clock() if self.clock is not None else timezone.now()

    def _to_datetime(self, value: Any) -> datetime:
        return datetime.fromisoformat(value).replace(tzinfo=UTC)

    def _listen_once(self, tell: Callable[[], None], stopped: threading.Event) -> None:
        """``data_version`` moves when another connection commits; asking costs microseconds."""
        with self.connection.cursor() as cursor:
            seen = None
            while not stopped.wait(LOOK_EVERY):
                version = cursor.execute("PRAGMA data_version").fetchone()[0]
                if seen is not None and version != seen:
                    tell()
                seen = version
