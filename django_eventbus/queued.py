"""Run waiting events now, or cancel them."""

from __future__ import annotations

import uuid
from collections.abc import Collection

from django_eventbus.errors import failures
from django_eventbus.publishing.wakeup import wake_on_commit
from django_eventbus.store import Store, store_for


def run_now(event_ids: Collection[uuid.UUID], *, using: str | None = None) -> int:
    """Make waiting events ready, although they are due later; return the number of changed events.

    Skips events that are already ready or running, and events that wait for an earlier event of
    their key.
    """
    store = store_for(using)
    hastened = store.hasten(_row_ids(store, event_ids))
    wake_on_commit(store.using)
    return hastened


def cancel(event_ids: Collection[uuid.UUID], *, reason: str = "", using: str | None = None) -> int:
    """Discard events and return their number. Discarded events are dead letters and can be retried.

    Skips events that are running.
    """
    store = store_for(using)
    message = reason or "cancelled by an operator"
    error = failures.decided("Cancelled", message, at=store.read_clock())
    return store.cancel(_row_ids(store, event_ids), error)


def _row_ids(store: Store, event_ids: Collection[uuid.UUID]) -> list[int]:
    wanted = store.queued.filter(event_id__in=list(event_ids))
    return list(wanted.values_list("id", flat=True))
