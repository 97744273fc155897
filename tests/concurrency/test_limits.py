"""Limits under concurrent publishers, and the locks of claims and publishers."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, connections, transaction

from django_eventbus import BackpressureError, handler, lanes, publish, publish_many
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.store import Completed, claiming, postgresql, store_for
from django_eventbus.store.lanes import LOCKED_WAIT
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.bus import drain, make_due
from tests.publishers import Publishers
from tests.shop.models import Effect
from tests.threads import while_another_transaction
from tests.workers import PATIENT, eventually

pytestmark = pytest.mark.django_db(transaction=True)

one_writer = pytest.mark.skipif(
    connection.vendor == "sqlite", reason="SQLite has one writer: there are no rivals"
)


def limited(settings, size, overflow, **options):
    limit = {"max_size": size, "overflow": overflow, **options}
    settings.EVENTBUS = {"LIMITS": {"default": limit}}


def in_threads(*actions):
    """Run the actions at the same time, each on a connection of its own."""
    start = threading.Barrier(len(actions))

    def run(action):
        start.wait(30)
        try:
            return action()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(60) for future in [pool.submit(run, each) for each in actions]]


def test_publishers_exceed_a_limit_by_less_than_their_number(settings):
    publishers, each, size = 8, 20, 50
    limited(settings, size, "halt")

    def publish_until_refused():
        stored = 0
        for _ in range(each):
            try:
                publish("x", {})
            except BackpressureError:
                continue
            stored += 1
        return stored

    stored = sum(in_threads(*[publish_until_refused] * publishers))
    assert stored == QueuedEvent.objects.count()
    assert size <= stored < size + publishers


@pytest.mark.processes
def test_publishing_processes_exceed_a_limit_by_less_than_their_number(tmp_path, transactional_db):
    size, number = 30, 4
    limits = {"LIMITS": {"default": {"max_size": size, "overflow": "halt"}}}
    with Publishers(tmp_path, number, "x", count=size, eventbus=limits) as publishers:
        said, codes = publishers.publish()
    stored = sum(each.count("published") for each in said)
    assert codes == [0] * number
    assert stored == QueuedEvent.objects.count() == Effect.objects.count()
    assert size <= stored < size + number
    assert sum(map(len, said)) == size * number


@one_writer
def test_uncommitted_events_of_others_are_not_counted(settings):
    """Uncommitted events are invisible, so concurrent publishers can exceed a limit."""
    limited(settings, 1, "drop")
    published, may_commit = threading.Event(), threading.Event()

    def publish_slowly():
        with transaction.atomic():
            assert publish("x", "mine")
            assert publish("x", "one's own counts at once") is None
            published.set()
            assert may_commit.wait(30)

    def publish_meanwhile():
        assert published.wait(30)
        assert publish("x", "not seen by the other")
        may_commit.set()

    in_threads(publish_slowly, publish_meanwhile)
    assert QueuedEvent.objects.count() == 2
    assert publish("x", "now it is full") is None


@one_writer
def test_coalescing_skips_a_claimed_event_without_waiting(settings):
    limited(settings, 1, "coalesce")
    first = publish("tick", 1)
    claimed, may_commit = threading.Event(), threading.Event()

    def claim():
        store = store_for()
        registration = new_registration(WorkerOptions(using="default", queues=("default",)))
        store.register(registration)
        with transaction.atomic():
            (event,) = store.claim("default", limit=1, worker_id=registration.pk)
            claimed.set()
            assert may_commit.wait(30)
        return event

    def publish_meanwhile():
        assert claimed.wait(30)
        second = publish("tick", 2)
        may_commit.set()
        return second

    event, second = in_threads(claim, publish_meanwhile)
    assert (event.row_id, event.payload_json) == (first.pk, "1")
    assert second.pk != first.pk
    assert dict(QueuedEvent.objects.values_list("status", "payload")) == {
        "PROCESSING": 1,
        "PENDING": 2,
    }


@one_writer
@pytest.mark.parametrize("routed", [False, True], ids=["new", "in its lane"])
def test_an_open_coalescing_transaction_delays_only_its_own_key(settings, routed):
    """An open transaction holds the lock on the coalesced row until it ends."""
    settings.EVENTBUS = {"LIMITS": {"key:slow": {"max_size": 1, "overflow": "coalesce"}}}
    handled = handle_and_remember("tick", "tock")
    publish("tick", 1, key="slow")
    if routed:
        with transaction.atomic():
            store_for().route("default", 10)

    with while_another_transaction(lambda: publish("tick", 2, key="slow")):
        publish("tock", 3, key="slow")
        publish_many((("tick", n) for n in range(200)), key=lambda item: f"other:{item[1]}")
        publish_many(("tick", n) for n in range(10))
        drain()
        assert ("slow", 1) not in handled
        assert ("slow", 3) not in handled
        assert len(handled) == 210
    make_due()
    drain()
    assert handled[210:] == [("slow", 2), ("slow", 3)]


@one_writer
def test_a_locked_lane_does_not_delay_other_keys():
    """An operator's transaction holds the lock on the lane until it ends."""
    handled = handle_and_remember("tick")
    publish("tick", 1, key="slow")
    with transaction.atomic():
        store_for().route("default", 10)
    with while_another_transaction(lambda: lanes.release("slow")):
        publish("tick", 2, key="slow")
        publish_many((("tick", n) for n in range(200)), key=lambda item: f"other:{item[1]}")
        publish("tick", 3)
        drain()
        assert len(handled) == 201
    make_due()
    drain()
    assert handled[201:] == [("slow", 1), ("slow", 2)]


@one_writer
def test_a_long_backlog_behind_a_locked_event_does_not_delay_other_keys(settings, monkeypatch):
    """A router reads a window of new events at a time, and the backlog may fill several."""
    for module in (claiming, postgresql):
        monkeypatch.setattr(module, "ROUTE_CHUNK", 3)
    monkeypatch.setattr(postgresql, "ROUTED_AT_LEAST", 3)
    settings.EVENTBUS = {"LIMITS": {"key:slow": {"max_size": 1, "overflow": "coalesce"}}}
    handled = handle_and_remember("*")
    publish("tick", 1, key="slow")
    publish_many(((f"tock{n}", n) for n in range(2, 20)), key="slow")
    publish("tick", 0, key="other")
    with while_another_transaction(lambda: publish("tick", 1, key="slow")):
        drain(batch_size=2)
        assert handled == [("other", 0)]
    make_due()
    drain()
    assert handled[1:] == [("slow", n) for n in range(1, 20)]


@one_writer
def test_a_worker_soon_claims_an_event_that_was_locked(settings, store, worker_id):
    settings.EVENTBUS = {"LIMITS": {"key:slow": {"max_size": 1, "overflow": "coalesce"}}}
    publish("tick", 1, key="slow")
    with while_another_transaction(lambda: publish("tick", 2, key="slow")):
        assert store.claim("default", limit=10, worker_id=worker_id) == []
        assert store.next_due(["default"]) <= LOCKED_WAIT
    assert len(store.claim("default", limit=10, worker_id=worker_id)) == 1
    assert store.next_due(["default"]) is None


def handle_and_remember(*types):
    """The (key, payload) of the handled events, in order."""
    handled = []
    for each in types:
        handler(each, name=f"remember {each}")(
            lambda event: handled.append((event.key, event.payload))
        )
    return handled


@one_writer
def test_coalescing_skips_an_event_locked_by_another_publisher_without_waiting(settings):
    """Otherwise two publishers with two keys in opposite order would deadlock."""
    limited(settings, 1, "coalesce")
    for key in "ab":
        publish("tick", 0, key=key)
    both = threading.Barrier(2)

    def publish_both(first, second):
        with transaction.atomic():
            publish("tick", 1, key=first)
            both.wait(30)
            publish("tick", 2, key=second)
            both.wait(30)

    in_threads(lambda: publish_both("a", "b"), lambda: publish_both("b", "a"))
    rows = QueuedEvent.objects.order_by("id").values_list("key", "payload")
    assert sorted(rows) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_the_claimed_payload_is_logged_and_the_last_payload_is_delivered(settings):
    """Publishers coalesce as fast as they can while claimers claim as fast as they can."""
    limited(settings, 3, "coalesce")
    last, claimed, done = 150, {}, threading.Event()

    def publish_ticks():
        try:
            for number in range(1, last + 1):
                publish("tick", number)
        finally:
            done.set()

    def claim_ticks():
        store = store_for()
        registration = new_registration(WorkerOptions(using="default", queues=("default",)))
        store.register(registration)
        while not done.is_set() or QueuedEvent.objects.filter(status="PENDING").exists():
            events = store.claim("default", limit=2, worker_id=registration.pk)
            for event in events:
                claimed[event.row_id] = json.loads(event.payload_json)
            if events:
                with store.atomic():
                    store.settle(
                        events[0].claim.token, [Completed(event.row_id) for event in events]
                    )

    in_threads(publish_ticks, claim_ticks, claim_ticks)
    assert dict(EventLog.objects.values_list("id", "payload")) == claimed
    assert last in claimed.values()


def test_a_worker_makes_room_for_a_blocked_publisher(settings, start_worker):
    limited(settings, 5, "block", timeout=60)
    worker = start_worker(eventbus=PATIENT)
    worker.wait_until_registered()
    assert publish_many(("process.effect", number) for number in range(50)) == 50
    eventually(lambda: Effect.objects.count() == 50, lambda: worker.log)


@one_writer
def test_a_publisher_can_wait_inside_its_transaction(settings, start_worker):
    """Workers make room, and the publisher's own uncommitted events use it."""
    limited(settings, 2, "block", timeout=60)
    publish_many([("process.effect", 1), ("process.effect", 2)])
    worker = start_worker(eventbus=PATIENT)
    with transaction.atomic():
        publish("process.effect", 3)
        publish("process.effect", 4)
        settings.EVENTBUS = {
            "LIMITS": {"default": {"max_size": 2, "overflow": "block", "timeout": 0.05}}
        }
        with pytest.raises(BackpressureError):
            publish("process.effect", 5)
    eventually(lambda: Effect.objects.count() == 4, lambda: worker.log)
