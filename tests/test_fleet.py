"""Workers of two versions: events are left to the worker that has all handlers."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import Event, dead_letters, handler, publish, subscribe, unsubscribe
from django_eventbus.flow.fleet import OtherWorkers, digest_of, known_here
from django_eventbus.models import EventLane, EventLog, EventWorker, QueuedEvent
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.bus import drain, logged, make_due
from tests.workers import LONG_AGO

pytestmark = pytest.mark.django_db


@pytest.fixture
def calls():
    return []


@pytest.fixture
def old(calls):
    """The handler that this process has."""
    return handler("order.*", name="old")(lambda event: calls.append(("old", event.payload)))


@pytest.fixture
def other_worker(store):
    """Register another live worker with these handlers."""

    def register(handlers, *, queues=("default",)):
        registration = new_registration(WorkerOptions(using="default", queues=queues))
        store.register(registration)
        store.note_handlers(registration.pk, handlers, digest_of(handlers))
        return registration

    return register


def deploy(calls, name="new", pattern="order.*"):
    """Make this process the new version, and end all other workers."""
    EventWorker.objects.all().delete()
    return subscribe(pattern, lambda event: calls.append((name, event.payload)), name=name)


def assert_waits_uncharged(**expected):
    event = QueuedEvent.objects.get()
    states = {name: state["state"] for name, state in (event.deliveries or {}).items()}
    assert (event.status, event.crashes, event.errors or []) == ("PENDING", 0, [])
    assert states == expected
    assert not EventLog.objects.exists()
    return event


def test_an_event_is_not_completed_without_a_handler_that_another_worker_has(
    old, calls, other_worker
):
    """A deployment adds a handler: the old and the new handler run once each."""
    other_worker({"old": ["order.*"], "new": ["order.*"]})
    event = publish("order.paid", 1)
    for _ in range(3):
        drain()
        make_due()
    assert calls == [("old", 1)]
    assert assert_waits_uncharged(old="done").attempts == 1
    deploy(calls)
    drain()
    assert calls == [("old", 1), ("new", 1)]
    assert logged(event).status == "COMPLETED"
    assert {name: state["failures"] for name, state in logged(event).deliveries.items()} == {
        "old": 0,
        "new": 0,
    }


def test_an_event_left_to_another_worker_waits_before_it_is_claimed_again(old, other_worker):
    other_worker({"old": ["order.*"], "new": ["order.*"]})
    publish("order.paid", 1)
    assert drain().handled == 0
    assert QueuedEvent.objects.get().available_at is not None


def test_an_event_that_only_another_worker_handles_is_not_charged(calls, other_worker):
    other_worker({"new": ["order.paid"]})
    publish("order.paid", 1)
    for _ in range(3):
        drain()
        make_due()
    assert assert_waits_uncharged().attempts == 0
    deploy(calls)
    drain()
    assert calls == [("new", 1)]


def test_an_event_that_only_another_worker_handles_is_not_completed_as_unhandled(
    settings, other_worker
):
    settings.EVENTBUS = {"UNHANDLED": "complete"}
    other_worker({"new": ["order.paid"]})
    publish("order.paid", 1)
    drain()
    assert_waits_uncharged()


def test_an_event_that_had_no_handler_is_not_charged_again(calls, other_worker):
    publish("order.paid", 1)
    drain()
    other_worker({"new": ["order.paid"]})
    for _ in range(3):
        make_due()
        drain()
    (error,) = QueuedEvent.objects.get().errors
    assert error["handler"] == "(no handler)"
    deploy(calls)
    make_due()
    drain()
    assert calls == [("new", 1)]


def test_the_retry_of_a_handler_that_another_worker_has_is_left_to_it(old, calls, other_worker):
    """The new handler failed in the other worker; here its absence must not count as a failure."""
    publish("order.paid", 1)
    failing = subscribe("order.*", lambda event: 1 / 0, name="new")
    drain()
    unsubscribe(failing)
    other_worker({"old": ["order.*"], "new": ["order.*"]})
    for _ in range(5):
        make_due()
        drain()
    waiting = QueuedEvent.objects.get()
    assert waiting.deliveries["new"]["failures"] == len(waiting.errors) == 1
    deploy(calls)
    make_due()
    drain()
    assert calls == [("old", 1), ("new", 1)]
    assert dead_letters.list() == []


def test_a_removed_handler_holds_events_only_while_a_live_worker_has_it(old, calls, other_worker):
    """The opposite case: this is the new worker, and an old worker has an additional handler."""
    before = other_worker({"old": ["order.*"], "removed": ["order.paid"]})
    event = publish("order.paid", 1)
    drain()
    assert_waits_uncharged(old="done")
    EventWorker.objects.filter(pk=before.pk).update(expires_at=LONG_AGO)
    make_due()
    drain()
    assert calls == [("old", 1)]
    assert logged(event).status == "COMPLETED"


def test_a_worker_that_has_ended_holds_no_events(old, calls, other_worker, store):
    store.dismiss(other_worker({"new": ["order.*"]}).pk)
    publish("order.paid", 1)
    assert drain().handled == 1


def test_only_workers_of_the_queue_count(settings, old, calls, other_worker):
    settings.EVENTBUS = {"QUEUES": ["default", "mail"]}
    other_worker({"old": ["order.*"], "new": ["order.*"]}, queues=("mail",))
    here, there = publish("order.paid", 1), publish("order.paid", 2, queue="mail")
    drain()
    assert logged(here).status == "COMPLETED"
    assert QueuedEvent.objects.get().event_id == there.event_id


def test_only_events_of_the_types_of_that_handler_wait(old, other_worker):
    other_worker({"old": ["order.*"], "new": ["order.paid"]})
    publish("order.paid", 1)
    sent = publish("order.sent", 2)
    drain()
    assert logged(sent).status == "COMPLETED"
    assert QueuedEvent.objects.get().type == "order.paid"


def test_a_handler_of_this_process_may_have_more_types_elsewhere(old, calls, other_worker):
    handler("invoice.*", name="books")(lambda event: calls.append("books"))
    other_worker({"old": ["order.*"], "books": ["invoice.*", "order.paid"]})
    publish("order.paid", 1)
    drain()
    assert_waits_uncharged(old="done")


def test_the_order_of_a_key_is_kept(old, calls, other_worker):
    other_worker({"old": ["order.*"], "new": ["order.paid"]})
    publish("order.paid", 1, key="k")
    publish("order.sent", 2, key="k")
    publish("order.sent", 3, key="other")
    for _ in range(2):
        drain()
        make_due()
    assert calls == [("old", 1), ("old", 3)]
    deploy(calls, pattern="order.paid")
    make_due()
    drain()
    assert calls == [("old", 1), ("old", 3), ("new", 1), ("old", 2)]
    assert not EventLane.objects.exists()


def test_handlers_without_a_transaction_are_recorded_and_not_run_again(calls, other_worker):
    handler("order.*", name="mail", atomic=False)(lambda event: calls.append("mail"))
    other_worker({"mail": ["order.*"], "new": ["order.*"]})
    publish("order.paid", 1)
    for _ in range(3):
        drain()
        make_due()
    assert calls == ["mail"]
    assert_waits_uncharged(mail="done")


def test_a_failing_handler_of_this_worker_is_retried_meanwhile(calls, other_worker):
    def fail(event):
        calls.append(event.attempt)
        raise ValueError

    handler("order.*", name="old", retry={"max_retries": 1})(fail)
    other_worker({"old": ["order.*"], "new": ["order.*"]})
    event = publish("order.paid", 1)
    for _ in range(4):
        drain()
        make_due()
    assert calls == [1, 2]
    assert QueuedEvent.objects.get().deliveries["old"]["state"] == "dead"
    deploy(calls)
    drain()
    assert calls == [1, 2, ("new", 1)]
    assert logged(event).status == "COMPLETED_WITH_ERRORS"


def test_handlers_of_an_atomic_event_run_in_a_worker_that_has_all_of_them(
    settings, old, calls, other_worker
):
    settings.EVENTBUS = {"ATOMIC": "event"}
    other_worker({"old": ["order.*"], "new": ["order.*"]})
    publish("order.paid", 1)
    drain()
    assert calls == []
    assert_waits_uncharged()
    deploy(calls)
    make_due()
    drain()
    assert calls == [("old", 1), ("new", 1)]


def test_handlers_of_an_atomic_event_that_no_worker_has_together_do_not_wait_for_ever(
    settings, old, calls, other_worker
):
    settings.EVENTBUS = {"ATOMIC": "event"}
    other_worker({"new": ["order.*"]})
    publish("order.paid", 1)
    drain()
    assert calls == [("old", 1)]
    assert_waits_uncharged(old="done")


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="only PostgreSQL has NOTIFY")
def test_other_workers_are_woken_for_an_event_that_is_left_to_them(old, other_worker):
    """An idle worker may have a long POLL_INTERVAL."""
    other_worker({"old": ["order.*"], "new": ["order.paid"]})
    publish("order.sent", 1)
    with CaptureQueriesContext(connection) as queries:
        drain()
    assert not any("NOTIFY" in query["sql"] for query in queries)
    publish("order.sent", 2)
    publish("order.paid", 3)
    with CaptureQueriesContext(connection) as queries:
        drain()
    assert any("NOTIFY" in query["sql"] for query in queries)


# -- the handlers that workers store


def test_a_worker_stores_its_handlers_when_it_starts(store, worker_id):
    class Paid(Event):
        pass

    class OrderPaid(Paid, type="colleagues.order.paid"):
        pass

    handler(Paid, "invoice.*", name="books")(print)
    OtherWorkers(worker_id).keep_up(store)
    row = EventWorker.objects.get()
    assert row.handlers == known_here() == {"books": ["colleagues.order.paid", "invoice.*"]}
    assert row.handlers_digest == digest_of(row.handlers)


def test_added_and_removed_handlers_are_stored_at_once(store, worker_id):
    one = OtherWorkers(worker_id)
    one.keep_up(store)
    added = subscribe("x", print, name="late")
    one.keep_up(store)
    assert EventWorker.objects.get().handlers == {"late": ["x"]}
    unsubscribe(added)
    one.keep_up(store)
    assert EventWorker.objects.get().handlers == {}


def test_workers_with_the_same_handlers_do_not_differ(store, worker_id, old, other_worker):
    other_worker(known_here())
    one = OtherWorkers(worker_id)
    one.keep_up(store)
    assert not one.differ


def test_a_worker_that_has_not_started_yet_is_ignored(store, worker_id, old):
    store.register(new_registration(WorkerOptions(using="default", queues=("default",))))
    one = OtherWorkers(worker_id)
    one.keep_up(store)
    assert not one.differ


def test_checking_for_changed_handlers_is_one_statement(
    store, worker_id, old, other_worker, django_assert_num_queries
):
    other_worker({"new": ["order.*"]})
    one = OtherWorkers(worker_id)
    one.keep_up(store)
    one.keep_up(store)
    one._read_at = float("-inf")
    with django_assert_num_queries(1, connection=connection) as queries:
        one.keep_up(store)
    assert '"handlers"' not in queries[0]["sql"].replace("`", '"')
    with django_assert_num_queries(0):
        one.keep_up(store)
    assert one.differ
