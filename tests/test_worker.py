"""The dispatcher: claim, hand out, wait, and recover from database errors."""

import asyncio
import gc
import itertools
import tracemalloc
import uuid
from concurrent.futures import Future
from statistics import median

import pytest
from django.db import OperationalError

from django_eventbus import handler, pauses, publish, publish_many
from django_eventbus.delivery.deadlines import Board
from django_eventbus.models import EventLane, EventLog, EventWorker, FlowControl, QueuedEvent
from django_eventbus.store import store_for
from django_eventbus.worker import claiming, upkeep, wakeup
from django_eventbus.worker.claiming import ClaimedBatch, Pace
from django_eventbus.worker.dispatcher import Dispatcher
from django_eventbus.worker.registration import WorkerOptions
from django_eventbus.worker.threads import Delivered, Delivery
from django_eventbus.worker.wakeup import Bell
from django_eventbus.worker.worker import Worker, run_here
from tests.bus import drain

pytestmark = pytest.mark.django_db


@pytest.fixture
def make_dispatcher(worker_id):
    made = []

    def make(**options):
        chosen = {"using": "default", "queues": ("default",), "batch_size": 100} | options
        made.append(dispatcher := Dispatcher(Worker(WorkerOptions(**chosen), worker_id)))
        return dispatcher

    yield make
    for dispatcher in made:
        if not dispatcher.worker.stopping():
            dispatcher._end()


def claim(dispatcher, limit=100):
    dispatcher.claims.expect_events()
    return dispatcher.claims.claim(limit)


def test_a_claim_whose_answer_was_lost_is_released(monkeypatch, transactional_db):
    """The claim was committed without an answer: its events must not wait for the worker's end."""
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


def test_a_claim_ahead_that_loses_its_connection_opens_a_new_one(
    make_dispatcher, monkeypatch, transactional_db
):
    dispatcher = make_dispatcher()
    helper, store = dispatcher.threads.executor, dispatcher.store

    def lose_the_connection(limit):
        store.connection.ensure_connection()
        raise OperationalError("connection lost")

    monkeypatch.setattr(dispatcher.claims, "claim", lose_the_connection)
    dispatcher.ahead.start(10)
    with pytest.raises(OperationalError):
        dispatcher.ahead.take()
    kept = helper.submit(lambda: store.connection.connection)
    assert kept.result() is None


def test_a_stopping_worker_releases_its_unhandled_events(monkeypatch, transactional_db):
    publish("x", {})
    handler("x", name="h")(lambda event: None)

    def forget(self, batch):
        self.deliverer.stopping.__self__.stop()
        return Delivered(batch=batch)

    monkeypatch.setattr(Delivery, "deliver", forget)
    drain()
    row = QueuedEvent.objects.get()
    assert (row.status, row.attempts, row.errors) == ("PENDING", 0, None)
    assert not EventWorker.objects.exists()


def test_queues_take_turns(make_dispatcher, settings):
    settings.EVENTBUS = {"QUEUES": ["a", "b"], "QUEUE": "a"}
    for queue in ("a", "b"):
        publish_many((("x", n) for n in range(4)), queue=queue)
    dispatcher = make_dispatcher(queues=("a", "b"))
    turns = [claim(dispatcher, 2).events[0].claim.queue for _ in range(4)]
    assert sorted(turns[:2]) == sorted(turns[2:]) == ["a", "b"]


def fit(pace, delivered, seconds):
    pace.fit(ClaimedBatch([], pace.size), delivered, seconds)


def test_fast_batches_grow_up_to_the_limit_and_slow_ones_shrink():
    pace = Pace(100)
    for _ in range(10):
        fit(pace, pace.size, 0.01)
    assert pace.size == 100
    fit(pace, 100, 50.0)
    assert pace.size == 2
    fit(pace, 2, 60.0)
    assert pace.size == 1


def test_a_batch_that_was_not_full_does_not_change_the_batch_size():
    pace = Pace(100)
    before = pace.size
    fit(pace, 1, 0.001)
    assert pace.size == before


@pytest.mark.parametrize(("threads", "share"), [(1, 20), (3, 7), (20, 1), (50, 1)])
def test_the_size_of_a_batch_is_divided_among_idle_threads(threads, share):
    assert Pace(100).share(threads) == share


@pytest.fixture
def fast_dispatcher(make_dispatcher, transactional_db):
    """A dispatcher with fast batches, and more waiting events than one batch."""
    if not store_for().may_claim_ahead():
        pytest.skip("this database has one writer")
    dispatcher = make_dispatcher(batch_size=10)
    dispatcher.pace.seconds = 0.0
    publish_many(("x", n) for n in range(30))
    return dispatcher


def test_the_next_batch_is_claimed_while_one_is_delivered(fast_dispatcher):
    handler("x", name="h")(lambda event: None)
    assert fast_dispatcher.hand_out()
    ahead = fast_dispatcher.ahead.take()
    assert [event.payload_json for event in ahead.events] == [f"{n}" for n in range(10, 20)]


def test_events_claimed_ahead_are_released_uncharged_when_the_worker_stops(fast_dispatcher):
    handler("x", name="h")(lambda event: fast_dispatcher.worker.stop())
    fast_dispatcher.run()
    assert EventLog.objects.count() == 1
    left = set(QueuedEvent.objects.values_list("status", "attempts", "crashes"))
    assert left == {("PENDING", 0, 0)}


@pytest.mark.parametrize(
    ("seconds", "size"), [(1.0, 100), (0.01, 5)], ids=["it is slow", "it is not full"]
)
def test_no_batch_is_claimed_ahead_if(make_dispatcher, transactional_db, seconds, size):
    handler("x", name="h")(lambda event: None)
    publish_many(("x", n) for n in range(size))
    dispatcher = make_dispatcher(batch_size=100)
    dispatcher.pace.size, dispatcher.pace.seconds = 100, seconds
    assert dispatcher.hand_out()
    assert dispatcher.ahead.take() is None
    assert not QueuedEvent.objects.exists()


def test_a_claim_ahead_that_fails_is_made_again(fast_dispatcher, monkeypatch):
    handler("x", name="h")(lambda event: None)
    store = type(fast_dispatcher.store)
    claim, answers = store.claim, [None, OperationalError("connection lost")]

    def claim_and_lose_the_second_answer(self, *args, **kwargs):
        claimed = claim(self, *args, **kwargs)
        if answers and (error := answers.pop(0)):
            raise error
        return claimed

    monkeypatch.setattr(store, "claim", claim_and_lose_the_second_answer)
    assert fast_dispatcher.hand_out()
    with pytest.raises(OperationalError):
        fast_dispatcher.hand_out()
    again = fast_dispatcher.claim(10)
    assert {event.attempts for event in again.events} == {1}
    assert not QueuedEvent.objects.exclude(attempts__in=(0, 1)).exists()


def test_spurious_notifications_are_rate_limited(make_dispatcher, monkeypatch):
    """S16: any role of the database may NOTIFY any channel."""
    pauses = []
    monkeypatch.setattr(wakeup.time, "sleep", pauses.append)
    dispatcher = make_dispatcher()
    assert not dispatcher.hand_out()

    def ring_and_wait():
        dispatcher.bell.ring(new_events=True)
        dispatcher.wait()
        dispatcher.bell.take_rings()

    for _ in range(wakeup.FALSE_ALARMS + 10):
        ring_and_wait()
    assert pauses == [wakeup.FALSE_ALARM_PAUSE] * 10
    handler("x", name="h")(lambda event: None)
    publish("x", {})
    dispatcher.claims.expect_events()
    assert dispatcher.hand_out()
    dispatcher.collect()
    ring_and_wait()
    assert len(pauses) == 10, "a justified wake-up is not counted"


def test_the_ring_of_a_signal_that_upkeep_took_ends_the_wait(make_dispatcher, monkeypatch):
    dispatcher, waits = make_dispatcher(poll_interval=60), []
    monkeypatch.setattr(dispatcher.bell, "wait", waits.append)
    keep_up = dispatcher.upkeep.keep_up

    def be_signalled():
        """The signal arrives after the loop has looked for it, and before the ring is taken."""
        dispatcher.worker.stop()
        dispatcher.bell.take_rings()
        keep_up()

    monkeypatch.setattr(dispatcher.upkeep, "keep_up", be_signalled)
    dispatcher._work()
    assert waits == []


def test_a_worker_claims_the_held_events_that_its_upkeep_has_released(make_dispatcher):
    handler("x", name="h")(lambda event: None)
    pauses.pause(handler="h")
    pauses.resume(handler="h")
    publish("x", 1)
    dispatcher = make_dispatcher()
    dispatcher.upkeep.check()
    QueuedEvent.objects.update(held_by=FlowControl.objects.get().pk)
    dispatcher.claims.ready.clear()
    dispatcher.worker.flow_controls.read_again()
    dispatcher.upkeep.check()
    assert QueuedEvent.objects.get().held_by is None
    assert dispatcher.claims.are_possible()
    assert not dispatcher.upkeep.is_current, "its answer is older than the release"


def test_a_wake_up_before_a_claim_does_not_end_the_wait_after_it():
    bell = Bell()
    bell.ring(new_events=True)
    bell.ring()
    assert bell.take_rings()
    assert not bell.wait(0.001)
    assert not bell.take_rings()


def test_the_board_shows_running_and_completed_events():
    board = Board.local(2)
    write, clear = board.slot(1)
    write(7, 12.5, b"shop.ship", 7)
    board.count(handled=3, failed=1, dead=0)
    board.count(handled=1, failed=0, dead=1)
    assert board.running() == [(7, 12.5, "shop.ship")]
    assert board.counted() == (4, 1, 1)
    clear(0)
    assert board.running() == []


def test_a_slot_that_was_written_in_part_shows_no_handler():
    """A process can be stopped or killed at any byte. Its event must not be charged."""
    complete = bytearray(Board.size(1))
    running = (2**40 + 7, 12.5, "shop.ship")
    write, _clear = Board(complete).slot(0)
    write(2**40 + 7, 12.5, b"shop.ship", 2**40 + 7)
    assert Board(complete).running() == [running]
    for written in range(len(complete)):
        partly = complete[:written] + bytes(len(complete) - written)
        assert Board(partly).running() in ([], [running]), written


def test_an_event_that_waits_for_its_retry_is_not_counted_as_handled():
    @handler("x", name="h")
    def sometimes(event):
        if event.payload == 1:
            raise ValueError

    publish_many(("x", n) for n in range(3))
    tally = drain()
    assert (tally.handled, tally.failed, tally.dead) == (2, 1, 0)


def test_a_claim_that_the_worker_does_not_know_is_released(make_dispatcher, worker_id):
    """A standby without our settlements took over: its rows would stay claimed by us for ever."""
    publish_many(("x", n) for n in range(2))
    publish("x", {}, key="k")
    lost = store_for().claim("default", limit=3, worker_id=worker_id)
    publish("x", {})
    dispatcher = make_dispatcher()
    known = claim(dispatcher).events
    dispatcher.keep_up()
    rows = dict(QueuedEvent.objects.values_list("id", "status"))
    assert {rows[event.row_id] for event in lost} == {"PENDING"}
    assert {rows[event.row_id] for event in known} == {"PROCESSING"}
    assert set(QueuedEvent.objects.filter(status="PENDING").values_list("attempts", "crashes")) == {
        (0, 0)
    }
    assert not EventLane.objects.exclude(claim_token=None).exists()


def test_unknown_claims_are_searched_only_after_a_new_connection(
    make_dispatcher, monkeypatch, settings
):
    """The search reads the whole queue."""
    settings.EVENTBUS = {"ABANDON_AFTER": 0.001}
    monkeypatch.setattr(upkeep, "RECOVER_EVERY", 0.0)
    dispatcher, looks = make_dispatcher(), []
    dispatcher.store.claims_of = lambda worker_id: looks.append(worker_id) or set()
    dispatcher.upkeep.check()
    dispatcher.upkeep.check()
    assert len(looks) == 1
    dispatcher.upkeep._session = object()
    dispatcher.upkeep.check()
    assert len(looks) == 2


@pytest.mark.costly
def test_m22_the_memory_of_a_worker_does_not_grow_with_the_events_it_handled(transactional_db):
    """The memory that Python has traced after each batch. One larger step is not a leak."""
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
    assert len(left) == 30
    growth = median(after - before for before, after in itertools.pairwise(left[10:]))
    assert growth < 200 * 30, "200 bytes per event"


def test_the_supervisor_sees_which_async_handler_is_running(transactional_db):
    """It needs the row and the handler to charge the right event when it kills the process."""
    workers, seen = [], []

    @handler("x", name="h", timeout=60)
    async def look_at_the_board(event):
        while not (running := workers[0].board.running()):
            await asyncio.sleep(0.01)
        seen.extend((row_id, name) for row_id, _, name in running)

    event = publish("x", {})
    options = WorkerOptions(using="default", queues=("default",), drain=True)
    run_here(options, on_start=workers.append)
    assert seen == [(event.pk, "h")]


class Queue:
    """An executor that runs a submitted function only when ``run_next`` is called."""

    def __init__(self):
        self.waiting = []

    def submit(self, action, *args):
        future = Future()
        self.waiting.append((future, action, args))
        return future

    def run_next(self):
        future, action, args = self.waiting.pop(0)
        future.set_result(action(*args))


def test_the_release_of_an_old_batch_does_not_release_a_later_claim(make_dispatcher, monkeypatch):
    """The later claim waits in the same queue: the release would wait for it for ever."""
    monkeypatch.setattr(claiming, "HOLD_SECONDS", -1.0)
    publish_many(("x", n) for n in range(4))
    errands = Queue()
    ahead = claiming.ClaimAhead(make_dispatcher().claims, errands)
    ahead.start(2)
    errands.run_next()
    ahead.release_if_old()
    first = ahead.take()
    ahead.start(2)
    errands.run_next()  # This runs the release while the second claim is still queued.
    errands.run_next()
    second = ahead.take()
    assert [len(batch.events) for batch in (first, second)] == [2, 2]


def test_a_claim_in_doubt_is_released_again_although_the_worker_is_idle(make_dispatcher):
    publish("x", {})
    dispatcher = make_dispatcher()
    claims = dispatcher.claims
    batch = claim(dispatcher)
    claims._in_doubt[batch.token] = 1.0
    claims._in_doubt[uuid.uuid4()] = claiming.AT_ONCE
    claims.release_late()
    assert QueuedEvent.objects.get().status == "PENDING"
    assert list(claims._in_doubt.values()) == [claiming.AT_ONCE]
