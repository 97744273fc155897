"""The state of pauses, circuit breakers and limits in a worker process.

A process reads the flow controls twice a second, and releases the held events that may run now. The
process does not check each held event, so held events cause no load.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from django_eventbus.flow.decisions import (
    RELEASED_AT_ONCE,
    breaker_is_open,
    probe_is_due,
    room_for_executor,
    room_for_held,
)
from django_eventbus.flow.window import room_in_window
from django_eventbus.models import FlowControl, FlowControlKind
from django_eventbus.policies import Limits
from django_eventbus.registry import registry
from django_eventbus.schema.patterns import matches
from django_eventbus.store import SEVERAL, Store

READ_EVERY = 0.5
#: Seconds between two searches for held events while there is no flow control. Such events exist if
#: the flow control that held them was deleted.
SEARCH_HELD_EVERY = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The flow controls as they were last read."""

    paused_queues: frozenset[str] = frozenset()
    #: Pairs of a type pattern and the id of its flow control.
    paused_types: tuple[tuple[str, int], ...] = ()
    #: Handlers that are paused or whose breaker is open, with the id of their flow control.
    stopped_handlers: dict[str, int] = field(default_factory=dict)
    #: Handlers whose breaker is open and for which one call may be tried now.
    probes_due: frozenset[str] = frozenset()
    #: The limits that handlers declare, by the name of the handler.
    limits: dict[str, Limits] = field(default_factory=dict)
    #: The ids of the flow controls of handlers, by the name of the handler.
    handler_ids: dict[str, int] = field(default_factory=dict)
    #: The ids of the flow controls of executors, by the name of the executor.
    executor_ids: dict[str, int] = field(default_factory=dict)
    #: Executors whose broker is unavailable, with the id of their flow control. An executor for
    #: which a new attempt is due is not included.
    closed_executors: dict[str, int] = field(default_factory=dict)
    #: Executors whose broker was unavailable at the last attempt.
    failed_executors: frozenset[str] = frozenset()
    #: Handlers whose last message could not be sent, although the broker was available.
    unsent_handlers: frozenset[str] = frozenset()

    @property
    def stops_events(self) -> bool:
        return bool(self.paused_types or self.stopped_handlers)

    @property
    def stops_anything(self) -> bool:
        return bool(self.paused_queues or self.stops_events)

    @property
    def is_empty(self) -> bool:
        rules = self.handler_ids or self.executor_ids or self.paused_queues or self.paused_types
        return not rules

    @property
    def stops(self) -> set[tuple[str, int]]:
        """All pauses of types and handlers, and all open breakers."""
        return {*self.paused_types, *self.stopped_handlers.items()}


class FlowControls:
    """The flow controls that a worker process last read. Its threads share this object."""

    def __init__(
        self,
        queues: Collection[str] = (),
        *,
        searches_at_once: bool = False,
        releases: bool = True,
    ) -> None:
        """Initialize without reading the database.

        A process with ``releases=False`` leaves it to other processes to release held events.
        With ``searches_at_once=True``, the first read also searches for held events. Pass this
        option if the process may end before SEARCH_HELD_EVERY has passed.
        """
        self.snapshot = Snapshot()
        self.queues = tuple(queues)
        self.releases = releases
        self._read_at = float("-inf")
        self._searched_at = float("-inf") if searches_at_once else time.monotonic()
        self._registry_changes = -1
        #: Whether a pause or open breaker has ended since this process last released events that
        #: several flow controls held. A new process cannot know, so the initial value is True.
        self._pause_or_breaker_ended = True
        #: The number of held events that were released so far.
        self._released = 0
        self._lock = threading.Lock()

    def is_paused(self, queue: str) -> bool:
        return queue in self.snapshot.paused_queues

    def pause_of_type(self, type_name: str) -> int | None:
        """Return the id of the pause that holds all events of this type, if there is one."""
        for pattern, flow_control_id in self.snapshot.paused_types:
            if matches(pattern, type_name):
                return flow_control_id
        return None

    def next_read(self) -> float | None:
        """Return the seconds until the next read, or None if there is no flow control."""
        if self.snapshot.is_empty and self._read_at != float("-inf"):
            return None
        return max(0.0, self._read_at + READ_EVERY - time.monotonic())

    def keep_up(self, store: Store) -> bool:
        """Read the flow controls if READ_EVERY has passed, and release events that may run.

        Returns whether there may be new events to claim: held events were released, or a queue was
        resumed. One thread reads while the other threads use the last snapshot. All threads wait
        for the first read.
        """
        never_read = self._registry_changes < 0
        paused, released = self.snapshot.paused_queues, self._released
        if self._is_time() and self._lock.acquire(blocking=never_read):
            try:
                if self._is_time():
                    self._read_all(store)
            finally:
                self._lock.release()
        return self._released > released or bool(paused - self.snapshot.paused_queues)

    def _is_time(self) -> bool:
        passed = time.monotonic() - self._read_at
        return passed >= READ_EVERY or self._registry_changes != registry.changes

    def confirm(self) -> None:
        """Postpone the next read. Call this if a query found no flow control that stops events."""
        if not self.snapshot.stops_anything:
            self._read_at = time.monotonic()

    def read_again(self) -> None:
        """Make the next ``keep_up`` read again, because a flow control has changed."""
        self._read_at = float("-inf")

    def _read_all(self, store: Store) -> None:
        self._read_at, changes = time.monotonic(), registry.changes
        limits = {each.name: declared for each in registry.all() if (declared := each.limits)}
        rows = _read(store, limits.keys() | _handed_off().keys())
        now = store.read_clock() if rows else datetime.max
        before, self.snapshot = self.snapshot, _snapshot(rows, limits, now)
        self._registry_changes = changes
        self._pause_or_breaker_ended |= bool(before.stops - self.snapshot.stops)
        if not self.releases:
            return
        if rows or time.monotonic() - self._searched_at >= SEARCH_HELD_EVERY:
            self._searched_at = time.monotonic()
            self._release_held(store, {row.pk: row for row in rows}, now)

    def _release_held(self, store: Store, rows: dict[int, FlowControl], now: datetime) -> None:
        for holder in store.ids_that_hold(self.queues):
            room = self._room(store, holder, rows.get(holder), now)
            released = store.release_held(holder, limit=room, queues=self.queues) if room else 0
            self._released += released
            may_be_more = released >= RELEASED_AT_ONCE
            if holder == SEVERAL:
                self._pause_or_breaker_ended = may_be_more
            if may_be_more:
                self.read_again()

    def _room(self, store: Store, holder: int, row: FlowControl | None, now: datetime) -> int:
        """Return how many of the events held by ``holder`` may be released now.

        Without a row, this is RELEASED_AT_ONCE: the flow control was deleted, or ``holder`` is
        SEVERAL and a pause or breaker has ended, or none stops events.
        """
        if holder == SEVERAL and not self._pause_or_breaker_ended and self.snapshot.stops_events:
            return len(self.snapshot.probes_due)
        if row is None:
            return RELEASED_AT_ONCE
        if row.kind == FlowControlKind.EXECUTOR:
            return room_for_executor(row, now)
        limits = self.snapshot.limits.get(row.name) if _is_of_handler(row) else None
        room = room_for_held(row, limits, now)
        handler = registry.get(row.name) if _is_of_handler(row) else None
        if handler is not None and handler.executor is not None:
            room = min(room, room_in_window(store, handler))
        return room


def _handed_off() -> dict[str, str]:
    """Return the name of the executor of each handler that has one."""
    return {each.name: each.executor.name for each in registry.all() if each.executor}


def _read(store: Store, handlers: Collection[str]) -> list[FlowControl]:
    """Return all flow controls. Insert missing flow controls of these handlers and of executors."""
    rows = store.read_flow_controls()
    known = {(row.kind, row.name) for row in rows}
    needed = {(FlowControlKind.HANDLER, name) for name in handlers}
    needed |= {(FlowControlKind.EXECUTOR, name) for name in _handed_off().values()}
    if missing := sorted(needed - known):
        for kind in {kind for kind, _ in missing}:
            store.make_flow_controls(kind, [name for each, name in missing if each == kind])
        rows = store.read_flow_controls()
    return rows


def _snapshot(rows: Iterable[FlowControl], limits: dict[str, Limits], now: datetime) -> Snapshot:
    paused = [row for row in rows if row.paused_at is not None]
    paused_handlers = [row for row in paused if _is_of_handler(row)]
    of_handlers = [row for row in rows if _is_of_handler(row)]
    broken = [row for row in of_handlers if breaker_is_open(row, limits.get(row.name))]
    executors = [row for row in rows if row.kind == FlowControlKind.EXECUTOR]
    return Snapshot(
        paused_queues=frozenset(row.name for row in paused if row.kind == FlowControlKind.QUEUE),
        paused_types=tuple(
            (row.name, row.pk) for row in paused if row.kind == FlowControlKind.TYPE
        ),
        stopped_handlers={row.name: row.pk for row in (*broken, *paused_handlers)},
        probes_due=frozenset(
            row.name for row in broken if row.paused_at is None and probe_is_due(row, now)
        ),
        limits=limits,
        handler_ids={row.name: row.pk for row in of_handlers},
        executor_ids={row.name: row.pk for row in executors},
        closed_executors={row.name: row.pk for row in executors if not room_for_executor(row, now)},
        failed_executors=frozenset(row.name for row in executors if row.opened_at is not None),
        unsent_handlers=frozenset(row.name for row in of_handlers if row.unsent_since is not None),
    )


def _is_of_handler(row: FlowControl) -> bool:
    return row.kind == FlowControlKind.HANDLER
