"""Purge completed events or dead letters from the log."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet

from django_eventbus.models import DEAD_STATUSES, EventLog, LogStatus
from django_eventbus.store import Store, store_for

BATCH = 1000
#: The precision of SQLite's clock. SQLite compares times as text, so time ranges in queries are
#: extended by this duration.
PRECISION = timedelta(milliseconds=1)
COMPLETED = LogStatus.COMPLETED.lower()
#: The value of ``status`` that selects all dead letters. The other values in STATUSES, except
#: COMPLETED, select the dead letters with one status, such as "failed".
DEAD = "dead"
STATUSES = (COMPLETED, DEAD, *(each.lower() for each in DEAD_STATUSES))


def purge(
    older_than: timedelta | datetime,
    *,
    status: str = COMPLETED,
    limit: int | None = None,
    batch_size: int = BATCH,
    using: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> int:
    """Delete the events from the log that are older than an age or a time; return their number.

    ``status`` is ``"completed"``, ``"dead"``, or a status of dead letters: ``"failed"``,
    ``"discarded"``, ``"completed_with_errors"``. Each batch is a transaction, so do not call this
    function inside a transaction: a handler that calls it needs ``atomic=False``.
    """
    store = store_for(using)
    rows = ended(older_than, status=status, using=store.using)
    return purge_in_batches(store, rows, limit=limit, batch_size=batch_size, progress=progress)


def ended(
    older_than: timedelta | datetime, *, status: str = COMPLETED, using: str | None = None
) -> QuerySet[EventLog]:
    """Return the events that ``purge()`` would delete."""
    if status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, not {status!r}")
    store = store_for(using)
    rows = store.completed if status == COMPLETED else store.dead
    if status not in (COMPLETED, DEAD):
        rows = rows.filter(status=status.upper())
    return rows.filter(finished_at__lte=moment(store, older_than))


def purge_in_batches(
    store: Store,
    rows: QuerySet[Any],
    *,
    limit: int | None = None,
    batch_size: int = BATCH,
    progress: Callable[[int], None] = lambda done: None,
) -> int:
    """Delete rows of a query on the log, oldest first; each batch is a transaction."""
    purged, most = 0, sys.maxsize if limit is None else limit
    left = rows
    while deleted := store.purge(left, limit=min(batch_size, most - purged)):
        purged += deleted
        progress(purged)
        oldest = left.order_by("finished_at").values_list("finished_at", flat=True).first()
        if oldest is None:
            break
        # PostgreSQL keeps deleted rows in the index while an older snapshot, for example of
        # pg_dump, may read them. The next batch starts at the oldest row that is left, so that its
        # index scan skips the deleted rows.
        left = rows.filter(finished_at__gte=oldest - PRECISION)
    return purged


def moment(store: Store, older_than: timedelta | datetime) -> datetime:
    """Return ``older_than`` as a time. An age is subtracted from the database's time."""
    if isinstance(older_than, datetime):
        return older_than
    return store.read_clock() - older_than
