"""For tests of projects that use the bus: handle what was published, look at what was published.

Events are rows, so all of this works inside the transaction of a plain ``TestCase``; and handlers
are run by the worker's own code, so retries, savepoints and dead letters are the real ones.
"""

from __future__ import annotations

import json
import signal
import threading
import time
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from typing import Any

from django_eventbus.batch import Tally
from django_eventbus.conf import settings
from django_eventbus.events import ClaimedEvent, Event, encode, plain
from django_eventbus.exceptions import Discard, EventBusError, Retry
from django_eventbus.models import EventFields, EventLog
from django_eventbus.registry import covers, did_you_mean, registry
from django_eventbus.signals import delivery_failed
from django_eventbus.store import Store, default_alias, store_for
from django_eventbus.worker import WorkerOptions, run_here

#: A worker never looks at the very moment; one that did could find a handler not due yet, whose
#: time is counted from the claim.
A_LITTLE_LATE = 0.01
SHOWN_EVENTS = 20
SHOWN_CHARACTERS = 200


def drain(
    *,
    until: timedelta | datetime | None = None,
    raise_errors: bool = True,
    max_events: int = 1000,
    queues: tuple[str, ...] | None = None,
    using: str | None = None,
) -> Tally:
    """Handle all that is ready, as a worker would, but in this thread; tell what came of it.

    The first error of a handler is raised when the rest is done, unless ``raise_errors`` is
    False; ``Retry`` and ``Discard`` are a handler's way to say what it wants, not errors. Events
    that wait for a later time stay where they are, unless time passes ``until`` then: what
    becomes due on the way, retries included, is handled in its turn. Raises EventBusError after
    ``max_events``, because events that publish each other would go on for ever.

    Schedules do not fire: what a test counts must not depend on the time of day. Publish what one
    would with ``schedules.run(name)``.
    """
    options = WorkerOptions(
        using=using or default_alias(),
        queues=queues or tuple(settings.QUEUES),
        drain=True,
        max_events=max_events + 1,
        fires_schedules=False,
    )
    with _failures() as errors, _alarm_kept():
        tally = run_here(options) if until is None else _drain_until(until, options)
    if raise_errors and errors:
        raise errors[0]
    if tally.handled + tally.postponed > max_events:
        raise EventBusError(_no_end(options, max_events))
    return tally


def published(
    event: str | type[Event] = "*", /, *, using: str | None = None, **subset: Any
) -> list[EventFields]:
    """The events of a type, pattern or class whose payload has these values, oldest first.

    Those still queued and those already handled; what was rolled back was never published.
    """
    return [
        each for each in _standing(using) if covers(event, each.type) and _has(each.payload, subset)
    ]


def assert_published(
    event: str | type[Event], /, *, using: str | None = None, **subset: Any
) -> EventFields:
    """Fail unless such an event was published; return the latest of them."""
    __tracebackhide__ = True
    found = published(event, using=using, **subset)
    if not found:
        raise AssertionError(f"{_named(event, subset)} was not published. {_shown(using)}")
    return found[-1]


def assert_not_published(
    event: str | type[Event], /, *, using: str | None = None, **subset: Any
) -> None:
    """Fail if such an event was published."""
    __tracebackhide__ = True
    if published(event, using=using, **subset):
        raise AssertionError(f"{_named(event, subset)} was published. {_shown(using)}")


@contextmanager
def capture_events(using: str | None = None) -> Iterator[list[EventFields]]:
    """A list that has, after the block, the events that were published in it and still stand."""
    before = {each.event_id for each in published(using=using)}
    captured: list[EventFields] = []
    yield captured
    captured += [each for each in published(using=using) if each.event_id not in before]


@contextmanager
def isolated_handlers(*kept: Callable[..., Any] | str) -> Iterator[None]:
    """Set all handlers aside but those named, and forget those declared in the block after it."""
    before = sorted(registry.all(), key=lambda each: each.position)
    known = {each.name for each in before}
    for name in kept:
        if isinstance(name, str) and name not in known:
            raise EventBusError(f"there is no handler {name!r}{did_you_mean(name, known)}")
    for each in before:
        if each.func not in kept and each.name not in kept:
            registry.remove(each.id)
    try:
        yield
    finally:
        for each in registry.all():
            registry.remove(each.id)
        for each in before:
            registry.add(each)


def own_handlers() -> AbstractContextManager[None]:
    """Forget the handlers declared in the block after it."""
    return isolated_handlers(*(each.name for each in registry.all()))


class EventBusTestMixin(unittest.TestCase):
    """The same for a ``TestCase``; handlers that a test declares are forgotten when it ends."""

    drain = staticmethod(drain)
    captureEvents = staticmethod(capture_events)
    assertEventPublished = staticmethod(assert_published)
    assertEventNotPublished = staticmethod(assert_not_published)

    def setUp(self) -> None:
        super().setUp()
        self.enterContext(own_handlers())


def _drain_until(until: timedelta | datetime, options: WorkerOptions) -> Tally:
    """From one due event to the next, as if the time between them had passed."""
    clock = _Clock(store_for(options.using))
    end = until if isinstance(until, datetime) else clock() + until
    store = store_for(options.using, clock=clock)
    tally = Tally()
    while True:
        done = run_here(options, clock=clock)
        tally.add(done)
        now = clock()
        wait = store.next_due(options.queues)
        stuck = not (wait or done.handled or done.postponed)
        if wait is None or stuck or now + timedelta(seconds=wait) > end:
            return tally
        if options.max_events and tally.handled + tally.postponed >= options.max_events:
            return tally
        clock.put_forward(wait + A_LITTLE_LATE)


class _Clock:
    """The database's clock; it goes on by itself and can be put forward."""

    def __init__(self, store: Store) -> None:
        self._start = store.read_clock()
        self._started = time.monotonic()

    def __call__(self) -> datetime:
        return self._start + timedelta(seconds=time.monotonic() - self._started)

    def put_forward(self, seconds: float) -> None:
        self._start += timedelta(seconds=seconds)


@contextmanager
def _alarm_kept() -> Iterator[None]:
    """The worker's watchdog takes SIGALRM; a runner that ends hanging tests by it wants it back."""
    before = signal.getsignal(signal.SIGALRM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, before)


@contextmanager
def _failures() -> Iterator[list[BaseException]]:
    """The errors that handlers raise during the block, each with a note of where."""
    raised: list[BaseException] = []

    def note(
        sender: Any,
        *,
        event: ClaimedEvent,
        handler: str,
        attempt: int,
        exception: BaseException,
        **kwargs: Any,
    ) -> None:
        if not isinstance(exception, Retry | Discard):
            exception.add_note(f"{handler}, attempt {attempt} at {event.type} {event.event_id}")
            raised.append(exception)

    delivery_failed.connect(note, weak=False)
    try:
        yield raised
    finally:
        delivery_failed.disconnect(note)


def _no_end(options: WorkerOptions, max_events: int) -> str:
    types = Counter(each.type for each in _standing(options.using))
    often = ", ".join(f"{name!r} {count:,} times" for name, count in types.most_common(3))
    return (
        f"drain() handled more than {max_events:,} events ({often}): do they publish each other? "
        "If there have to be so many, say drain(max_events=…)."
    )


def _standing(using: str | None) -> list[EventFields]:
    alias = using or default_alias()
    ended = EventLog.objects.using(alias).filter(namespace=settings.NAMESPACE)
    return sorted([*store_for(alias).queued, *ended], key=lambda each: each.pk)


def _has(payload: Any, subset: dict[str, Any]) -> bool:
    if not subset:
        return True
    return isinstance(payload, dict) and all(
        name in payload and payload[name] in _stored_forms(value) for name, value in subset.items()
    )


def _stored_forms(value: Any) -> list[Any]:
    """As a plain payload and as a typed event would store it: moments differ."""
    return [json.loads(encode(plain(value))), json.loads(encode(value))]


def _named(event: str | type[Event], subset: dict[str, Any]) -> str:
    name = repr(event) if isinstance(event, str) else event.__name__
    values = ", ".join(f"{name}={value!r}" for name, value in subset.items())
    return f"{name} with {values}" if values else name


def _shown(using: str | None) -> str:
    """What was published instead, the latest last."""
    events = _standing(using)
    if not events:
        return "Nothing was."
    lines = [_line(each) for each in events[-SHOWN_EVENTS:]]
    if len(events) > SHOWN_EVENTS:
        lines.insert(0, f"({len(events) - SHOWN_EVENTS:,} earlier ones)")
    return "\n  ".join(["These were:", *lines])


def _line(event: EventFields) -> str:
    payload = encode(event.payload)
    if len(payload) > SHOWN_CHARACTERS:
        payload = f"{payload[:SHOWN_CHARACTERS]}…"
    return f"{event.type} {payload}" + (f" key={event.key!r}" if event.key else "")
