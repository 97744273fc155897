"""Factories for events in any state, to test code that reads events: pages, dashboards, reports.

Do not test handlers with factories. To test a handler, publish an event and call ``drain()``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.utils import timezone

from django_eventbus.conf import settings
from django_eventbus.errors import failures
from django_eventbus.events import uuid7
from django_eventbus.models import EventLog, LogStatus, QueuedEvent

try:
    from factory.declarations import LazyAttribute, LazyFunction, SelfAttribute, Sequence, Trait
    from factory.django import DjangoModelFactory
except ImportError as error:
    raise ImportError(
        "the factories of django_eventbus need factory_boy: pip install factory-boy"
    ) from error

#: The first id of a created log row. It is larger than any id in the queue: an event keeps its id
#: when it moves from the queue to the log, so a smaller id could collide with a queued event.
FIRST_LOG_ID = 2**40


class EventFactory(DjangoModelFactory[Any]):
    class Meta:
        abstract = True

    event_id = LazyFunction(uuid7)
    namespace = LazyFunction(lambda: settings.NAMESPACE)
    queue = LazyFunction(lambda: settings.QUEUE)
    type = "test.event"
    payload = LazyFunction(dict)
    producer = "factory"


class QueuedEventFactory(EventFactory):
    """A pending event; ``QueuedEventFactory(delayed=True)`` is due in an hour."""

    class Meta:
        model = QueuedEvent

    class Params:
        delayed = Trait(
            due_at=LazyFunction(lambda: timezone.now() + timedelta(hours=1)),
            available_at=SelfAttribute("due_at"),
        )


class EventLogFactory(EventFactory):
    """A completed event; ``EventLogFactory(dead=True)`` is a dead letter."""

    class Meta:
        model = EventLog

    class Params:
        dead = Trait(
            status=LogStatus.FAILED,
            attempts=1,
            deliveries=LazyAttribute(
                lambda event: {event.dead_handler: {"state": "dead", "failures": 1}}
            ),
            errors=LazyAttribute(lambda event: [_error_of(event)]),
            dead_handler="test.handler",
            error_type="ValueError",
            error_fingerprint=LazyAttribute(lambda event: failures.fingerprint(event.errors[0])),
        )

    id = Sequence(lambda n: FIRST_LOG_ID + n)
    status = LogStatus.COMPLETED
    finished_at = LazyFunction(timezone.now)


def _error_of(event: Any) -> dict[str, Any]:
    return {
        "handler": event.dead_handler,
        "attempt": event.attempts,
        "at": event.finished_at.isoformat(),
        "type": event.error_type,
        "message": "made by a factory",
        "where": "",
        "traceback": "",
    }
