"""Lanes: order per key, and nobody else waits (M15)."""

import pytest
from django.db import connection, transaction

from django_eventbus.models import EventLane, EventWorker, QueuedEvent
from django_eventbus.publishing import publish, publish_many
from django_eventbus.store import Completed, Postponed, base, postgresql, store_for
from tests.threads import in_thread

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


def test_single_claims_take_turns_between_keyed_and_other_events(store, worker_id):
    publish_many((("keyed", n) for n in range(4)), key="a")
    publish_many(("free", n) for n in range(4))
    types = [event.type for _ in range(4) for event in one_at_a_time(store, worker_id)]
    assert sorted(types) == ["free", "free", "keyed", "keyed"]


def one_at_a_time(store, worker_id):
    claimed = claim(store, worker_id, 1)
    settle(store, claimed)
    return claimed


def test_a_key_is_owned_by_one_claim_at_a_time(store, worker_id):
    publish_many((("step", n) for n in range(4)), key="order:1")
    first = claim(store, worker_id, 2)
    assert [event.payload_json for event in first] == ["0", "1"]
    assert claim(store, worker_id) == []
    settle(store, first)
    assert [event.payload_json for event in claim(store, worker_id)] == ["2", "3"]


def test_a_key_stays_with_its_claim_until_that_gives_it_back(store, worker_id):
    """Its head went back into the queue, but the worker has not yet said when it is due."""
    publish_many((("step", n) for n in range(2)), key="a")
    head, *_ = claim(store, worker_id)
    later = Postponed(row_id=head.row_id, deliveries={}, errors=[], delay=60)
    store.settle(head.claim.token, [later])
    assert claim(store, worker_id) == []
    assert QueuedEvent.objects.get(pk=head.row_id).attempts == 1


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
    again = claim(store, worker_id)
    assert [event.payload_json for event in again] == ["1"]
    settle(store, again)
    assert [event.payload_json for event in claim(store, worker_id)] == ["2"]


def test_those_behind_an_event_that_failed_are_not_claimed_with_it(store, worker_id):
    """They would be given back each time it fails, and other keys would pay for it."""
    publish_many((("step", n) for n in range(100)), key="a")
    publish("step", "other", key="b")
    settle(store, claim(store, worker_id, 1))
    run = claim(store, worker_id, 50)
    settle(store, run[:1], delay=0)
    store.release(run[0].claim.token, [event.row_id for event in run[1:]])
    claimed = claim(store, worker_id, 50)
    assert [event.payload_json for event in claimed if event.key == "a"] == [run[0].payload_json]


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


def test_a_lane_that_has_nothing_to_give_does_not_hide_the_next(store, worker_id):
    """Freed by hand under a running event, or left empty: a claim is empty only if all is."""
    for key in ("held", "emptied"):
        publish("step", key, key=key)
    claim(store, worker_id)
    QueuedEvent.objects.filter(key="emptied").delete()
    EventLane.objects.update(claim_token=None)
    publish("step", "next", key="next")
    assert [event.key for event in claim(store, worker_id, 1)] == ["next"]


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


def test_a_claim_looks_behind_the_tail_of_a_key_that_waits(store, worker_id, monkeypatch):
    """Different keys never wait for each other, however many events stand between them."""
    monkeypatch.setattr(base, "ROUTE_CHUNK", 3)
    monkeypatch.setattr(postgresql, "ROUTE_CHUNK", 3)
    monkeypatch.setattr(postgresql, "ROUTED_AT_LEAST", 1)
    publish("step", 0, key="a")
    claim(store, worker_id)
    publish_many((("step", n) for n in range(1, 10)), key="a")
    publish("step", "free", key="b")
    assert [event.key for event in claim(store, worker_id, 2)] == ["b"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif("connection.vendor != 'mysql'", reason="an old snapshot that nothing refuses")
def test_a_lane_is_not_deleted_for_what_a_snapshot_does_not_show(store, worker_id, monkeypatch):
    """Of REPEATABLE READ, on MariaDB: the event would wait for ever for a lane that is gone."""
    lane = EventLane.objects.create(namespace="default", queue="default", key="k")
    connection.close()
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "isolation_level", "repeatable read")

    def publish_and_route():
        publish("step", key="k")
        with transaction.atomic():
            assert store_for().route("default", 10) == 1

    with transaction.atomic():
        assert QueuedEvent.objects.count() == 0
        with in_thread(publish_and_route):
            pass
        assert claim(store, worker_id) == []
        assert QueuedEvent.objects.count() == 0, "this transaction does not see it"
    connection.close()
    monkeypatch.undo()
    assert QueuedEvent.objects.get().lane_id == EventLane.objects.get().pk == lane.pk


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif("connection.vendor != 'mysql'", reason="an old snapshot that nothing refuses")
def test_the_bus_sees_what_others_route_while_it_claims(store, monkeypatch):
    """Or it would take what it routed itself, before what another worker has just put in front."""
    connection.close()
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "isolation_level", "repeatable read")
    seen = {}
    for name, begin in {"bus": store.atomic, "project": transaction.atomic}.items():
        with begin():
            before = QueuedEvent.objects.count()
            with in_thread(publish, "step", key="k"):
                pass
            seen[name] = QueuedEvent.objects.count() - before
    connection.close()
    assert seen == {"bus": 1, "project": 0}
