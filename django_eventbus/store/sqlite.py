"""SQLite: only one connection can write at a time, so claims write only if an event is ready.

Publishers send no wake-up. Workers poll ``data_version``, which shows commits of other connections.
"""

from __future__ import annotations

import sqlite3
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ClassVar

from django.db import IntegrityError
from django.db.models import Q, TextField, Value
from django.utils import timezone

from django_eventbus.errors import introspection
from django_eventbus.models import QueuedStatus
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.store.base import Store
from django_eventbus.store.sqlite_inspecting import InspectingSQLite

POLL_EVERY = 0.01


class SQLiteStore(InspectingSQLite, Store):
    reports_wakeups: ClassVar[bool] = True
    new_uuid = "LOWER(HEX(RANDOMBLOB(16)))"
    allows_concurrent_writes: ClassVar[bool] = False

    def claim(
        self, queue: str, *, limit: int, worker_id: uuid.UUID, token: uuid.UUID | None = None
    ) -> list[ClaimedEvent]:
        unkeyed = self.queued.filter(
            queue=queue,
            key__isnull=True,
            available_at__isnull=True,
            held_by__isnull=True,
            status=QueuedStatus.PENDING,
        )
        idle = not (
            unkeyed.exists() or self.unrouted(queue).exists() or self.ready_lanes(queue).exists()
        )
        return [] if idle else super().claim(queue, limit=limit, worker_id=worker_id, token=token)

    def read_clock(self) -> datetime:
        # SQLite runs in this process and uses the clock of this machine.
        return self.clock() if self.clock is not None else timezone.now()

    def ended_after(self, at: datetime, row_id: int) -> Q:
        # SQLite compares times as text. Django writes a full second without decimals, but the clock
        # of the database writes six decimals.
        text = at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
        later = Q(finished_at__gt=Value(text, output_field=TextField()))
        return Q(finished_at__gte=at) & (later | Q(id__gt=row_id))

    def late_writers(self, until: datetime) -> set[str]:
        return set()  # Only one transaction at a time can write.

    def is_refused_commit(self, error: BaseException) -> bool:
        # The error does not name the table, so any violated foreign key counts. Django defers
        # foreign keys, so only COMMIT raises this error.
        if not issubclass(type(error), IntegrityError | sqlite3.IntegrityError):
            return False  # An error class of the project may override __str__.
        return introspection.message(error) == "FOREIGN KEY constraint failed"

    def _to_datetime(self, value: Any) -> datetime:
        return datetime.fromisoformat(value).replace(tzinfo=UTC)

    def _listen_once(self, on_wakeup: Callable[[], None], stopped: threading.Event) -> None:
        """Poll ``data_version``, which changes when another connection commits.

        A read of ``data_version`` takes only microseconds.
        """
        with self.connection.cursor() as cursor:
            seen = None
            while not stopped.wait(POLL_EVERY):
                version = cursor.execute("PRAGMA data_version").fetchone()[0]
                if seen is not None and version != seen:
                    on_wakeup()
                seen = version
