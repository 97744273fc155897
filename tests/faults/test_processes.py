"""Handlers that fork or leak memory, and a deployment between two versions."""

import pytest
from django.db import connection

from django_eventbus.models import EventLog, EventWorker, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from tests.faults import invariants
from tests.shop.models import Effect
from tests.workers import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]


def drained():
    return not QueuedEvent.objects.exists()


def test_a_forked_process_does_not_share_the_connection_of_its_handler(start_worker):
    """F12: the forked process queries the database and exits; the worker settles once."""
    if connection.vendor == "sqlite":
        pytest.skip("an inherited connection is only a file on SQLite")
    publish_many(("fault.fork", n) for n in range(5))
    publish_many(("fault.effect", n) for n in range(20))
    worker = start_worker()
    eventually(drained, lambda: worker.log)
    invariants.check()
    assert EventLog.objects.filter(status="COMPLETED").count() == 25, worker.log
    assert Effect.objects.filter(handler="fault.fork").count() == 5


def test_a_process_whose_handlers_leak_memory_is_replaced_between_batches(start_worker, figures):
    """F13: 2,000 events of half a megabyte each pass through processes of a few hundred."""
    publish_many(("fault.leak", n) for n in range(2000))
    worker = start_worker("--batch-size", "50", eventbus={"MAX_MEMORY": 200})
    seen = set()

    def watch():
        seen.update(EventWorker.objects.values_list("pk", flat=True))
        return drained()

    eventually(watch, lambda: worker.log, patience=120)
    invariants.check()
    assert EventLog.objects.filter(status="COMPLETED", attempts=1, crashes=0).count() == 2000
    figures(f"{len(seen)} processes for 2,000 events that leak half a megabyte each")
    assert len(seen) >= 5, worker.log


def test_old_workers_leave_events_of_the_new_version_to_new_workers(start_worker):
    """F45: an old worker knows neither the type nor a handler that the event waits for."""
    patient = {"UNHANDLED_RETRY": {"base_delay": 0.2, "max_delay": 0.2, "max_retries": 1000}}
    unknown = publish("fault.of_the_new_version", {})
    publish("fault.effect", {})
    old = start_worker(eventbus=patient)
    eventually(lambda: EventLog.objects.count() == 1, lambda: old.log)
    eventually(
        lambda: QueuedEvent.objects.filter(deliveries__isnull=False).exists(), lambda: old.log
    )
    waiting = QueuedEvent.objects.get(event_id=unknown.event_id)
    assert "no handler is registered" in waiting.errors[0]["message"]
    start_worker(
        eventbus=patient, env={"EVENTBUS_TEST_IMPORT": "tests.faults.handlers_of_the_next_version"}
    )
    eventually(drained, lambda: old.log)
    invariants.check()
    assert EventLog.objects.get(event_id=unknown.event_id).status == "COMPLETED"
    assert Effect.objects.filter(handler="fault.of_the_new_version").count() == 1
