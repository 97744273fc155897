"""Several threads of one process: the dispatcher hands out batches and collects results."""

import threading

import pytest
from django.db import OperationalError

from django_eventbus import handler, publish, publish_many
from django_eventbus.delivery.deliverer import Deliverer
from django_eventbus.models import EventLog, EventWorker, QueuedEvent
from django_eventbus.worker import threads
from django_eventbus.worker.claiming import ClaimedBatch
from django_eventbus.worker.registration import WorkerOptions
from django_eventbus.worker.threads import Delivered, Delivery, ThreadPool
from django_eventbus.worker.worker import Worker, run_here
from tests.bus import drain
from tests.threads import in_thread
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

MANY = 60


@pytest.fixture
def pool(worker_id):
    options = WorkerOptions(using="default", queues=("default",), concurrency=3)
    made = ThreadPool(Worker(options, worker_id))
    yield made
    made.end()


@pytest.fixture
def deliveries(monkeypatch):
    """Record (thread, batch) instead of delivering; a batch ends when the test releases it."""
    seen, go_on = [], threading.Semaphore(0)

    def deliver(self, batch):
        seen.append((threading.current_thread(), batch))
        go_on.acquire()
        return Delivered(batch=batch)

    monkeypatch.setattr(Delivery, "deliver", deliver)
    return seen, go_on


def finished(pool):
    return eventually(lambda: list(pool.finished()))


def test_a_thread_is_started_only_if_no_thread_is_idle(pool, deliveries):
    seen, go_on = deliveries
    batches = [ClaimedBatch([], n) for n in range(3)]
    assert (pool.idle, pool.busy) == (3, False)
    pool.hand(batches[0])
    pool.hand(batches[1])
    assert (pool.idle, pool.busy) == (1, True)
    eventually(lambda: len(seen) == 2)
    go_on.release(2)
    while pool.busy:
        (last,) = finished(pool)[-1:]
    pool.hand(batches[2])
    eventually(lambda: len(seen) == 3)
    assert pool.idle == 2
    by_batch = {id(batch): thread for thread, batch in seen}
    assert by_batch[id(batches[2])] is by_batch[id(last.batch)]
    go_on.release()


def test_a_thread_without_work_becomes_idle_once(pool, deliveries, monkeypatch):
    rested = []
    monkeypatch.setattr(Delivery, "rest", lambda self: rested.append(self.watch))
    seen, go_on = deliveries
    pool.hand(ClaimedBatch([], 1))
    go_on.release()
    finished(pool)
    pool.keep_up()
    monkeypatch.setattr(threads, "REST_AFTER", -1.0)
    pool.keep_up()
    pool.keep_up()
    pool.hand(ClaimedBatch([], 1))
    go_on.release()
    finished(pool)
    assert len(seen) == 2
    assert len(rested) == 1


def test_all_events_are_handled_once(transactional_db):
    handler("x", name="h")(lambda event: None)
    publish_many((("x", n) for n in range(MANY)), key=lambda item: str(item[1] % 5))
    publish_many(("x", n) for n in range(MANY))
    tally = drain(concurrency=4, batch_size=5)
    assert tally.handled == EventLog.objects.count() == 2 * MANY
    assert set(EventLog.objects.values_list("attempts", "crashes")) == {(1, 0)}
    assert not QueuedEvent.objects.exists()


def test_events_published_by_handlers_are_drained():
    @handler("x", name="h")
    def publish_the_next(event):
        if event.payload:
            publish("x", event.payload - 1)

    publish("x", 5)
    assert drain(concurrency=3).handled == 6


def test_unstarted_events_are_released_uncharged_when_the_worker_stops():
    workers, go_on, running = [], threading.Event(), threading.Semaphore(0)

    @handler("x", name="h", atomic=False, timeout=600)
    def wait_for_the_test(event):
        running.release()
        go_on.wait()

    publish_many(("x", n) for n in range(MANY))
    options = WorkerOptions(using="default", queues=("default",), concurrency=2)
    with in_thread(run_here, options, workers.append):
        for _ in range(2):
            running.acquire()
        workers[0].stop()
        go_on.set()
    assert EventLog.objects.count() == 2
    left = QueuedEvent.objects.values_list("status", "attempts", "crashes").distinct()
    assert list(left) == [("PENDING", 0, 0)]
    assert QueuedEvent.objects.count() == MANY - 2
    assert not EventWorker.objects.exists()


def test_a_batch_whose_thread_lost_the_database_is_released_uncharged(monkeypatch):
    handler("x", name="h")(lambda event: None)
    deliver, losses = Deliverer.deliver, [OperationalError("connection lost")]

    def lose_the_first(self, events):
        if losses:
            raise losses.pop()
        return deliver(self, events)

    monkeypatch.setattr(Deliverer, "deliver", lose_the_first)
    publish_many(("x", n) for n in range(10))
    drain(concurrency=2)
    assert EventLog.objects.count() == 10
    assert set(EventLog.objects.values_list("attempts", "interruptions")) == {(1, 0)}


def test_a_batch_that_fails_as_a_whole_is_run_again(monkeypatch):
    handler("x", name="h")(lambda event: None)
    deliver, errors = Deliverer.deliver, [ValueError("a bug")]

    def fail_first(self, events):
        if errors:
            raise errors.pop()
        return deliver(self, events)

    monkeypatch.setattr(Deliverer, "deliver", fail_first)
    publish_many(("x", n) for n in range(10))
    drain(concurrency=2)
    assert EventLog.objects.filter(status="COMPLETED").count() == 10


def test_an_error_that_ends_a_thread_ends_the_worker(monkeypatch):
    def leave(self, batch):
        raise SystemExit("as no handler could")

    monkeypatch.setattr(Delivery, "deliver", leave)
    publish("x", 1)
    with pytest.raises(SystemExit, match="as no handler could"):
        drain(concurrency=2)
    assert QueuedEvent.objects.get().attempts == 0
    assert not EventWorker.objects.exists()
