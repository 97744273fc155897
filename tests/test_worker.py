"""The loop: claim, deliver, wait; and what it does when the database plays tricks."""

import gc
import itertools
import tracemalloc

import pytest
from django.db import OperationalError

from django_eventbus import handler, publish, publish_many, worker
from django_eventbus.deadlines import Board
from django_eventbus.models import EventLane, EventLog, EventWorker, QueuedEvent
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


def test_a_claim_ahead_that_loses_its_connection_begins_the_next_on_a_new_one(
    make_loop, monkeypatch, transactional_db
):
    loop = make_loop()

    def lose_the_connection():
        loop.store.connection.ensure_connection()
        raise OperationalError("connection lost")

    monkeypatch.setattr(loop, "claim", lose_the_connection)
    assert isinstance(loop._claimer.submit(loop._claim_there).exception(), OperationalError)
    kept = loop._claimer.submit(lambda: loop.store.connection.connection)
    assert kept.result() is None
    loop._stop_claiming()


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


@pytest.fixture
def fast_loop(make_loop, transactional_db):
    """A loop whose batches go fast, with more events than a batch waiting."""
    if not store_for().may_claim_ahead():
        pytest.skip("this database has one writer")
    loop = make_loop(batch_size=10)
    loop._batch_seconds = 0.0
    publish_many(("x", n) for n in range(30))
    yield loop
    if not loop.worker.stopping():
        loop._stop_claiming()


def test_the_next_batch_is_claimed_while_one_is_delivered(fast_loop):
    handler("x", name="h")(lambda event: None)
    fast_loop.deliver(fast_loop.claim())
    ahead = fast_loop.next_batch()
    assert [event.payload_json for event in ahead] == [f"{n}" for n in range(10, 20)]


def test_what_was_claimed_ahead_returns_uncharged_when_the_worker_stops(fast_loop):
    handler("x", name="h")(lambda event: fast_loop.worker.stop())
    fast_loop.run()
    assert EventLog.objects.count() == 1
    left = set(QueuedEvent.objects.values_list("status", "attempts", "crashes"))
    assert left == {("PENDING", 0, 0)}


@pytest.mark.parametrize(
    ("seconds", "size"), [(1.0, 100), (0.01, 5)], ids=["it is slow", "it is not full"]
)
def test_nothing_is_held_ahead_of_a_batch_if(make_loop, transactional_db, seconds, size):
    publish("x", {})
    loop = make_loop(batch_size=100)
    loop._batch, loop._batch_seconds = 100, seconds
    loop.claim_ahead(size)
    assert loop._next is None


def test_a_claim_ahead_that_fails_is_made_again(fast_loop, monkeypatch):
    handler("x", name="h")(lambda event: None)
    claim, answers = type(fast_loop.store).claim, [None, OperationalError("connection lost")]

    def claim_and_lose_the_second_answer(self, *args, **kwargs):
        claimed = claim(self, *args, **kwargs)
        if answers and (error := answers.pop(0)):
            raise error
        return claimed

    monkeypatch.setattr(type(fast_loop.store), "claim", claim_and_lose_the_second_answer)
    fast_loop.deliver(fast_loop.claim())
    with pytest.raises(OperationalError):
        fast_loop.next_batch()
    again = fast_loop.next_batch()
    assert {event.attempts for event in again} == {1}


def test_who_rings_without_end_does_not_make_a_worker_look_without_end(make_loop, monkeypatch):
    """S16: any role of the database may NOTIFY any channel."""
    pauses = []
    monkeypatch.setattr(worker.time, "sleep", pauses.append)
    loop = make_loop()
    for _ in range(worker.FALSE_ALARMS + 10):
        loop.news.tell()
        loop.wait()
    assert pauses == [worker.FALSE_ALARM_PAUSE] * 10
    handler("x", name="h")(lambda event: None)
    publish("x", {})
    loop.deliver(loop.claim())
    loop.news.tell()
    loop.wait()
    assert len(pauses) == 10, "an alarm that was true is forgiven"


def test_news_from_before_a_look_are_not_heard_after_it():
    news = News()
    news.tell()
    news.tell()
    news.forget()
    news.wait(0.001)
    assert news._bell.empty()


def test_the_board_shows_what_runs_and_what_was_done():
    board = Board.local(2)
    write, clear = board.slot(1)
    write(7, 12.5, b"shop.ship")
    board.count(handled=3, failed=1, dead=0)
    board.count(handled=1, failed=0, dead=1)
    assert board.running() == [(7, 12.5, "shop.ship")]
    assert board.counted() == (4, 1, 1)
    clear(0)
    assert board.running() == []


def test_an_event_that_waits_for_its_retry_is_not_counted_as_handled():
    @handler("x", name="h")
    def sometimes(event):
        if event.payload == 1:
            raise ValueError

    publish_many(("x", n) for n in range(3))
    tally = drain()
    assert (tally.handled, tally.failed, tally.dead) == (2, 1, 0)


def test_a_claim_that_nobody_here_knows_of_is_given_back(make_loop, worker_id):
    """A standby took over that missed our settlements: its rows are claimed by us, for ever."""
    publish_many(("x", n) for n in range(2))
    publish("x", {}, key="k")
    lost = store_for().claim("default", limit=3, worker_id=worker_id)
    publish("x", {})
    loop = make_loop()
    known = loop.claim()
    loop.upkeep()
    rows = dict(QueuedEvent.objects.values_list("id", "status"))
    assert {rows[event.row_id] for event in lost} == {"PENDING"}
    assert {rows[event.row_id] for event in known} == {"PROCESSING"}
    assert set(QueuedEvent.objects.filter(status="PENDING").values_list("attempts", "crashes")) == {
        (0, 0)
    }
    assert not EventLane.objects.exclude(claim_token=None).exists()


def test_forgotten_claims_are_sought_only_after_a_new_connection(make_loop, monkeypatch, settings):
    """It is a look at the whole queue."""
    settings.EVENTBUS = {"ABANDON_AFTER": 0.001}
    monkeypatch.setattr(worker, "RECOVER_EVERY", 0.0)
    loop, looks = make_loop(), []
    loop.store.claims_of = lambda worker_id: looks.append(worker_id) or set()
    loop.upkeep()
    loop.upkeep()
    assert len(looks) == 1
    loop._session = object()
    loop.upkeep()
    assert len(looks) == 2


@pytest.mark.costly
def test_m22_the_memory_of_a_worker_does_not_grow_with_what_it_has_done(transactional_db):
    """By Python's own books: what is left after a batch, in the second third and in the last."""
    events, done, left = 900, itertools.count(), []

    @handler("x", name="h")
    def look_now_and_then(event):
        if next(done) % 30 == 0:
            gc.collect()
            left.append(tracemalloc.get_traced_memory()[0])

    def key(item):
        number = item[1]["n"]
        return None if number % 10 else str(number)

    publish_many((("x", {"n": n, "text": "x" * 500}) for n in range(events)), key=key)
    tracemalloc.start()
    try:
        drain(batch_size=30)
    finally:
        tracemalloc.stop()
    third = len(left) // 3
    assert third == 10
    a_leak_of_200_bytes = 200 * events // 3
    assert min(left[-third:]) - min(left[third:-third]) < a_leak_of_200_bytes
