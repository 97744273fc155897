"""Limits on running, in one process. Many processes: concurrency/test_gates.py."""

import asyncio
import threading

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import gates, handler, publish, publish_many, subscribe
from django_eventbus.models import EventGate, EventLog, EventWorker, QueuedEvent
from django_eventbus.store import store_for
from django_eventbus.worker import WorkerOptions, new_registration
from tests.bus import drain

pytestmark = pytest.mark.django_db


@pytest.fixture
def ran():
    return []


def refill(tokens):
    """So much time passes that this many tokens are there."""
    now = store_for().read_clock()
    EventGate.objects.update(tokens=tokens, tokens_at=now)


def somebody_else_holds_a_slot(name="h"):
    store = store_for()
    registration = new_registration(WorkerOptions(using="default", queues=("default",)))
    store.register(registration)
    store.make_gates("handler", [name])
    EventGate.objects.filter(name=name).update(running={f"{registration.pk}/0": 1})


def test_a_rate_lets_so_many_run_and_parks_the_others(ran):
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


def test_a_rate_is_that_of_one_handler_and_no_other(ran):
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


def test_tokens_of_deliveries_that_were_not_made_go_back(ran):
    def fail_first(event):
        ran.append(event.payload)
        raise ValueError

    subscribe("x", fail_first, name="h", rate="3600/h")
    for n in range(2):
        publish("x", n, key="k")
    drain()
    assert ran == [0], "the second waits for the first, which is to be retried"
    assert EventGate.objects.get().tokens >= 1


@pytest.mark.parametrize("atomic", [True, False])
def test_without_a_free_slot_deliveries_wait(ran, atomic):
    handler("x", name="h", max_running=1, atomic=atomic)(lambda event: ran.append(event.payload))
    somebody_else_holds_a_slot()
    publish_many(("x", n) for n in range(3))
    drain()
    assert ran == []
    assert QueuedEvent.objects.filter(attempts=0, deliveries__isnull=True).count() == 3


def test_the_slot_of_a_worker_that_is_gone_is_free(ran):
    handler("x", name="h", max_running=1)(lambda event: ran.append(event.payload))
    somebody_else_holds_a_slot()
    publish_many(("x", n) for n in range(3))
    drain()
    EventWorker.objects.all().delete()
    drain()
    assert sorted(ran) == [0, 1, 2]
    assert EventGate.objects.get().running == {}


def test_a_slot_is_taken_for_a_batch_at_once(ran):
    handler("x", name="h", max_running=1)(lambda event: ran.append(event.payload))
    publish_many(("x", n) for n in range(20))
    with CaptureQueriesContext(connection) as queries:
        drain()
    writes = [q for q in queries if q["sql"].startswith("UPDATE") and "eventgate" in q["sql"]]
    assert len(ran) == 20
    assert len(writes) == 2, "into the batch and out of it"


def test_a_slot_is_freed_when_a_batch_is_cut_short(ran, transactional_db, monkeypatch):
    """Trouble in the middle: the next look at the gates gives back what was taken."""

    def stumble(event):
        ran.append(event.payload)

    handler("x", name="h", max_running=1)(stumble)
    publish("x", 1)
    from django_eventbus.delivery import Deliverer

    give_back = Deliverer._give_back
    troubles = [RuntimeError("a fault of our own"), None, None]

    def give_back_or_stumble(self, batch):
        if error := troubles.pop(0):
            raise error
        give_back(self, batch)

    monkeypatch.setattr(Deliverer, "_give_back", give_back_or_stumble)
    drain()
    assert EventGate.objects.get().running == {}


def test_coroutines_overlap_only_as_far_as_they_may(transactional_db):
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


def test_where_nothing_is_used_no_statement_is_added(ran):
    """One look at the gates when a worker begins; the rest is as if there were none."""
    handler("x", name="h")(lambda event: ran.append(event.payload))
    publish_many(("x", n) for n in range(1000))
    with CaptureQueriesContext(connection) as queries:
        drain()
    assert len(ran) == 1000
    looks = [q for q in queries if "eventgate" in q["sql"]]
    assert all(q["sql"].startswith("SELECT") for q in looks)
    assert len(looks) <= 3


def test_a_handler_subscribed_at_run_time_is_limited_at_once(ran):
    @handler("first", name="first")
    def subscribe_another(event):
        subscribe("x", lambda event: ran.append(event.payload), name="late", rate="60/h")

    publish("first", {})
    publish_many((("x", n) for n in range(5)), delay=0)
    drain(batch_size=1)
    assert len(ran) == 1


def test_a_rate_and_a_pause_together(ran):
    handler("x", name="h", rate="60/h")(lambda event: ran.append(event.payload))
    gates.pause(handler="h")
    publish("x", 1)
    drain()
    assert ran == []
    gates.resume(handler="h")
    drain()
    assert ran == [1]


def test_gates_deleted_by_hand_are_made_again(ran):
    """Between two groups of a batch: nothing is lost, and nobody is blamed."""

    def delete_all(event):
        ran.append(event.payload)
        EventGate.objects.all().delete()

    subscribe("x", delete_all, name="h", max_running=1, atomic=False)
    publish_many(("x", n) for n in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_eventbus.admission.LOOK_EVERY", 0.0)
        drain()
    assert sorted(ran) == [0, 1, 2]
    assert EventLog.objects.filter(status="COMPLETED", crashes=0).count() == 3
