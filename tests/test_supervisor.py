"""The events that a supervisor charges when a worker process ends, and the kind of charge."""

from types import SimpleNamespace

import pytest

from django_eventbus import handler, publish, publish_many
from django_eventbus.delivery.deadlines import Board, Watch
from django_eventbus.models import EventLog, EventWorker, QueuedEvent
from django_eventbus.store import Charge
from django_eventbus.worker.child import Child
from django_eventbus.worker.registration import WorkerOptions
from django_eventbus.worker.supervisor import Supervisor
from tests.bus import drain

pytestmark = pytest.mark.django_db

OPTIONS = WorkerOptions(using="default", queues=("default",))


@pytest.fixture
def child(worker_id):
    """A worker process with one thread, as its supervisor sees it."""
    registration = EventWorker.objects.get(pk=worker_id)
    return Child(SimpleNamespace(pid=1), registration, Board.local(1), None, renewed=0.0)


@pytest.fixture
def supervisor(store):
    made = Supervisor(OPTIONS)
    # Another connection would not see the rows of the test's transaction.
    made._through_outage = lambda action: action()
    return made


def claim(store, child, count=2):
    publish_many(("x", n) for n in range(count))
    claimed = store.claim("default", limit=count, worker_id=child.registration.pk)
    return [event.row_id for event in claimed]


def runs(child, row_id):
    Watch(child.board).start(row_id, b"h", 600.0)


def test_only_an_event_whose_handler_was_running_has_crashed(supervisor, store, child):
    first, _ = claim(store, child)
    runs(child, first)
    assert supervisor._blamed(child) == ({first}, Charge.CRASH)


def test_the_end_of_a_stuck_process_counts_as_an_interruption(supervisor, store, child):
    first, _ = claim(store, child)
    runs(child, first)
    child.charge = Charge.INTERRUPTION
    assert supervisor._blamed(child) == ({first}, Charge.INTERRUPTION)


def test_a_suspect_that_was_not_running_is_interrupted(supervisor, store, child):
    first, _ = claim(store, child)
    store.suspect(child.registration.pk, [first])
    assert supervisor._blamed(child) == ({first}, Charge.INTERRUPTION)


def test_the_end_of_a_process_during_shutdown_charges_no_event(supervisor, store, child):
    first, _ = claim(store, child)
    runs(child, first)
    supervisor.stop()
    assert supervisor._blamed(child) == ({first}, Charge.NOTHING)


def test_after_a_death_between_handlers_each_event_runs_alone_and_uncharged(
    supervisor, store, child
):
    ran = []
    handler("x", name="h")(lambda event: ran.append(event.payload))
    claim(store, child)
    supervisor._recover_crashed(child, -9)
    assert set(QueuedEvent.objects.values_list("crashes", "interruptions")) == {(0, 1)}
    drain()
    assert sorted(ran) == [0, 1]
    assert set(EventLog.objects.values_list("status", "crashes")) == {("COMPLETED", 0)}


@pytest.mark.parametrize(("retries", "status"), [(0, "dead"), (1, "retry")])
def test_a_kill_at_the_deadline_is_recorded_under_the_handlers_own_policy(
    supervisor, store, child, retries, status
):
    handler("x", name="h", retry={"max_retries": retries})(print)
    handler("x", name="other")(lambda event: None)
    first, _ = claim(store, child)
    runs(child, first)
    child.guilty = (first, "h")
    supervisor._recover_crashed(child, -9)
    killed, neighbour = QueuedEvent.objects.order_by("id")
    assert killed.pk == first
    assert killed.deliveries["h"]["state"] == status
    assert (killed.crashes, killed.interruptions) == (0, 0)
    # The other handler does not wait for the retry of this one.
    assert killed.available_at is None
    assert (neighbour.attempts, neighbour.crashes, neighbour.interruptions) == (0, 0, 0)


def test_a_kill_at_the_deadline_delays_the_key_of_its_event(supervisor, store, child):
    handler("x", name="h", retry={"max_retries": 1, "base_delay": 600, "max_delay": 600})(print)
    publish("x", 0, key="a")
    publish("x", 1, key="a")
    head, _ = store.claim("default", limit=2, worker_id=child.registration.pk)
    runs(child, head.row_id)
    child.guilty = (head.row_id, "h")
    supervisor._recover_crashed(child, -9)
    assert drain().handled == 0
    assert QueuedEvent.objects.filter(status="PENDING").count() == 2


def test_a_killed_handler_whose_event_cannot_be_read_is_interrupted_once(supervisor, store, child):
    first, _ = claim(store, child)
    QueuedEvent.objects.filter(pk=first).update(deliveries={"h": "of a newer version"})
    runs(child, first)
    child.guilty = (first, "h")
    supervisor._recover_crashed(child, -9)
    killed = QueuedEvent.objects.get(pk=first)
    assert (killed.status, killed.crashes, killed.interruptions) == ("PENDING", 0, 1)
    assert "cannot be read by this version" in killed.errors[-1]["message"]
    assert killed.available_at is not None
