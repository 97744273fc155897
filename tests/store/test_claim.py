"""claim: which events a worker gets, in which order, and never twice."""

import uuid

import pytest

from django_eventbus.events import uuid7
from django_eventbus.exceptions import WorkerEvictedError
from django_eventbus.models import EventWorker, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from django_eventbus.store import store_for

pytestmark = pytest.mark.django_db


def claim(store, worker_id, limit=100, queue="default"):
    return store.claim(queue, limit=limit, worker_id=worker_id)


def test_a_claim_marks_the_row_and_charges_an_attempt(store, worker_id):
    """M2: PROCESSING, attempts+1 and the start time are set together."""
    publish("order.placed", {"order": 7}, headers={"h": 1})
    (claimed,) = claim(store, worker_id)
    row = QueuedEvent.objects.get()
    assert (row.status, row.attempts, row.claimed_by) == ("PROCESSING", 1, worker_id)
    assert row.processing_started_at is not None
    assert row.claim_token == claimed.claim.token
    assert (claimed.row_id, claimed.event_id, claimed.type) == (row.pk, row.event_id, row.type)
    assert (claimed.payload_json, claimed.attempts) == ('{"order": 7}', 1)
    assert abs(claimed.created_epoch - row.created_at.timestamp()) < 0.001
    assert abs(claimed.started_epoch - row.processing_started_at.timestamp()) < 0.001


def test_a_claimed_event_is_not_claimed_again(store, worker_id):
    publish("order.placed", {})
    assert len(claim(store, worker_id)) == 1
    assert claim(store, worker_id) == []


def test_events_are_claimed_in_the_order_of_publishing(store, worker_id):
    publish_many(("order.placed", n) for n in range(30))
    first, second = claim(store, worker_id, 10), claim(store, worker_id, 20)
    assert [event.payload_json for event in first + second] == [str(n) for n in range(30)]


def test_a_claim_takes_at_most_its_limit(store, worker_id):
    publish_many(("order.placed", n) for n in range(30))
    assert len(claim(store, worker_id, 7)) == 7
    assert QueuedEvent.objects.filter(status="PROCESSING").count() == 7


def test_a_higher_priority_overtakes_a_backlog(store, worker_id):
    publish_many((("order.placed", n) for n in range(20)), priority=0)
    claim(store, worker_id, 5)
    publish("urgent", {}, priority=5)
    publish("whenever", {}, priority=-5)
    types = [event.type for event in claim(store, worker_id)]
    assert types == ["urgent"] + ["order.placed"] * 15 + ["whenever"]


def test_a_retried_event_with_an_old_id_is_found_behind_the_floor(store, worker_id):
    """A claim starts at the floor of the last one; released events below it must not be lost."""
    publish_many(("order.placed", n) for n in range(40))
    first = claim(store, worker_id, 10)
    claim(store, worker_id, 10)
    store.release(first[0].claim.token, [event.row_id for event in first])
    rest = claim(store, worker_id, 100)
    assert len(rest) == 30
    assert {event.row_id for event in first} <= {event.row_id for event in rest}


def test_events_on_both_sides_of_the_floor_are_claimed_in_order(store, worker_id):
    publish_many(("step", n) for n in range(3))
    first = claim(store, worker_id, 1)
    claim(store, worker_id, 1)
    store.release_claim(first[0].claim.token)
    assert [event.payload_json for event in claim(store, worker_id)] == ["0", "2"]


def test_a_claim_takes_events_of_its_queue_only(store, worker_id, settings):
    settings.EVENTBUS = {"QUEUES": ["default", "mail"]}
    publish("a", {})
    publish("b", {}, queue="mail")
    assert [event.type for event in claim(store, worker_id, queue="mail")] == ["b"]
    assert [event.type for event in claim(store, worker_id)] == ["a"]


def test_a_claim_takes_events_of_its_namespace_only(store, worker_id, settings):
    """M8: projects that share a database do not see each other's events."""
    publish("ours", {})
    settings.EVENTBUS = {"NAMESPACE": "theirs"}
    publish("theirs", {})
    registration = EventWorker(id=uuid7(), host="h", pid=1, queues=[])
    store.register(registration)
    assert [event.type for event in claim(store, registration.pk)] == ["theirs"]
    assert store.depth() == 1


def test_a_delayed_event_waits_for_the_database_clock(worker_id, clock):
    store = store_for(clock=clock)
    EventWorker.objects.update(expires_at=clock.now.replace(year=2100))
    event = publish("later", {}, at=clock.now.replace(minute=5))
    assert (store.promote(), claim(store, worker_id)) == (0, [])
    clock.tick(301)
    assert store.promote() == 1
    assert [each.event_id for each in claim(store, worker_id)] == [event.event_id]


def test_the_store_returns_when_the_next_event_is_due(clock):
    store = store_for(clock=clock)
    assert store.next_due(["default"]) is None
    publish("later", {}, at=clock.now.replace(minute=5))
    publish("much later", {}, at=clock.now.replace(minute=50))
    assert store.next_due(["default"]) == 300
    clock.tick(301)
    assert store.next_due(["default"]) == 0


def test_an_unregistered_worker_claims_nothing(store, worker_id):
    publish("order.placed", {})
    EventWorker.objects.all().delete()
    try:
        claimed = claim(store, worker_id)
    except WorkerEvictedError:
        claimed = []
    assert claimed == []
    assert QueuedEvent.objects.get().attempts == 0


def test_a_worker_whose_registration_expired_claims_nothing(store, worker_id):
    publish("order.placed", {})
    EventWorker.objects.update(expires_at="2000-01-01T00:00:00Z")
    try:
        claimed = claim(store, worker_id)
    except WorkerEvictedError:
        claimed = []
    assert claimed == []


def test_every_claim_has_its_own_token(store, worker_id):
    publish_many(("order.placed", n) for n in range(2))
    (one,), (other,) = claim(store, worker_id, 1), claim(store, worker_id, 1)
    assert one.claim.token != other.claim.token
    assert isinstance(one.claim.token, uuid.UUID)
