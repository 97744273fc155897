"""The claims of a process of another executor: the events of one message, a few at a time.

Each claim takes as many events as the process delivers in about a second. So if the process dies,
few events are interrupted. And between two claims the process finds the interrupted events of other
processes, even if its own message takes minutes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator

from django_eventbus.errors.failpoints import reached
from django_eventbus.executors import LARGEST_BATCH, Executor, Message
from django_eventbus.logs import about
from django_eventbus.registry import Handler, registry
from django_eventbus.store import HandedOffClaim, Store
from django_eventbus.worker.claiming import ClaimedBatch, Pace
from django_eventbus.worker.worker import Worker

logger = logging.getLogger(__name__)

#: Seconds between two searches of a process for interrupted events of other handlers.
SEARCH_EVERY = 1.0
#: Seconds between the attempts to claim events that other transactions have locked. A claim does
#: not wait for locks, so it cannot be part of a deadlock.
LOCK_WAITS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)

#: The pace of each handler in this process.
_paces: dict[str, Pace] = {}
#: The time of the last search in each queue of a database, for each executor.
_searched_at: dict[tuple[str, str, Executor], float] = {}


class MessageClaims:
    """The claims for one message. Each step of the iteration claims the next events."""

    def __init__(self, store: Store, message: Message, handler: Handler, worker: Worker) -> None:
        self.store = store
        self.message = message
        self.handler = handler
        self.worker = worker
        self.pace = _pace_of(handler.name)
        #: The number of events that were claimed.
        self.count = 0
        #: Whether events of the message were still locked after the last wait.
        self.gave_up = False

    def __iter__(self) -> Iterator[ClaimedBatch]:
        """Yield the events of each claim.

        Events that another transaction had locked are claimed last. Otherwise a lock of a
        millisecond would delay an event until HANDOFF_DEADLINE.
        """
        rows, locked = set(self.message.rows), set[int]()
        waits = iter(LOCK_WAITS)
        while rows and not self.worker.evicted:
            limit = self.pace.size
            events, left, behind_locks = self._claim(rows, limit)
            locked |= behind_locks
            if events:
                self.count += len(events)
                reached("handed_off.claimed")
                yield ClaimedBatch(events, limit)
            elif not behind_locks:
                locked, left = locked | left, set()
            rows = left
            if locked and not rows:
                wait = next(waits, None)
                if wait is None:
                    self._give_up(locked)
                    return
                reached("handed_off.locked")
                self.worker.bell.wait(wait)
                rows, locked = locked, set()

    def _claim(self, rows: Collection[int], limit: int) -> HandedOffClaim:
        handlers = _handlers_to_search(self.message, self.handler)
        return self.store.claim_handed_off(
            self.message.queue,
            rows,
            limit=limit,
            # The interrupted events may be events of the slowest handler, so its pace is used.
            limit_of_others=min(_pace_of(each).size for each in handlers),
            handlers=handlers,
            token=self.message.token,
            worker_id=self.worker.worker_id,
        )

    def _give_up(self, rows: Collection[int]) -> None:
        self.gave_up = True
        logger.info(
            "%s of %s events of a message to the handler %s are locked by other transactions; "
            "they are handed off again after their hand-off deadline",
            len(rows),
            len(self.message.rows),
            self.handler.name,
            extra=about(handler=self.handler.name, queue=self.message.queue),
        )


def _pace_of(handler: str) -> Pace:
    """Return the pace of a handler in this process.

    The first claim takes one event, because a process of another executor does not return the
    unstarted events of a slow claim.
    """
    return _paces.setdefault(handler, Pace(LARGEST_BATCH, first=1))


def _handlers_to_search(message: Message, handler: Handler) -> list[str]:
    """Return the handlers whose interrupted events the next claim takes too.

    Once per SEARCH_EVERY, these are all handlers with the same executor, because the messages of
    one handler may wait behind many messages of another handler.
    """
    assert handler.executor is not None
    searched, now = (message.using, message.queue, handler.executor), time.monotonic()
    if now - _searched_at.get(searched, float("-inf")) < SEARCH_EVERY:
        return [handler.name]
    _searched_at[searched] = now
    return [each.name for each in registry.all() if each.executor == handler.executor]
