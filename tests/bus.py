"""Helpers that make events due, drain the queue and read the results."""

from datetime import datetime, timedelta

from django_eventbus import testing
from django_eventbus.conf import settings
from django_eventbus.delivery.batch import Tally
from django_eventbus.models import EventLane, EventLog, QueuedEvent
from django_eventbus.worker.registration import WorkerOptions
from django_eventbus.worker.worker import run_here


def drain(**options) -> Tally:
    """Handle all ready events in this thread, as a worker would."""
    chosen = {"using": "default", "queues": tuple(settings.QUEUES), "drain": True} | options
    return run_here(WorkerOptions(**chosen))


def make_due() -> None:
    """Make all waiting events due now."""
    QueuedEvent.objects.update(available_at=None, held_by=None)
    EventLane.objects.filter(blocked_by=None).update(ready_at="2000-01-01T00:00:00Z", held_by=None)
    for event in QueuedEvent.objects.filter(deliveries__isnull=False):
        for state in event.deliveries.values():
            if "due" in state:
                state["due"] = "2000-01-01T00:00:00+00:00"
        event.save()


def let_hand_off_expire() -> None:
    """Make the deadline of the only queued event pass, which is handed off."""
    event = QueuedEvent.objects.get()
    state = event.deliveries[event.handed_off_to]
    started = datetime.fromisoformat(state["at"]) - timedelta(seconds=state["seconds"])
    state["at"] = started.isoformat()
    event.available_at = None
    event.save()


def drain_with_retries() -> Tally:
    """Drain and make retries due until the queue is empty."""
    return testing.drain(until=timedelta(days=365), raise_errors=False)


def logged(event) -> EventLog:
    return EventLog.objects.get(event_id=event.event_id)
