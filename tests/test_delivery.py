"""Running handlers: what commits together, what is undone alone, what is tried again."""

import asyncio
import contextlib
import re
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
    coroutines,
    dead_letters,
    delivery,
    handler,
    publish,
    publish_many,
    subscribe,
    unsubscribe,
)
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.store import Store
from tests.bus import drain, drain_with_retries, logged, make_due
from tests.shop.models import Effect

pytestmark = pytest.mark.django_db

ONCE = {"max_retries": 0}


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


def test_a_failing_handler_takes_only_its_own_writes_back():
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


def test_a_failing_event_leaves_its_neighbours_of_the_group_alone():
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
def groups_take_their_time(monkeypatch):
    """A busy machine does not cut them."""
    monkeypatch.setattr(delivery, "GROUP_SECONDS", float("inf"))


def test_handlers_of_many_events_share_a_transaction(transactional_db, groups_take_their_time):
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


def test_a_handler_that_touches_nothing_costs_no_statement_of_its_own():
    handler("idle", name="idle")(lambda event: None)
    handler("busy", name="busy")(effect)

    def statements_for(count, kind):
        publish_many((kind, n) for n in range(count))
        with CaptureQueriesContext(connection) as queries:
            drain()
        return [query["sql"] for query in queries]

    # Some go by time: what is delayed, scheduled or to be recovered is looked for now and then.
    now_and_then = 10
    alone, together = statements_for(1, "idle"), statements_for(20, "idle")
    assert len(together) <= len(alone) + now_and_then
    savepoint = re.compile(r"^SAVEPOINT .?eventbus_")
    assert not list(filter(savepoint.match, together))
    assert len(list(filter(savepoint.match, statements_for(20, "busy")))) == 20, "or none is seen"
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


def test_a_handler_that_vanished_in_a_deploy_is_waited_for_and_then_dead(settings):
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


def test_retry_says_when():
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
def test_whatever_a_handler_raises_is_a_failure_and_not_the_end(transactional_db, exception, kind):
    """F10: recorded by its name, whatever it is; the next event is handled."""

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


def test_all_handlers_of_an_event_or_none(settings):
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


def test_one_dead_handler_is_the_death_of_an_atomic_event(settings):
    settings.EVENTBUS = {"ATOMIC": "event"}
    handler("x", name="a")(lambda event: effect(event, "a"))

    @handler("x", name="b", retry=ONCE)
    def b(event):
        raise ValueError

    event = publish("x", {})
    drain()
    assert notes() == []
    assert logged(event).status == "FAILED"


def test_events_published_by_a_handler_that_fails_never_were():
    @handler("x", name="h", retry=ONCE)
    def fail(event):
        publish("child", {})
        raise ValueError

    publish("x", {})
    drain()
    assert not QueuedEvent.objects.filter(type="child").exists()
    assert not EventLog.objects.filter(type="child").exists()


def test_a_swallowed_database_error_is_a_failure_of_that_handler_alone():
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
    assert "swallowed a database error" in dead.errors[0]["message"]


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
    """F14: Django refuses it inside of a transaction; the next event finds all as it was."""

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


def test_a_durable_block_in_a_handler_is_told_what_it_needs():
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


def test_a_handler_that_closes_its_connection_fails_alone(transactional_db):
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


def test_a_handler_whose_session_is_ended_fails_alone(transactional_db):
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


def test_no_handler_is_blamed_for_a_full_disk(transactional_db, monkeypatch):
    """What it wrote was fine; there was no room for the log of it."""
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


def test_a_handler_that_idles_longer_than_its_session_may_is_told_so(transactional_db):
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


def test_a_commit_that_fails_is_the_failure_of_the_guilty_alone(transactional_db):
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


def test_rows_written_by_copy_are_undone_with_their_handler(transactional_db):
    """COPY passes by Django's execute hooks; asking for the cursor is what counts."""
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


def test_a_plain_handler_runs_outside_of_any_transaction_of_ours(transactional_db):
    @handler("x", name="h", atomic=False)
    def look(event):
        effect(event, str(connection.in_atomic_block))

    event = publish("x", {})
    drain()
    assert notes() == ["False"]
    assert logged(event).status == "COMPLETED"


def test_atomic_handlers_are_done_before_the_others_of_their_event_run(transactional_db):
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


def test_a_coroutine_that_nobody_would_await_is_a_failure():
    async def work(event):
        effect(event)

    handler("x", name="h", retry=ONCE)(lambda event: work(event))
    event = publish("x", {})
    drain()
    assert logged(event).status == "FAILED"
    assert "nobody awaits" in logged(event).errors[0]["message"]


def test_async_handlers_overlap(transactional_db):
    """Each waits for the other: one after the other they would wait for ever."""
    both = threading.Barrier(2, timeout=10)

    @handler("x", name="h", timeout=15)
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


def test_an_async_handler_past_its_deadline_is_cancelled():
    @handler("x", name="h", timeout=0.1, retry=ONCE)
    async def sleep(event):
        await asyncio.Event().wait()

    event = publish("x", {})
    drain()
    assert logged(event).errors[0]["type"] == "TimeoutError"


def test_a_coroutine_that_blocks_the_loop_is_blamed_and_no_other(monkeypatch):
    """Those that could not go on because of it are run again, uncharged, on another loop."""
    monkeypatch.setattr(coroutines, "GRACE", 0.2)
    released, ran = threading.Event(), []

    @handler("x", name="blocks", timeout=0.2, retry=ONCE)
    async def block(event):
        released.wait(60)

    @handler("y", name="fine", timeout=0.2, retry=ONCE)
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


def test_coroutines_get_over_a_lost_session(transactional_db):
    """The thread in which they meet the ORM lives as long as the process."""

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


def test_a_callback_that_raises_harms_neither_its_event_nor_the_callbacks_of_others(
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


def test_order_is_kept_through_failures_of_the_head():
    """M15, F39: same key, one at a time, oldest first, also when the first has to be retried."""
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


def test_events_behind_a_failing_head_are_not_charged():
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


def test_a_dead_head_lets_its_key_go_on():
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


def test_a_group_is_cut_when_it_holds_many_savepoints(
    transactional_db, groups_take_their_time, monkeypatch
):
    monkeypatch.setattr(delivery, "GROUP_SAVEPOINTS", 3)
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
    """Fencing: another worker took one of the events while its handler ran."""

    @handler("x", name="h")
    def lose(event):
        effect(event, str(event.payload))
        publish("child", event.payload)
        if event.payload == 1:
            # As another worker would: by its own connection.
            steal_from_another_connection(event.id)

    publish_many(("x", n) for n in range(3))
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has one writer: nobody can steal while the group's transaction is open")
    drain(max_events=2)
    assert notes() == ["0", "2"]
    stolen = QueuedEvent.objects.get(type="x")
    assert stolen.payload == 1
    # F41: the children of the fenced one vanish with it.
    children = QueuedEvent.objects.filter(type="child").values_list("payload", flat=True)
    assert sorted(children) == [0, 2]


def test_a_lost_claim_is_told(transactional_db, capture):
    handler("x", name="h", atomic=False)(lambda event: steal_from_another_connection(event.id))
    publish("x", {})
    drain()
    assert "1 of 1 events are not held here any more" in capture.text


def steal_from_another_connection(event_id):
    def steal():
        QueuedEvent.objects.filter(event_id=event_id).update(
            claim_token=uuid.uuid4(), claimed_by=uuid.uuid4()
        )
        connection.close()

    thread = threading.Thread(target=steal)
    thread.start()
    thread.join()


def test_a_fault_of_our_own_with_one_event_does_not_take_the_others_with_it(monkeypatch):
    """An event that the bus itself stumbles over is dead in the end; the others are handled."""

    def fail_to_fail(progress, handler, error, started):
        raise TypeError("a bug in the bus")

    monkeypatch.setattr(delivery.Deliverer, "_failed", staticmethod(fail_to_fail))

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
    assert (logged(bad).status, logged(bad).error_type) == ("FAILED", "crashed")


def test_a_change_of_the_schema_cannot_commit_the_work_of_neighbours(transactional_db):
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


def test_a_rollback_past_django_is_noticed(transactional_db):
    """On the driver's own connection, by a handler that never asked Django for a cursor."""
    if not hasattr(connection.connection, "in_transaction") and connection.vendor == "mysql":
        pytest.skip("the driver does not tell whether it is in a transaction")

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
def test_ending_the_transaction_past_django_is_a_failure(transactional_db, how):
    """F15: what it committed is on disk, a hole the docs name; but each event ends once."""
    if connection.vendor == "mysql":
        pytest.skip("the driver does not tell whether it is in a transaction")

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
def test_a_plain_handler_cannot_swallow_the_settlements_of_others(transactional_db, how):
    if how == "raw begin" and connection.vendor == "mysql":
        pytest.skip("the driver does not tell whether it is in a transaction")

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
    """What was passed over in the group must not be overtaken when its head makes it alone."""
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


def test_a_fault_of_our_own_does_not_keep_a_key_for_ever(monkeypatch):
    def fail_to_fail(progress, handler, error, started):
        raise TypeError("a bug in the bus")

    monkeypatch.setattr(delivery.Deliverer, "_failed", staticmethod(fail_to_fail))
    ran = []

    @handler("step", name="h")
    def step(event):
        if event.payload == 0:
            raise ValueError
        ran.append(event.payload)

    publish_many((("step", n) for n in range(3)), key="a")
    drain_with_retries()
    assert ran == [1, 2]
    assert dead_letters.list()[0].error_type == "crashed"


def test_a_plain_handlers_event_is_settled_before_the_next_one_runs(transactional_db):
    settled = []

    @handler("x", name="h", atomic=False)
    def count(event):
        settled.append(EventLog.objects.count())

    publish_many(("x", n) for n in range(4))
    drain()
    assert settled == [0, 1, 2, 3]


def test_a_callback_that_hangs_or_exits_harms_only_itself(transactional_db, settings):
    settings.EVENTBUS = {"HANDLER_TIMEOUT": 0.2}
    called = []

    def hang():
        try:
            threading.Event().wait()
        finally:
            # The others shall not hurry, on a busy machine.
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
