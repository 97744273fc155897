"""The dead letters: list, group, retry, edit, purge. Needs no worker, only the database."""

from __future__ import annotations

import builtins
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, Max, Min, OuterRef, Q, QuerySet, Subquery

from django_eventbus.events import check_payload, class_for, from_payload
from django_eventbus.models import DeadEvent, EventLog
from django_eventbus.publishing import wake_on_commit
from django_eventbus.retention import moment, purge_in_batches
from django_eventbus.store import Store, store_for

CHUNK = 1000
MOST_GROUPS = 1000


def matching(
    *,
    type: str | None = None,
    handler: str | None = None,
    queue: str | None = None,
    key: str | None = None,
    event_id: uuid.UUID | Iterable[uuid.UUID] | None = None,
    error_type: str | None = None,
    fingerprint: str | None = None,
    older_than: timedelta | datetime | None = None,
    using: str | None = None,
) -> QuerySet[DeadEvent]:
    """The dead letters that fit all that is given; ``type`` may end in ``*``."""
    store = store_for(using)
    rows: QuerySet[DeadEvent] = DeadEvent.objects.using(store.using)
    if type is not None:
        rows = rows.filter(_of_type(store, type))
    if event_id is not None:
        rows = rows.filter(event_id__in=_ids(event_id))
    exact = {
        "dead_handler": handler,
        "queue": queue,
        "key": key,
        "error_type": error_type,
        "error_fingerprint": fingerprint,
    }
    rows = rows.filter(**{name: value for name, value in exact.items() if value is not None})
    if older_than is not None:
        rows = rows.filter(finished_at__lte=moment(store, older_than))
    return rows


def list(limit: int = 100, offset: int = 0, **filters: Any) -> builtins.list[DeadEvent]:
    """Newest dead first. ``filters`` as for ``matching``."""
    rows = matching(**filters).order_by("-finished_at", "-id")
    return builtins.list(rows[offset : offset + limit])


def retry(
    event: EventLog | uuid.UUID | Iterable[EventLog | uuid.UUID] | None = None,
    *,
    per_minute: float | None = None,
    delay: float = 0.0,
    only: str | None = None,
    using: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
    **filters: Any,
) -> int:
    """Put dead letters back into the queue as if they were new; returns how many.

    Give an event, its id, several of them, or filters. Handlers that had succeeded are not run
    again; what is not dead (any more) is passed over. With ``per_minute`` they become ready one
    after the other at that pace, the first after ``delay`` seconds. ``only`` names a handler that
    is to try again, while others that died stay dead.
    """
    _required(event, filters)
    store = store_for(using)
    rows = matching(using=store.using, **filters)
    if event is not None:
        rows = rows.filter(event_id__in=_ids(event))
    every = _seconds_between(per_minute)
    retried = 0
    for ids in _chunks(rows):
        start = delay + retried * every
        retried += store.revive(ids, delay=start, every=every, handler=only)
        wake_on_commit(store.using)
        progress(retried)
    return retried


def edit(
    event: EventLog | uuid.UUID, payload: Any, *, by: str = "", using: str | None = None
) -> bool:
    """Retry a dead letter with another payload; the one it had is kept in its ``edits``.

    The payload is checked as when it is published, and that it fits the class of the event, if
    there is one: raises InvalidPayloadError or UnknownEventError. False if it is not dead any
    more.
    """
    store = store_for(using)
    letter = matching(using=store.using, event_id=_ids(event)).only("id", "type").first()
    check_payload(payload, depth=store.deepest_json)
    if letter is None:
        return False
    if cls := class_for(letter.type):
        from_payload(cls, payload)
    edited = store.edit(letter.pk, payload, by=by)
    wake_on_commit(store.using)
    return edited


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
    return purge_in_batches(store, rows, batch_size=CHUNK, progress=progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Dead letters of one handler, one type of error and one line of code."""

    fingerprint: str
    #: Counting stops at ``count_at_most``.
    count: int
    first_at: datetime
    last_at: datetime
    #: The one that died last, without payload.
    latest: DeadEvent


class Groups(builtins.list[Group]):
    """A page of groups; ``is_capped`` if there are more than ``MOST_GROUPS`` in all: the others
    are not looked at."""

    is_capped = False


def groups(
    limit: int = 100,
    offset: int = 0,
    *,
    count_at_most: int = 10_001,
    among: QuerySet[DeadEvent] | None = None,
    using: str | None = None,
) -> Groups:
    """Those with the newest dead letter first. Reads no more than that: neither all dead letters,
    nor more than ``MOST_GROUPS`` groups.

    ``among`` some dead letters only, all of those are read.
    """
    if among is not None:
        return _groups_among(among, limit, offset, count_at_most)
    store = store_for(using)
    found = store.dead_groups(at_most=MOST_GROUPS + 1)
    is_capped = len(found) > MOST_GROUPS
    found = found[:MOST_GROUPS]
    found.sort(key=lambda each: each.last_at, reverse=True)
    chosen = found[offset : offset + limit]
    counts = store.count_dead([each.fingerprint for each in chosen], at_most=count_at_most)
    rows = matching(using=store.using).defer("payload", "headers", "edits")
    latest = rows.in_bulk([each.latest_id for each in chosen])
    page = Groups(
        Group(
            fingerprint=each.fingerprint,
            count=counts[each.fingerprint],
            first_at=each.first_at,
            last_at=each.last_at,
            latest=latest[each.latest_id],
        )
        for each in chosen
        if each.latest_id in latest
    )
    page.is_capped = is_capped
    return page


def _groups_among(rows: QuerySet[DeadEvent], limit: int, offset: int, count_at_most: int) -> Groups:
    alike = rows.filter(error_fingerprint=OuterRef("error_fingerprint")).order_by("-finished_at")
    found = (
        rows.order_by()
        .values("error_fingerprint")
        .annotate(
            count=Count("pk"),
            first_at=Min("finished_at"),
            last_at=Max("finished_at"),
            latest_id=Subquery(alike.values("pk")[:1]),
        )
        .order_by("-last_at")[offset : offset + limit]
    )
    chosen = builtins.list(found)
    shown = rows.defer(None).defer("payload", "headers", "edits")
    latest = shown.in_bulk([each["latest_id"] for each in chosen])
    return Groups(
        Group(
            fingerprint=each["error_fingerprint"],
            count=min(each["count"], count_at_most),
            first_at=each["first_at"],
            last_at=each["last_at"],
            latest=latest[each["latest_id"]],
        )
        for each in chosen
        if each["latest_id"] in latest
    )


def _of_type(store: Store, type_name: str) -> Q:
    prefix, star, rest = type_name.partition("*")
    if rest:
        raise ValueError(f"a star may only end a type: {type_name!r}")
    if not star:
        return Q(type=type_name)
    return store.starting_with("type", prefix) if prefix else Q()


def _required(event: Any, filters: dict[str, Any]) -> None:
    if event is None and not any(value is not None for value in filters.values()):
        raise ValueError("say which dead letters are meant; all of them are type='*'")


def _seconds_between(per_minute: float | None) -> float:
    if per_minute is None:
        return 0.0
    if not per_minute > 0:
        raise ValueError(f"per_minute must be more than 0, not {per_minute!r}")
    return 60 / per_minute


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
