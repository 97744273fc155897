"""The dead letters: list, retry, purge. Needs no worker, only the database."""

from __future__ import annotations

import builtins
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.db.models.functions import Left

from django_eventbus.models import DeadEvent, EventLog
from django_eventbus.publishing import wake_on_commit
from django_eventbus.store import Store, store_for

CHUNK = 1000


def matching(
    *,
    type: str | None = None,
    handler: str | None = None,
    queue: str | None = None,
    key: str | None = None,
    event_id: uuid.UUID | None = None,
    error_type: str | None = None,
    older_than: timedelta | datetime | None = None,
    using: str | None = None,
) -> QuerySet[DeadEvent]:
    """The dead letters that fit all that is given; ``type`` may end in ``*``."""
    store = store_for(using)
    rows: QuerySet[DeadEvent] = DeadEvent.objects.using(store.using)
    if type is not None:
        rows = _of_type(rows, type)
    exact = {
        "dead_handler": handler,
        "queue": queue,
        "key": key,
        "event_id": event_id,
        "error_type": error_type,
    }
    rows = rows.filter(**{name: value for name, value in exact.items() if value is not None})
    if older_than is not None:
        rows = rows.filter(finished_at__lte=_moment(store, older_than))
    return rows


def list(limit: int = 100, offset: int = 0, **filters: Any) -> builtins.list[DeadEvent]:
    """Newest dead first. ``filters`` as for ``matching``."""
    rows = matching(**filters).order_by("-finished_at", "-id")
    return builtins.list(rows[offset : offset + limit])


def retry(
    event: EventLog | uuid.UUID | Iterable[EventLog | uuid.UUID] | None = None,
    *,
    using: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
    **filters: Any,
) -> int:
    """Put dead letters back into the queue as if they were new; returns how many.

    Give an event, its id, several of them, or filters. Handlers that had succeeded are not run
    again; what is not dead (any more) is passed over.
    """
    _required(event, filters)
    store = store_for(using)
    rows = matching(using=store.using, **filters)
    if event is not None:
        rows = rows.filter(event_id__in=_ids(event))
    retried = 0
    for ids in _chunks(rows):
        retried += store.revive(ids)
        wake_on_commit(store.using)
        progress(retried)
    return retried


def purge(
    older_than: timedelta | datetime | None = None,
    *,
    using: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
    **filters: Any,
) -> int:
    """Delete dead letters for good, those that died by then and fit the filters."""
    _required(older_than, filters)
    store = store_for(using)
    rows = matching(using=store.using, older_than=older_than, **filters)
    purged = 0
    while deleted := store.purge(rows, limit=CHUNK):
        purged += deleted
        progress(purged)
    return purged


def _of_type(rows: QuerySet[DeadEvent], type_name: str) -> QuerySet[DeadEvent]:
    prefix, star, rest = type_name.partition("*")
    if rest:
        raise ValueError(f"a star may only end a type: {type_name!r}")
    if not star:
        return rows.filter(type=type_name)
    # Not startswith: SQLite's LIKE takes "Order" and "order" for the same.
    return rows.annotate(start=Left("type", len(prefix))).filter(start=prefix) if prefix else rows


def _required(event: Any, filters: dict[str, Any]) -> None:
    if event is None and not any(value is not None for value in filters.values()):
        raise ValueError("say which dead letters are meant; all of them are type='*'")


def _moment(store: Store, older_than: timedelta | datetime) -> datetime:
    if isinstance(older_than, datetime):
        return older_than
    return store.read_clock() - older_than


def _ids(event: Any) -> builtins.list[uuid.UUID]:
    many = [event] if isinstance(event, EventLog | uuid.UUID) else builtins.list(event)
    return [each.event_id if isinstance(each, EventLog) else each for each in many]


def _chunks(rows: QuerySet[DeadEvent]) -> Iterator[builtins.list[int]]:
    """Row ids in pieces, oldest first. Each piece is looked up when the one before is done."""
    last = 0
    while ids := builtins.list(
        rows.filter(id__gt=last).order_by("id").values_list("id", flat=True)[:CHUNK]
    ):
        yield ids
        last = ids[-1]
