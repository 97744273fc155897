"""List, group, retry, edit and purge dead letters."""

from __future__ import annotations

import builtins
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, TypedDict, Unpack

from django.db.models import Count, F, Max, Min, OuterRef, Q, QuerySet, Subquery

from django_eventbus.events import class_for
from django_eventbus.models import DeadEvent, EventLog
from django_eventbus.publishing.wakeup import wake_on_commit
from django_eventbus.retention import PRECISION, moment, purge_in_batches
from django_eventbus.schema.payloads import check_payload
from django_eventbus.schema.typed_payloads import from_payload
from django_eventbus.store import Store, store_for

CHUNK = 1000
MOST_GROUPS = 1000
_NOT_SHOWN = ("payload", "headers", "edits", "history")


class Filters(TypedDict, total=False):
    """The filters that ``matching``, ``retry`` and ``purge`` accept, for type checkers."""

    type: str | None
    handler: str | None
    queue: str | None
    key: str | None
    event_id: uuid.UUID | Iterable[uuid.UUID] | None
    error_type: str | None
    fingerprint: str | None


class FiltersByAge(Filters, total=False):
    older_than: timedelta | datetime | None


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
    """Return the dead letters that match all filters; ``type`` may end in ``*``."""
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


def list(
    limit: int = 100,
    offset: int = 0,
    *,
    using: str | None = None,
    **filters: Unpack[FiltersByAge],
) -> builtins.list[DeadEvent]:
    """Return dead letters, the latest first. Accepts the filters of ``matching``."""
    store = store_for(using)
    rows = matching(using=store.using, **filters).order_by("-finished_at", "-id")
    with store.reading_by_index(may_sort=bool(filters)):
        return builtins.list(rows[offset : offset + limit])


def retry(
    event: EventLog | uuid.UUID | Iterable[EventLog | uuid.UUID] | None = None,
    *,
    per_minute: float | None = None,
    delay: float = 0.0,
    only: str | None = None,
    by: str = "",
    using: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
    **filters: Unpack[FiltersByAge],
) -> int:
    """Put dead letters back into the queue with zero attempts. Returns their number.

    Pass events, event ids or filters. Handlers that have succeeded do not run again; events that
    are not dead are skipped. If ``per_minute`` is given, the events become ready one after the
    other at this rate. The first event becomes ready after ``delay`` seconds. ``only`` is the name
    of a handler: only this handler is retried, and other dead handlers stay dead. The ``history``
    of each event keeps the earlier attempts and errors, and the name of the operator (``by``).
    """
    _required(event, filters)
    store = store_for(using)
    rows = matching(using=store.using, **filters)
    if event is not None:
        rows = rows.filter(event_id__in=_ids(event))
    every = _seconds_between(per_minute)
    are_named = event is not None or filters.get("event_id") is not None
    named = rows.order_by("id").values_list("id", flat=True) if are_named else None
    retried = 0
    for ids in _chunks(store, rows) if named is None else _pieces(named):
        start = delay + retried * every
        retried += store.revive(ids, delay=start, every=every, handler=only, by=by)
        wake_on_commit(store.using)
        progress(retried)
    return retried


def edit(
    event: EventLog | uuid.UUID, payload: Any, *, by: str = "", using: str | None = None
) -> bool:
    """Retry a dead letter with another payload. The column ``edits`` keeps the earlier payload.

    Returns False if the event is not dead any more. Raises InvalidPayloadError if ``publish()``
    would refuse the payload, and UnknownEventError if the payload does not match the event class.
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
    **filters: Unpack[Filters],
) -> int:
    """Delete the dead letters that match the filters, and return their number.

    ``older_than`` is a minimum age, or the time before which the events ended.
    """
    _required(older_than, filters)
    store = store_for(using)
    rows = matching(using=store.using, older_than=older_than, **filters)
    return purge_in_batches(store, rows, batch_size=CHUNK, progress=progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Dead letters with the same handler, the same error type and the same failing line."""

    fingerprint: str
    #: The number of dead letters; counting stops at ``count_at_most``.
    count: int
    first_at: datetime
    last_at: datetime
    #: The latest dead letter, without its payload.
    latest: DeadEvent


class Groups(builtins.list[Group]):
    """A page of groups.

    ``is_capped`` is True if there are more than ``MOST_GROUPS`` groups. Groups beyond this number
    were not read.
    """

    is_capped = False


def groups(
    limit: int = 100,
    offset: int = 0,
    *,
    count_at_most: int = 10_001,
    among: QuerySet[DeadEvent] | None = None,
    using: str | None = None,
) -> Groups:
    """Return groups of dead letters by error, the group with the latest dead letter first.

    By default an index scan reads at most ``MOST_GROUPS`` groups. If the queryset ``among`` is
    given, only its dead letters are grouped, and the database reads all of them.
    """
    if among is not None:
        return _groups_among(among, limit, offset, count_at_most)
    store = store_for(using)
    with store.reading_by_index():
        found = store.dead_groups(at_most=MOST_GROUPS + 1)
        is_capped = len(found) > MOST_GROUPS
        found = found[:MOST_GROUPS]
        found.sort(key=lambda each: each.last_at, reverse=True)
        chosen = found[offset : offset + limit]
        counts = store.count_dead([each.fingerprint for each in chosen], at_most=count_at_most)
        rows = matching(using=store.using).defer(*_NOT_SHOWN)
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
            earlier_at=Min("first_dead_at", filter=Q(first_dead_of=F("error_fingerprint"))),
            last_at=Max("finished_at"),
            latest_id=Subquery(alike.values("pk")[:1]),
        )
        .order_by("-last_at")[offset : offset + limit]
    )
    chosen = builtins.list(found)
    shown = rows.defer(None).defer(*_NOT_SHOWN)
    latest = shown.in_bulk([each["latest_id"] for each in chosen])
    return Groups(
        Group(
            fingerprint=each["error_fingerprint"],
            count=min(each["count"], count_at_most),
            first_at=min(each["first_at"], each["earlier_at"] or each["first_at"]),
            last_at=each["last_at"],
            latest=latest[each["latest_id"]],
        )
        for each in chosen
        if each["latest_id"] in latest
    )


def _of_type(store: Store, type_name: str) -> Q:
    prefix, star, rest = type_name.partition("*")
    if rest:
        raise ValueError(f"a type may contain * only at its end, not {type_name!r}")
    if not star:
        return Q(type=type_name)
    return store.starting_with("type", prefix) if prefix else Q()


def _required(event: Any, filters: Mapping[str, Any]) -> None:
    if event is None and not any(value is not None for value in filters.values()):
        raise ValueError("pass events or filters; type='*' selects all dead letters")


def _seconds_between(per_minute: float | None) -> float:
    if per_minute is None:
        return 0.0
    if not per_minute > 0:
        raise ValueError(f"per_minute must be more than 0, not {per_minute!r}")
    return 60 / per_minute


def _ids(event: Any) -> builtins.list[uuid.UUID]:
    many = [event] if isinstance(event, EventLog | uuid.UUID) else builtins.list(event)
    return [each.event_id if isinstance(each, EventLog) else each for each in many]


def _chunks(store: Store, rows: QuerySet[DeadEvent]) -> Iterator[builtins.list[int]]:
    """Yield the row ids of dead letters in chunks, oldest first.

    Each chunk is read after the caller has processed the previous chunk. A retried event that dies
    again during this time is skipped: its new end time is later than the end time of the newest
    dead letter at the start.
    """
    newest = store.dead.order_by("-finished_at").values_list("finished_at", flat=True).first()
    if newest is None:
        return
    # SQLite compares times as text. A full second without decimals sorts before the same time with
    # decimals, so a condition with ``lte`` could miss the newest rows.
    rows = rows.filter(finished_at__lt=newest + PRECISION)
    seen: dict[int, datetime] = {}
    while page := store.page_of_dead(rows.exclude(id__in=builtins.list(seen)), limit=CHUNK):
        yield [row_id for row_id, _ in page]
        since = page[-1][1] - PRECISION
        # The next page starts shortly before the end time of this page's last row, so the query
        # must exclude the rows of this page that ended at about that time.
        seen = {row_id: at for row_id, at in [*seen.items(), *page] if at >= since - PRECISION}
        rows = rows.filter(finished_at__gte=since)


def _pieces(ids: Iterable[int]) -> Iterator[builtins.list[int]]:
    iterator = iter(ids)
    while piece := builtins.list(islice(iterator, CHUNK)):
        yield piece
