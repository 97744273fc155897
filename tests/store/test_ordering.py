"""Lanes: order per key, without delaying other keys (M15)."""

from contextlib import ExitStack

import pytest
from django.db import connection, transaction

from django_eventbus.models import EventLane, EventWorker, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from django_eventbus.store import (
    AT_ONCE,
    After,
    Completed,
    Postponed,
    claiming,
    postgresql,
    store_for,
)
from tests.threads import a_session_waits_for_a_lock, in_thread, while_another_transaction
from tests.workers import eventually

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
            [
                Postponed(row_id=e.row_id, deliveries={}, errors=[], wait=After(delay))
                for e in events
            ],
        )
    store.release_lanes(token, {event.lane_id: After(delay or 0.0) for event in events})


def test_neither_events_with_a_key_nor_events_without_starve(store, worker_id):
    publish_many((("keyed", n) for n in range(50)), key="a")
    publish_many(("free", n) for n in range(50))
    types = [event.type for event in claim(store, worker_id, 20)]
    assert types.count("keyed") == types.count("free") == 10


def test_single_claims_alternate_between_events_with_and_without_a_key(store, worker_id):
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


def test_a_claim_owns_a_key_until_it_releases_it(store, worker_id):
    """Its first event is back in the queue, but the worker has not yet set when it is due."""
    publish_many((("step", n) for n in range(2)), key="a")
    head, *_ = claim(store, worker_id)
    later = Postponed(row_id=head.row_id, deliveries={}, errors=[], wait=After(60))
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


def test_several_keys_share_a_claim_and_each_keeps_its_order(store, worker_id):
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


def test_a_lane_is_deleted_with_its_last_event(store, worker_id):
    publish("step", 1, key="a")
    settle(store, claim(store, worker_id))
    assert not EventLane.objects.exists()


def test_a_failing_first_event_delays_only_its_own_key(worker_id, clock):
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


def test_events_behind_a_failed_event_are_not_claimed_with_it(store, worker_id):
    """They would be released at each failure, which would delay other keys."""
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


def test_a_lane_whose_first_event_is_being_handled_is_not_claimed(store, worker_id):
    """An operator may have released the lane while its event was running."""
    publish("step", 1, key="a")
    publish("step", 2, key="a")
    claim(store, worker_id, 1)
    EventLane.objects.update(claim_token=None)
    assert claim(store, worker_id) == []


def test_a_lane_without_claimable_events_does_not_hide_the_next_lane(store, worker_id):
    """Such a lane was released during a run, or is empty. A claim must read the next lane."""
    for key in ("held", "emptied"):
        publish("step", key, key=key)
    claim(store, worker_id)
    QueuedEvent.objects.filter(key="emptied").delete()
    EventLane.objects.update(claim_token=None)
    publish("step", "next", key="next")
    assert [event.key for event in claim(store, worker_id, 1)] == ["next"]


def test_a_lane_without_claimable_events_is_not_owned_by_the_claim(store, worker_id):
    """The claim has no event of the lane, so it would never release the lane."""
    publish("step", "held", key="held")
    claim(store, worker_id)
    EventLane.objects.update(claim_token=None, claimed_by=None)
    publish("step", "next", key="next")
    assert [event.key for event in claim(store, worker_id)] == ["next"]
    assert EventLane.objects.get(key="held").claim_token is None
    assert EventLane.objects.get(key="next").claim_token is not None


def test_each_key_starts_with_its_oldest_event_in_any_physical_order(store, worker_id):
    """A retried dead letter keeps its id, but is stored after all other rows."""
    publish_many((("step", n) for n in range(40)), key="a")
    oldest = QueuedEvent.objects.order_by("id").values_list("id", flat=True)[:3]
    for row_id in reversed(oldest):
        row = QueuedEvent.objects.filter(id=row_id).values().get()
        QueuedEvent.objects.filter(id=row_id).delete()
        QueuedEvent.objects.create(**row)
    if connection.vendor == "postgresql":
        # Without an index that happens to have the right order.
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL enable_indexscan = off")
            cursor.execute("SET LOCAL enable_indexonlyscan = off")
            cursor.execute("SET LOCAL enable_bitmapscan = off")
    assert [event.payload_json for event in claim(store, worker_id, 3)] == ["0", "1", "2"]


def test_a_released_key_continues_where_it_stopped(store, worker_id):
    publish_many((("step", n) for n in range(4)), key="a")
    run = claim(store, worker_id)
    token = run[0].claim.token
    store.settle(token, [Completed(run[0].row_id)])
    assert store.release(token, [event.row_id for event in run[1:]]) == 3
    store.release_lanes(token, {run[0].lane_id: AT_ONCE})
    again = claim(store, worker_id)
    assert [(event.payload_json, event.attempts) for event in again] == [
        ("1", 1),
        ("2", 1),
        ("3", 1),
    ]


def test_a_claim_reads_past_the_backlog_of_a_waiting_key(store, worker_id, monkeypatch):
    """Keys do not wait for each other, however many events are between them."""
    monkeypatch.setattr(claiming, "ROUTE_CHUNK", 3)
    monkeypatch.setattr(postgresql, "ROUTE_CHUNK", 3)
    monkeypatch.setattr(postgresql, "ROUTED_AT_LEAST", 1)
    publish("step", 0, key="a")
    claim(store, worker_id)
    publish_many((("step", n) for n in range(1, 10)), key="a")
    publish("step", "free", key="b")
    assert [event.key for event in claim(store, worker_id, 2)] == ["b"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif("connection.vendor != 'mysql'", reason="an old snapshot that nothing refuses")
def test_a_lane_with_events_outside_of_the_snapshot_is_not_deleted(store, worker_id, monkeypatch):
    """REPEATABLE READ on MariaDB: otherwise the event would wait for ever for a deleted lane."""
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
def test_a_transaction_of_the_store_sees_concurrent_commits(store, monkeypatch):
    """Otherwise a claim would take events it routed itself before older ones of another worker."""
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


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="SQLite has one writer at a time")
def test_a_release_waits_for_a_router_and_keeps_the_lane_of_its_event(store, worker_id):
    """Otherwise the event would be routed to a deleted lane, and wait for ever."""
    publish("step", 1, key="a")
    first = claim(store, worker_id)
    store.settle(first[0].claim.token, [Completed(first[0].row_id)])
    publish("step", 2, key="a")
    waits = {first[0].lane_id: AT_ONCE}
    another = while_another_transaction(lambda: store_for().route("default", 10))
    with ExitStack() as threads, another:
        release = in_thread(store_for().release_lanes, first[0].claim.token, waits)
        releasing = threads.enter_context(release)
        eventually(lambda: releasing.done() or a_session_waits_for_a_lock())
        assert not releasing.done()
    assert [event.payload_json for event in claim(store, worker_id)] == ["2"]
