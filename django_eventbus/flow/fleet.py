"""The handlers that other live workers have and this process does not have.

During a deployment, workers of two versions run at the same time. Each worker writes its handlers
into its registration and reads the handlers of the other workers once a second. If this worker
lacks a handler that another live worker has for an event, this worker does not complete the event.
It runs its own handlers and returns the event to the queue, without counting an attempt. The other
worker can then run the missing handler.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
import uuid
from typing import NamedTuple

from django_eventbus.events import Event, classes_declared
from django_eventbus.logs import about
from django_eventbus.registry import Subject, registry
from django_eventbus.schema.patterns import matches
from django_eventbus.store import Store

logger = logging.getLogger(__name__)

READ_EVERY = 1.0
#: Seconds for which an event that is left to another worker waits before it can be claimed.
LEAVE_FOR = 0.5
#: The largest number of event types in the cache. The cache needs a limit: types may contain ids,
#: so there may be any number of types.
_REMEMBERED_TYPES = 10_000

#: The patterns of event types that each handler subscribes to, by the name of the handler.
Patterns = dict[str, list[str]]


class OtherHandlers(NamedTuple):
    """The handlers of one event type that other workers have and this process lacks."""

    names: frozenset[str] = frozenset()
    #: Whether one other worker has all handlers of the type, including those of this process.
    one_has_all: bool = False


class OtherWorkers:
    """The handlers of other workers, as last read. The threads of a process share this object."""

    def __init__(self, worker_id: uuid.UUID) -> None:
        self.worker_id = worker_id
        #: (queues, handlers) of live workers whose handlers differ from those of this process.
        self._others: list[tuple[list[str], Patterns]] = []
        self._by_digest: dict[str, Patterns] = {}
        self._by_type: dict[tuple[str, str], OtherHandlers] = {}
        self.digest = ""
        self._noted: tuple[int, int] | None = None
        self._read_at = float("-inf")
        self._lock = threading.Lock()

    @property
    def differ(self) -> bool:
        return bool(self._others)

    def elsewhere(self, queue: str, type_name: str) -> OtherHandlers:
        """Return the handlers of this type that only other workers of the queue have."""
        memory = self._by_type
        found = memory.get((queue, type_name))
        if found is None:
            if len(memory) >= _REMEMBERED_TYPES:
                memory.clear()
            found = memory[queue, type_name] = self._find(queue, type_name)
        return found

    def _find(self, queue: str, type_name: str) -> OtherHandlers:
        here = registry.handlers_for(type_name).names
        theirs = [
            {name for name, patterns in handlers.items() if _fit(patterns, type_name)}
            for queues, handlers in self._others
            if queue in queues
        ]
        everywhere = here.union(*theirs)
        return OtherHandlers(everywhere - here, any(each == everywhere for each in theirs))

    def confirm(self) -> None:
        """Postpone the next read. Call this if a query found no worker whose handlers differ."""
        if not self.differ:
            self._read_at = time.monotonic()

    def keep_up(self, store: Store) -> None:
        """Write the handlers of this process, and read the handlers of other workers.

        This is done if READ_EVERY has passed, or a handler was added or removed. One thread does
        this while the other threads use the last result. All threads wait for the first result.
        """
        never_read = self._noted is None
        if self._is_time() and self._lock.acquire(blocking=never_read):
            try:
                if self._is_time():
                    self._note(store)
                    self._read_others(store)
            finally:
                self._lock.release()

    def _is_time(self) -> bool:
        return time.monotonic() - self._read_at >= READ_EVERY or self._noted != _version()

    def _note(self, store: Store) -> None:
        version = _version()
        if version != self._noted:
            handlers = known_here()
            self.digest = digest_of(handlers)
            store.note_handlers(self.worker_id, handlers, self.digest)
            self._noted = version

    def _read_others(self, store: Store) -> None:
        """Read handlers of other workers. If none have changed, one query reads only digests."""
        found = store.handlers_of_others(self.worker_id, own=self.digest)
        digests = {digest for digest, _ in found}
        known = {each: self._by_digest[each] for each in digests & self._by_digest.keys()}
        if missing := digests - known.keys():
            known |= store.handlers_by_digest(missing)
        # A digest may be missing in ``known``, if its worker ended between the two queries.
        others = [(queues, known[digest]) for digest, queues in found if digest in known]
        self._by_digest = known
        if bool(others) != self.differ:
            logger.info(
                "leaving events to other workers that have handlers which this worker lacks"
                if others
                else "all live workers have the same handlers",
                extra=about(worker_id=self.worker_id),
            )
        self._others, self._by_type = others, {}
        self._read_at = time.monotonic()


def known_here() -> Patterns:
    return {
        each.name: sorted({pattern for s in each.subjects for pattern in _patterns(s)})
        for each in registry.all()
    }


def digest_of(handlers: Patterns) -> str:
    text = json.dumps(handlers, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _version() -> tuple[int, int]:
    """Return a value that changes when a handler or an event class is added or removed."""
    return registry.changes, classes_declared()


def _patterns(subject: Subject) -> set[str]:
    """Return the patterns of a subject.

    Other workers may lack an event class. So a class is replaced by its event type and the event
    types of its subclasses.
    """
    return {subject} if isinstance(subject, str) else _types_of(subject)


def _types_of(cls: type[Event]) -> set[str]:
    own = set() if cls.event_type is None else {cls.event_type}
    return own.union(*map(_types_of, cls.__subclasses__()))


def _fit(patterns: list[str], type_name: str) -> bool:
    return any(matches(pattern, type_name) for pattern in patterns)
