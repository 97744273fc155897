"""The loop: claim, deliver, wait; and what it does when the database plays tricks."""

import pytest
from django.db import OperationalError

from django_eventbus import handler, publish, publish_many
from django_eventbus.deadlines import Board
from django_eventbus.models import EventLog, EventWorker, QueuedEvent
from django_eventbus.store import store_for
from django_eventbus.worker import News, Worker, WorkerLoop, WorkerOptions
from tests.bus import drain

pytestmark = pytest.mark.django_db


@pytest.fixture
def make_loop(worker_id):
    def make(**options):
        chosen = {"using": "default", "queues": ("default",), "batch_size": 100} | options
        worker = Worker(WorkerOptions(**chosen), worker_id)
        worker._news = [News()]
        return WorkerLoop(worker, 0)

    return make


def test_a_claim_whose_answer_was_lost_is_taken_back(monkeypatch, transactional_db):
    """The claim was committed, but nobody heard: its events must not wait for the worker's end."""
    handler("x", name="h")(lambda event: None)
    publish_many(("x", n) for n in range(3))
    store = type(store_for())
    claim, answers = store.claim, [OperationalError("connection lost")]

    def claim_and_lose_the_answer(self, *args, **kwargs):
        claimed = claim(self, *args, **kwargs)
        if answers:
            raise answers.pop()
        return claimed

    monkeypatch.setattr(store, "claim", claim_and_lose_the_answer)
    drain()
    assert EventLog.objects.count() == 3
    assert set(EventLog.objects.values_list("attempts", "crashes")) == {(1, 0)}


def test_a_worker_that_leaves_something_behind_gives_it_back(monkeypatch, transactional_db):
    publish("x", {})
    handler("x", name="h")(lambda event: None)

    def forget(self, events):
        self.worker.stop()

    monkeypatch.setattr(WorkerLoop, "deliver", forget)
    drain()
    row = QueuedEvent.objects.get()
    assert (row.status, row.attempts, row.errors) == ("PENDING", 0, None)
    assert not EventWorker.objects.exists()


def test_queues_take_turns(make_loop, settings):
    settings.EVENTBUS = {"QUEUES": ["a", "b"], "QUEUE": "a"}
    for queue in ("a", "b"):
        publish_many((("x", n) for n in range(4)), queue=queue)
    loop = make_loop(queues=("a", "b"), batch_size=2)
    turns = [loop.claim()[0].claim.queue for _ in range(4)]
    assert sorted(turns[:2]) == sorted(turns[2:]) == ["a", "b"]


def test_fast_batches_grow_up_to_the_limit_and_slow_ones_shrink(make_loop):
    loop = make_loop(batch_size=100)
    for _ in range(10):
        loop._fit_batch(loop._batch, 0.01)
    assert loop._batch == 100
    loop._fit_batch(100, 50.0)
    assert loop._batch == 2
    loop._fit_batch(2, 60.0)
    assert loop._batch == 1


def test_a_batch_that_was_not_full_says_nothing_about_a_larger_one(make_loop):
    loop = make_loop()
    before = loop._batch
    loop._fit_batch(1, 0.001)
    assert loop._batch == before


def test_news_from_before_a_look_are_not_heard_after_it():
    news = News()
    news.tell()
    news.tell()
    news.forget()
    news.wait(0.001)
    assert news._bell.empty()


def test_the_board_shows_what_runs_and_what_was_done():
    board = Board.local(2)
    board.write(1, 7, 12.5, b"shop.ship")
    board.count(handled=3, failed=1, dead=0)
    board.count(handled=1, failed=0, dead=1)
    assert board.running() == [(7, 12.5, "shop.ship")]
    assert board.counted() == (4, 1, 1)
    board.clear(1)
    assert board.running() == []


def test_an_event_that_waits_for_its_retry_is_not_counted_as_handled():
    @handler("x", name="h")
    def sometimes(event):
        if event.payload == 1:
            raise ValueError

    publish_many(("x", n) for n in range(3))
    tally = drain()
    assert (tally.handled, tally.failed, tally.dead) == (2, 1, 0)
