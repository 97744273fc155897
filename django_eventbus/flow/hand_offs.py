"""Decide which events of a batch are handed off to other executors.

At most about HANDOFF_WINDOW events of a handler wait for their executor. Events beyond this number
are held, and so are all events of an executor whose broker is unavailable.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from django_eventbus.conf import settings
from django_eventbus.flow.controls import FlowControls
from django_eventbus.flow.window import room_in_window
from django_eventbus.outcomes.event_run import EventRun
from django_eventbus.registry import Handler
from django_eventbus.store import SEVERAL, HeldBy, Store


class HandOffs:
    """The hand-offs of one batch. All of them have the same token."""

    def __init__(self, store: Store, controls: FlowControls) -> None:
        self.store = store
        self.controls = controls
        self.token = uuid.uuid4()
        #: The number of events of each handler that may still be handed off.
        self._room: dict[str, int] = {}

    def begin(self, batch: Iterable[EventRun]) -> None:
        self.token = uuid.uuid4()
        handlers = {handler.name: handler for run in batch for handler in run.elsewhere}
        self._room = {name: room_in_window(self.store, each) for name, each in handlers.items()}

    @property
    def are_needed(self) -> bool:
        return bool(self._room)

    def choose(self, run: EventRun) -> None:
        """Hand the event off for the first handler that may run, and hold the handlers before it.

        Only one handler at a time can be handed off, because only one process can claim the event.
        The handlers after it are handed off later, when the event returns to an event worker.
        """
        while run.elsewhere:
            handler = run.elsewhere[0]
            holder = self._holder_of(handler)
            if holder is None:
                self._room[handler.name] -= 1
                run.hand_off_to(handler, self.token)
                return
            run.hold([handler], HeldBy(holder))

    def _holder_of(self, handler: Handler) -> int | None:
        """Return the id of the flow control that holds the event; None if it may be handed off."""
        known = self.controls.snapshot
        assert handler.executor is not None
        closed = known.closed_executors.get(handler.executor.name)
        if closed is not None:
            return closed
        if self._room.setdefault(handler.name, settings.HANDOFF_WINDOW) > 0:
            return None
        return known.handler_ids.get(handler.name, SEVERAL)
