"""HANDOFF_WINDOW: how many events of a handler may wait for its executor."""

from __future__ import annotations

from django_eventbus.conf import settings
from django_eventbus.registry import Handler
from django_eventbus.store import Store

#: The room is a multiple of the message size, or of the window divided by this number if that is
#: less.
MESSAGES_IN_WINDOW = 10


def room_in_window(store: Store, handler: Handler) -> int:
    """Return how many more events of a handler may be handed off.

    The number is a multiple of the message size. Otherwise a nearly full window would have room for
    only a few events at a time, and most messages would be small.
    """
    assert handler.executor is not None
    window = settings.HANDOFF_WINDOW
    room = window - store.count_handed_off(handler.name, at_most=window)
    return room - room % min(handler.executor.batch, max(1, window // MESSAGES_IN_WINDOW))
