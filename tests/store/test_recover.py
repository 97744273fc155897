"""recover: what a dead worker held is given to the living, and only the guilty are blamed."""

import pytest

from django_eventbus.events import uuid7
from django_eventbus.models import EventLane, EventWorker, QueuedEvent
from django_eventbus.publishing import publish, publish_many
from django_eventbus.store import store_for

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
    assert (again.attempts, again.crashes) == (2, 1)
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


def test_a_worker_that_is_gone_hears_it_at_its_renewal(clock):
    store = store_for(clock=clock)
    worker = register(store)
    clock.tick(61)
    store.recover()
    assert store.renew([worker]) == set()


def test_every_event_that_was_held_gets_an_error_record(clock):
    """Nothing crashed may be without a trace."""
    store = store_for(clock=clock)
    publish_many(("order.placed", n) for n in range(3))
    claim(store, register(store))
    clock.tick(61)
    store.recover()
    for row in QueuedEvent.objects.all():
        (error,) = row.errors
        assert error["type"] == "WorkerLost"
        assert error["attempt"] == 1


def test_a_worker_that_named_its_suspects_lets_the_others_go_uncharged(clock):
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


def test_a_supervisor_blames_exactly_what_was_running(store):
    worker = register(store)
    publish_many(("order.placed", n) for n in range(3))
    guilty, *_ = claim(store, worker)
    assert store.recover_worker(worker, blamed=[guilty.row_id], error=ERROR) == 3
    row = QueuedEvent.objects.get(pk=guilty.row_id)
    assert (row.status, row.attempts, row.crashes) == ("PENDING", 1, 1)
    assert row.errors[0]["message"] == "SIGKILL"
    assert QueuedEvent.objects.filter(attempts=0, crashes=0, errors__isnull=True).count() == 2
    assert not EventWorker.objects.exists()


def test_events_whose_registration_is_gone_are_found(store):
    worker = register(store)
    publish("order.placed", {})
    claim(store, worker)
    assert store.recover_orphans() == 0
    EventWorker.objects.all().delete()
    assert store.recover() == 0
    assert store.recover_orphans() == 1
    assert QueuedEvent.objects.get().status == "PENDING"


def test_lanes_of_a_dead_worker_are_free_again(clock):
    store = store_for(clock=clock)
    publish_many((("step", n) for n in range(2)), key="a")
    claim(store, register(store))
    clock.tick(61)
    store.recover()
    assert EventLane.objects.get().claim_token is None
    clock.tick(1)
    again = claim(store, register(store))
    assert [event.payload_json for event in again] == ["0", "1"]


def test_a_claim_can_be_taken_back_as_a_whole(store):
    worker = register(store)
    publish_many(("order.placed", n) for n in range(2))
    claimed = claim(store, worker)
    assert store.recover_claim(claimed[0].claim.token, error=ERROR) == 2
    assert QueuedEvent.objects.filter(status="PENDING", crashes=1).count() == 2


def test_recovery_leaves_other_namespaces_alone(clock, settings):
    store = store_for(clock=clock)
    publish("order.placed", {})
    claim(store, register(store))
    clock.tick(61)
    settings.EVENTBUS = {"NAMESPACE": "other"}
    assert (store.recover(), store.recover_orphans()) == (0, 0)


def test_a_hundred_stuck_events_are_recovered_in_one_go(clock):
    """M29: at start-up and during operation; the time is in the benchmark, the work is here."""
    store = store_for(clock=clock)
    publish_many(("order.placed", n) for n in range(100))
    claim(store, register(store))
    clock.tick(61)
    assert store.recover() == 100
    assert QueuedEvent.objects.filter(status="PENDING").count() == 100


def test_a_lane_whose_registration_is_gone_is_found_without_any_row_of_it(store):
    worker = register(store)
    publish_many((("step", n) for n in range(2)), key="a")
    claimed = claim(store, worker)
    store.release(claimed[0].claim.token, [event.row_id for event in claimed])
    EventWorker.objects.all().delete()
    store.recover_orphans()
    assert EventLane.objects.get().claim_token is None


def test_who_was_there_when_three_workers_died_is_charged_for_the_first_alone(clock):
    """Suspects are named before they run; one that was not had no part in it."""
    store = store_for(clock=clock)
    publish_many(("order.placed", n) for n in range(3))
    for _ in range(3):
        worker = register(store)
        assert len(claim(store, worker)) == 3
        clock.tick(61)
        assert store.recover() == 3
    assert set(QueuedEvent.objects.values_list("attempts", "crashes")) == {(1, 1)}


def test_newcomers_are_blamed_before_suspects_that_waited_for_their_turn(clock):
    store = store_for(clock=clock)
    publish("order.placed", "suspect")
    claim(store, register(store))
    clock.tick(61)
    store.recover()
    publish("order.placed", "newcomer")
    claim(store, register(store))
    clock.tick(61)
    store.recover()
    assert list(QueuedEvent.objects.order_by("id").values_list("crashes", flat=True)) == [1, 1]
