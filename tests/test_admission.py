"""Limits on running, in one process. Many processes: concurrency/test_flow_controls.py."""

import asyncio
import threading

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import handler, pauses, publish, publish_many, subscribe
from django_eventbus.delivery.returning import Returner
from django_eventbus.models import EventLog, EventWorker, FlowControl, QueuedEvent
from django_eventbus.store import store_for
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.bus import drain

pytestmark = pytest.mark.django_db


@pytest.fixture
def ran():
    return []


def refill(tokens):
    """Set the number of tokens, as if time had passed."""
    now = store_for().read_clock()
    FlowControl.objects.update(tokens=tokens, tokens_at=now)


def another_worker_holds_a_slot(name="h"):
    store = store_for()
    registration = new_registration(WorkerOptions(using="default", queues=("default",)))
    store.register(registration)
    store.make_flow_controls("handler", [name])
    FlowControl.objects.filter(name=name).update(running={f"{registration.pk}/0": 1})


def test_a_rate_limits_the_calls_and_holds_the_other_events(ran):
    handler("x", name="h", rate="60/h")(lambda event: ran.append(event.payload))
    publish_many(("x", n) for n in range(10))
    drain()
    assert ran == [0]
    assert (
        QueuedEvent.objects.filter(attempts=0, deliveries__isnull=True, status="PENDING").count()
        == 9
    )
    refill(1.0)
    drain()
    assert len(ran) == 2


def test_a_rate_limits_only_its_own_handler(ran):
    handler("x", name="slow", rate="60/h")(lambda event: ran.append("slow"))
    handler("x", name="fast")(lambda event: ran.append("fast"))
    publish_many(("x", n) for n in range(5))
    drain()
    assert sorted(ran) == ["fast"] * 5 + ["slow"]


def test_order_per_key_is_kept_under_a_rate(ran):
    handler("x", name="h", rate="60/h")(lambda event: ran.append(event.payload))
    for n in range(4):
        publish("x", n, key="k")
    for _ in range(4):
        drain()
        refill(1.0)
    assert ran == [0, 1, 2, 3]


def test_unused_tokens_are_returned(ran):
    def fail_first(event):
        ran.append(event.payload)
        raise ValueError

    subscribe("x", fail_first, name="h", rate="3600/h")
    for n in range(2):
        publish("x", n, key="k")
    drain()
    assert ran == [0], "the second waits for the first, which is to be retried"
    assert FlowControl.objects.get().tokens >= 1


@pytest.mark.parametrize("atomic", [True, False])
def test_deliveries_wait_for_a_free_slot(ran, atomic):
    handler("x", name="h", max_running=1, atomic=atomic)(lambda event: ran.append(event.payload))
    another_worker_holds_a_slot()
    publish_many(("x", n) for n in range(3))
    drain()
    assert ran == []
    assert QueuedEvent.objects.filter(attempts=0, deliveries__isnull=True).count() == 3


def test_the_slot_of_a_worker_that_has_ended_is_free(ran):
    handler("x", name="h", max_running=1)(lambda event: ran.append(event.payload))
    another_worker_holds_a_slot()
    publish_many(("x", n) for n in range(3))
    drain()
    EventWorker.objects.all().delete()
    drain()
    assert sorted(ran) == [0, 1, 2]
    assert FlowControl.objects.get().running == {}


def test_a_slot_is_taken_once_per_batch(ran):
    handler("x", name="h", max_running=1)(lambda event: ran.append(event.payload))
    publish_many(("x", n) for n in range(20))
    with CaptureQueriesContext(connection) as queries:
        drain()
    writes = [q for q in queries if q["sql"].startswith("UPDATE") and "flowcontrol" in q["sql"]]
    assert len(ran) == 20
    assert len(writes) == 2, "into the batch and out of it"


def test_a_slot_is_freed_when_a_batch_is_cut_short(ran, transactional_db, monkeypatch):
    """After an internal error, the next look at the flow controls returns the slot."""

    def stumble(event):
        ran.append(event.payload)

    handler("x", name="h", max_running=1)(stumble)
    publish("x", 1)
    give_back = Returner.release
    troubles = [RuntimeError("a fault of our own"), None, None]

    def give_back_or_stumble(self, batch):
        if error := troubles.pop(0):
            raise error
        give_back(self, batch)

    monkeypatch.setattr(Returner, "release", give_back_or_stumble)
    drain()
    assert FlowControl.objects.get().running == {}


def test_coroutines_overlap_only_up_to_the_limit(transactional_db):
    running, most = [], []

    @handler("x", name="h", max_running=2)
    async def overlap(event):
        running.append(event.payload)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.remove(event.payload)

    publish_many(("x", n) for n in range(8))
    drain()
    assert EventLog.objects.filter(status="COMPLETED").count() == 8
    assert max(most) == 2


def test_threads_of_one_worker_share_the_slots(transactional_db):
    lock = threading.Lock()
    running, most = set(), []

    @handler("x", name="h", max_running=1, atomic=False)
    def work(event):
        with lock:
            running.add(event.payload)
            most.append(len(running))
        threading.Event().wait(0.005)
        with lock:
            running.discard(event.payload)

    publish_many(("x", n) for n in range(20))
    for _ in range(20):
        drain(concurrency=4, batch_size=3)
        if not QueuedEvent.objects.exists():
            break
    assert max(most) == 1
    assert EventLog.objects.filter(status="COMPLETED").count() == 20


def test_without_flow_controls_no_statement_is_added(ran, monkeypatch):
    """A worker reads the flow controls at its start, and on a slow machine again later."""
    monkeypatch.setattr("django_eventbus.flow.controls.READ_EVERY", 3600.0)
    handler("x", name="h")(lambda event: ran.append(event.payload))
    publish_many(("x", n) for n in range(1000))
    with CaptureQueriesContext(connection) as queries:
        drain()
    assert len(ran) == 1000
    # The attention statement names the table in a subquery.
    looks = [q for q in queries if "flowcontrol" in q["sql"].partition("FROM")[0]]
    assert all(q["sql"].startswith("SELECT") for q in looks)
    assert len(looks) == 1


def test_a_handler_subscribed_at_run_time_is_limited_at_once(ran):
    @handler("first", name="first")
    def subscribe_another(event):
        subscribe("x", lambda event: ran.append(event.payload), name="late", rate="60/h")

    publish("first", {})
    publish_many((("x", n) for n in range(5)), delay=0)
    drain(batch_size=1)
    assert len(ran) == 1


def test_a_rate_and_a_pause_work_together(ran):
    handler("x", name="h", rate="60/h")(lambda event: ran.append(event.payload))
    pauses.pause(handler="h")
    publish("x", 1)
    drain()
    assert ran == []
    pauses.resume(handler="h")
    drain()
    assert ran == [1]


def test_deleted_flow_controls_are_created_again(ran):
    """They are deleted between two groups of a batch: no event is lost or charged."""

    def delete_all(event):
        ran.append(event.payload)
        FlowControl.objects.all().delete()

    subscribe("x", delete_all, name="h", max_running=1, atomic=False)
    publish_many(("x", n) for n in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_eventbus.flow.controls.READ_EVERY", 0.0)
        drain()
    assert sorted(ran) == [0, 1, 2]
    assert EventLog.objects.filter(status="COMPLETED", crashes=0).count() == 3
