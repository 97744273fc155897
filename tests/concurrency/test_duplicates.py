"""Concurrent publishers of one key: the unique index makes the second wait for the first."""

import threading
from datetime import timedelta

import pytest
from django.db import transaction
from django.utils import timezone

from django_eventbus import DuplicateEventError, handler, once_per, publish
from django_eventbus.models import EventLog, IdempotencyKey, QueuedEvent
from django_eventbus.store.idempotency_keys import PUBLISHED
from tests.bus import drain
from tests.concurrency.test_limits import in_threads
from tests.publishers import Publishers
from tests.shop.models import Effect
from tests.workers import IN_ONE_PROCESS, PATIENT, eventually

pytestmark = pytest.mark.django_db(transaction=True)

WINDOW = {"dedup_key": "order:7", "dedup_for": timedelta(hours=1)}


def two_publishers(*, first_commits):
    """Publish the second event while the first transaction is open; return both results."""
    published = threading.Event()
    # Set before BEGIN, because on SQLite the second transaction already waits there.
    second_tries = threading.Event()

    def publish_first():
        with transaction.atomic():
            event = publish("order.placed", "first", **WINDOW)
            published.set()
            assert second_tries.wait(30)
            transaction.set_rollback(not first_commits)
        return event

    def publish_second():
        assert published.wait(30)
        second_tries.set()
        with transaction.atomic():
            event = publish("order.placed", "second", **WINDOW)
            # The refused event must leave the transaction usable.
            publish("order.noticed", {})
        return event

    return in_threads(publish_first, publish_second)


def test_the_second_publisher_gets_a_duplicate_if_the_first_commits():
    first, second = two_publishers(first_commits=True)
    assert second.event_id == first.event_id
    assert QueuedEvent.objects.get(type="order.placed").payload == "first"
    assert QueuedEvent.objects.filter(type="order.noticed").exists()


def test_the_second_publisher_succeeds_if_the_first_rolls_back():
    first, second = two_publishers(first_commits=False)
    assert second.event_id != first.event_id
    assert QueuedEvent.objects.get(type="order.placed").payload == "second"
    assert IdempotencyKey.objects.get(scope=PUBLISHED).event_id == second.event_id


@pytest.mark.parametrize("expired", [False, True], ids=["no window", "an expired window"])
def test_concurrent_publishers_of_one_key_publish_one_event(expired):
    """This includes publishers that all find an expired window, as after a nightly run."""
    handler("order.placed", name="do")(lambda event: None)
    for turn in range(5):
        if expired:
            publish("order.placed", turn, **WINDOW)
            drain()
            past = timezone.now() - timedelta(hours=1)
            IdempotencyKey.objects.update(expires_at=past)
        EventLog.objects.all().delete()
        in_threads(*[lambda turn=turn: publish("order.placed", turn, **WINDOW)] * 6)
        assert QueuedEvent.objects.count() == 1
        drain()
        IdempotencyKey.objects.all().delete()


def test_all_but_one_of_the_concurrent_publishers_get_an_error():
    def publish_or_say_so():
        try:
            with transaction.atomic():
                publish("order.placed", {}, on_duplicate="raise", **WINDOW)
        except DuplicateEventError:
            return "duplicate"
        return "published"

    answers = in_threads(*[publish_or_say_so] * 6)
    assert sorted(answers) == ["duplicate"] * 5 + ["published"]


@pytest.mark.processes
def test_concurrent_processes_with_one_key_publish_one_event(tmp_path):
    keys = [f"order:{number}" for number in range(20)]
    with Publishers(tmp_path, 4, "order.placed", *keys) as publishers:
        said, codes = publishers.publish()
    assert codes == [0] * 4
    for answers in zip(*said, strict=True):
        assert sorted(answers) == ["duplicate"] * 3 + ["published"]
    assert sorted(QueuedEvent.objects.values_list("dedup_key", flat=True)) == sorted(keys)
    assert Effect.objects.count() == len(keys), "the transaction of a duplicate is rolled back"


def test_two_workers_with_one_key_have_one_effect(start_worker):
    """Two processes handle two events with the same key at the same time."""
    for number in range(30):
        publish("process.once", number)
        publish("process.once", number)
    workers = [
        start_worker(*IN_ONE_PROCESS, "--batch-size", "7", eventbus=PATIENT) for _ in range(2)
    ]

    def logs():
        return [worker.log for worker in workers]

    eventually(
        lambda: EventLog.objects.filter(status="COMPLETED").count() == 60, lambda: str(logs())
    )
    notes = Effect.objects.values_list("note", flat=True)
    assert sorted(notes, key=int) == [str(number) for number in range(30)]


def test_the_other_worker_makes_the_effect_if_the_first_fails():
    calls = []

    @handler("payment", name="book")
    @once_per("payload.payment_id")
    def book(event):
        calls.append(event.id)
        if len(calls) == 1:
            raise ValueError("the first time")
        Effect.objects.create(event_id=event.id, handler="book")

    publish("payment", {"payment_id": 7})
    publish("payment", {"payment_id": 7})
    drain()
    assert Effect.objects.count() == 1
