"""What tests do with the bus: make it ready, drain it, look at what is left."""

from datetime import timedelta

from django_eventbus import testing
from django_eventbus.batch import Tally
from django_eventbus.conf import settings
from django_eventbus.models import EventLane, EventLog, QueuedEvent
from django_eventbus.worker import WorkerOptions, run_here


def drain(**options) -> Tally:
    """Handle all that is ready, in this thread, as a worker would."""
    chosen = {"using": "default", "queues": tuple(settings.QUEUES), "drain": True} | options
    return run_here(WorkerOptions(**chosen))


def make_due() -> None:
    """Time passes: everything that waits is ready now."""
    QueuedEvent.objects.update(available_at=None)
    EventLane.objects.update(ready_at="2000-01-01T00:00:00Z")
    for event in QueuedEvent.objects.filter(deliveries__isnull=False):
        for state in event.deliveries.values():
            if "due" in state:
                state["due"] = "2000-01-01T00:00:00+00:00"
        event.save()


def drain_with_retries() -> Tally:
    """Drain, let time pass, drain again, until nothing is left."""
    return testing.drain(until=timedelta(days=365), raise_errors=False)


def logged(event) -> EventLog:
    return EventLog.objects.get(event_id=event.event_id)
