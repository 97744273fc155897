"""F49: what InnoDB does under load, and what becomes of it when its server is killed."""

import os
import uuid

import pytest
from django.db import connection

from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing import publish_many
from tests.faults import invariants
from tests.faults.journal import OK
from tests.shop.models import Effect
from tests.workers import eventually

pytestmark = pytest.mark.long

CRASHES = int(os.environ.get("EVENTBUS_FAULT_CRASHES", 10)) // 3


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_handlers_that_get_into_each_others_way(start_worker, isolation, figures):
    """The victim of a deadlock is rolled back whole and tried again, until all is done once."""
    if connection.vendor != "mysql":
        pytest.skip("MariaDB's locks")
    rows = [Effect.objects.create(event_id=uuid.uuid4(), handler="row").pk for _ in "ab"]
    patient = {"RETRY": {"max_retries": 50, "base_delay": 0.05, "max_delay": 0.5, "jitter": 1.0}}
    publish_many(("fault.update", rows if n % 2 else rows[::-1]) for n in range(60))
    publish_many((("fault.effect", n) for n in range(60)), key="k")
    publish_many(("fault.effect", n) for n in range(60))
    workers = [
        start_worker(
            *("--concurrency", "2", "--batch-size", "10"),
            eventbus=patient,
            env={"EVENTBUS_TEST_ISOLATION": isolation},
        )
        for _ in range(2)
    ]
    eventually(
        lambda: not QueuedEvent.objects.exists(), lambda: workers[0].log[-3000:], patience=120
    )
    invariants.check()
    invariants.check_order_of_effects()
    assert set(EventLog.objects.values_list("status", flat=True)) == {"COMPLETED"}
    assert Effect.objects.exclude(handler="row").count() == 180
    unlucky = EventLog.objects.exclude(errors=None)
    figures(f"{unlucky.count()} of 60 events failed at least once")
    assert set(unlucky.values_list("type", flat=True)) <= {"fault.update"}


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_the_server_is_killed_again_and_again_under_load(mariadb, seed, isolation, figures):
    """What was committed is there; workers come back by themselves."""
    here = {"EVENTBUS_TEST_ISOLATION": isolation}
    producer = mariadb.start_producer("--seed", f"{seed}", "--keys", "5", "--pause", "0.02")
    workers = [mariadb.start_worker("--processes", "2", env=here) for _ in range(2)]
    for _ in range(CRASHES):
        before = mariadb.in_the_end(lambda: EventLog.objects.count() + 1)
        mariadb.in_the_end(lambda before=before: EventLog.objects.count() > before + 50)
        mariadb.crash()
        mariadb.start()
        connection.close()
    producer.stop()
    mariadb.in_the_end(lambda: not QueuedEvent.objects.exists())
    acknowledged = len(producer.journal.with_outcome(OK))
    handled = EventLog.objects.count()
    figures(f"{CRASHES} kills, {acknowledged} events acknowledged, {handled} handled")
    invariants.check(mariadb.journals)
    invariants.check_order_of_effects()
    assert not EventLog.objects.exclude(status="COMPLETED").exists()
    assert Effect.objects.count() == handled > 0
    assert [each.process.poll() for each in workers] == [None, None]
