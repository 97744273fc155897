"""How long the log keeps what has ended. Completed events and dead letters are purged apart."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet

from django_eventbus.models import DEAD_STATUSES, EventLog, LogStatus
from django_eventbus.store import Store, store_for

BATCH = 1000
#: SQLite compares times as texts, and writes its own to the millisecond.
PRECISION = timedelta(milliseconds=1)
COMPLETED = LogStatus.COMPLETED.lower()
#: All dead letters; each kind of them also has its own name.
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
    """Delete events from the log that ended by then; returns how many.

    Only completed ones, unless ``status`` says otherwise: ``"dead"``, or one of ``"failed"``,
    ``"discarded"``, ``"completed_with_errors"``. Each batch is a transaction of its own, so do not
    call this inside of one: a handler that does needs ``atomic=False``.
    """
    store = store_for(using)
    rows = ended(older_than, status=status, using=store.using)
    return purge_in_batches(store, rows, limit=limit, batch_size=batch_size, progress=progress)


def ended(
    older_than: timedelta | datetime, *, status: str = COMPLETED, using: str | None = None
) -> QuerySet[EventLog]:
    """The events that ``purge()`` would delete."""
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
    """Delete rows of a query on the log, oldest first, a transaction for each batch."""
    purged, most = 0, sys.maxsize if limit is None else limit
    left = rows
    while deleted := store.purge(left, limit=min(batch_size, most - purged)):
        purged += deleted
        progress(purged)
        oldest = left.order_by("finished_at").values_list("finished_at", flat=True).first()
        if oldest is None:
            break
        # Deleted rows stay in the index while any snapshot may see them, such as a nightly dump's:
        # each batch begins where the last one ended, and walks over none of them.
        left = rows.filter(finished_at__gte=oldest - PRECISION)
    return purged


def moment(store: Store, older_than: timedelta | datetime) -> datetime:
    """A time ago is counted by the database's clock."""
    if isinstance(older_than, datetime):
        return older_than
    return store.read_clock() - older_than
