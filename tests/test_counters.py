"""Counters: what is counted, when it is written, and why a counter never goes down (M20)."""

import os
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress

import pytest
from django.core.signals import request_finished
from django.db import DatabaseError, OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_eventbus import Event, Retry, RetryPolicy, handler, publish, publish_many
from django_eventbus.counters import process
from django_eventbus.counters.counting import ProcessCounters
from django_eventbus.counters.process import counters_of_process, write_at_exit
from django_eventbus.models import (
    EVENTS,
    FOLDED,
    PUBLISHING,
    RUNS,
    STARTS,
    EventCounter,
    QueuedEvent,
)
from django_eventbus.schema.histograms import COLUMNS
from django_eventbus.statistics.recorder import StatisticsRecorder
from django_eventbus.store import COUNTED, FOLD_AFTER, Series, store_for
from django_eventbus.store import counters as stored
from tests.bus import drain, drain_with_retries
from tests.test_statistics import settled
from tests.threads import in_thread

pytestmark = pytest.mark.django_db(transaction=True)

LONG_AGO = "2000-01-01T00:00:00Z"


def counted(measure=PUBLISHING):
    """The counters of the database as {(queue, handler or type): {column: number}}."""
    write_at_exit()
    found = {}
    for series, numbers in store_for().read_counters().items():
        if series.measure == measure:
            named = dict(zip(COUNTED, numbers, strict=True))
            wanted = {name: n for name, n in named.items() if n and name not in COLUMNS}
            wanted.pop("seconds", None)
            found[series.queue, series.handler or series.event_type] = wanted
    return found


def timed(measure):
    """The number of durations of all series."""
    write_at_exit()
    sums = store_for().read_counters().items()
    return sum(
        sum(dict(zip(COUNTED, numbers, strict=True))[name] for name in COLUMNS)
        for series, numbers in sums
        if series.measure == measure
    )


@pytest.fixture
def known():
    """Two types that this process knows."""
    handler("order.placed", name="bill")(lambda event: None)
    handler("order.*", name="log")(lambda event: None)
    handler("mail", name="send")(lambda event: None)


# -- publishing


def test_published_events_are_counted_by_queue_and_type(known, settings):
    settings.EVENTBUS = {"QUEUES": ["default", "mails"]}
    publish("order.placed")
    publish("mail", queue="mails")
    publish_many([("order.placed", None), ("mail", None), ("order.placed", None)])
    assert counted() == {
        ("default", "order.placed"): {"published": 3},
        ("default", "mail"): {"published": 1},
        ("mails", "mail"): {"published": 1},
    }


def test_types_that_no_class_and_no_handler_names_are_counted_as_other(known):
    """M20: types may contain ids, so a label for each type would have no bound."""

    class Shipped(Event, type="counters.shipped"):
        pass

    publish(Shipped())
    publish("order.7.shipped")
    publish("order.8.shipped")
    publish("order.*".replace("*", "x"))
    assert counted() == {
        ("default", "counters.shipped"): {"published": 1},
        ("default", "other"): {"published": 3},
    }


def test_a_rolled_back_event_is_not_counted(known):
    with suppress(ZeroDivisionError), transaction.atomic():
        publish("mail")
        raise ZeroDivisionError
    assert counted() == {}


def test_an_event_of_a_rolled_back_savepoint_is_not_counted(known):
    with transaction.atomic():
        publish("mail")
        with suppress(ZeroDivisionError), transaction.atomic():
            publish("mail")
            publish("order.placed")
            raise ZeroDivisionError
        with transaction.atomic():
            publish("order.placed")
        publish("mail")
    assert counted() == {
        ("default", "mail"): {"published": 2},
        ("default", "order.placed"): {"published": 1},
    }
    assert QueuedEvent.objects.count() == 3


def test_an_event_that_a_failed_handler_published_is_not_counted(known):
    @handler("start", name="start", retry=RetryPolicy(max_retries=0))
    def start(event):
        publish("mail")
        if event.payload:
            raise ValueError

    publish_many([("start", True), ("start", False)])
    drain()
    assert counted()["default", "mail"] == {"published": 1}


def test_a_duplicate_is_not_counted(known):
    publish("mail", dedup_key="once")
    publish("mail", dedup_key="once")
    assert counted() == {("default", "mail"): {"published": 1}}


@pytest.mark.parametrize("many", [False, True], ids=["publish", "publish_many"])
def test_dropped_and_coalesced_events_are_counted(known, settings, many):
    settings.EVENTBUS = {
        "LIMITS": {
            "type:mail": {"max_size": 1, "overflow": "drop"},
            "type:order.placed": {"max_size": 1, "overflow": "coalesce"},
        }
    }
    items = [(name, None) for name in ("mail", "mail", "mail", "order.placed", "order.placed")]
    if many:
        publish_many(items)
    else:
        for name, _ in items:
            publish(name)
    assert counted() == {
        ("default", "mail"): {"published": 1, "dropped": 2},
        ("default", "order.placed"): {"published": 1, "coalesced": 1},
    }


# -- when publishers write


def writes(queries):
    table = EventCounter._meta.db_table
    return [each["sql"] for each in queries if table in each["sql"]]


def test_a_publisher_writes_at_once_and_then_every_few_seconds(known):
    with CaptureQueriesContext(connection) as queries:
        publish("mail")
        assert len(writes(queries)) == 1
        publish("mail")
        publish("mail")
        assert len(writes(queries)) == 1
        counters_of_process("default").postpone(0)
        publish("mail")
    assert len(writes(queries)) == 2
    assert EventCounter.objects.get().published == 4


def test_nothing_is_written_inside_of_a_transaction(known):
    with CaptureQueriesContext(connection) as queries, transaction.atomic():
        publish("mail")
        process.write_if_due("default")
        write_at_exit()
        assert not writes(queries)
    assert EventCounter.objects.get().published == 1


def test_a_dropped_event_in_a_transaction_is_written_later(known, settings):
    settings.EVENTBUS = {"LIMITS": {"type:mail": {"max_size": 1, "overflow": "drop"}}}
    publish("mail")
    counters_of_process("default").postpone(0)
    with transaction.atomic():
        assert publish("mail") is None
    assert EventCounter.objects.get().dropped == 0
    request_finished.send(None)
    assert EventCounter.objects.get().dropped == 1


def test_a_request_writes_counts_that_are_due(known):
    publish("mail")
    publish("mail")
    request_finished.send(None)
    assert EventCounter.objects.get().published == 1, "five seconds have not passed"
    counters_of_process("default").postpone(0)
    request_finished.send(None)
    assert EventCounter.objects.get().published == 2


def test_with_autocommit_off_nothing_is_counted_or_written(known):
    transaction.set_autocommit(False)
    try:
        publish("mail")
        transaction.commit()
        process.count_publishing("default", "default", "mail", "dropped")
        process.write_if_due("default")
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert not EventCounter.objects.exists()


@pytest.mark.django_db(transaction=False)
def test_the_transaction_of_a_test_case_is_left_alone(known, django_capture_on_commit_callbacks):
    with CaptureQueriesContext(connection) as queries:
        with django_capture_on_commit_callbacks(execute=True):
            publish("mail")
        request_finished.send(None)
    assert not writes(queries)


@pytest.mark.parametrize("error", [DatabaseError("no such table"), OperationalError("gone")])
def test_an_error_does_not_reach_the_publisher_and_the_counts_are_kept(
    known, monkeypatch, capture, error
):
    def fail(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(stored.Counters, "write_counters", fail)
        publish("mail")
        publish("mail")
    assert capture.text.count("counters could not be written") == 1, "no attempt at every publish"
    assert counted() == {("default", "mail"): {"published": 2}}


ENDS_SESSION = {
    "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend(%s)"),
    "mysql": ("SELECT connection_id()", "KILL %s"),
}


def execute(statement, *parameters):
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return cursor.fetchone()


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server that ends sessions")
def test_a_lost_session_is_closed_so_that_the_next_statement_reconnects(known, capture):
    find, end = ENDS_SESSION[connection.vendor]
    (session,) = execute(find)
    process.count_publishing("default", "default", "mail", "dropped")
    with in_thread(execute, end, session):
        pass
    process.write_if_due("default")
    assert "counters could not be written" in capture.text
    assert QueuedEvent.objects.count() == 0, "the next statement has a new session"
    assert counted() == {("default", "mail"): {"dropped": 1}}


def test_a_forked_process_counts_from_zero(known, monkeypatch):
    publish("mail")
    publish("mail")
    parent = counters_of_process("default")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert counters_of_process("default") is not parent
    write_at_exit()
    assert EventCounter.objects.get().published == 1, "the parent writes its own counts"


def test_counts_of_one_database_are_not_written_to_another_database(known, monkeypatch):
    """When a test runner ends, the alias names the database of the project again."""
    publish("mail")
    publish("mail")
    monkeypatch.setitem(connection.settings_dict, "NAME", "of the project")
    write_at_exit()
    monkeypatch.undo()
    assert EventCounter.objects.get().published == 1


@pytest.mark.processes
def test_a_process_writes_the_rest_when_it_ends():
    code = (
        "import django; django.setup()\n"
        "from django_eventbus import publish\n"
        "for number in range(5): publish('process.effect')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert EventCounter.objects.get().published == 5


# -- the work of workers


def test_results_runs_and_starts_are_counted():
    @handler("order", name="bill", retry=RetryPolicy(max_retries=1))
    def bill(event):
        raise ValueError

    handler("order", name="ship")(lambda event: None)
    handler("mail", name="send", atomic=False)(lambda event: None)
    handler("mail", name="store")(lambda event: None)
    publish("order")
    publish_many([("mail", None)] * 3)
    drain_with_retries()
    assert counted(EVENTS) == {("default", ""): {"done": 3, "dead": 1, "retried": 1}}
    assert counted(RUNS) == {
        ("default", "bill"): {"retried": 1, "dead": 1},
        ("default", "ship"): {"done": 1},
        ("default", "send"): {"done": 3},
        ("default", "store"): {"done": 3},
    }
    assert timed(EVENTS) == 4, "an event is timed when it ends"
    assert timed(STARTS) == 4, "only the first start of an event is timed"
    assert timed(RUNS) == 9, "failed runs are timed too"


def test_the_first_start_is_timed_from_the_due_time_to_the_call(clock):
    """Events of one claim run one after another, so the claim is not the start."""

    @handler("slow", name="slow")
    def slow(event):
        time.sleep(0.12)

    publish_many([("slow", None)] * 3)
    QueuedEvent.objects.update(due_at="2000-01-01T00:00:00Z")  # before it was published
    drain()
    numbers = store_for().read_counters()[Series(STARTS, "default")]
    found = dict(zip(COUNTED, numbers, strict=True))
    assert found["seconds"] >= 0.12 + 0.24, "the second and the third event waited for the others"


def test_an_event_without_a_handler_has_no_start():
    publish("unknown")
    drain()
    assert timed(STARTS) == 0
    assert counted(EVENTS) == {("default", ""): {"retried": 1}}


def test_a_retry_that_a_handler_wants_is_no_second_start():
    @handler("order", name="bill")
    def bill(event):
        if event.attempt < 3:
            raise Retry(delay=1)

    publish("order")
    drain_with_retries()
    assert timed(STARTS) == 1
    assert counted(EVENTS) == {("default", ""): {"done": 1, "retried": 2}}


def test_lost_claims_are_counted():
    @handler("order", name="bill")
    def bill(event):
        with in_thread(QueuedEvent.objects.update, claim_token=uuid.uuid4()):
            pass

    if not connection.features.has_select_for_update:
        pytest.skip("SQLite has one writer: no other worker can take the event")
    publish("order")
    drain(max_events=1, max_seconds=1.0)
    assert counted(EVENTS)["default", ""]["lost"] >= 1


# -- totals that never go down


def rows_of(source, *, published=1, event_type="mail"):
    numbers = [0.0] * len(COUNTED)
    numbers[COUNTED.index("published")] = published
    return source, {Series(PUBLISHING, "default", event_type=event_type): numbers}


def published_total():
    return sum(
        numbers[COUNTED.index("published")] for numbers in store_for().read_counters().values()
    )


def test_rows_of_ended_processes_are_folded_into_one(store):
    for number in range(5):
        store.write_counters(*rows_of(uuid.uuid4(), published=number))
    EventCounter.objects.update(written_at=LONG_AGO)
    store.write_counters(*rows_of(uuid.uuid4(), published=100))
    assert store.fold_counters() == 5
    assert store.fold_counters() == 0
    assert published_total() == 110
    assert EventCounter.objects.count() == 2
    assert EventCounter.objects.get(source=FOLDED).published == 10


def test_totals_are_larger_than_32_bits(store):
    for _ in range(3):
        store.write_counters(*rows_of(uuid.uuid4(), published=2**40))
        EventCounter.objects.update(written_at=LONG_AGO)
        store.fold_counters()
    assert published_total() == 3 * 2**40


def test_a_reader_sees_constant_sums_while_two_processes_fold(store, monkeypatch):
    """M20: a concurrent fold never makes a counter go down, and nothing is counted twice."""
    monkeypatch.setattr(stored, "FOLD_CHUNK", 3)
    types = ("mail", "order", "other")
    for number in range(60):
        store.write_counters(*rows_of(uuid.uuid4(), published=7, event_type=types[number % 3]))
    EventCounter.objects.update(written_at=LONG_AGO)
    start, failures, seen = threading.Barrier(3), [], set()
    is_folded = threading.Event()

    def fold():
        try:
            start.wait()
            # Rows that the other thread has locked are skipped, so 0 does not mean the end.
            while EventCounter.objects.exclude(source=FOLDED).exists():
                store_for().fold_counters()
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            connections.close_all()

    def read():
        try:
            start.wait()
            while not is_folded.is_set():
                seen.add(published_total())
        finally:
            connections.close_all()

    folders = [threading.Thread(target=fold) for _ in range(2)]
    reader = threading.Thread(target=read)
    for each in (*folders, reader):
        each.start()
    for each in folders:
        each.join()
    is_folded.set()
    reader.join()
    assert failures == []
    assert seen == {60 * 7}
    assert published_total() == 60 * 7
    assert EventCounter.objects.count() == 3


def test_a_process_that_was_idle_for_long_continues_with_a_new_source(store):
    """Otherwise it would write totals again that were folded."""
    counters, series = ProcessCounters(), Series(PUBLISHING, "default", event_type="mail")
    counters.add(series, published=5)
    counters.write(store)
    EventCounter.objects.update(written_at=LONG_AGO)
    store.fold_counters()
    counters._written_at = (time.time(), time.monotonic() - FOLD_AFTER)
    counters.add(series, published=2)
    counters.write(store)
    assert published_total() == 7


def test_a_write_that_is_repeated_after_a_lost_reply_counts_once(store, monkeypatch):
    counters, series = ProcessCounters(), Series(PUBLISHING, "default", event_type="mail")
    counters.add(series, published=5)
    written = store.write_counters

    def lose_the_reply(*args):
        written(*args)
        raise OperationalError("the reply was lost")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_counters", lose_the_reply)
        with pytest.raises(OperationalError):
            counters.write(store)
    counters.add(series, published=1)
    counters.write(store)
    assert published_total() == 6


def test_a_worker_folds_the_rows_of_ended_processes(store):
    store.write_counters(*rows_of(uuid.uuid4()))
    EventCounter.objects.update(written_at=LONG_AGO)
    recorder = StatisticsRecorder(uuid.uuid4())
    recorder._write_at = 0.0
    recorder.write_if_due(store)
    assert EventCounter.objects.filter(source=FOLDED).count() == 1


def test_other_namespaces_are_not_read_and_not_folded(store, settings):
    store.write_counters(*rows_of(uuid.uuid4()))
    EventCounter.objects.update(written_at=LONG_AGO, namespace="another")
    assert store.fold_counters() == 0
    assert store.read_counters() == {}


@pytest.mark.django_db(transaction=False)
def test_two_hundred_processes_add_no_series(known):
    """M20: labels never contain a worker, so restarts do not increase the number of series."""

    def work_in_a_new_process():
        process._counters.cache_clear()
        process._known.clear()
        for name in ("mail", "order.placed", "unknown"):
            process.count_publishing("default", "default", name, "published")
        worker = StatisticsRecorder(uuid.uuid4(), counters_of_process("default"))
        worker.count("default", [settled()])
        worker.write(store_for())

    work_in_a_new_process()
    before = set(store_for().read_counters())
    for _ in range(200):
        work_in_a_new_process()
    assert set(store_for().read_counters()) == before
    assert EventCounter.objects.values("source").distinct().count() == 201
    EventCounter.objects.update(written_at=LONG_AGO)
    while store_for().fold_counters():
        pass
    assert EventCounter.objects.count() == len(before)
    assert counted()["default", "mail"] == {"published": 201}


def test_every_number_has_a_column():
    fields = {field.name for field in EventCounter._meta.fields}
    assert set(COUNTED) == fields - {"id", "written_at", *stored._IDENTITY}
