"""Gates: who gets in, who is counted, what is parked and let out. Time is a parameter."""

import uuid

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import publish, publish_many
from django_eventbus.exceptions import ClaimLostError
from django_eventbus.models import EventGate, EventLane, QueuedEvent
from django_eventbus.pacing import CircuitBreaker, Limits, Rate
from django_eventbus.store import Held, Report, store_for, until_opened
from django_eventbus.store.rows import parked_at
from django_eventbus.worker import WorkerOptions, new_registration

pytestmark = pytest.mark.django_db

BREAKER = Limits(breaker=CircuitBreaker(failure_rate=0.5, window=60, min_calls=4, open_for=30))
QUEUES = ("default",)


@pytest.fixture
def store(db, clock):
    return store_for(clock=clock)


@pytest.fixture
def register(store):
    """Register a worker; return the name its thread holds slots under."""

    def new():
        registration = new_registration(WorkerOptions(using="default", queues=QUEUES))
        store.register(registration)
        return f"{registration.pk}/0"

    return new


@pytest.fixture
def gate(store):
    store.make_gates("handler", ["h"])
    return EventGate.objects.get()


def enter(store, gate, limits, holder, *, want=10, one_by_one=True, patience=90):
    return store.enter(
        gate.pk, limits, holder=holder, want=want, one_by_one=one_by_one, patience=patience
    )


def report(store, gate, holder, limits=BREAKER, **told):
    return store.report(gate.pk, limits, holder, Report(**told))


def test_making_a_gate_twice_makes_one(store, gate):
    store.make_gates("handler", ["h", "i"])
    assert EventGate.objects.filter(name="h").get() == gate
    assert EventGate.objects.count() == 2


def test_names_that_differ_in_case_are_different_gates(store):
    store.make_gates("handler", ["h", "H"])
    assert EventGate.objects.count() == 2


# -- breakers


def test_failures_of_all_workers_open_a_breaker_together(store, gate, register):
    one, other = register(), register()
    assert report(store, gate, one, calls=2, failures=1) is None
    changed = report(store, gate, other, calls=2, failures=1)
    assert changed.opened_at == store.read_clock()


def test_failures_of_long_ago_do_not_open_a_breaker(store, gate, register, clock):
    holder = register()
    report(store, gate, holder, calls=3, failures=3)
    clock.tick(61)
    assert report(store, gate, holder, calls=3, failures=3) is None


def test_exactly_one_gets_the_probe(store, gate, register, clock):
    one, other = register(), register()
    report(store, gate, one, calls=4, failures=4)
    assert not enter(store, gate, BREAKER, one).granted
    clock.tick(30)
    entry = enter(store, gate, BREAKER, one)
    assert (entry.granted, entry.is_probe) == (1, True)
    assert not enter(store, gate, BREAKER, other).granted


def test_a_probe_that_succeeds_closes_the_breaker(store, gate, register, clock):
    one, other = register(), register()
    report(store, gate, one, calls=4, failures=4)
    clock.tick(30)
    enter(store, gate, BREAKER, one)
    assert report(store, gate, other, calls=1) is None, "it is not the other's probe"
    changed = report(store, gate, one, calls=1)
    assert (changed.opened_at, changed.calls) == (None, {})


def test_a_probe_that_fails_opens_the_breaker_for_as_long_again(store, gate, register, clock):
    one = register()
    report(store, gate, one, calls=4, failures=4)
    opened_at = clock.now
    clock.tick(30)
    enter(store, gate, BREAKER, one)
    assert report(store, gate, one, calls=1, failures=1) is None
    gate.refresh_from_db()
    assert gate.opened_at == opened_at
    clock.tick(29)
    assert not enter(store, gate, BREAKER, one).granted
    clock.tick(1)
    assert enter(store, gate, BREAKER, one).is_probe


def test_a_probe_is_given_again_when_its_worker_is_gone(store, gate, register, clock):
    one, other = register(), register()
    report(store, gate, one, calls=4, failures=4)
    clock.tick(30)
    enter(store, gate, BREAKER, one)
    store.unregister(uuid.UUID(one.partition("/")[0]))
    assert enter(store, gate, BREAKER, other).is_probe


def test_a_probe_is_given_again_when_it_takes_too_long(store, gate, register, clock):
    one, other = register(), register()
    report(store, gate, one, calls=4, failures=4)
    clock.tick(30)
    enter(store, gate, BREAKER, one, patience=40)
    clock.tick(39)
    assert not enter(store, gate, BREAKER, other).granted
    clock.tick(1)
    assert enter(store, gate, BREAKER, other).is_probe
    report(store, gate, one, calls=1)
    gate.refresh_from_db()
    assert gate.probe_by == other, "the late one has nothing to say any more"


def test_a_probe_that_was_not_used_is_given_back(store, gate, register, clock):
    one, other = register(), register()
    report(store, gate, one, calls=4, failures=4)
    clock.tick(30)
    enter(store, gate, BREAKER, one)
    report(store, gate, one, unused=1, leaves=True)
    assert enter(store, gate, BREAKER, other).is_probe


def test_a_gate_that_somebody_deleted_lets_nobody_in_and_counts_nothing(store, gate, register):
    one = register()
    EventGate.objects.all().delete()
    assert not enter(store, gate, Limits(max_running=1), one).granted
    assert report(store, gate, one, calls=4, failures=4) is None


# -- slots


def test_no_more_get_in_than_there_are_slots(store, gate, register):
    limits = Limits(max_running=2)
    one, two, three = register(), register(), register()
    assert enter(store, gate, limits, one).granted == 10, "one by one is one slot"
    assert enter(store, gate, limits, two).granted == 10
    assert not enter(store, gate, limits, three).granted
    report(store, gate, one, limits, leaves=True)
    assert enter(store, gate, limits, three).granted


def test_coroutines_get_as_many_slots_as_are_free(store, gate, register):
    limits = Limits(max_running=3)
    one, two = register(), register()
    enter(store, gate, limits, one)
    entry = enter(store, gate, limits, two, one_by_one=False)
    assert (entry.granted, entry.slots) == (10, 2)


def test_who_enters_again_holds_no_more_than_before(store, gate, register):
    limits = Limits(max_running=2)
    one = register()
    for _ in range(3):
        assert enter(store, gate, limits, one).slots == 1
    assert store.look_at_gates()[0].running == {one: 1}


def test_the_slot_of_a_dead_worker_is_free(store, gate, register):
    limits = Limits(max_running=1)
    one, two = register(), register()
    enter(store, gate, limits, one)
    store.unregister(uuid.UUID(one.partition("/")[0]))
    assert store.look_at_gates()[0].running == {}
    assert enter(store, gate, limits, two).granted


# -- rates


def test_tokens_are_taken_for_a_batch_at_once(store, gate, register, clock):
    limits = Limits(rate=Rate(2.0))
    one, two = register(), register()
    assert enter(store, gate, limits, one).granted == 3
    assert not enter(store, gate, limits, two).granted
    clock.tick(1)
    assert enter(store, gate, limits, two, want=1).granted == 1
    assert enter(store, gate, limits, one).granted == 1


def test_tokens_that_were_not_used_go_back(store, gate, register):
    limits = Limits(rate=Rate(2.0))
    one = register()
    enter(store, gate, limits, one)
    report(store, gate, one, limits, unused=2, leaves=True)
    assert enter(store, gate, limits, one).granted == 2


def test_no_token_is_spent_on_who_gets_no_slot(store, gate, register):
    limits = Limits(rate=Rate(2.0), max_running=1)
    one, two = register(), register()
    assert enter(store, gate, limits, one, want=1).granted == 1
    assert not enter(store, gate, limits, two).granted
    report(store, gate, one, limits, leaves=True)
    assert enter(store, gate, limits, two).granted == 2


def test_a_paused_handler_gets_nothing(store, gate, register):
    store.pause("handler", "h", by="me", reason="")
    assert not enter(store, gate, Limits(max_running=1), register()).granted


# -- parking


@pytest.fixture
def held(store, worker_id):
    """Claim what is there and hold it behind a gate."""

    def hold(gate_id, *events):
        claimed = store.claim("default", limit=1000, worker_id=worker_id)
        token = claimed[0].claim.token
        with store.atomic():
            store.settle(token, [Held(each.row_id, until_opened(gate_id)) for each in claimed])
        lanes = {each.lane_id: until_opened(gate_id) for each in claimed if each.lane_id}
        store.release_lanes(token, lanes)

    return hold


def test_what_is_held_is_as_it_was(store, held):
    publish("x", {"a": 1})
    held(7)
    row = QueuedEvent.objects.get()
    assert (row.status, row.attempts, row.deliveries, row.errors) == ("PENDING", 0, None, None)
    assert row.available_at == parked_at(7)


def test_holding_a_batch_is_one_statement(store, worker_id):
    publish_many(("x", n) for n in range(50))
    claimed = store.claim("default", limit=50, worker_id=worker_id)
    settlements = [Held(each.row_id, until_opened(7)) for each in claimed]
    with CaptureQueriesContext(connection) as queries:
        store.settle(claimed[0].claim.token, settlements)
    assert len(queries) == 1


def test_only_what_is_still_ours_is_held(store, worker_id):
    publish("x", {})
    (claimed,) = store.claim("default", limit=1, worker_id=worker_id)
    with pytest.raises(ClaimLostError):
        store.settle(uuid.uuid4(), [Held(claimed.row_id, until_opened(7))])


def test_what_is_parked_is_not_claimed_and_never_due(store, held, worker_id, clock):
    publish("x", {})
    publish("x", {}, key="k")
    held(7)
    clock.tick(100 * 365 * 24 * 3600)
    assert store.promote() == 0
    store.renew([worker_id])
    assert store.claim("default", limit=10, worker_id=worker_id) == []


def test_each_gate_lets_out_its_own(store, held, worker_id):
    publish("one", {})
    held(7)
    publish("two", {})
    held(8)
    assert store.parked(QUEUES) == {7, 8}
    assert store.let_out(7, limit=10, queues=QUEUES) == 1
    (claimed,) = store.claim("default", limit=10, worker_id=worker_id)
    assert claimed.type == "one"
    assert store.parked(QUEUES) == {8}


def test_events_are_let_out_in_chunks(store, held):
    publish_many(("x", n) for n in range(25))
    held(7)
    assert [store.let_out(7, limit=10, queues=QUEUES) for _ in range(4)] == [10, 10, 5, 0]
    assert store.parked(QUEUES) == set()


def test_a_lane_is_parked_with_all_of_its_key(store, held, worker_id):
    publish_many([("x", n) for n in range(5)], key="k")
    held(7)
    publish("x", 5, key="k")
    assert store.claim("default", limit=10, worker_id=worker_id) == []
    assert EventLane.objects.get().ready_at == parked_at(7)
    assert store.parked(QUEUES) == {7}
    store.let_out(7, limit=10, queues=QUEUES)
    claimed = store.claim("default", limit=20, worker_id=worker_id)
    assert [each.payload_json for each in claimed] == ["0", "1", "2", "3", "4", "5"]


def test_a_lane_that_a_dead_letter_blocks_is_not_parked(store, held, settings):
    """Only a person opens it."""
    publish("x", {}, key="k")
    held(7)
    lane = EventLane.objects.get()
    store.block_lane(lane.pk, QueuedEvent.objects.get().pk)
    assert store.parked(QUEUES) == set()


def test_looking_for_what_is_parked_does_not_read_all_of_it(store, held):
    publish_many(("x", n) for n in range(200))
    held(7)
    with CaptureQueriesContext(connection) as queries:
        assert store.parked(QUEUES) == {7}
    assert len(queries) == 3, "to the moment, past it, and once for the queue's lanes"


def test_gates_of_another_project_are_not_ours(store, settings, gate):
    store.pause("queue", "default", by="me", reason="")
    settings.EVENTBUS = {"NAMESPACE": "other"}
    assert store.look_at_gates() == []
    assert not store.resume("queue", "default")
