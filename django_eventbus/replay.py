"""Replay events: copy ended events from the log into the queue, so that handlers run again.

The log is never changed. A copy has its own id, and ``event.original_id`` is the id of the event
that was published. Workers do the copying: each step of a replay is an event of the bus itself,
whose handler copies a chunk and publishes the next step in the same transaction.
"""

from __future__ import annotations

import builtins
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict, Unpack

from django_eventbus.conf import settings
from django_eventbus.errors.suggestions import check_queue, did_you_mean
from django_eventbus.events import Envelope
from django_eventbus.exceptions import EventBusError
from django_eventbus.flow.fleet import known_here
from django_eventbus.models import ACTIVE_STATES, EventLog, EventReplay, ReplayState
from django_eventbus.publishing.publisher import publish
from django_eventbus.publishing.wakeup import wake_on_commit
from django_eventbus.registry import Handler, registry, subscribe
from django_eventbus.retention import STATUSES
from django_eventbus.retries import RetryPolicy
from django_eventbus.schema.names import MAX_NAME_LENGTH, check_name
from django_eventbus.store import Store, store_for

#: The type of the event that asks a worker to copy the next chunk of a replay.
STEP = "django_eventbus.replay_step"
#: Steps have the highest priority, so that they do not wait behind the copies.
STEP_PRIORITY = 32_767
#: Seconds until the first step. By then, a settlement that wrote its end time before the replay
#: began has locked the log, so that ``late_writers`` finds it.
FIRST_STEP_AFTER = 1.0
#: The largest number of events that one step copies.
STEP_SIZE = 5000
#: A replay without a rate stops copying while this many of its copies wait in the queue, so that a
#: cancelled replay ends soon and the queue stays small.
MOST_WAITING = 20_000
#: Seconds until the next step, if too many copies wait in the queue.
WAIT = 0.25
#: Seconds until the next step, if open transactions may still add events to the log.
WAIT_FOR_WRITERS = 1.0
#: Seconds between two steps of a replay with a rate.
PACE = 1.0
COUNTED_UP_TO = 1_000_000
MOST_EVENT_IDS = 1000
DELETE_CHUNK = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStatus:
    """The current numbers of a replay. Counting stops at ``COUNTED_UP_TO``."""

    state: ReplayState
    #: The number of events that were selected at the start.
    total: int
    #: The number of events that were copied so far.
    copied: int
    #: The number of copies that are in the queue.
    waiting: int
    #: The number of copies that became dead letters.
    dead: int

    @property
    def handled(self) -> int:
        """The number of copies that have ended."""
        return max(0, self.copied - self.waiting)

    @property
    def is_over(self) -> bool:
        return self.state not in ACTIVE_STATES and not self.waiting


class Selection(TypedDict, total=False):
    """The filters of a replay, for type checkers."""

    type: str
    since: datetime | None
    until: datetime | None
    status: str | None
    key: str | None
    event_id: uuid.UUID | EventLog | Iterable[uuid.UUID | EventLog] | None


class Options(Selection, total=False):
    """The arguments of ``start`` and ``prepare``, for type checkers."""

    handler: str | None
    queue: str | None
    rate: float | None
    by: str
    using: str | None


def start(**options: Unpack[Options]) -> EventReplay:
    """Start a replay of ended events, and return it. Workers carry it out.

    The filters select completed events and dead letters of the log: ``type`` (may end in ``*``),
    the time of their end (``since`` inclusive, ``until`` exclusive, default: now), ``key``, single
    events (``event_id``), and ``status`` as in ``retention.purge()``, such as ``"completed"`` or
    ``"dead"``. At least one filter is required; ``type="*"`` selects all events.

    With ``handler``, only events that this handler handles are selected, and only this handler
    receives the copies. Otherwise all handlers of the event receive them, except handlers with
    ``replay=False``. Copies go to the queue of their original event, or to ``queue``. ``rate`` is
    the largest number of copies per second. ``by`` is the name of the operator.

    Raises EventBusError for an invalid filter, and for an unknown handler or queue.
    """
    store = store_for(options.get("using"))
    with store.atomic():
        replay = prepare(**options)
        store.start_replay(replay)
        _publish_step(replay, store, delay=FIRST_STEP_AFTER)
    return replay


def prepare(
    *,
    handler: str | None = None,
    queue: str | None = None,
    rate: float | None = None,
    by: str = "",
    using: str | None = None,
    **selection: Unpack[Selection],
) -> EventReplay:
    """Return the replay that ``start()`` would start; ``total`` is the number of its events."""
    store = store_for(using)
    replay = _selecting(store, **selection)
    if handler is not None:
        _check_handler(handler, replay.type)
        replay.handler, replay.handler_types = handler, _types_of(handler)
    if queue is not None:
        check_queue(queue)
    if rate is not None and not 0 < rate < float("inf"):
        raise EventBusError(f"rate must be more than 0 events per second, not {rate!r}")
    replay.queue, replay.rate = queue or "", rate
    replay.created_by = by[:MAX_NAME_LENGTH]
    replay.total = store.selected(replay).count()
    return replay


def _selecting(
    store: Store,
    *,
    type: str = "",
    since: datetime | None = None,
    until: datetime | None = None,
    status: str | None = None,
    key: str | None = None,
    event_id: Any = None,
) -> EventReplay:
    """Return a new replay with these filters. Raises EventBusError if a filter is invalid."""
    if not type and all(each is None for each in (since, until, status, key, event_id)):
        raise EventBusError("pass a filter; type='*' selects all events")
    if type:
        check_name(type, "the event type")
    if "*" in type[:-1]:
        raise EventBusError(f"a type may contain * only at its end, not {type!r}")
    if status is not None and status not in STATUSES:
        raise EventBusError(f"status must be one of {', '.join(STATUSES)}, not {status!r}")
    now = store.read_clock()
    end = now if until is None else min(until, now)
    if since is not None and since >= end:
        raise EventBusError(f"since must be before until: {since} is not before {end}")
    return EventReplay(
        type=type,
        since=since,
        until=end,
        status=status or "",
        key=key or "",
        event_ids=None if event_id is None else _ids(event_id),
    )


def _check_handler(name: str, type_name: str) -> None:
    found = registry.get(name)
    if found is None:
        known = [each.name for each in registry.all()]
        raise EventBusError(f"there is no handler {name!r}{did_you_mean(name, known)}")
    if not found.replay:
        raise EventBusError(f"{name} is declared with replay=False, so it receives no replays")
    if type_name and "*" not in type_name and not found.handles(type_name):
        raise EventBusError(f"{name} does not handle events of the type {type_name!r}")


def _types_of(handler: str) -> builtins.list[str]:
    """Return the event types of a handler. A pattern is cut after its first ``*``."""
    patterns = known_here()[handler]
    return sorted({start + star for start, star, _ in (each.partition("*") for each in patterns)})


def _ids(event: Any) -> builtins.list[str]:
    many = [event] if isinstance(event, EventLog | uuid.UUID) else builtins.list(event)
    if len(many) > MOST_EVENT_IDS:
        raise EventBusError(
            f"a replay of single events takes at most {MOST_EVENT_IDS:,} of them, not "
            f"{len(many):,}: use filters"
        )
    return [str(each.event_id if isinstance(each, EventLog) else each) for each in many]


def list(*, limit: int = 100, using: str | None = None) -> builtins.list[EventReplay]:
    """Return the latest replays, the newest first."""
    return builtins.list(store_for(using).replays.order_by("-id")[:limit])


def status(replay: EventReplay | int, *, using: str | None = None) -> ReplayStatus:
    """Return the current numbers of a replay."""
    store = store_for(using)
    row = store.replays.get(pk=replay.pk if isinstance(replay, EventReplay) else replay)
    return ReplayStatus(
        state=ReplayState(row.state),
        total=row.total,
        copied=row.copied,
        waiting=store.waiting_copies(row.pk, at_most=COUNTED_UP_TO),
        dead=store.dead_copies(row.pk, at_most=COUNTED_UP_TO),
    )


def cancel(
    replay: EventReplay | int,
    *,
    using: str | None = None,
    report: Callable[[int], None] = lambda deleted: None,
) -> bool:
    """Stop a replay, and delete its copies that no worker is handling.

    Returns False if the replay has ended: all its copies were handled, or it was cancelled before.
    The effects of handlers that have run are not undone.
    """
    store = store_for(using)
    replay_id = replay.pk if isinstance(replay, EventReplay) else replay
    with store.atomic():
        row = store.lock_replay(replay_id)
        has_copies = store.waiting_copies(replay_id, at_most=1) > 0
        if row is None or not (row.is_active or has_copies):
            return False
        if row.state != ReplayState.CANCELLED:
            row.state, row.finished_at = ReplayState.CANCELLED, store.read_clock()
            store.save_replay(row, "state", "finished_at")
    deleted = 0
    while chunk := store.delete_copies(replay_id, limit=DELETE_CHUNK):
        deleted += chunk
        report(deleted)
    return True


# -- the steps


def _publish_step(replay: EventReplay, store: Store, delay: float | None = None) -> None:
    publish(STEP, {"replay": replay.pk}, priority=STEP_PRIORITY, delay=delay, using=store.using)


def take_step(event: Envelope[Any]) -> None:
    """Copy the next events of a replay, and publish the next step in the same transaction."""
    store = store_for(event.using)
    replay = store.lock_replay(event.payload["replay"])
    if replay is None or not replay.is_active:
        return  # The replay was deleted or cancelled.
    if replay.state == ReplayState.STARTING and _has_late_writers(store, replay):
        _publish_step(replay, store, delay=WAIT_FOR_WRITERS)
        return
    room = _room(store, replay)
    copied = store.copy_to_queue(replay, room)
    if copied < room:
        replay.state, replay.finished_at = ReplayState.COPIED, store.read_clock()
        store.save_replay(replay, "state", "finished_at")
        wake_on_commit(store.using)
        return
    _publish_step(replay, store, delay=_seconds_to_next(replay, copied))


def _has_late_writers(store: Store, replay: EventReplay) -> bool:
    """Return whether a transaction may still add selected events to the log.

    An event gets the time of its end before its settlement is committed. So a settlement that was
    open when the replay began can add an event behind the position of the replay.
    """
    open_now = store.late_writers(replay.until)
    if replay.waits_for is not None:
        open_now &= set(replay.waits_for)
    replay.waits_for = sorted(open_now)
    if not replay.waits_for:
        replay.state = ReplayState.COPYING
    store.save_replay(replay, "state", "waits_for")
    return bool(replay.waits_for)


def _room(store: Store, replay: EventReplay) -> int:
    if replay.rate is not None:
        return max(1, min(STEP_SIZE, round(replay.rate * PACE)))
    waiting = store.waiting_copies(replay.pk, at_most=MOST_WAITING)
    return min(STEP_SIZE, MOST_WAITING - waiting)


def _seconds_to_next(replay: EventReplay, copied: int) -> float | None:
    if replay.rate is not None:
        return max(copied, 1) / replay.rate
    return None if copied else WAIT


def register() -> Handler:
    """Register the handler of the steps. The module ``handlers`` of the bus calls this."""
    return subscribe(
        STEP,
        take_step,
        name="django_eventbus.replay",
        isolated=True,
        retry=RetryPolicy(max_retries=100, max_delay=60),
        breaker=False,
        timeout=max(60.0, settings.HANDLER_TIMEOUT),
        replay=False,
    )
