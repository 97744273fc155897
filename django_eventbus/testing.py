"""Test helpers for projects that use the bus: handle and inspect published events.

Events are rows, so the helpers work inside the transaction of a plain ``TestCase``. The code of the
worker runs the handlers, so retries, savepoints and dead letters behave as in production.
"""

from __future__ import annotations

import json
import signal
import threading
import time
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any

from django_eventbus.conf import settings
from django_eventbus.delivery.batch import Tally
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.events import Event
from django_eventbus.exceptions import Discard, EventBusError, Retry
from django_eventbus.models import EventFields, EventLog
from django_eventbus.outcomes.assignments import EVERY_HANDLER
from django_eventbus.registry import covers, registry
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.schema.payloads import encode
from django_eventbus.schema.typed_payloads import as_json
from django_eventbus.signals import delivery_failed
from django_eventbus.store import Store, default_alias, store_for
from django_eventbus.worker.registration import WorkerOptions
from django_eventbus.worker.worker import run_here

#: ``drain(until=…)`` moves its clock to the next due time plus this many seconds. The due time of
#: a handler is computed from the time of the claim, so it may be slightly later than the due time
#: of the event. Without this margin, the handler might not be due yet.
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
    """Handle all ready events, as a worker would, but in this thread; return the counts.

    The first error of a handler is raised after all events are handled, unless ``raise_errors`` is
    False. ``Retry`` and ``Discard`` do not count as errors. Events that wait for a later time
    remain in the queue. ``until`` simulates the passing of time: all events and retries that become
    due up to this time are handled in order. Raises EventBusError after ``max_events`` events,
    because handlers that publish events for each other would never end.

    Schedules do not fire, because the result of a test must not depend on the time of day. Use
    ``schedules.run(name)`` to publish the event of a schedule.
    """
    options = WorkerOptions(
        using=using or default_alias(),
        queues=queues or tuple(settings.QUEUES),
        drain=True,
        max_events=max_events + 1,
        fires_schedules=False,
    )
    with _failures() as errors, _alarm_kept():
        if until is None:
            tally = run_here(options, assignment=EVERY_HANDLER)
        else:
            tally = _drain_until(until, options)
    if raise_errors and errors:
        raise errors[0]
    if tally.handled + tally.postponed > max_events:
        raise EventBusError(_no_end(options, max_events))
    return tally


def published(
    event: str | type[Event] = "*", /, *, using: str | None = None, **subset: Any
) -> list[EventFields]:
    """Return the events of a type, pattern or class with these payload values, oldest first.

    The result contains queued and ended events. Events that were rolled back do not count as
    published.
    """
    return [
        each for each in _stored(using) if covers(event, each.type) and _has(each.payload, subset)
    ]


def assert_published(
    event: str | type[Event], /, *, using: str | None = None, **subset: Any
) -> EventFields:
    """Fail if no matching event was published; otherwise return the latest matching event."""
    __tracebackhide__ = True
    found = published(event, using=using, **subset)
    if not found:
        raise AssertionError(f"{_named(event, subset)} was not published. {_shown(using)}")
    return found[-1]


def assert_not_published(
    event: str | type[Event], /, *, using: str | None = None, **subset: Any
) -> None:
    """Fail if a matching event was published."""
    __tracebackhide__ = True
    if published(event, using=using, **subset):
        raise AssertionError(f"{_named(event, subset)} was published. {_shown(using)}")


@contextmanager
def capture_events(using: str | None = None) -> Iterator[list[EventFields]]:
    """Yield a list. After the block it contains the events that were published in the block.

    The list does not contain events that were rolled back.
    """
    before = {each.event_id for each in published(using=using)}
    captured: list[EventFields] = []
    yield captured
    captured += [each for each in published(using=using) if each.event_id not in before]


@contextmanager
def isolated_handlers(*kept: Callable[..., Any] | str) -> Iterator[None]:
    """Keep only the given handlers during the block.

    After the block, the handlers that existed before the block are restored, and handlers that were
    declared in the block are removed.
    """
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
    """Keep all handlers. When the block ends, remove the handlers that were declared in it."""
    return isolated_handlers(*(each.name for each in registry.all()))


class EventBusTestMixin(unittest.TestCase):
    """The functions of this module as methods of a ``TestCase``.

    Handlers that a test declares are removed when the test ends.
    """

    drain = staticmethod(drain)
    captureEvents = staticmethod(capture_events)
    assertEventPublished = staticmethod(assert_published)
    assertEventNotPublished = staticmethod(assert_not_published)

    def setUp(self) -> None:
        super().setUp()
        self.enterContext(own_handlers())


def _drain_until(until: timedelta | datetime, options: WorkerOptions) -> Tally:
    """Handle the events up to a time, with a clock that skips the time between two events."""
    clock = _Clock(store_for(options.using))
    end = until if isinstance(until, datetime) else clock() + until
    store = store_for(options.using, clock=clock)
    tally = Tally()
    was_stuck = False
    while True:
        done = run_here(options, clock=clock, assignment=EVERY_HANDLER)
        tally.add(done)
        now = clock()
        wait = store.next_due(options.queues)
        # An event may have become due after the worker looked, so only the second time counts.
        is_stuck = not (wait or done.handled or done.postponed)
        if wait is None or (is_stuck and was_stuck) or now + timedelta(seconds=wait) > end:
            return tally
        was_stuck = is_stuck
        if options.max_events and tally.handled + tally.postponed >= options.max_events:
            return tally
        clock.put_forward(wait + A_LITTLE_LATE)


class _Clock:
    """A clock that starts at the database's time and can be moved forward."""

    def __init__(self, store: Store) -> None:
        self._start = store.read_clock()
        self._started = time.monotonic()

    def __call__(self) -> datetime:
        return self._start + timedelta(seconds=time.monotonic() - self._started)

    def put_forward(self, seconds: float) -> None:
        self._start += timedelta(seconds=seconds)


@contextmanager
def _alarm_kept() -> Iterator[None]:
    """Restore the signal handler of SIGALRM after the block.

    The worker replaces this signal handler, but a test runner may need it to end a hanging test.
    """
    before = signal.getsignal(signal.SIGALRM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, before)


@contextmanager
def _failures() -> Iterator[list[BaseException]]:
    """Yield a list of the errors that handlers raise in the block.

    Each error gets a note that names the handler, the attempt and the event.
    """
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
        if not issubclass(type(exception), Retry | Discard):
            raised.append(exception)
            where = f"{handler}, attempt {attempt} at {event.type} {event.event_id}"
            with suppress(Exception):  # The handler may have set __notes__ to any type.
                BaseException.add_note(exception, where)

    delivery_failed.connect(note, weak=False)
    try:
        yield raised
    finally:
        delivery_failed.disconnect(note)


def _no_end(options: WorkerOptions, max_events: int) -> str:
    types = Counter(each.type for each in _stored(options.using))
    often = ", ".join(f"{name!r} {count:,} times" for name, count in types.most_common(3))
    return (
        f"drain() handled more than {max_events:,} events ({often}): check whether their handlers "
        "publish events for each other without end. To allow more, pass drain(max_events=…)."
    )


def _stored(using: str | None) -> list[EventFields]:
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
    """Return the value as a typed event stores it, and as a plain payload stores it.

    Typed events and plain payloads store a datetime in different formats.
    """
    return [json.loads(encode(as_json(value))), json.loads(encode(value))]


def _named(event: str | type[Event], subset: dict[str, Any]) -> str:
    name = repr(event) if isinstance(event, str) else event.__name__
    values = ", ".join(f"{name}={value!r}" for name, value in subset.items())
    return f"{name} with {values}" if values else name


def _shown(using: str | None) -> str:
    """Return a text with the latest published events, oldest first."""
    events = _stored(using)
    if not events:
        return "No events were published."
    lines = [_line(each) for each in events[-SHOWN_EVENTS:]]
    if len(events) > SHOWN_EVENTS:
        lines.insert(0, f"({len(events) - SHOWN_EVENTS:,} earlier events)")
    return "\n  ".join(["Published events:", *lines])


def _line(event: EventFields) -> str:
    payload = encode(event.payload)
    if len(payload) > SHOWN_CHARACTERS:
        payload = f"{payload[:SHOWN_CHARACTERS]}…"
    return f"{event.type} {payload}" + (f" key={event.key!r}" if event.key else "")
