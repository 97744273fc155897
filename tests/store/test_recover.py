"""recover: abandoned events return to the queue, and only the running ones are charged."""

import pytest
from django.db import connection

from django_eventbus.events import uuid7
from django_eventbus.models import EventLane, EventLog, EventWorker, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from django_eventbus.store import Charge, Completed, store_for
from tests.threads import while_another_transaction

pytestmark = pytest.mark.django_db

ERROR = {"handler": "h", "type": "WorkerCrashed", "message": "SIGKILL", "traceback": ""}


def register(store):
    registration = EventWorker(id=uuid7(), host="h", pid=1, queues=[])
    store.register(registration)
    return registration.pk


def claim(store, worker_id, limit=100):
    return store.claim("default", limit=limit, worker_id=worker_id)


def test_events_of_a_silent_worker_are_claimed_again(clock):
    """M3: beyond the abandonment timeout, attempts+1."""
    store = store_for(clock=clock)
    dead = register(store)
    publish("order.placed", {})
    claim(store, dead)
    clock.tick(59)
    assert store.recover() == 0
    clock.tick(2)
    assert store.recover() == 1
    (again,) = claim(store, register(store))
    assert (again.attempts, again.crashes, again.interruptions) == (2, 0, 1)
    assert not EventWorker.objects.filter(pk=dead).exists()


def test_a_worker_that_renews_keeps_its_events(clock):
    store = store_for(clock=clock)
    worker = register(store)
    publish("order.placed", {})
    claim(store, worker)
    for _ in range(5):
        clock.tick(40)
        assert store.renew([worker]) == {worker}
        assert store.recover() == 0


def test_a_renewal_reports_that_the_registration_was_deleted(clock):
    store = store_for(clock=clock)
    worker = register(store)
    clock.tick(61)
    store.recover()
    assert store.renew([worker]) == set()


def test_every_abandoned_event_gets_an_error_record(clock):
    """Every crash leaves an error record."""
    store = store_for(clock=clock)
    publish_many(("order.placed", n) for n in range(3))
    claim(store, register(store))
    clock.tick(61)
    store.recover()
    for row in QueuedEvent.objects.all():
        (error,) = row.errors
        assert error["type"] == "WorkerLost"
        assert error["attempt"] == 1


def test_only_the_named_suspects_of_a_worker_are_charged(clock):
    store = store_for(clock=clock)
    worker = register(store)
    publish_many(("order.placed", n) for n in range(3))
    guilty, *others = claim(store, worker)
    store.suspect(worker, [guilty.row_id])
    clock.tick(61)
    assert store.recover() == 3
    rows = {row.pk: (row.attempts, row.crashes) for row in QueuedEvent.objects.all()}
    assert rows.pop(guilty.row_id) == (1, 1)
    assert set(rows.values()) == {(0, 0)}
    assert len(others) == 2


def test_a_supervisor_charges_exactly_the_running_events(store):
    worker = register(store)
    publish_many(("order.placed", n) for n in range(3))
    guilty, *_ = claim(store, worker)
    assert store.recover_worker(worker, blamed=[guilty.row_id], error=ERROR) == 3
    row = QueuedEvent.objects.get(pk=guilty.row_id)
    assert (row.status, row.attempts, row.crashes) == ("PENDING", 1, 1)
    assert row.errors[0]["message"] == "SIGKILL"
    assert QueuedEvent.objects.filter(attempts=0, crashes=0, errors__isnull=True).count() == 2
    assert not EventWorker.objects.exists()


def test_events_without_a_registration_are_recovered(store):
    worker = register(store)
    publish("order.placed", {})
    claim(store, worker)
    assert store.recover_orphans() == 0
    EventWorker.objects.all().delete()
    assert store.recover() == 0
    assert store.recover_orphans() == 1
    assert QueuedEvent.objects.get().status == "PENDING"


def test_lanes_of_a_dead_worker_are_released(clock):
    store = store_for(clock=clock)
    publish_many((("step", n) for n in range(2)), key="a")
    claim(store, register(store))
    clock.tick(61)
    store.recover()
    assert EventLane.objects.get().claim_token is None
    clock.tick(1)
    again = claim(store, register(store))
    assert [event.payload_json for event in again] == ["0", "1"]


def test_an_interrupted_claim_is_released_and_charges_no_event(store):
    worker = register(store)
    publish_many(("order.placed", n) for n in range(2))
    claimed = claim(store, worker)
    assert store.interrupt_claim(claimed[0].claim.token, error=ERROR) == 2
    released = QueuedEvent.objects.filter(status="PENDING", crashes=0, interruptions=1)
    assert released.count() == 2


def test_the_end_of_a_worker_that_ran_nothing_charges_no_event(store):
    """The running event is unknown, so each of them runs alone the next time."""
    worker = register(store)
    publish_many(("order.placed", n) for n in range(2))
    claim(store, worker)
    store.recover_worker(worker, blamed=(), error=ERROR)
    assert set(QueuedEvent.objects.values_list("crashes", "interruptions")) == {(0, 1)}


def test_the_end_of_a_worker_that_was_asked_to_stop_charges_no_event(store):
    worker = register(store)
    publish_many(("order.placed", n) for n in range(2))
    running, _ = claim(store, worker)
    store.recover_worker(worker, blamed=[running.row_id], error=ERROR, charge=Charge.NOTHING)
    rows = QueuedEvent.objects.order_by("id").values_list("attempts", "crashes", "interruptions")
    assert list(rows) == [(1, 0, 0), (0, 0, 0)]


def test_error_records_that_are_not_a_list_do_not_stop_a_recovery(store):
    """A newer version of the code may have written them."""
    worker = register(store)
    publish("order.placed", {})
    (event,) = claim(store, worker)
    QueuedEvent.objects.update(errors={"written by": "a newer version"})
    store.recover_worker(worker, blamed=[event.row_id], error=ERROR)
    assert [each["type"] for each in QueuedEvent.objects.get().errors] == ["WorkerCrashed"]


def test_recovery_does_not_change_other_namespaces(clock, settings):
    store = store_for(clock=clock)
    publish("order.placed", {})
    claim(store, register(store))
    clock.tick(61)
    settings.EVENTBUS = {"NAMESPACE": "other"}
    assert (store.recover(), store.recover_orphans()) == (0, 0)


def test_a_hundred_abandoned_events_are_recovered_together(clock):
    """M29: at start-up and during operation. The benchmark measures the time."""
    store = store_for(clock=clock)
    publish_many(("order.placed", n) for n in range(100))
    claim(store, register(store))
    clock.tick(61)
    assert store.recover() == 100
    assert QueuedEvent.objects.filter(status="PENDING").count() == 100


def test_a_lane_without_a_registration_is_recovered_although_it_has_no_events(store):
    worker = register(store)
    publish_many((("step", n) for n in range(2)), key="a")
    claimed = claim(store, worker)
    store.release(claimed[0].claim.token, [event.row_id for event in claimed])
    EventWorker.objects.all().delete()
    store.recover_orphans()
    assert EventLane.objects.get().claim_token is None


def test_events_that_were_claimed_when_three_workers_died_count_one_interruption(clock):
    """Suspects are named before they run; one that was not named did not run."""
    store = store_for(clock=clock)
    publish_many(("order.placed", n) for n in range(3))
    for _ in range(3):
        worker = register(store)
        assert len(claim(store, worker)) == 3
        clock.tick(61)
        assert store.recover() == 3
    counted = QueuedEvent.objects.values_list("attempts", "crashes", "interruptions")
    assert set(counted) == {(1, 0, 1)}


def test_new_events_become_suspects_before_suspects_that_did_not_run(clock):
    store = store_for(clock=clock)
    publish("order.placed", "suspect")
    claim(store, register(store))
    clock.tick(61)
    store.recover()
    publish("order.placed", "newcomer")
    claim(store, register(store))
    clock.tick(61)
    store.recover()
    counted = QueuedEvent.objects.order_by("id").values_list("crashes", "interruptions")
    assert list(counted) == [(0, 1), (0, 1)]


def test_the_first_and_the_last_errors_of_very_many_crashes_are_kept(store):
    publish("order.placed", {})
    for _ in range(30):
        worker = register(store)
        (event,) = claim(store, worker)
        store.recover_worker(worker, blamed=[event.row_id], error=ERROR)
    row = QueuedEvent.objects.get()
    assert (row.crashes, len(row.errors)) == (30, 21)
    assert row.errors[5]["omitted"] == 10
    assert [each["attempt"] for each in row.errors[-2:]] == [29, 30]


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")
def test_a_recovery_skips_an_event_whose_settlement_is_in_progress(store):
    """It neither waits for the settlement nor counts and charges an event that ends with it."""
    worker = register(store)
    publish("order.placed", {})
    (event,) = claim(store, worker)
    settle = store_for().settle
    done = [Completed(event.row_id)]
    with while_another_transaction(lambda: settle(event.claim.token, done)):
        assert store.recover_worker(worker, blamed=[event.row_id], error=ERROR) == 0
        assert EventWorker.objects.filter(pk=worker).exists()
    assert EventLog.objects.get().crashes == 0
