"""Handed-off events and unavailable brokers in the status, its problems and the statistics."""

import io
import json
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models import Sum
from django.test.utils import CaptureQueriesContext

from django_eventbus import handler, publish, publish_many, queued, status
from django_eventbus.erasure import TOMBSTONE, erase
from django_eventbus.models import EventLog, FlowControl, MinuteStatistics, QueuedEvent
from django_eventbus.statistics import problems
from tests.bus import drain
from tests.plans import explaining, make_tables_as_new

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("outbox"),
]

NAME = "shop.mail"


@pytest.fixture
def mail():
    return handler("order.placed", name=NAME, executor="celery")(lambda event: None)


@pytest.fixture
def worker(worker_id):
    """A live worker that serves all queues."""
    return worker_id


def attention():
    return [each.text for each in problems.find_problems(status.look())]


def output_of(*arguments):
    output = io.StringIO()
    call_command("event_status", *arguments, stdout=output)
    return output.getvalue()


def break_broker(store, **values):
    FlowControl.objects.create(
        namespace="default",
        kind="executor",
        name="celery",
        opened_at=store.read_clock() - timedelta(minutes=5),
        probe_at=store.read_clock() + timedelta(seconds=20),
    )


# -- counts


def test_handed_off_events_count_as_handed_off_only(mail):
    publish("order.placed")
    publish_many((("order.placed", n) for n in range(2)), key="order:1")
    publish("later", delay=60)
    drain()
    found = status.look().metrics
    counted = {name: found[name] for name in status.METRICS[:6] if found[name]}
    assert counted == {"pending": 1, "handed_off": 2, "scheduled": 1}


def test_a_handler_has_the_number_of_its_handed_off_events(mail):
    handler("order.placed", name="local")(lambda event: None)
    handler("order.paid", name="idle", executor="celery")(lambda event: None)
    publish_many(("order.placed", n) for n in range(3))
    drain()
    found = {each.name: (each.executor, each.handed_off) for each in status.look().handlers}
    assert found == {NAME: ("celery", 3), "idle": ("celery", 0), "local": (None, 0)}


def test_the_counts_stop_at_a_bound(mail, monkeypatch):
    monkeypatch.setattr(status, "COUNTED_UP_TO", 3)
    publish_many(("order.placed", n) for n in range(9))
    drain()
    seen = status.look()
    assert (seen.metrics["handed_off"], seen.handed_off) == (4, {NAME: 4})


def test_more_counts_than_one_statement_may_have(store, monkeypatch, mail):
    monkeypatch.setattr("django_eventbus.store.depths.COUNTS_AT_ONCE", 2)
    publish("order.placed")
    drain()
    names = ["a", "b", NAME, "c", "d"]
    found = store.handed_off_by_handler(names, at_most=10)
    assert found == {"a": 0, "b": 0, NAME: 1, "c": 0, "d": 0}


def test_executors_cost_one_more_query_and_an_unavailable_one_two(mail, store, worker):
    with CaptureQueriesContext(connection) as well:
        problems.find_problems(status.look())
    handler("order.paid", name="second", executor="celery")(lambda event: None)
    break_broker(store)
    with CaptureQueriesContext(connection) as broken:
        problems.find_problems(status.look())
    counts = [[each for each in captured if "FROM (" in each["sql"]] for captured in (well, broken)]
    assert [len(each) for each in counts] == [2, 3]


@pytest.mark.skipif(connection.vendor != "postgresql", reason="reads PostgreSQL's plans")
@pytest.mark.django_db
def test_the_counts_use_their_indexes(store, mail, settings):
    settings.EVENTBUS = {**settings.EVENTBUS, "HANDOFF_WINDOW": 100}
    make_tables_as_new()
    publish_many(("order.placed", n) for n in range(200))
    publish_many(("other", n) for n in range(3000))
    QueuedEvent.objects.filter(type="order.placed").update(handed_off_to=NAME)
    QueuedEvent.objects.filter(type="other").update(held_by=7)
    break_broker(store)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    with explaining() as plans:
        status.look()
    for sql, plan in plans:
        assert "Seq Scan on django_eventbus_queuedevent" not in plan, f"{sql}\n{plan}"
    by_handler = next(plan for sql, plan in plans if 'handed_off_to" >=' in sql)
    assert "eventbus_handed_off" in by_handler, by_handler
    held = next(plan for sql, plan in plans if 'held_by" >=' in sql)
    assert "eventbus_held" in held, held


# -- problems


def test_handed_off_events_are_no_problem(mail, worker):
    publish("order.placed")
    drain()
    assert attention() == []


def test_a_handed_off_event_that_is_not_picked_up_has_a_lag_and_is_a_problem(mail, store, worker):
    publish("order.placed")
    drain()
    old = store.read_clock() - timedelta(minutes=4)
    QueuedEvent.objects.update(created_at=old)
    assert status.look().lag > 200
    assert attention() == [
        "The oldest handed-off event has been waiting for 4 min: "
        "check that workers of celery are running and read the queue to which its message was sent."
    ]
    QueuedEvent.objects.update(errors=[{"type": "ValueError"}])
    assert attention() == [], "an event that failed before waits for a good reason"


def test_an_unavailable_broker_is_a_problem_and_no_circuit_breaker(mail, outbox, worker):
    outbox.is_down = True
    publish_many(("order.placed", n) for n in range(3))
    publish("order.placed", key="order:1")
    drain()
    seen = status.look()
    assert (seen.metrics["broker_outages"], seen.metrics["open_breakers"]) == (1, 0)
    assert (seen.metrics["handed_off"], seen.metrics["held"]) == (0, 4)
    (text,) = attention()
    assert text.startswith("The broker of celery has been unavailable for ")
    assert "next attempt in " in text
    assert text.endswith("Held events: 4 (all events of a key count as one).")
    assert [each.executor_unavailable for each in seen.handlers] == [True]


# -- the command


def test_the_table_shows_the_handed_off_events_of_each_handler(mail):
    assert "handed_off         0\n" in output_of()
    publish("order.placed")
    drain()
    assert "handed_off         1\n" in output_of()
    assert f"- {NAME} (celery): 1 of 1,000\n" in output_of()


def test_the_table_of_a_project_without_executors_is_short():
    assert "Handed off" not in output_of()


def test_json_has_the_executors(mail, store):
    publish("order.placed")
    drain()
    record = json.loads(output_of("--format", "json"))
    assert record["executors"] == {
        "celery": {"unavailable_since": None, "next_attempt_at": None, "held": 0}
    }
    assert record["handoff_window"] == 1000
    handlers = record["handlers"][NAME]
    assert (handlers["executor"], handlers["handed_off"], handlers["hand_offs"]) == ("celery", 1, 1)


def test_a_condition_can_be_an_unavailable_broker(mail, store):
    output_of("--fail-if", "broker_outages>0")
    break_broker(store)
    executors = json.loads(output_of("--format", "json"))["executors"]
    assert executors["celery"]["unavailable_since"] < executors["celery"]["next_attempt_at"]
    with pytest.raises(CommandError, match="broker_outages is 1"):
        output_of("--fail-if", "broker_outages>0")


def test_ignored_messages_are_shown_and_are_no_problem(mail, outbox, worker):
    publish("order.placed")
    drain()
    output_of("--fail-if", "ignored_messages>0")
    outbox.messages *= 3
    outbox.deliver()
    assert "ignored_messages   2\n" in output_of()
    assert json.loads(output_of("--format", "json"))["ignored_messages"] == 2
    assert attention() == [], "late and repeated messages are normal"
    with pytest.raises(CommandError, match="ignored_messages is 2"):
        output_of("--fail-if", "ignored_messages>0")


def test_an_executor_cannot_be_paused():
    with pytest.raises(CommandError, match="executor"):
        call_command("event_pause", "executor", "celery")


# -- statistics


def test_hand_offs_are_counted_and_are_no_runs(mail, outbox):
    publish_many(("order.placed", n) for n in range(3))
    drain()
    of_handler = MinuteStatistics.objects.filter(handler=NAME)
    assert of_handler.aggregate(Sum("handed_off"), Sum("done")) == {
        "handed_off__sum": 3,
        "done__sum": 0,
    }
    assert status.look().recent.total == 0
    outbox.deliver()
    (shown,) = status.look().handlers
    assert (shown.runs.handed_off, shown.runs.total, shown.runs.failed) == (3, 3, 0)
    assert status.look().recent.done == 3


# -- actions on handed-off events


@pytest.mark.parametrize("key", [None, "order:1"])
def test_a_handed_off_event_that_runs_now_is_handed_off_again(mail, outbox, key):
    event = publish("order.placed", key=key)
    drain()
    assert queued.run_now([event.event_id]) == 1
    drain()
    old, new = outbox.messages
    assert (old.rows, old.token != new.token) == (new.rows, True)
    outbox.deliver()
    assert EventLog.objects.get().status == "COMPLETED"


@pytest.mark.parametrize("key", [None, "order:1"])
def test_a_cancelled_event_is_not_delivered(mail, outbox, key):
    event = publish("order.placed", key=key)
    drain()
    assert queued.cancel([event.event_id]) == 1
    outbox.deliver()
    letter = EventLog.objects.get()
    assert (letter.status, letter.deliveries[NAME]["state"]) == ("DISCARDED", "handed_off")


def test_a_handed_off_event_is_erased_and_delivered(outbox):
    seen = []
    handler("order.placed", name=NAME, executor="celery")(lambda event: seen.append(event.payload))
    publish("order.placed", {"mail": "ann@example.com"})
    drain()
    erase(where={"mail": "ann@example.com"}, only=["mail"])
    outbox.deliver()
    assert seen == [{"mail": TOMBSTONE}]
