"""Rivals for one key: the unique index lets the second wait for the first's fate."""

import threading
from datetime import timedelta

import pytest
from django.db import transaction
from django.utils import timezone

from django_eventbus import DuplicateEventError, handler, once_per, publish
from django_eventbus.models import EventLog, EventMark, QueuedEvent
from django_eventbus.store.marks import PUBLISHED
from tests.bus import drain
from tests.concurrency.test_limits import in_threads
from tests.publishers import Publishers
from tests.shop.models import Effect
from tests.workers import IN_ONE_PROCESS, eventually

pytestmark = pytest.mark.django_db(transaction=True)

WINDOW = {"dedup_key": "order:7", "dedup_for": timedelta(hours=1)}


def two_publishers(*, first_commits):
    """The second publishes while the first has not decided; what each of them got."""
    published = threading.Event()
    # SQLite's second waits where its transaction begins, before it can tell.
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
            # What was refused has not broken the transaction.
            publish("order.noticed", {})
        return event

    return in_threads(publish_first, publish_second)


def test_the_second_is_a_duplicate_if_the_first_commits():
    first, second = two_publishers(first_commits=True)
    assert second.event_id == first.event_id
    assert QueuedEvent.objects.get(type="order.placed").payload == "first"
    assert QueuedEvent.objects.filter(type="order.noticed").exists()


def test_the_second_takes_the_place_of_a_first_that_rolls_back():
    first, second = two_publishers(first_commits=False)
    assert second.event_id != first.event_id
    assert QueuedEvent.objects.get(type="order.placed").payload == "second"
    assert EventMark.objects.get(scope=PUBLISHED).event_id == second.event_id


@pytest.mark.parametrize("expired", [False, True], ids=["no window", "an expired window"])
def test_of_many_at_once_one_is_published(expired):
    """Also when all of them find a window that has just ended, as after a nightly run."""
    handler("order.placed", name="do")(lambda event: None)
    for turn in range(5):
        if expired:
            publish("order.placed", turn, **WINDOW)
            drain()
            past = timezone.now() - timedelta(hours=1)
            EventMark.objects.update(expires_at=past)
        EventLog.objects.all().delete()
        in_threads(*[lambda turn=turn: publish("order.placed", turn, **WINDOW)] * 6)
        assert QueuedEvent.objects.count() == 1
        drain()
        EventMark.objects.all().delete()


def test_of_many_at_once_all_but_one_may_be_told():
    def publish_or_say_so():
        try:
            with transaction.atomic():
                publish("order.placed", {}, on_duplicate="raise", **WINDOW)
        except DuplicateEventError:
            return "duplicate"
        return "published"

    answers = in_threads(*[publish_or_say_so] * 6)
    assert sorted(answers) == ["duplicate"] * 5 + ["published"]


def test_of_many_processes_at_once_one_publishes(tmp_path):
    keys = [f"order:{number}" for number in range(20)]
    with Publishers(tmp_path, 4, "order.placed", *keys) as publishers:
        said, codes = publishers.publish()
    assert codes == [0] * 4
    for answers in zip(*said, strict=True):
        assert sorted(answers) == ["duplicate"] * 3 + ["published"]
    assert sorted(QueuedEvent.objects.values_list("dedup_key", flat=True)) == sorted(keys)
    assert Effect.objects.count() == len(keys), "a loser's transaction is undone with it"


def test_two_workers_with_one_key_have_one_effect(start_worker):
    """Two events that mean the same, handled at the same time by two processes."""
    for number in range(30):
        publish("process.once", number)
        publish("process.once", number)
    workers = [start_worker(*IN_ONE_PROCESS, "--batch-size", "7") for _ in range(2)]

    def logs():
        return [worker.log for worker in workers]

    eventually(
        lambda: EventLog.objects.filter(status="COMPLETED").count() == 60, lambda: str(logs())
    )
    notes = Effect.objects.values_list("note", flat=True)
    assert sorted(notes, key=int) == [str(number) for number in range(30)]


def test_a_rival_that_fails_leaves_the_effect_to_the_other():
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
