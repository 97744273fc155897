"""Limits among rivals: how far they can be passed, and what a claim and a publisher may share."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, connections, transaction

from django_eventbus import BackpressureError, handler, publish, publish_many
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.store import Completed, store_for
from django_eventbus.worker import WorkerOptions, new_registration
from tests.bus import drain
from tests.publishers import Publishers
from tests.shop.models import Effect
from tests.workers import eventually

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


def test_publishers_pass_a_limit_by_no_more_than_they_are(settings):
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


def test_processes_that_publish_pass_a_limit_by_no_more_than_they_are(tmp_path, transactional_db):
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
def test_what_another_has_not_committed_is_not_counted(settings):
    """How a limit can be passed: by what is published and not yet committed elsewhere."""
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
def test_an_event_in_the_hands_of_a_claim_is_passed_over_without_waiting(settings):
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


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="claims that wait only briefly")
@pytest.mark.parametrize("routed", [False, True], ids=["new", "in its lane"])
def test_who_coalesces_holds_up_no_event_without_a_key(settings, routed):
    """Its transaction may be long, and has the row of an event until it ends."""
    limited(settings, 1, "coalesce")
    settings.EVENTBUS["LIMITS"] = {"key:slow": settings.EVENTBUS["LIMITS"]["default"]}
    handler("tick", name="h")(lambda event: Effect.objects.create(event_id=event.id, handler="h"))
    publish("tick", 1, key="slow")
    if routed:
        with transaction.atomic():
            store_for().route("default", 10)
    coalesced, may_commit = threading.Event(), threading.Event()

    def publish_slowly():
        with transaction.atomic():
            publish("tick", 2, key="slow")
            coalesced.set()
            assert may_commit.wait(60)

    def work_meanwhile():
        assert coalesced.wait(30)
        publish("tick", 3)
        try:
            drain()
            return list(EventLog.objects.values_list("payload", flat=True))
        finally:
            may_commit.set()

    _, handled = in_threads(publish_slowly, work_meanwhile)
    assert handled == [3]
    drain()
    assert set(EventLog.objects.values_list("payload", flat=True)) == {2, 3}


@one_writer
def test_an_event_that_another_publisher_is_changing_is_passed_over_without_waiting(settings):
    """Two publishers with two keys in opposite order would deadlock otherwise."""
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


def test_what_was_claimed_is_what_is_logged_and_the_last_word_is_delivered(settings):
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


def test_a_worker_makes_room_for_a_publisher_that_is_blocked(settings, start_worker):
    limited(settings, 5, "block", timeout=60)
    worker = start_worker()
    worker.wait_until_registered()
    assert publish_many(("process.effect", number) for number in range(50)) == 50
    eventually(lambda: Effect.objects.count() == 50, lambda: worker.log)


@one_writer
def test_a_publisher_may_be_blocked_inside_its_transaction(settings, start_worker):
    """Others make room; what it has published itself takes it."""
    limited(settings, 2, "block", timeout=60)
    publish_many([("process.effect", 1), ("process.effect", 2)])
    worker = start_worker()
    with transaction.atomic():
        publish("process.effect", 3)
        publish("process.effect", 4)
        settings.EVENTBUS = {
            "LIMITS": {"default": {"max_size": 2, "overflow": "block", "timeout": 0.05}}
        }
        with pytest.raises(BackpressureError):
            publish("process.effect", 5)
    eventually(lambda: Effect.objects.count() == 4, lambda: worker.log)
