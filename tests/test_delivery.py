"""Running handlers: group commits, rollbacks of single handlers, and retries."""

import asyncio
import contextlib
import re
import sys
import threading
import time
import uuid

import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_eventbus import (
    Discard,
    Retry,
    dead_letters,
    handler,
    publish,
    publish_many,
    subscribe,
    unsubscribe,
)
from django_eventbus.delivery import event_loop, grouped
from django_eventbus.delivery.call import Caller
from django_eventbus.delivery.settling import Settler
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.store import Store, is_outage
from django_eventbus.worker.threads import Delivery
from tests.bus import drain, drain_with_retries, logged, make_due
from tests.shop.models import Effect
from tests.test_failures import ODD_ERRORS

pytestmark = pytest.mark.django_db

ONCE = {"max_retries": 0}
SERIALIZATION_FAILURE = "40001"


def effect(event, note=""):
    Effect.objects.create(event_id=event.id, handler=event.handler_name, note=note)


def notes():
    return sorted(Effect.objects.values_list("note", flat=True))


def test_handlers_run_by_priority_then_in_order_of_registration():
    """M11."""
    ran = []
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5)):
        handler("x", name=name, priority=priority)(lambda event: ran.append(event.handler_name))
    publish("x", {})
    drain()
    assert ran == ["b", "d", "a", "c"]


def test_a_failing_handler_rolls_back_only_its_own_writes():
    @handler("x", name="good")
    def good(event):
        effect(event, "good")

    @handler("x", name="bad", retry=ONCE)
    def bad(event):
        effect(event, "bad")
        raise ValueError("no")

    event = publish("x", {})
    drain()
    assert notes() == ["good"]
    assert logged(event).status == "COMPLETED_WITH_ERRORS"
    assert logged(event).deliveries["bad"] == {"state": "dead", "failures": 1}


def test_a_failing_event_does_not_affect_the_others_of_its_group():
    @handler("x", name="h", retry=ONCE)
    def sometimes(event):
        effect(event, str(event.payload))
        if event.payload == 3:
            raise ValueError("three")

    publish_many(("x", n) for n in range(6))
    drain()
    assert notes() == ["0", "1", "2", "4", "5"]
    assert EventLog.objects.filter(status="COMPLETED").count() == 5
    assert EventLog.objects.filter(status="FAILED").count() == 1


@pytest.fixture
def groups_have_no_time_limit(monkeypatch):
    """Do not end groups by time, so that a busy machine does not split them."""
    monkeypatch.setattr(grouped, "GROUP_SECONDS", float("inf"))


def test_handlers_of_many_events_share_a_transaction(transactional_db, groups_have_no_time_limit):
    order = []

    @handler("x", name="h")
    def write(event):
        effect(event)
        order.append("run")
        transaction.on_commit(lambda: order.append("committed"))

    publish_many(("x", n) for n in range(10))
    drain()
    assert Effect.objects.count() == 10
    assert order == ["run"] * 10 + ["committed"] * 10


def test_an_isolated_handler_shares_its_transaction_with_no_other_event(
    transactional_db, groups_have_no_time_limit
):
    order = []

    def run(event):
        effect(event, str(event.payload))
        order.append(event.payload)
        transaction.on_commit(lambda: order.append("commit"))

    handler("x", name="grouped")(run)
    handler("y", name="isolated", isolated=True)(run)
    for n, type_name in enumerate("xxyyxx"):
        publish(type_name, n)
    drain()
    commits = ["commit", "commit"]
    assert order == [0, 1, *commits, 2, "commit", 3, "commit", 4, 5, *commits]
    assert notes() == ["0", "1", "2", "3", "4", "5"]


def test_the_other_handlers_of_an_event_keep_their_order_around_an_isolated_one(transactional_db):
    order = []

    def run(event):
        order.append(event.handler_name)
        transaction.on_commit(lambda: order.append("commit"))

    handler("x", name="first", priority=2)(run)
    handler("x", name="isolated", priority=1, isolated=True)(run)
    handler("x", name="last")(run)
    handler("x", name="outside", atomic=False, priority=3)(
        lambda event: order.append(event.handler_name)
    )
    publish("x", {})
    drain()
    assert order == ["first", "commit", "isolated", "commit", "last", "commit", "outside"]


def test_an_isolated_handler_keeps_the_order_of_its_key(transactional_db):
    order = []

    def run(event):
        order.append(event.payload)
        if event.payload == 2 and event.attempt == 1:
            raise ValueError

    handler("x", name="grouped")(run)
    handler("y", name="isolated", isolated=True)(run)
    for n, type_name in enumerate("xxyxyx"):
        publish(type_name, n, key="k")
    publish("x", "other")
    drain()
    assert order == [0, 1, 2, "other"] or order == ["other", 0, 1, 2]
    drain_with_retries()
    assert [each for each in order if each != "other"] == [0, 1, 2, 2, 3, 4, 5]


def test_an_isolated_handler_that_fails_is_rolled_back_without_its_group(
    transactional_db, groups_have_no_time_limit
):
    calls = []

    def run(event):
        calls.append(event.payload)
        effect(event, str(event.payload))
        if event.payload == 1:
            raise ValueError

    handler("x", name="grouped")(run)
    handler("y", name="isolated", isolated=True, retry=ONCE)(run)
    for n, type_name in enumerate("xyx"):
        publish(type_name, n)
    drain()
    assert calls == [0, 1, 2]
    assert notes() == ["0", "2"]
    assert [dead.payload for dead in dead_letters.list()] == [1]


def test_an_isolated_handler_of_an_atomic_event_isolates_the_event(
    transactional_db, settings, groups_have_no_time_limit
):
    settings.EVENTBUS = {"ATOMIC": "event"}
    order = []

    def run(event):
        order.append(event.handler_name)
        transaction.on_commit(lambda: order.append("commit"))

    handler("x", "y", name="grouped")(run)
    handler("y", name="isolated", isolated=True)(run)
    for type_name in "xyx":
        publish(type_name, {})
    drain()
    alone = ["grouped", "isolated", "commit", "commit"]
    assert order == ["grouped", "commit", *alone, "grouped", "commit"]


def test_a_handler_without_queries_costs_no_statement():
    handler("idle", name="idle")(lambda event: None)
    handler("busy", name="busy")(effect)

    def statements_for(count, kind):
        publish_many((kind, n) for n in range(count))
        with CaptureQueriesContext(connection) as queries:
            drain()
        return [query["sql"] for query in queries]

    # The upkeep of delayed events, schedules and recovery adds statements over time.
    now_and_then = 10
    alone, together = statements_for(1, "idle"), statements_for(20, "idle")
    assert len(together) <= len(alone) + now_and_then
    savepoint = re.compile(r"^SAVEPOINT .?eventbus_")
    assert not list(filter(savepoint.match, together))
    assert len(list(filter(savepoint.match, statements_for(20, "busy")))) == 20, (
        "the pattern finds savepoints"
    )
    assert EventLog.objects.count() == 41


def test_every_attempt_is_kept_in_order():
    """M28, M13: all errors of all attempts, with type, message, time and traceback."""

    @handler("x", name="h", retry={"max_retries": 2})
    def fail(event):
        raise ValueError(f"attempt {event.attempt}")

    event = publish("x", {"a": 1})
    drain_with_retries()
    log = logged(event)
    assert [error["message"] for error in log.errors] == ["attempt 1", "attempt 2", "attempt 3"]
    assert {error["type"] for error in log.errors} == {"ValueError"}
    assert "raise ValueError" in log.errors[0]["traceback"]
    assert log.payload == {"a": 1}
    assert (log.status, log.attempts) == ("FAILED", 3)


def test_the_first_and_the_last_of_very_many_attempts_are_kept():
    """The others are counted. A handler that died in between is still in the dead letter."""

    @handler("x", name="d", retry={"max_retries": 7, "base_delay": 0})
    def die(event):
        raise KeyError(event.attempt)

    @handler("x", name="h", retry={"max_retries": 103, "base_delay": 0})
    def fail(event):
        raise ValueError(f"attempt {event.attempt}")

    event = publish("x", {"a": 1})
    drain_with_retries()
    log = logged(event)
    assert log.deliveries["h"]["failures"] == 104
    assert (log.dead_handler, log.error_type) == ("d", "KeyError")
    [marker] = [each for each in log.errors if "omitted" in each]
    assert marker["omitted"] == 104 + 8 - 5 - 1 - 15
    assert [each["attempt"] for each in log.errors[-15:]] == list(range(90, 105))
    assert [each["message"] for each in log.errors[-15:]][-1] == "attempt 104"


@pytest.mark.parametrize("kind", ["atomic", "plain"])
def test_errors_that_exceed_the_packet_size_are_shortened(transactional_db, settings, kind):
    """A statement beyond max_allowed_packet was treated as an outage and repeated for ever."""
    if connection.vendor != "mysql":
        pytest.skip("max_allowed_packet")
    settings.EVENTBUS = {"MAX_ERROR_BYTES": 40_000_000}

    @handler("x", name="h", retry=ONCE, atomic=kind == "atomic")
    def fail(event):
        raise ValueError("x" * 40_000_000)

    handler("y", name="i")(effect)
    event, neighbour = publish("x", {}), publish("y", {})
    drain()
    [error] = logged(event).errors
    assert (error["handler"], error["type"]) == ("h", "ValueError")
    assert (error["message"], error["traceback"]) == ("x" * 197 + "…", "")
    assert (logged(neighbour).status, logged(neighbour).errors) == ("COMPLETED", None)


@pytest.mark.parametrize("code", [1153, 2020])
def test_a_statement_that_is_too_large_is_not_an_outage(code):
    assert not is_outage(OperationalError(code, "Got a packet bigger than max_allowed_packet"))
    assert is_outage(OperationalError(2006, "Server has gone away"))


def test_an_event_without_a_handler_waits_and_then_dies(settings):
    """M12: kept and redelivered, then dead-lettered with that reason."""
    settings.EVENTBUS = {"UNHANDLED_RETRY": {"max_retries": 1}}
    event = publish("nobody.cares", {})
    drain()
    assert QueuedEvent.objects.get().status == "PENDING"
    make_due()
    drain()
    assert logged(event).status == "FAILED"
    assert "no handler is registered for 'nobody.cares'" in logged(event).errors[-1]["message"]


def test_an_event_whose_handler_arrives_with_the_next_deploy_is_handled():
    event = publish("x", {})
    drain()

    @handler("x", name="h")
    def arrived(event):
        effect(event, "here")

    make_due()
    drain()
    assert notes() == ["here"]
    assert logged(event).status == "COMPLETED"


def test_an_event_without_a_handler_may_count_as_completed(settings):
    settings.EVENTBUS = {"UNHANDLED": "complete"}
    event = publish("nobody.cares", {})
    drain()
    assert logged(event).status == "COMPLETED"


@pytest.mark.parametrize(
    ("policies", "completed"),
    [
        ({"audit.*": "complete"}, {"audit.login", "audit.logout"}),
        ({"audit.*": "complete", "audit.login": "retry"}, {"audit.logout"}),
        ({"*": "retry", "audit.login": "complete"}, {"audit.login"}),
        ({"*": "complete", "audit.*": "retry"}, {"order.paid"}),
        ({"audit.*": "retry", "*": "complete"}, {"order.paid"}),
        ({}, set()),
    ],
)
def test_the_most_specific_pattern_decides_about_an_unhandled_event(settings, policies, completed):
    settings.EVENTBUS = {"UNHANDLED": policies}
    for each in ("audit.login", "audit.logout", "order.paid"):
        publish(each, {})
    drain()
    assert set(EventLog.objects.values_list("type", flat=True)) == completed


def test_an_event_waits_for_a_handler_removed_by_a_deploy_and_then_dies(settings):
    settings.EVENTBUS = {"UNHANDLED_RETRY": {"max_retries": 0}}

    def fail(event):
        raise ValueError

    subscription = subscribe("x", fail, name="old.name")
    handler("x", name="other")(lambda event: None)
    event = publish("x", {})
    drain()
    unsubscribe(subscription)
    make_due()
    drain()
    log = logged(event)
    assert (log.status, log.dead_handler) == ("COMPLETED_WITH_ERRORS", "old.name")
    assert "'old.name', which is not registered" in log.errors[-1]["message"]


def test_discard_gives_up_at_once():
    @handler("x", name="h")
    def refuse(event):
        raise Discard("card declined")

    event = publish("x", {})
    drain()
    assert (logged(event).status, logged(event).attempts) == ("DISCARDED", 1)
    assert dead_letters.list()[0].errors[0]["message"] == "card declined"


def test_retry_sets_the_delay():
    @handler("x", name="h")
    def later(event):
        raise Retry("not yet", delay=3600)

    publish("x", {})
    drain()
    row = QueuedEvent.objects.get()
    waits = row.available_at - row.created_at
    assert 3500 < waits.total_seconds() < 3700


@pytest.mark.parametrize(
    "exception",
    [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, MemoryError],
)
@pytest.mark.parametrize("kind", ["atomic", "plain", "async"])
def test_any_exception_of_a_handler_is_a_failure_and_the_worker_continues(
    transactional_db, exception, kind
):
    """F10: every kind of exception is recorded by name, and the next event is handled."""

    ran = []

    def leave(event):
        if event.payload == "leave":
            raise exception
        ran.append(event.payload)

    async def leave_async(event):
        leave(event)

    chosen = leave_async if kind == "async" else leave
    handler("x", name="h", retry=ONCE, atomic=kind == "atomic", timeout=20)(chosen)
    event = publish("x", "leave")
    drain()
    publish("x", "stay")
    drain()
    (error,) = logged(event).errors
    assert error["type"].endswith(exception.__name__)
    assert ran == ["stay"]


def test_the_handlers_of_an_atomic_event_commit_together_or_not_at_all(settings):
    """M10: EVENTBUS["ATOMIC"] = "event"."""
    settings.EVENTBUS = {"ATOMIC": "event"}
    answers = [ValueError("first time"), None]

    @handler("x", name="a")
    def a(event):
        effect(event, "a")

    @handler("x", name="b")
    def b(event):
        effect(event, "b")
        if error := answers.pop(0):
            raise error

    event = publish("x", {})
    drain()
    assert notes() == []
    make_due()
    drain()
    assert notes() == ["a", "b"]
    assert logged(event).status == "COMPLETED"


def test_one_dead_handler_makes_an_atomic_event_a_dead_letter(settings):
    settings.EVENTBUS = {"ATOMIC": "event"}
    handler("x", name="a")(lambda event: effect(event, "a"))

    @handler("x", name="b", retry=ONCE)
    def b(event):
        raise ValueError

    event = publish("x", {})
    drain()
    assert notes() == []
    assert logged(event).status == "FAILED"


def test_events_published_by_a_failing_handler_are_rolled_back():
    @handler("x", name="h", retry=ONCE)
    def fail(event):
        publish("child", {})
        raise ValueError

    publish("x", {})
    drain()
    assert not QueuedEvent.objects.filter(type="child").exists()
    assert not EventLog.objects.filter(type="child").exists()


def test_a_caught_database_error_fails_only_that_handler():
    """F14: Django marks the transaction for rollback, whether or not the database broke it."""

    @handler("x", name="h", retry=ONCE)
    def swallow(event):
        if event.payload == 1:
            with pytest.raises(IntegrityError):
                Effect.objects.create(event_id=None, handler="h")
        else:
            effect(event, str(event.payload))

    publish_many(("x", n) for n in range(3))
    drain()
    assert notes() == ["0", "2"]
    (dead,) = dead_letters.list()
    assert "caught and ignored a database error" in dead.errors[0]["message"]


def test_a_handler_that_leaves_its_atomic_block_open_fails():
    @handler("x", name="h", retry=ONCE)
    def leave_open(event):
        if event.payload == 1:
            transaction.atomic().__enter__()
        effect(event, str(event.payload))

    publish_many(("x", n) for n in range(3))
    drain()
    assert notes() == ["0", "2"]
    (dead,) = dead_letters.list()
    assert "left an atomic() block open" in dead.errors[0]["message"]


def test_a_handler_that_asks_for_rollback_fails():
    @handler("x", name="h", retry=ONCE)
    def roll_back(event):
        effect(event, str(event.payload))
        if event.payload == 1:
            transaction.set_rollback(True)

    publish_many(("x", n) for n in range(3))
    drain()
    assert notes() == ["0", "2"]
    assert "marked for rollback" in dead_letters.list()[0].errors[0]["message"]


def test_a_handler_that_turns_autocommit_off_fails(transactional_db):
    """F14: Django refuses it inside of a transaction, and the next event is not affected."""

    @handler("x", name="h", retry=ONCE)
    def turn_off(event):
        effect(event, str(event.payload))
        if event.payload == 1:
            transaction.set_autocommit(False)

    publish_many(("x", n) for n in range(3))
    drain()
    assert notes() == ["0", "2"]
    assert [dead.payload for dead in dead_letters.list()] == [1]
    assert transaction.get_autocommit()


def test_a_durable_block_in_a_handler_raises_an_error_with_a_hint():
    @handler("x", name="h", retry=ONCE)
    def durable(event):
        with transaction.atomic(durable=True):
            pass

    publish("x", {})
    drain()
    text = dead_letters.list()[0].errors[0]["traceback"]
    assert "durable" in text
    assert "atomic=False" in text


@pytest.mark.parametrize(
    "sql",
    ["COMMIT", " rollback", "BEGIN", "END", "/* x */ COMMIT", "-- x\ncommit", "SELECT 1; COMMIT"],
)
def test_a_handler_cannot_end_the_transaction_it_shares(transactional_db, sql):
    @handler("x", name="h", retry=ONCE)
    def end(event):
        effect(event, str(event.payload))
        if event.payload == 1:
            with connection.cursor() as cursor:
                cursor.execute(sql)

    publish_many(("x", n) for n in range(3))
    drain()
    assert notes() == ["0", "2"]
    assert "would end the worker's transaction" in dead_letters.list()[0].errors[0]["message"]


def test_only_the_handler_that_closes_its_connection_fails(transactional_db):
    @handler("x", name="h", retry=ONCE)
    def close(event):
        effect(event, str(event.payload))
        if event.payload == 1:
            transaction.atomic().__enter__()
            connection.close()

    publish_many(("x", n) for n in range(4))
    drain()
    assert notes() == ["0", "2", "3"]
    assert [dead.payload for dead in dead_letters.list()] == [1]


def test_only_the_handler_whose_session_is_terminated_fails(transactional_db):
    if connection.vendor != "postgresql":
        pytest.skip("sessions are ended by pg_terminate_backend")

    @handler("x", name="h", retry=ONCE)
    def end_session(event):
        effect(event, str(event.payload))
        if event.payload == 1:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    publish_many(("x", n) for n in range(4))
    drain()
    assert notes() == ["0", "2", "3"]
    (dead,) = dead_letters.list()
    assert dead.payload == 1
    assert "terminat" in dead.errors[0]["message"]


def test_no_handler_is_charged_for_a_full_disk(transactional_db, monkeypatch):
    """Its writes succeeded; only the log row had no room."""
    handler("x", name="h", retry=ONCE)(lambda event: effect(event, "done"))
    settle, full = Store.settle, [1, 1, 1, 1]

    class DiskFull(Exception):
        sqlstate = "53100"

    def settle_if_there_is_room(self, *args):
        if full:
            full.pop()
            raise OperationalError("No space left on device") from DiskFull()
        settle(self, *args)

    monkeypatch.setattr(Store, "settle", settle_if_there_is_room)
    publish("x", {})
    drain()
    assert EventLog.objects.get().errors is None
    assert notes() == ["done"]


def test_a_handler_that_exceeds_the_idle_timeout_of_its_session_gets_a_hint(transactional_db):
    if connection.vendor != "postgresql":
        pytest.skip("idle_in_transaction_session_timeout")

    @handler("x", name="h", retry=ONCE)
    def idle(event):
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL idle_in_transaction_session_timeout = '50ms'")
        time.sleep(0.5)

    publish("x", {})
    drain()
    (dead,) = dead_letters.list()
    assert "idle-in-transaction timeout" in dead.errors[0]["message"]


def test_a_failing_commit_fails_only_the_handler_that_caused_it(transactional_db):
    if connection.vendor != "postgresql":
        pytest.skip("constraints that are checked at commit")
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE once (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        cursor.execute("INSERT INTO once VALUES (1)")

    @handler("x", name="h", retry=ONCE)
    def insert(event):
        effect(event, str(event.payload))
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO once VALUES (%s)", [event.payload])

    publish_many(("x", n) for n in range(4))
    try:
        drain()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE once")
    assert notes() == ["0", "2", "3"]
    assert [dead.payload for dead in dead_letters.list()] == [1]
    assert dead_letters.list()[0].error_type == "django.db.utils.IntegrityError"


def test_rows_written_by_copy_are_rolled_back_with_their_handler(transactional_db):
    """COPY bypasses Django's execute hooks, so opening the cursor is what counts."""
    if connection.vendor != "postgresql":
        pytest.skip("COPY")
    handler("y", name="i")(lambda event: effect(event, "neighbour"))

    @handler("x", name="h", retry=ONCE)
    def copy(event):
        into = "COPY shop_effect (event_id, handler, note) FROM STDIN"
        with connection.cursor() as cursor, cursor.copy(into) as stream:
            stream.write_row((event.id, "h", "copied"))
        raise ValueError

    publish("y", {})
    publish("x", {})
    drain()
    assert notes() == ["neighbour"]


def test_a_handler_may_nest_atomic_blocks_and_catch_what_they_raise():
    @handler("x", name="h")
    def nest(event):
        effect(event, "outer")
        try:
            with transaction.atomic():
                effect(event, "inner")
                raise ValueError
        except ValueError:
            pass

    event = publish("x", {})
    drain()
    assert notes() == ["outer"]
    assert logged(event).status == "COMPLETED"


def test_a_plain_handler_runs_outside_of_any_transaction(transactional_db):
    @handler("x", name="h", atomic=False)
    def look(event):
        effect(event, str(connection.in_atomic_block))

    event = publish("x", {})
    drain()
    assert notes() == ["False"]
    assert logged(event).status == "COMPLETED"


def test_atomic_handlers_run_before_the_other_handlers_of_their_event(transactional_db):
    @handler("x", name="outside", atomic=False, priority=10, retry=ONCE)
    def outside(event):
        row = QueuedEvent.objects.get()
        effect(event, row.deliveries["inside"]["state"])

    @handler("x", name="inside")
    def inside(event):
        effect(event, "inside")

    publish("x", {})
    drain()
    assert notes() == ["done", "inside"]


def test_a_plain_handler_that_fails_is_retried_alone(transactional_db):
    answers = [ValueError("gateway"), None]

    @handler("x", name="mail", atomic=False)
    def mail(event):
        if error := answers.pop(0):
            raise error

    handler("x", name="stock")(lambda event: effect(event, "stock"))
    event = publish("x", {})
    drain()
    make_due()
    drain()
    assert notes() == ["stock"]
    assert logged(event).status == "COMPLETED"
    assert answers == []


def test_a_plain_handler_that_leaves_a_transaction_open_fails(transactional_db):
    @handler("x", name="h", atomic=False, retry=ONCE)
    def leave_open(event):
        transaction.atomic().__enter__()
        effect(event)

    event = publish("x", {})
    drain()
    assert logged(event).status == "FAILED"
    assert notes() == []


def test_a_coroutine_that_is_never_awaited_is_a_failure():
    async def work(event):
        effect(event)

    handler("x", name="h", retry=ONCE)(lambda event: work(event))
    event = publish("x", {})
    drain()
    assert logged(event).status == "FAILED"
    assert "never awaited" in logged(event).errors[0]["message"]


def test_async_handlers_overlap(transactional_db):
    """Each waits for the other, so in sequence they would wait for ever."""
    both = threading.Barrier(2, timeout=60)

    @handler("x", name="h", timeout=90)
    async def meet(event):
        await asyncio.to_thread(both.wait)

    publish_many(("x", n) for n in range(2))
    drain()
    assert EventLog.objects.filter(status="COMPLETED").count() == 2


def test_an_async_handler_that_fails_is_retried():
    answers = [ValueError("first"), None]

    @handler("x", name="h")
    async def fail(event):
        if error := answers.pop(0):
            raise error

    event = publish("x", {})
    drain_with_retries()
    assert logged(event).status == "COMPLETED"
    assert [error["message"] for error in logged(event).errors] == ["first"]


def test_a_handler_that_sleeps_past_its_deadline_is_interrupted():
    """M17: a timeout is a failure like any other."""
    never = threading.Event()

    @handler("x", name="h", timeout=0.1, retry=ONCE)
    def sleep(event):
        never.wait()

    handler("y", name="i")(lambda event: effect(event, "next"))
    event = publish("x", {})
    publish("y", {})
    drain()
    assert logged(event).errors[0]["type"] == "TimeoutError"
    assert "h ran longer than 0.1 s" in logged(event).errors[0]["message"]
    assert notes() == ["next"]


def test_a_busy_handler_is_interrupted_too():
    @handler("x", name="h", timeout=0.1, retry=ONCE)
    def spin(event):
        while True:
            with contextlib.suppress(Exception):
                sum(range(100))

    event = publish("x", {})
    drain()
    assert logged(event).errors[0]["type"] == "TimeoutError"


NEVER_IN_TIME = 30


def hang(*args):
    """Block far beyond the deadline of the handler, but not for ever."""
    threading.Event().wait(NEVER_IN_TIME)
    return "too late"


class HangsWhenDescribed(Exception):
    __str__ = hang


class HidesOneThatHangs(Exception):
    def __init__(self):
        self.__cause__ = HangsWhenDescribed()


def is_async(handle):
    async def handle_async(event):
        handle(event)

    return handle_async


def event_that_raises(kind, new_error, **options):
    """Return the fourth of six events, whose handler raises; check that the others succeed."""

    def handle(event):
        if kind == "atomic after a write":
            effect(event)
        if event.payload == 3:
            raise new_error()

    options |= {"name": "h", "retry": {"max_retries": 1, "base_delay": 0}}
    if kind == "async":
        handler("x", **options)(is_async(handle))
    else:
        handler("x", **options, atomic=kind != "plain")(handle)
    events = [publish("x", n) for n in range(6)]
    drain()
    drain()
    others = [logged(each) for each in events if each != events[3]]
    assert {(each.status, each.attempts, each.errors) for each in others} == {
        ("COMPLETED", 1, None)
    }
    return logged(events[3])


@pytest.mark.parametrize("kind", ["atomic", "plain", "async"])
@pytest.mark.parametrize("error", [HangsWhenDescribed, HidesOneThatHangs])
def test_an_error_whose_str_hangs_counts_as_a_timeout_of_its_handler(transactional_db, kind, error):
    guilty = event_that_raises(kind, error, timeout=0.3)
    assert [each["type"] for each in guilty.errors] == ["TimeoutError"] * 2
    assert error.__name__ in guilty.errors[0]["message"]
    assert "the description of this error took longer than 0.3 s" in guilty.errors[0]["message"]


class OddRuntimeError(RuntimeError):
    def __str__(self):
        raise ValueError("no text")


class OddTimeoutError(TimeoutError):
    __str__ = OddRuntimeError.__str__


class OddOperationalError(OperationalError):
    @property
    def args(self):
        raise ValueError("no args")


def in_a_circle(first):
    second = ValueError("second")
    first.__context__, second.__context__ = second, first
    return first


def retry_with(delay):
    error = Retry("again")
    error.delay = delay
    return error


def durable_with_odd_notes():
    error = RuntimeError("A durable atomic block cannot be nested within another atomic block.")
    error.__notes__ = ("not a list",)
    return error


class ErrorWithoutClass(Exception):
    @property
    def __class__(self):
        raise ValueError("no class")


HOSTILE_ERRORS = ODD_ERRORS | {
    "a class that cannot be read": ErrorWithoutClass,
    "RuntimeError without text": OddRuntimeError,
    "TimeoutError without text": OddTimeoutError,
    "arguments that cannot be hashed": lambda: OperationalError(["x"], {}),
    "no arguments": OperationalError,
    "arguments that raise": OddOperationalError,
    "a circle": lambda: in_a_circle(ValueError("first")),
    "a circle of the database's": lambda: in_a_circle(OperationalError("first")),
    "retry in 10**400 s": lambda: retry_with(10**400),
    "retry in nan s": lambda: retry_with(float("nan")),
    "notes that are no list": durable_with_odd_notes,
    "a NUL": lambda: ValueError("a\x00b"),
    "half a surrogate": lambda: ValueError("a\ud800b"),
}


@pytest.mark.parametrize("kind", ["atomic", "atomic after a write", "plain", "async"])
@pytest.mark.parametrize("name", HOSTILE_ERRORS)
def test_an_exception_that_breaks_the_recording_is_charged_only_to_its_event(
    transactional_db, kind, name
):
    guilty = event_that_raises(kind, HOSTILE_ERRORS[name])
    assert (guilty.status, guilty.attempts, guilty.crashes) == ("FAILED", 2, 0)
    assert [(each["handler"], each["attempt"]) for each in guilty.errors] == [("h", 1), ("h", 2)]


@pytest.mark.parametrize(
    "reason", [None, 7, b"\xff", ["a"], {}, "\x00", "\ud800", "x" * 100_000, OddRuntimeError()]
)
def test_a_handler_may_discard_with_any_reason(reason):
    @handler("x", name="h")
    def give_up(event):
        raise Discard(reason)

    event, neighbour = publish("x", {}), publish("y", {})
    handler("y", name="i")(lambda event: None)
    drain()
    assert (logged(event).status, len(logged(event).errors)) == ("DISCARDED", 1)
    assert logged(neighbour).errors is None


def test_a_redacting_function_that_hangs_is_a_timeout_of_the_handler(settings):
    settings.EVENTBUS = {"REDACT_ERRORS": f"{__name__}.hang"}

    @handler("x", name="h", timeout=0.1, retry=ONCE)
    def fail(event):
        raise ValueError("secret")

    event = publish("x", {})
    drain()
    assert logged(event).errors[0]["type"] == "TimeoutError"
    assert "secret" not in str(logged(event).errors)


def test_an_error_of_a_callback_that_hangs_when_it_is_logged_is_interrupted(
    transactional_db, settings, capture
):
    settings.EVENTBUS = {"HANDLER_TIMEOUT": 0.1, "REDACT_ERRORS": f"{__name__}.hang"}

    def fail():
        raise ValueError

    @handler("x", name="h")
    def work(event):
        transaction.on_commit(fail)

    event = publish("x", {})
    drain()
    assert logged(event).status == "COMPLETED"
    assert "an on_commit callback failed: django_eventbus.exceptions.HandlerTimeout" in capture.text


def test_a_long_hostile_error_text_is_recorded_as_a_failure():
    """Redacting it took more than a minute, so the worker was killed as stuck."""

    @handler("x", name="h", retry=ONCE)
    def fail(event):
        raise ValueError("not a good url: " + "://:" * 30_000)

    event = publish("x", {})
    drain()
    assert logged(event).errors[0]["message"] == "not a good url: ://…"
    assert logged(event).errors[0]["type"] == "ValueError"


def test_an_async_handler_past_its_deadline_is_cancelled():
    @handler("x", name="h", timeout=0.1, retry=ONCE)
    async def sleep(event):
        await asyncio.Event().wait()

    event = publish("x", {})
    drain()
    assert logged(event).errors[0]["type"] == "TimeoutError"


def test_only_the_coroutine_that_blocks_the_loop_is_charged(monkeypatch):
    """The coroutines that it blocked run again on another loop, uncharged."""
    monkeypatch.setattr(event_loop, "GRACE", 0.2)
    released, ran = threading.Event(), []

    @handler("x", name="blocks", timeout=0.2, retry=ONCE)
    async def block(event):
        released.wait(60)

    @handler("y", name="fine", timeout=60, retry=ONCE)
    async def work(event):
        ran.append(event.payload)

    before = publish("y", "before")
    blocking = publish("x", {})
    after = [publish("y", n) for n in range(3)]
    try:
        drain()
    finally:
        released.set()
    assert sorted(ran, key=str) == [0, 1, 2, "before"]
    assert logged(blocking).errors[0]["type"] == "TimeoutError"
    assert [logged(each).errors for each in (before, *after)] == [None] * 4
    assert {logged(each).attempts for each in after} == {1}


async def leave(error):
    raise error


def stop_the_loop(loop):
    loop.stop()


def exit_in_a_task(loop):
    loop.create_task(leave(SystemExit(3)))


def interrupt_in_a_task(loop):
    loop.create_task(leave(KeyboardInterrupt()))


def exit_in_a_callback(loop):
    loop.call_soon(sys.exit, 3)


def close_the_loop(loop):
    """A running loop cannot be closed, so this one is closed when it is to run again."""
    loop.run_forever = loop.close
    loop.stop()


@pytest.mark.parametrize(
    "end",
    [stop_the_loop, exit_in_a_task, interrupt_in_a_task, exit_in_a_callback, close_the_loop],
)
def test_a_handler_that_stops_the_event_loop_does_not_affect_others(end, transactional_db):
    ended, ran = [], []

    @handler("x", name="ends", timeout=20, retry=ONCE)
    async def end_it(event):
        if not ended:
            ended.append(True)
            end(asyncio.get_running_loop())

    @handler("y", name="fine", timeout=20, retry=ONCE)
    async def work(event):
        for _ in range(5):
            await asyncio.sleep(0)
        ran.append(event.payload)

    others = [publish("y", "before")]
    guilty = publish("x", {})
    others += [publish("y", n) for n in range(3)]
    drain()
    others.append(publish("y", "later"))
    drain()
    assert sorted(ran, key=str) == [0, 1, 2, "before", "later"]
    for each in (guilty, *others):
        assert (logged(each).status, logged(each).errors) == ("COMPLETED", None)
        assert logged(each).attempts == 1


def close_it_from_another_thread(loop):
    """Nothing says which coroutine did it."""
    loop.run_forever = loop.close
    stop = threading.Thread(target=loop.call_soon_threadsafe, args=[loop.stop])
    stop.start()
    stop.join()


def close_it_in_a_callback(loop):
    loop.run_forever = loop.close
    loop.call_soon(loop.stop)


def close_it_in_a_task(loop):
    async def close():
        close_the_loop(loop)

    loop.create_task(close())


@pytest.mark.parametrize(
    "end",
    [close_the_loop, close_it_in_a_callback, close_it_in_a_task, close_it_from_another_thread],
)
def test_a_handler_that_closes_its_loop_every_time_is_charged_and_no_other(end, transactional_db):
    attempts, ran = [], []

    @handler("x", name="closes", timeout=20, retry={"max_retries": 1})
    async def close(event):
        attempts.append(event.attempt)
        if len(attempts) > 10:
            return  # So that a run without limit ends.
        end(asyncio.get_running_loop())
        await asyncio.Event().wait()

    @handler("y", name="fine", timeout=20, retry=ONCE)
    async def work(event):
        for _ in range(5):
            await asyncio.sleep(0)
        ran.append(event.payload)

    others = [publish("y", "before")]
    guilty = publish("x", {})
    others += [publish("y", n) for n in range(3)]
    drain_with_retries()
    assert (logged(guilty).status, logged(guilty).attempts) == ("FAILED", 2)
    assert attempts[-1] == 2
    message = "the handler closed the event loop that it runs on"
    assert [each["message"] for each in logged(guilty).errors] == [message] * 2
    assert set(ran) == {0, 1, 2, "before"}
    for each in others:
        assert (logged(each).status, logged(each).errors) == ("COMPLETED", None)
        assert logged(each).attempts == 1


def test_a_task_that_blocks_the_loop_is_charged_to_its_own_handler(monkeypatch, transactional_db):
    monkeypatch.setattr(event_loop, "GRACE", 0.2)
    released, calls = threading.Event(), []

    async def block():
        released.wait(60)

    @handler("x", name="blocks", timeout=0.2, retry=ONCE)
    async def start_it(event):
        calls.append(event.attempt)
        if len(calls) <= 10:  # So that a run without limit ends.
            await asyncio.create_task(block())

    @handler("y", name="fine", timeout=60, retry=ONCE)
    async def work(event):
        await asyncio.sleep(0.01)

    guilty = publish("x", {})
    others = [publish("y", n) for n in range(2)]
    try:
        drain()
    finally:
        released.set()
    assert logged(guilty).errors[0]["type"] == "TimeoutError"
    for each in others:
        assert (logged(each).status, logged(each).errors) == ("COMPLETED", None)


def test_a_coroutine_that_is_cancelled_with_a_blocked_loop_is_not_charged(
    monkeypatch, transactional_db
):
    """The loop runs again, and cancels its tasks, before the result of the coroutine is read."""
    monkeypatch.setattr(event_loop, "GRACE", 0.2)
    released, cancelled, calls = threading.Event(), threading.Event(), []

    async def block():
        released.wait(60)

    @handler("first", name="first", timeout=2, retry=ONCE)
    async def find_the_block(event):
        calls.append("first")
        if calls.count("first") == 1:
            await asyncio.sleep(0.01)
        else:
            released.set()
            await asyncio.to_thread(cancelled.wait, 30)

    @handler("waits", name="waits", timeout=60, retry=ONCE)
    async def wait(event):
        calls.append("waits")
        if calls.count("waits") == 1:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

    @handler("x", name="blocks", timeout=0.5, retry=ONCE)
    async def start_it(event):
        await asyncio.create_task(block())

    first, innocent = publish("first", {}), publish("waits", {})
    publish("x", {})
    try:
        drain()
    finally:
        released.set()
    assert calls.count("waits") == 2
    for each in (first, innocent):
        assert (logged(each).status, logged(each).errors) == ("COMPLETED", None)


def test_a_coroutine_that_blocks_its_loop_and_ignores_its_cancellation_is_charged(monkeypatch):
    monkeypatch.setattr(event_loop, "GRACE", 0.2)
    loop, entered, released = event_loop.AsyncLoop(), threading.Event(), threading.Event()

    async def block():
        entered.set()
        released.wait(60)
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def answer():
        return None

    try:
        blocks = loop.start("blocks", block)
        assert entered.wait(30)
        blocked = loop.start("blocked", answer)
        with pytest.raises(event_loop.LoopBlockedError):
            loop.outcome(blocked, within=0)
        released.set()
        error = blocks.future.result(30)
    finally:
        released.set()
        loop.stop()
    assert not isinstance(error, event_loop.LoopBlockedError)
    assert str(error) == "the handler blocked the event loop and ignored its cancellation"


def test_the_turns_of_coroutines_continue_on_a_new_loop(transactional_db):
    """A semaphore of asyncio works in one loop only, and the loop is closed between two waves."""
    ran = []

    @handler("x", name="limited", max_running=1, retry=ONCE)
    async def work(event):
        await asyncio.sleep(0.01)
        ran.append(event.payload)

    @handler("closes", name="closes", retry=ONCE)
    async def close(event):
        while len(ran) < 3:
            await asyncio.sleep(0.01)
        close_the_loop(asyncio.get_running_loop())
        await asyncio.Event().wait()

    for key in "abc":
        publish_many((("x", [key, number]) for number in range(2)), key=key)
    publish("closes", {})
    drain()
    assert sorted(ran) == [[key, number] for key in "abc" for number in range(2)]
    errors = EventLog.objects.filter(type="x").values_list("status", "errors")
    assert list(errors) == [("COMPLETED", None)] * 6


def test_an_event_whose_settlement_met_a_conflict_is_not_charged(monkeypatch, transactional_db):
    """The handler had returned: it is run again, with the conflict of the settlement only."""
    conflict = OperationalError(SERIALIZATION_FAILURE)
    monkeypatch.setattr(Store, "is_conflict", lambda store, error: error is conflict)
    write, conflicts, calls = Settler.write, [conflict], []

    def write_in_conflict(settler, *args):
        write(settler, *args)
        if conflicts:
            raise conflicts.pop()

    monkeypatch.setattr(Settler, "write", write_in_conflict)

    @handler("x", name="h", isolated=True, retry=ONCE)
    def work(event):
        calls.append(event.attempt)
        effect(event, "written")

    event = publish("x", {})
    drain()
    assert (logged(event).status, logged(event).attempts) == ("COMPLETED", 1)
    assert (logged(event).errors, calls, notes()) == (None, [1, 1], ["written"])


@pytest.fixture
def stop_worker(monkeypatch):
    """Stop the worker that delivers, as SIGTERM would."""
    deliver, workers = Delivery.deliver, []

    def note_and_deliver(delivery, batch):
        workers.append(delivery.deliverer.stopping.__self__)
        return deliver(delivery, batch)

    monkeypatch.setattr(Delivery, "deliver", note_and_deliver)
    return lambda: workers[-1].stop()


def test_no_coroutine_of_a_batch_starts_after_a_shutdown_began(stop_worker):
    ran = []
    handler("stop", name="stops")(lambda event: stop_worker())

    @handler("x", name="h")
    async def work(event):
        ran.append(event.payload)

    publish_many(("x", n) for n in range(3))
    publish("stop", {})
    drain()
    rows = QueuedEvent.objects.values_list("status", "attempts", "deliveries")
    assert (ran, list(rows)) == ([], [("PENDING", 0, None)] * 3)
    drain()
    assert sorted(ran) == [0, 1, 2]


def test_a_coroutine_that_waits_for_its_turn_does_not_start_after_a_shutdown_began(stop_worker):
    ran = []

    @handler("x", name="h", max_running=1)
    async def work(event):
        ran.append(event.payload)
        stop_worker()

    publish_many(("x", n) for n in range(3))
    drain()
    rows = QueuedEvent.objects.values_list("status", "attempts", "deliveries", "errors")
    assert (ran, list(rows)) == ([0], [("PENDING", 0, None, None)] * 2)
    drain()
    drain()
    assert sorted(ran) == [0, 1, 2]


def test_a_closed_loop_is_replaced_and_its_calls_are_abandoned():
    loop, entered = event_loop.AsyncLoop(), threading.Event()

    async def wait_for_ever():
        entered.set()
        await asyncio.Event().wait()

    async def answer():
        return None

    try:
        running = loop.start("waits", wait_for_ever)
        assert entered.wait(30)
        running.loop.stop()
        with pytest.raises(event_loop.LoopBlockedError):
            raise loop.outcome(running, within=30)
        assert not running.loop.is_alive()
        late = running.loop.start("late", answer)
        with pytest.raises(event_loop.LoopBlockedError):
            raise loop.outcome(late, within=30)
        assert loop.outcome(loop.start("next", answer), within=30) is None
    finally:
        loop.stop()


def test_coroutines_work_again_after_a_lost_session(transactional_db):
    """The thread in which coroutines use the ORM lives as long as the process."""

    def lose_the_session():
        connection.ensure_connection()
        connection.connection.close()

    @handler("x", name="h", retry={"max_retries": 1})
    async def work(event):
        if event.attempt == 1 and event.payload == 0:
            await sync_to_async(lose_the_session)()
        await Effect.objects.acreate(event_id=event.id, handler="h")
        await sync_to_async(connections.close_all)()

    for number in range(3):
        publish("x", number)
        drain_with_retries()
    assert set(EventLog.objects.values_list("status", flat=True)) == {"COMPLETED"}
    errors = EventLog.objects.order_by("id").values_list("errors", flat=True)
    assert [len(each or []) for each in errors] == [1, 0, 0]


def test_callbacks_of_a_handler_that_failed_do_not_run(transactional_db):
    called = []

    @handler("x", name="h", retry=ONCE)
    def fail(event):
        transaction.on_commit(lambda: called.append(event.payload))
        if event.payload in (1, 3):
            if event.payload == 3:
                effect(event)
            raise ValueError

    publish_many(("x", n) for n in range(5))
    drain()
    assert called == [0, 2, 4]


def test_a_failing_callback_affects_neither_its_event_nor_other_callbacks(
    transactional_db,
):
    called = []

    def explode():
        raise ValueError("callback")

    @handler("x", name="h")
    def register(event):
        effect(event, str(event.payload))
        transaction.on_commit(explode if event.payload == 0 else lambda: called.append(1))

    publish_many(("x", n) for n in range(3))
    drain()
    assert called == [1, 1]
    assert EventLog.objects.filter(status="COMPLETED").count() == 3
    assert notes() == ["0", "1", "2"]


def test_order_is_kept_when_the_first_event_fails():
    """M15, F39: events of one key run one at a time and oldest first, also with retries."""
    ran = []
    answers = {0: [ValueError("once")], 2: [ValueError("once")]}

    @handler("step", name="h")
    def step(event):
        if answers.get(event.payload):
            raise answers[event.payload].pop()
        ran.append(event.payload)

    publish_many((("step", n) for n in range(5)), key="a")
    publish("step", "free", key="b")
    drain()
    assert ran == ["free"]
    drain_with_retries()
    assert [n for n in ran if n != "free"] == [0, 1, 2, 3, 4]


def test_events_behind_a_failing_first_event_are_not_charged():
    """F39."""

    @handler("step", name="h")
    def fail(event):
        raise ValueError

    publish_many((("step", n) for n in range(3)), key="a")
    drain()
    attempts = QueuedEvent.objects.order_by("id").values_list("attempts", flat=True)
    assert list(attempts) == [1, 0, 0]


def test_order_is_kept_across_handlers_outside_of_transactions(transactional_db):
    ran = []

    @handler("step", name="inside")
    def inside(event):
        ran.append(("inside", event.payload))

    @handler("step", name="outside", atomic=False)
    def outside(event):
        ran.append(("outside", event.payload))

    publish_many((("step", n) for n in range(3)), key="a")
    drain()
    assert ran == [(name, n) for n in range(3) for name in ("inside", "outside")]


def test_a_dead_first_event_does_not_block_its_key():
    """F39."""
    ran = []

    @handler("step", name="h", retry=ONCE)
    def step(event):
        if event.payload == 0:
            raise ValueError
        ran.append(event.payload)

    publish_many((("step", n) for n in range(3)), key="a")
    drain_with_retries()
    assert ran == [1, 2]


def test_a_group_ends_when_it_has_many_savepoints(
    transactional_db, groups_have_no_time_limit, monkeypatch
):
    monkeypatch.setattr(grouped, "GROUP_SAVEPOINTS", 3)
    committed = []

    @handler("x", name="h")
    def write(event):
        effect(event)
        transaction.on_commit(lambda: committed.append(event.payload))
        if event.payload == 7:
            committed.append("seven runs")

    publish_many(("x", n) for n in range(8))
    drain()
    assert committed[:7] == [0, 1, 2, 3, 4, 5, "seven runs"]


def test_a_lost_claim_commits_nothing_of_its_group(transactional_db):
    """Another worker claimed one of the events while its handler ran."""

    @handler("x", name="h")
    def lose(event):
        effect(event, str(event.payload))
        publish("child", event.payload)
        if event.payload == 1:
            # Like another worker, on its own connection.
            steal_from_another_connection(event.id)

    publish_many(("x", n) for n in range(3))
    if connection.vendor == "sqlite":
        pytest.skip(
            "SQLite has one writer: no claim is possible while the group's transaction is open"
        )
    drain(max_events=2)
    assert notes() == ["0", "2"]
    stolen = QueuedEvent.objects.get(type="x")
    assert stolen.payload == 1
    # F41: the events it published are rolled back too.
    children = QueuedEvent.objects.filter(type="child").values_list("payload", flat=True)
    assert sorted(children) == [0, 2]


def test_a_lost_claim_is_logged(transactional_db, capture):
    handler("x", name="h", atomic=False)(lambda event: steal_from_another_connection(event.id))
    publish("x", {})
    drain()
    assert "lost the claim on 1 of 1 events" in capture.text


def steal_from_another_connection(event_id):
    def steal():
        QueuedEvent.objects.filter(event_id=event_id).update(
            claim_token=uuid.uuid4(), claimed_by=uuid.uuid4()
        )
        connection.close()

    thread = threading.Thread(target=steal)
    thread.start()
    thread.join()


def test_an_atomic_event_that_loses_its_transaction_waits_for_its_retry(transactional_db, settings):
    """Run alone, its handlers also succeed or fail together, so none continues under this claim."""
    settings.EVENTBUS = {"ATOMIC": "event"}
    handler("x", name="first", priority=1)(effect)

    @handler("x", name="second")
    def lose(event):
        effect(event)
        connection.close()

    publish("x", {})
    tally = drain()
    assert (tally.handled, tally.postponed, tally.failed) == (0, 1, 1)
    assert QueuedEvent.objects.get().available_at is not None
    assert notes() == []


def fail_to_blame(run, handler, error, seconds):
    raise TypeError("a bug in the bus")


def test_an_internal_error_with_one_event_does_not_affect_the_others(monkeypatch):
    """An event that causes internal errors becomes a dead letter; the others are handled."""
    monkeypatch.setattr(Caller, "blame", staticmethod(fail_to_blame))

    @handler("*", name="h")
    def stumble(event):
        if event.type == "bad":
            raise ValueError
        effect(event, event.type)

    publish("good", {})
    bad = publish("bad", {})
    publish("good", {})
    drain_with_retries()
    assert notes() == ["good", "good"]
    assert (logged(bad).status, logged(bad).error_type) == ("FAILED", "unsettleable")
    assert set(EventLog.objects.values_list("crashes", flat=True)) == {0}


def test_a_schema_change_cannot_commit_the_work_of_other_events(transactional_db):
    if connection.features.can_rollback_ddl:
        pytest.skip("only where a change of the schema ends the transaction")

    @handler("x", name="h", retry=ONCE)
    def truncate(event):
        effect(event, str(event.payload))
        if event.payload == 1:
            with connection.cursor() as cursor:
                cursor.execute("TRUNCATE TABLE auth_group_permissions")

    publish_many(("x", n) for n in range(3))
    drain()
    assert notes() == ["0", "2"]


def test_a_rollback_on_the_driver_connection_is_detected(transactional_db):
    """The handler uses the driver connection and never opens a cursor through Django."""
    if not hasattr(connection.connection, "in_transaction") and connection.vendor == "mysql":
        pytest.skip("the driver does not report whether a transaction is open")

    @handler("x", name="h", retry=ONCE)
    def roll_back(event):
        if event.payload == 1:
            connection.connection.rollback()
        else:
            effect(event, str(event.payload))

    publish_many(("x", n) for n in range(3))
    drain()
    assert notes() == ["0", "2"]
    assert EventLog.objects.count() == 3


@pytest.mark.parametrize("how", ["commit", "rollback"])
def test_ending_the_transaction_on_the_driver_connection_is_a_failure(transactional_db, how):
    """F15: its writes stay committed, as the docs say, but each event ends once."""
    if connection.vendor == "mysql":
        pytest.skip("the driver does not report whether a transaction is open")

    @handler("x", name="h", retry=ONCE)
    def end(event):
        effect(event, str(event.payload))
        if event.payload == 1:
            getattr(connection.connection, how)()

    publish_many(("x", n) for n in range(3))
    drain()
    (dead,) = dead_letters.list()
    assert dead.payload == 1
    assert "transaction" in dead.errors[0]["message"]
    assert EventLog.objects.count() == 3
    assert not QueuedEvent.objects.exists()
    if how == "rollback":
        assert notes() == ["0", "2"]


@pytest.mark.parametrize("how", ["autocommit off", "raw begin", "atomic and raise"])
def test_a_plain_handler_cannot_roll_back_the_settlements_of_others(transactional_db, how):
    if how == "raw begin" and connection.vendor == "mysql":
        pytest.skip("the driver does not report whether a transaction is open")

    @handler("x", name="h", atomic=False, retry=ONCE)
    def leave_open(event):
        if event.payload == 1 and how == "autocommit off":
            transaction.set_autocommit(False)
        elif event.payload == 1 and how == "atomic and raise":
            transaction.atomic().__enter__()
            raise ValueError
        elif event.payload == 1:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")

    publish_many(("x", n) for n in range(4))
    drain()
    connection.close()
    assert EventLog.objects.filter(status="COMPLETED").count() == 3
    assert [dead.payload for dead in dead_letters.list()] == [1]


def test_order_is_kept_when_a_group_is_lost(transactional_db):
    """Events that the group left out must not be overtaken when the first event succeeds alone."""
    ran = []
    first_time = [ValueError("in the group")]

    @handler("step", name="inside", priority=1)
    def inside(event):
        if event.payload == 1 and first_time:
            raise first_time.pop()
        ran.append(event.payload)

    @handler("step", name="outside", atomic=False)
    def outside(event):
        pass

    broken = []

    @handler("breaker", name="breaker")
    def break_the_group(event):
        if not broken:
            broken.append(True)
            effect(event)
            connection.close()

    publish_many((("step", n) for n in (1, 2, 3)), key="k")
    publish("breaker", {})
    drain_with_retries()
    assert ran == [1, 2, 3]


def test_an_internal_error_does_not_block_a_key(monkeypatch):
    monkeypatch.setattr(Caller, "blame", staticmethod(fail_to_blame))
    ran = []

    @handler("step", name="h")
    def step(event):
        if event.payload == 0:
            raise ValueError
        ran.append(event.payload)

    publish_many((("step", n) for n in range(3)), key="a")
    drain_with_retries()
    assert ran == [1, 2]
    assert dead_letters.list()[0].error_type == "unsettleable"


def test_a_plain_handlers_event_is_settled_before_the_next_one_runs(transactional_db):
    settled = []

    @handler("x", name="h", atomic=False)
    def count(event):
        settled.append(EventLog.objects.count())

    publish_many(("x", n) for n in range(4))
    drain()
    assert settled == [0, 1, 2, 3]


def test_a_callback_that_hangs_or_exits_affects_only_itself(transactional_db, settings):
    settings.EVENTBUS = {"HANDLER_TIMEOUT": 0.2}
    called = []

    def hang():
        try:
            threading.Event().wait()
        finally:
            # The other callbacks get the default deadline, because the machine may be busy.
            settings.EVENTBUS = {}
            called.append("interrupted")

    def leave():
        raise SystemExit

    hooks = [hang, leave, lambda: called.append("next")]

    @handler("x", name="h", timeout=60)
    def register(event):
        transaction.on_commit(hooks[event.payload])

    publish_many(("x", n) for n in range(3))
    drain()
    assert called == ["interrupted", "next"]
    assert EventLog.objects.filter(status="COMPLETED").count() == 3


@pytest.mark.parametrize("how", ["autocommit off", "BEGIN", "atomic and raise"])
def test_a_callback_that_leaves_a_transaction_open_does_not_block_settlements(
    transactional_db, capture, how
):
    """Otherwise later settlements would be part of that transaction and never be committed."""
    if how == "BEGIN" and connection.vendor == "mysql":
        pytest.skip("the driver does not report whether a transaction is open")

    def leave_open():
        effect_of_callback = Effect(event_id=uuid.uuid4(), handler="callback", note="callback")
        if how == "autocommit off":
            transaction.set_autocommit(False)
        elif how == "BEGIN":
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")
        else:
            transaction.atomic().__enter__()
        effect_of_callback.save()
        if how == "atomic and raise":
            raise ValueError

    @handler("x", name="h")
    def register(event):
        effect(event, str(event.payload))
        if event.payload == 1:
            transaction.on_commit(leave_open)

    publish_many(("x", n) for n in range(4))
    drain(batch_size=2)
    connection.close()
    assert notes() == ["0", "1", "2", "3"]
    assert EventLog.objects.filter(status="COMPLETED").count() == 4
    assert "leave_open" in capture.text
    assert "left autocommit off or a transaction open" in capture.text


def test_a_query_past_the_deadline_is_cancelled(transactional_db):
    if connection.vendor != "postgresql":
        pytest.skip("pg_sleep")

    @handler("x", name="h", timeout=0.3, retry=ONCE)
    def sleep(event):
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(60)")

    handler("y", name="i")(lambda event: effect(event, "next"))
    event = publish("x", {})
    publish("y", {})
    drain()
    assert logged(event).errors[0]["type"] == "TimeoutError"
    assert notes() == ["next"]
