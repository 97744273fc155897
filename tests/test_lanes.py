"""Lanes that wait for a retry or are blocked by a dead letter, and operators who release them."""

import threading

import pytest
from django.db import connection, transaction

from django_eventbus import Discard, dead_letters, handler, lanes, publish, publish_many
from django_eventbus.delivery import grouped
from django_eventbus.lanes import LaneState
from django_eventbus.models import EventLane, EventLog, QueuedEvent
from django_eventbus.store import postgresql, store_for
from tests.bus import drain
from tests.shop.models import Effect
from tests.threads import in_thread

pytestmark = pytest.mark.django_db


class Steps:
    """A handler that records payloads and fails for those in ``failing``."""

    def __init__(self):
        self.got, self.failing = [], set()

    def __call__(self, event):
        if event.payload in self.failing:
            raise ValueError(f"{event.payload} fails")
        self.got.append(event.payload)


@pytest.fixture
def steps():
    steps = Steps()
    handler("step", name="step", retry={"max_retries": 0})(steps)
    return steps


@pytest.fixture
def blocked(settings, steps):
    """The first event of key a is dead, two wait behind it, and key b has been handled."""
    settings.EVENTBUS = {"DEAD_HEAD": "block"}
    steps.failing = {"a1"}
    for payload, key in [("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a")]:
        publish("step", payload, key=key)
    drain()
    steps.failing.clear()
    assert steps.got == ["b1"]
    return steps


def test_by_default_a_dead_event_does_not_block_its_key(steps):
    steps.failing = {1}
    for n in range(3):
        publish("step", n, key="a")
    drain()
    assert steps.got == [0, 2]
    assert not EventLane.objects.exists()


def test_a_dead_first_event_can_block_its_own_key_only(blocked):
    """F39."""
    (lane,) = lanes.list()
    assert (lane.key, lane.state, lane.depth) == ("a", LaneState.BLOCKED, 2)
    assert lane.head.payload == "a2"
    assert lane.blocked_by == EventLog.objects.get(status="FAILED").event_id
    publish("step", "a4", key="a")
    drain()
    assert blocked.got == ["b1"]


def test_a_blocking_dead_letter_that_is_retried_goes_first(blocked):
    assert dead_letters.retry(type="step") == 1
    drain()
    assert blocked.got == ["b1", "a1", "a2", "a3"]
    assert not EventLane.objects.exists()


def test_a_blocking_dead_letter_that_dies_again_blocks_again(blocked):
    blocked.failing = {"a1"}
    dead_letters.retry(type="step")
    drain()
    assert blocked.got == ["b1"]
    assert [lane.state for lane in lanes.list()] == ["blocked"]


def test_a_key_whose_last_event_died_stays_blocked_for_later_events(settings, steps):
    settings.EVENTBUS = {"DEAD_HEAD": "block"}
    steps.failing = {1}
    publish("step", 1, key="a")
    drain()
    publish("step", 2, key="a")
    drain()
    assert steps.got == []
    assert lanes.release("a")
    drain()
    assert steps.got == [2]


def test_a_discarded_event_blocks_nothing(settings):
    settings.EVENTBUS = {"DEAD_HEAD": "block"}
    got = []

    @handler("step", name="picky")
    def pick(event):
        if event.payload == 1:
            raise Discard("not wanted")
        got.append(event.payload)

    for n in (1, 2):
        publish("step", n, key="a")
    drain()
    assert got == [2]
    assert EventLog.objects.get(payload=1).status == "DISCARDED"


def test_a_purged_dead_letter_does_not_block_its_key(blocked):
    dead_letters.purge(type="step")
    drain()
    assert blocked.got == ["b1", "a2", "a3"]


def test_a_released_lane_continues_after_its_dead_letter(blocked):
    assert lanes.release("a")
    drain()
    assert blocked.got == ["b1", "a2", "a3"]
    assert dead_letters.list()[0].payload == "a1"


def test_a_released_lane_does_not_wait_for_its_retry(steps):
    handler("slow", name="slow", retry={"base_delay": 3600, "max_delay": 3600})(steps)
    steps.failing = {1}
    publish("slow", 1, key="a")
    drain()
    steps.failing = set()
    (lane,) = lanes.list()
    assert lane.state == LaneState.WAITING
    assert lanes.list(state="waiting") == [lane]
    assert lanes.list(state="ready") == lanes.list(state="blocked") == []
    drain()
    assert steps.got == []
    assert lanes.release("a")
    drain()
    assert steps.got == [1]


def test_the_first_event_of_a_lane_can_be_skipped(steps):
    handler("slow", name="slow", retry={"base_delay": 3600, "max_delay": 3600})(steps)
    steps.failing = {1}
    for n in (1, 2):
        publish("slow", n, key="a")
    drain()
    skipped = lanes.skip("a", reason="wrong address")
    assert (skipped.status, skipped.payload) == ("DISCARDED", 1)
    assert skipped.errors[-1]["message"] == "wrong address"
    drain()
    assert steps.got == [2]
    assert [dead.payload for dead in dead_letters.list()] == [1]


def test_a_lane_that_a_worker_owns_is_neither_released_nor_skipped(store, worker_id, steps):
    publish("step", 1, key="a")
    store.claim("default", limit=1, worker_id=worker_id)
    assert lanes.list()[0].state == LaneState.RUNNING
    assert not lanes.release("a")
    assert lanes.skip("a") is None
    assert QueuedEvent.objects.get().status == "PROCESSING"


def test_a_missing_lane_is_neither_released_nor_skipped(db):
    assert not lanes.release("nobody")
    assert lanes.skip("nobody") is None


def test_a_blocked_lane_stays_blocked_when_its_worker_dies(settings, store, worker_id, steps):
    """The block is part of the settlement, not of a later step of the worker."""
    settings.EVENTBUS = {"DEAD_HEAD": "block"}
    steps.failing = {1}
    publish("step", 1, key="a")
    publish("step", 2, key="a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store), "release_lanes", lambda self, token, waits: None)
        drain()
    store.recover_orphans()
    drain()
    assert steps.got == []
    assert lanes.list()[0].state == LaneState.BLOCKED


@pytest.mark.django_db(transaction=True)
def test_in_strict_order_a_later_publisher_of_a_key_waits_for_an_earlier_one(settings, steps):
    """F37: ids of a key are assigned in the order of commits."""
    settings.EVENTBUS = {"STRICT_ORDER": True}
    began, second = threading.Event(), []

    def publish_second():
        began.wait()
        second.append(publish("step", 2, key="a").pk)
        connection.close()

    rival = threading.Thread(target=publish_second)
    rival.start()
    with transaction.atomic():
        publish("step", 0, key="b")
        first = publish("step", 1, key="a").pk
        began.set()
        rival.join(0.3)
        assert not second, "it did not wait"
    rival.join()
    assert second[0] > first
    drain()
    assert steps.got.index(1) < steps.got.index(2)


@pytest.mark.django_db(transaction=True)
def test_in_strict_order_a_publisher_of_many_keys_waits_for_each(settings, steps):
    settings.EVENTBUS = {"STRICT_ORDER": True}
    began, done = threading.Event(), threading.Event()

    def publish_many_keys():
        began.wait()
        publish_many([("step", "b"), ("step", "a"), ("step", "c")], key=lambda item: item[1])
        done.set()
        connection.close()

    rival = threading.Thread(target=publish_many_keys)
    rival.start()
    with transaction.atomic():
        publish("step", 1, key="c")
        began.set()
        assert not done.wait(0.3), "it did not wait"
    rival.join()
    drain()
    assert steps.got.index(1) < steps.got.index("c")


@pytest.mark.django_db(transaction=True)
def test_in_strict_order_publishers_of_different_keys_do_not_wait(settings, steps):
    if not store_for().may_claim_ahead():
        pytest.skip("this database has one writer")
    settings.EVENTBUS = {"STRICT_ORDER": True}

    known = [f"known:{n}" for n in range(20)]
    publish_many((("step", key) for key in known), key=lambda item: item[1])

    def publish_others(than):
        publish_many((("step", n) for n in range(50)), key=lambda item: f"{than}/{item[1]}")

    for key in known:
        with transaction.atomic():
            publish("step", 1, key=key)
            with in_thread(publish_others, key):
                pass
    assert QueuedEvent.objects.count() == 20 + 20 * 51


@pytest.mark.django_db(transaction=True)
def test_no_event_overtakes_one_that_a_lost_group_left_out(monkeypatch):
    """The first event of a key fails, so the group leaves out the second. Then another handler ends
    the transaction. Run again alone, the first succeeds, but the third must wait for the second."""
    if connection.vendor == "mysql":
        pytest.skip("the driver does not report whether a transaction is open")
    monkeypatch.setattr(grouped, "GROUP_SECONDS", float("inf"))
    monkeypatch.setattr(postgresql, "RUN_LENGTH", 3)  # Claim both keys in one batch.
    calls = []

    @handler("step", name="fails_once")
    def fail_once(event):
        calls.append(event.payload)
        if calls == [1]:
            raise ValueError("the first time")

    @handler("break", name="breaks_once")
    def end_the_transaction_once(event):
        calls.append("break")
        if calls.count("break") == 1:
            Effect.objects.create(event_id=event.id, handler="breaks_once")
            connection.connection.rollback()

    publish("step", 1, key="a")
    publish("step", 2, key="a")
    publish("break", {}, key="b")
    publish("step", 3, key="a")
    drain()
    assert [each for each in calls if each != "break"] == [1, 1, 2, 3]
    assert set(EventLog.objects.values_list("status", "attempts")) == {("COMPLETED", 1)}
