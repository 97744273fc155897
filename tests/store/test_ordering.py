"""Lanes: order per key, and nobody else waits (M15)."""

import pytest

from django_eventbus.models import EventLane, EventWorker, QueuedEvent
from django_eventbus.publishing import publish, publish_many
from django_eventbus.store import Completed, Postponed, store_for

pytestmark = pytest.mark.django_db


def claim(store, worker_id, limit=100):
    return store.claim("default", limit=limit, worker_id=worker_id)


def settle(store, events, delay=None):
    token = events[0].claim.token
    if delay is None:
        store.settle(token, [Completed(event.row_id) for event in events])
    else:
        store.settle(
            token,
            [Postponed(row_id=e.row_id, deliveries={}, errors=[], delay=delay) for e in events],
        )
    store.release_lanes(token, {event.lane_id: delay or 0.0 for event in events})


def test_neither_keyed_nor_other_events_starve_the_rest(store, worker_id):
    publish_many((("keyed", n) for n in range(50)), key="a")
    publish_many(("free", n) for n in range(50))
    types = [event.type for event in claim(store, worker_id, 20)]
    assert types.count("keyed") == types.count("free") == 10


def test_a_key_is_owned_by_one_claim_at_a_time(store, worker_id):
    publish_many((("step", n) for n in range(4)), key="order:1")
    first = claim(store, worker_id, 4)
    assert [event.payload_json for event in first] == ["0", "1"]
    assert claim(store, worker_id) == []
    settle(store, first)
    assert [event.payload_json for event in claim(store, worker_id)] == ["2", "3"]


def test_keys_that_differ_in_case_are_different_keys(store, worker_id):
    publish("step", 1, key="Order:1")
    publish("step", 2, key="order:1")
    first = claim(store, worker_id, 1)
    second = claim(store, worker_id, 1)
    assert {first[0].key, second[0].key} == {"Order:1", "order:1"}


def test_different_keys_do_not_wait_for_each_other(store, worker_id):
    publish("step", 1, key="a")
    publish("step", 2, key="b")
    publish("step", 3)
    assert len(claim(store, worker_id)) == 3


def test_several_keys_share_a_claim_in_runs_that_keep_order(store, worker_id):
    for n in range(6):
        publish("step", n, key=f"k{n % 2}")
    claimed = claim(store, worker_id)
    for key in ("k0", "k1"):
        numbers = [int(event.payload_json) for event in claimed if event.key == key]
        assert numbers == sorted(numbers)
        assert len(numbers) == 3


def test_an_event_that_arrives_while_its_key_is_owned_waits(store, worker_id):
    publish("step", 1, key="a")
    first = claim(store, worker_id)
    publish("step", 2, key="a")
    assert claim(store, worker_id) == []
    settle(store, first)
    assert [event.payload_json for event in claim(store, worker_id)] == ["2"]


def test_a_lane_is_gone_when_its_last_event_is(store, worker_id):
    publish("step", 1, key="a")
    settle(store, claim(store, worker_id))
    assert not EventLane.objects.exists()


def test_a_failing_head_holds_up_its_key_and_nobody_else(worker_id, clock):
    store = store_for(clock=clock)
    EventWorker.objects.update(expires_at=clock.now.replace(year=2100))
    publish("step", 1, key="a")
    publish("step", 2, key="a")
    head = claim(store, worker_id, 1)
    settle(store, head, delay=30)
    publish("step", 3, key="b")
    assert [event.payload_json for event in claim(store, worker_id)] == ["3"]
    clock.tick(29)
    assert claim(store, worker_id) == []
    clock.tick(2)
    assert [event.payload_json for event in claim(store, worker_id)] == ["1", "2"]


def test_a_delayed_event_joins_its_lane_when_it_is_due(store, worker_id):
    publish("later", 1, key="a", delay=60)
    publish("now", 2, key="a")
    assert [event.type for event in claim(store, worker_id)] == ["now"]
    assert QueuedEvent.objects.get(type="later").lane_id is None


def test_a_lane_whose_head_is_still_being_handled_is_left_alone(store, worker_id):
    """A lane that was freed by hand under a running event must not run the next one."""
    publish("step", 1, key="a")
    publish("step", 2, key="a")
    claim(store, worker_id, 1)
    EventLane.objects.update(claim_token=None)
    assert claim(store, worker_id) == []


def test_a_released_run_goes_on_where_it_stopped(store, worker_id):
    publish_many((("step", n) for n in range(4)), key="a")
    run = claim(store, worker_id)
    token = run[0].claim.token
    store.settle(token, [Completed(run[0].row_id)])
    assert store.release(token, [event.row_id for event in run[1:]]) == 3
    store.release_lanes(token, {run[0].lane_id: 0.0})
    again = claim(store, worker_id)
    assert [(event.payload_json, event.attempts) for event in again] == [
        ("1", 1),
        ("2", 1),
        ("3", 1),
    ]
