"""Flow controls grant, count, hold and release. Time is a parameter."""

import uuid
from functools import partial

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import publish, publish_many
from django_eventbus.exceptions import ClaimLostError
from django_eventbus.flow import decisions
from django_eventbus.flow.decisions import Grant, Report
from django_eventbus.models import EventLane, FlowControl, QueuedEvent
from django_eventbus.policies import CircuitBreaker, Limits, Rate
from django_eventbus.store import Held, HeldBy, store_for
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.store.rows_read import rows_read

pytestmark = pytest.mark.django_db

BREAKER = Limits(breaker=CircuitBreaker(failure_rate=0.5, window=60, min_calls=4, open_for=30))
QUEUES = ("default",)
ERROR = {"handler": "", "type": "E", "message": "", "traceback": ""}


@pytest.fixture
def store(db, clock):
    return store_for(clock=clock)


@pytest.fixture
def register(store):
    """Register a worker; return the name under which its thread holds slots."""

    def new():
        registration = new_registration(WorkerOptions(using="default", queues=QUEUES))
        store.register(registration)
        return f"{registration.pk}/0"

    return new


@pytest.fixture
def control(store):
    store.make_flow_controls("handler", ["h"])
    return FlowControl.objects.get()


def enter(store, control, limits, holder, *, want=10, one_by_one=True, patience=90):
    asked = partial(
        decisions.grant,
        limits=limits,
        holder=holder,
        wanted=want,
        one_by_one=one_by_one,
        probe_seconds=patience,
    )
    return store.decide(control.pk, asked, ignore_dead_workers=True) or Grant()


def report(store, control, holder, limits=BREAKER, **reported):
    """Return the row if its breaker has opened or closed."""
    decision = partial(decisions.record, limits=limits, holder=holder, report=Report(**reported))
    recorded = store.decide(control.pk, decision)
    if recorded is None or recorded.breaker_opened == recorded.breaker_closed:
        return None
    return FlowControl.objects.get(pk=control.pk)


def test_creating_a_flow_control_twice_creates_one(store, control):
    store.make_flow_controls("handler", ["h", "i"])
    assert FlowControl.objects.filter(name="h").get() == control
    assert FlowControl.objects.count() == 2


def test_names_that_differ_in_case_are_different_flow_controls(store):
    store.make_flow_controls("handler", ["h", "H"])
    assert FlowControl.objects.count() == 2


# -- breakers


def test_failures_of_all_workers_open_a_breaker_together(store, control, register):
    one, other = register(), register()
    assert report(store, control, one, calls=2, failures=1) is None
    changed = report(store, control, other, calls=2, failures=1)
    assert changed.opened_at == store.read_clock()


def test_old_failures_do_not_open_a_breaker(store, control, register, clock):
    holder = register()
    report(store, control, holder, calls=3, failures=3)
    clock.tick(61)
    assert report(store, control, holder, calls=3, failures=3) is None


def test_exactly_one_worker_gets_the_probe(store, control, register, clock):
    one, other = register(), register()
    report(store, control, one, calls=4, failures=4)
    assert not enter(store, control, BREAKER, one).deliveries
    clock.tick(30)
    entry = enter(store, control, BREAKER, one)
    assert (entry.deliveries, entry.is_probe) == (1, True)
    assert not enter(store, control, BREAKER, other).deliveries


def test_a_successful_probe_closes_the_breaker(store, control, register, clock):
    one, other = register(), register()
    report(store, control, one, calls=4, failures=4)
    clock.tick(30)
    enter(store, control, BREAKER, one)
    assert report(store, control, other, calls=1) is None, "the probe belongs to another worker"
    changed = report(store, control, one, calls=1)
    assert (changed.opened_at, changed.calls) == (None, {})


def test_a_failed_probe_opens_the_breaker_for_the_same_time_again(store, control, register, clock):
    one = register()
    report(store, control, one, calls=4, failures=4)
    opened_at = clock.now
    clock.tick(30)
    enter(store, control, BREAKER, one)
    assert report(store, control, one, calls=1, failures=1) is None
    control.refresh_from_db()
    assert control.opened_at == opened_at
    clock.tick(29)
    assert not enter(store, control, BREAKER, one).deliveries
    clock.tick(1)
    assert enter(store, control, BREAKER, one).is_probe


def test_a_probe_is_granted_again_when_its_worker_has_ended(store, control, register, clock):
    one, other = register(), register()
    report(store, control, one, calls=4, failures=4)
    clock.tick(30)
    enter(store, control, BREAKER, one)
    store.unregister(uuid.UUID(one.partition("/")[0]))
    assert enter(store, control, BREAKER, other).is_probe


def test_a_probe_is_granted_again_when_it_takes_too_long(store, control, register, clock):
    one, other = register(), register()
    report(store, control, one, calls=4, failures=4)
    clock.tick(30)
    enter(store, control, BREAKER, one, patience=40)
    clock.tick(39)
    assert not enter(store, control, BREAKER, other).deliveries
    clock.tick(1)
    assert enter(store, control, BREAKER, other).is_probe
    report(store, control, one, calls=1)
    control.refresh_from_db()
    assert control.probe_by == other, "the result of a late probe is ignored"


def test_an_unused_probe_is_returned(store, control, register, clock):
    one, other = register(), register()
    report(store, control, one, calls=4, failures=4)
    clock.tick(30)
    enter(store, control, BREAKER, one)
    report(store, control, one, unused=1, leaves=True)
    assert enter(store, control, BREAKER, other).is_probe


def test_a_deleted_flow_control_grants_and_counts_nothing(store, control, register):
    one = register()
    FlowControl.objects.all().delete()
    assert not enter(store, control, Limits(max_running=1), one).deliveries
    assert report(store, control, one, calls=4, failures=4) is None


# -- slots


def test_at_most_as_many_workers_run_as_there_are_slots(store, control, register):
    limits = Limits(max_running=2)
    one, two, three = register(), register(), register()
    assert enter(store, control, limits, one).deliveries == 10, (
        "sequential deliveries need one slot"
    )
    assert enter(store, control, limits, two).deliveries == 10
    assert not enter(store, control, limits, three).deliveries
    report(store, control, one, limits, leaves=True)
    assert enter(store, control, limits, three).deliveries


def test_coroutines_get_all_free_slots(store, control, register):
    limits = Limits(max_running=3)
    one, two = register(), register()
    enter(store, control, limits, one)
    entry = enter(store, control, limits, two, one_by_one=False)
    assert (entry.deliveries, entry.slots) == (10, 2)


def test_a_worker_that_enters_again_holds_no_additional_slot(store, control, register):
    limits = Limits(max_running=2)
    one = register()
    for _ in range(3):
        assert enter(store, control, limits, one).slots == 1
    assert store.read_flow_controls()[0].running == {one: 1}


def test_the_slot_of_a_dead_worker_is_free(store, control, register):
    limits = Limits(max_running=1)
    one, two = register(), register()
    enter(store, control, limits, one)
    store.unregister(uuid.UUID(one.partition("/")[0]))
    assert store.read_flow_controls()[0].running == {}
    assert enter(store, control, limits, two).deliveries


# -- rates


def test_tokens_are_taken_once_per_batch(store, control, register, clock):
    limits = Limits(rate=Rate(2.0))
    one, two = register(), register()
    assert enter(store, control, limits, one).deliveries == 3
    assert not enter(store, control, limits, two).deliveries
    clock.tick(1)
    assert enter(store, control, limits, two, want=1).deliveries == 1
    assert enter(store, control, limits, one).deliveries == 1


def test_tokens_that_were_not_used_are_returned(store, control, register):
    limits = Limits(rate=Rate(2.0))
    one = register()
    enter(store, control, limits, one)
    report(store, control, one, limits, unused=2, leaves=True)
    assert enter(store, control, limits, one).deliveries == 2


def test_a_worker_without_a_slot_uses_no_tokens(store, control, register):
    limits = Limits(rate=Rate(2.0), max_running=1)
    one, two = register(), register()
    assert enter(store, control, limits, one, want=1).deliveries == 1
    assert not enter(store, control, limits, two).deliveries
    report(store, control, one, limits, leaves=True)
    assert enter(store, control, limits, two).deliveries == 2


def test_a_paused_handler_gets_no_deliveries(store, control, register):
    store.pause("handler", "h", by="me", reason="")
    assert not enter(store, control, Limits(max_running=1), register()).deliveries


# -- held events


@pytest.fixture
def held(store, worker_id):
    """Claim all ready events and hold them."""

    def hold(flow_control_id):
        claimed = store.claim("default", limit=1000, worker_id=worker_id)
        token = claimed[0].claim.token
        with store.atomic():
            store.settle(token, [Held(each.row_id, HeldBy(flow_control_id)) for each in claimed])
        lanes = {each.lane_id: HeldBy(flow_control_id) for each in claimed if each.lane_id}
        store.release_lanes(token, lanes)

    return hold


def test_a_held_event_keeps_its_state(store, held):
    publish("x", {"a": 1})
    held(7)
    row = QueuedEvent.objects.get()
    assert (row.status, row.attempts, row.deliveries, row.errors) == ("PENDING", 0, None, None)
    assert (row.held_by, row.available_at) == (7, None)


def test_holding_a_batch_is_one_statement(store, worker_id):
    publish_many(("x", n) for n in range(50))
    claimed = store.claim("default", limit=50, worker_id=worker_id)
    settlements = [Held(each.row_id, HeldBy(7)) for each in claimed]
    with CaptureQueriesContext(connection) as queries:
        store.settle(claimed[0].claim.token, settlements)
    assert len(queries) == 1


def test_only_events_under_the_current_claim_are_held(store, worker_id):
    publish("x", {})
    (claimed,) = store.claim("default", limit=1, worker_id=worker_id)
    with pytest.raises(ClaimLostError):
        store.settle(uuid.uuid4(), [Held(claimed.row_id, HeldBy(7))])


def test_a_held_event_is_not_claimed_and_never_due(store, held, worker_id, clock):
    publish("x", {})
    publish("x", {}, key="k")
    held(7)
    clock.tick(100 * 365 * 24 * 3600)
    assert store.promote() == 0
    store.renew([worker_id])
    assert store.claim("default", limit=10, worker_id=worker_id) == []


def test_each_flow_control_releases_its_own_events(store, held, worker_id):
    publish("one", {})
    held(7)
    publish("two", {})
    held(8)
    assert store.ids_that_hold(QUEUES) == {7, 8}
    assert store.release_held(7, limit=10, queues=QUEUES) == 1
    (claimed,) = store.claim("default", limit=10, worker_id=worker_id)
    assert claimed.type == "one"
    assert store.ids_that_hold(QUEUES) == {8}


def test_events_are_released_in_chunks(store, held):
    publish_many(("x", n) for n in range(25))
    held(7)
    assert [store.release_held(7, limit=10, queues=QUEUES) for _ in range(4)] == [10, 10, 5, 0]
    assert store.ids_that_hold(QUEUES) == set()


def test_holding_a_lane_holds_all_events_of_its_key(store, held, worker_id):
    publish_many([("x", n) for n in range(5)], key="k")
    held(7)
    publish("x", 5, key="k")
    assert store.claim("default", limit=10, worker_id=worker_id) == []
    lane = EventLane.objects.get()
    assert (lane.held_by, lane.ready_at) == (7, None)
    assert store.ids_that_hold(QUEUES) == {7}
    store.release_held(7, limit=10, queues=QUEUES)
    claimed = store.claim("default", limit=20, worker_id=worker_id)
    assert [each.payload_json for each in claimed] == ["0", "1", "2", "3", "4", "5"]


def test_a_lane_that_a_dead_letter_blocks_is_not_held(store, held, settings):
    """Only an operator releases it."""
    publish("x", {}, key="k")
    held(7)
    lane = EventLane.objects.get()
    store.block_lane(lane.pk, QueuedEvent.objects.get().pk)
    assert store.ids_that_hold(QUEUES) == set()


def add_backlog(count):
    """Held events, held lanes and blocked lanes."""
    ours = {"namespace": "default", "queue": "default"}
    QueuedEvent.objects.bulk_create(
        QueuedEvent(**ours, type="x", producer="p", held_by=7) for _ in range(count)
    )
    EventLane.objects.bulk_create(
        EventLane(**ours, key=str(uuid.uuid4()), ready_at=None, **stop)
        for stop in [{"held_by": 7}, {"blocked_by": uuid.uuid4()}] * count
    )


@pytest.mark.costly
def test_a_claim_reads_no_held_event_and_no_held_or_blocked_lane(store, worker_id, monkeypatch):
    def look():
        assert store.claim("default", limit=10, worker_id=worker_id) == []
        assert store.next_due(QUEUES) is None

    # On PostgreSQL a claim in a test's transaction does not set the planner, and reads lanes to
    # find the locked ones.
    monkeypatch.setattr(store, "_skips_locked", lambda queue: False, raising=False)
    with store.reading_by_index():
        add_backlog(20)
        few = rows_read(look)
        add_backlog(400)
        assert rows_read(look) < few + 20


def test_an_operator_can_run_a_held_event_and_the_first_event_of_a_held_lane(
    store, held, worker_id
):
    publish("alone", {})
    publish("first", {}, key="k")
    publish("second", {}, key="k")
    held(7)
    ids = dict(QueuedEvent.objects.values_list("type", "id"))
    assert store.hasten([ids["second"]]) == 0
    assert store.hasten([ids["alone"], ids["first"]]) == 2
    assert len(store.claim("default", limit=10, worker_id=worker_id)) == 3
    assert store.ids_that_hold(QUEUES) == set()


@pytest.mark.parametrize("act", ["release", "skip", "cancel"])
def test_an_operator_releases_a_held_lane(store, held, worker_id, act):
    publish("first", {}, key="k")
    publish("second", {}, key="k")
    held(7)
    if act == "release":
        assert store.free_lane("default", "k")
    elif act == "skip":
        assert store.skip_head("default", "k", ERROR).type == "first"
    else:
        head = QueuedEvent.objects.get(type="first")
        assert store.cancel([head.pk], ERROR) == 1
    assert store.ids_that_hold(QUEUES) == set()
    assert store.claim("default", limit=10, worker_id=worker_id)


def test_a_lane_whose_first_event_died_stays_blocked_when_it_is_released(store, worker_id):
    """A hold would be released without an operator."""
    publish_many([("x", n) for n in range(2)], key="k")
    claimed = store.claim("default", limit=10, worker_id=worker_id)
    token, lane_id = claimed[0].claim.token, claimed[0].lane_id
    store.block_lane(lane_id, claimed[0].row_id)
    store.release(token, [each.row_id for each in claimed])
    store.release_lanes(token, {lane_id: HeldBy(7)})
    lane = EventLane.objects.get()
    assert (lane.claim_token, lane.held_by, lane.ready_at) == (None, None, None)
    assert lane.blocked_by is not None
    assert store.claim("default", limit=10, worker_id=worker_id) == []


def test_the_search_for_flow_controls_with_held_events_does_not_read_all_of_them(store, held):
    publish_many(("x", n) for n in range(200))
    held(7)
    with CaptureQueriesContext(connection) as queries:
        assert store.ids_that_hold(QUEUES) == {7}
    assert len(queries) == 3, "to the holder, past it, and once for the lanes of the queue"


def test_flow_controls_of_another_namespace_are_not_read(store, settings, control):
    store.pause("queue", "default", by="me", reason="")
    settings.EVENTBUS = {"NAMESPACE": "other"}
    assert store.read_flow_controls() == []
    assert not store.resume("queue", "default")
