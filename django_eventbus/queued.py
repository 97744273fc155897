"""Events that still wait, and what an operator may do with them: run now, cancel."""

from __future__ import annotations

import uuid
from collections.abc import Collection

from django_eventbus import failures
from django_eventbus.publishing import wake_on_commit
from django_eventbus.store import Store, store_for


def run_now(event_ids: Collection[uuid.UUID], *, using: str | None = None) -> int:
    """Make events ready that wait for their time or their retry; returns how many.

    Passed over is what is ready or being handled, and what waits behind another of its key.
    """
    store = store_for(using)
    hastened = store.hasten(_row_ids(store, event_ids))
    wake_on_commit(store.using)
    return hastened


def cancel(event_ids: Collection[uuid.UUID], *, reason: str = "", using: str | None = None) -> int:
    """Discard events: they become dead letters that can still be retried; returns how many.

    Passed over is what is being handled.
    """
    store = store_for(using)
    message = reason or "cancelled by an operator"
    error = failures.decided("Cancelled", message, at=store.read_clock())
    return store.cancel(_row_ids(store, event_ids), error)


def _row_ids(store: Store, event_ids: Collection[uuid.UUID]) -> list[int]:
    wanted = store.queued.filter(event_id__in=list(event_ids))
    return list(wanted.values_list("id", flat=True))
