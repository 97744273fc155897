"""Statistics: the counts of workers, when they are written, and the cost."""

import uuid
from datetime import timedelta

import pytest
from django.db import DatabaseError, OperationalError, connection
from django.db.models import F, Sum
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_eventbus import Discard, RetryPolicy, handler, pauses, poll, publish, publish_many
from django_eventbus.models import MinuteStatistics
from django_eventbus.outcomes.event_run import Outcome
from django_eventbus.schema.claims import Claim, ClaimedEvent
from django_eventbus.schema.histograms import COLUMNS
from django_eventbus.statistics.recorder import StatisticsRecorder
from django_eventbus.store import After, Completed, Held, Progressed
from django_eventbus.store import statistics as stored
from django_eventbus.worker.polling import finalize
from tests.bus import drain, drain_with_retries

pytestmark = pytest.mark.django_db

OUTCOMES = ("done", "retried", "dead", "discarded")


def figures(handler=""):
    """The sum of each outcome over all minutes."""
    sums = MinuteStatistics.objects.filter(handler=handler).aggregate(
        **{n: Sum(n) for n in OUTCOMES}
    )
    return {name: count for name, count in sums.items() if count}


def timed(handler=""):
    """The number of values in the histogram."""
    every = sum((F(name) for name in COLUMNS[1:]), start=F(COLUMNS[0]))
    return MinuteStatistics.objects.filter(handler=handler).aggregate(n=Sum(every))["n"] or 0


def test_events_and_handler_runs_are_counted_separately():
    handler("order.*", name="bill")(lambda event: None)
    handler("order.*", name="ship")(lambda event: None)
    for number in range(3):
        publish("order.placed", {"number": number})
    drain()
    assert figures() == {"done": 3}
    assert figures("bill") == figures("ship") == {"done": 3}
    assert timed() == timed("bill") == 3


def test_retries_deaths_and_discards_are_counted_separately():
    @handler("order.*", name="bill", retry=RetryPolicy(max_retries=1))
    def bill(event):
        raise ValueError("no money")

    @handler("junk", name="sweep")
    def sweep(event):
        raise Discard("not worth it")

    publish("order.placed")
    publish("junk")
    drain_with_retries()
    assert figures("bill") == {"retried": 1, "dead": 1}
    assert figures("sweep") == {"discarded": 1}
    assert figures() == {"retried": 1, "dead": 1, "discarded": 1}
    assert timed() == 2, "an event is timed when it ends, not when it is retried"
    assert timed("bill") == 2, "failed runs are timed too"


def test_a_handler_outside_of_transactions_is_counted_once():
    handler("mail", name="send", atomic=False)(lambda event: None)
    publish("mail")
    drain()
    assert figures("send") == figures() == {"done": 1}


def test_an_event_that_killed_its_workers_counts_as_dead(store, settings):
    handler("bomb", name="explode")(lambda event: None)
    event = publish("bomb")
    store.queued.filter(pk=event.pk).update(crashes=settings.EVENTBUS.get("MAX_CRASHES", 3))
    drain()
    assert figures() == {"dead": 1}
    assert figures("explode") == {}


def test_each_queue_and_each_worker_has_its_own_rows(settings):
    settings.EVENTBUS = {"QUEUES": ["default", "mail"]}
    handler("*", name="see")(lambda event: None)
    for queue in ("default", "mail", "mail"):
        publish("seen", queue=queue)
        drain()
    rows = MinuteStatistics.objects.filter(handler="see")
    assert {row.queue: row.done for row in rows if row.queue == "default"} == {"default": 1}
    assert sum(row.done for row in rows if row.queue == "mail") == 2
    assert rows.values("worker_id").distinct().count() == 3


def test_handlers_whose_names_differ_in_case_are_counted_separately():
    handler("order", name="Bill")(lambda event: None)
    handler("order", name="bill")(lambda event: None)
    publish("order")
    drain()
    assert MinuteStatistics.objects.exclude(handler="").count() == 2


def test_polled_events_are_not_counted():
    publish("order.placed")
    finalize(poll())
    assert not MinuteStatistics.objects.exists()


# -- what it costs


def written(queries):
    table = MinuteStatistics._meta.db_table
    return [each["sql"] for each in queries if table in each["sql"] and "INSERT" in each["sql"]]


def test_many_batches_cost_one_statement():
    handler("n", name="count")(lambda event: None)
    publish_many(("n", {"n": number}) for number in range(60))
    with CaptureQueriesContext(
        connection,
    ) as queries:
        drain(batch_size=5)
    assert len(written(queries)) == 1
    assert figures() == figures("count") == {"done": 60}


def test_a_write_replaces_the_earlier_values_of_the_same_minute(store, clock):
    recorder = StatisticsRecorder(uuid.uuid4())
    for total in (1, 2, 3):
        recorder.count("default", [settled(seconds=0.02)])
        recorder._write_at = 0.0
        with CaptureQueriesContext(connection) as queries:
            recorder.write_if_due(store)
            recorder.write_if_due(store)
        assert len(written(queries)) == 1
        assert figures("bill") == {"done": total}
    assert MinuteStatistics.objects.get(handler="bill").up_to_30ms == 3


def test_a_completed_minute_is_dropped_from_memory_once_written(store):
    """Otherwise the memory of a worker would grow without bound."""
    recorder = StatisticsRecorder(uuid.uuid4())
    for number in range(10):
        recorder.count("default", [settled(at=1_800_000_000 + 60 * number)])
        recorder.write(store)
    assert MinuteStatistics.objects.filter(handler="").count() == 10
    assert len(recorder._counts) <= 4


def test_counts_of_a_failed_write_are_written_later(store, monkeypatch):
    recorder = StatisticsRecorder(uuid.uuid4())
    recorder.count("default", [settled()])
    recorder._write_at = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_statistics", failing(OperationalError("gone")))
        with pytest.raises(OperationalError):
            recorder.write_if_due(store)
    recorder.write(store)
    assert figures() == {"done": 1}


@pytest.mark.parametrize("error", [DatabaseError("no such table"), OperationalError("gone")])
def test_an_error_in_the_statistics_does_not_break_the_shutdown_of_a_worker(
    store, monkeypatch, capture, error
):
    recorder = StatisticsRecorder(uuid.uuid4())
    recorder.count("default", [settled()])
    monkeypatch.setattr(store, "write_statistics", failing(error))
    recorder.write(store)
    assert "the statistics of this worker could not be written" in capture.text


@pytest.mark.django_db(transaction=True)
def test_a_failed_write_of_statistics_closes_the_connection(store, monkeypatch):
    recorder = StatisticsRecorder(uuid.uuid4())
    recorder.count("default", [settled()])
    monkeypatch.setattr(store, "write_statistics", failing(OperationalError("gone")))
    connection.ensure_connection()
    recorder.write(store)
    assert connection.connection is None


def test_a_missing_statistics_table_does_not_stop_a_worker(store, monkeypatch, capture):
    recorder = StatisticsRecorder(uuid.uuid4())
    recorder.count("default", [settled()])
    recorder._write_at = 0.0
    monkeypatch.setattr(store, "write_statistics", failing(DatabaseError("no such table")))
    recorder.write_if_due(store)
    assert "could not be written" in capture.text


def test_progressed_and_held_events_are_not_counted_as_ended(store):
    recorder = StatisticsRecorder(uuid.uuid4())
    goes_on = Progressed(row_id=1, deliveries={}, errors=[])
    settlements = [goes_on, Held(1, After(5.0))]
    recorder.count("default", [settled(settlement=each) for each in settlements])
    recorder.write(store)
    assert figures() == {}
    assert figures("bill") == {"done": 2}


# -- retention


def test_workers_delete_statistics_older_than_the_setting(store, settings, monkeypatch):
    settings.EVENTBUS = {"STATISTICS_MINUTES": 90}
    monkeypatch.setattr(stored, "DELETE_CHUNK", 2)
    now = timezone.now()
    for age in (89, 92, 93, 94):
        MinuteStatistics.objects.create(
            namespace="default",
            minute=now - timedelta(minutes=age),
            worker_id=uuid.uuid4(),
            queue="default",
        )
    MinuteStatistics.objects.create(
        namespace="another", minute=now - timedelta(days=9), worker_id=uuid.uuid4(), queue="default"
    )
    assert [store.delete_old_statistics() for _ in range(3)] == [2, 1, 0]
    assert MinuteStatistics.objects.filter(namespace="default").count() == 1
    assert MinuteStatistics.objects.filter(namespace="another").count() == 1


def test_a_worker_deletes_until_no_expired_statistics_are_left(store, monkeypatch):
    asked = []
    monkeypatch.setattr(store, "delete_old_statistics", lambda: asked.append(1) or 3 - len(asked))
    recorder = StatisticsRecorder(uuid.uuid4())
    for _ in range(5):
        recorder._write_at = 0.0
        recorder.write_if_due(store)
    assert len(asked) == 3, "at once while rows are left, then once a minute"


def test_the_histogram_has_a_column_for_each_bucket():
    fields = {field.name for field in MinuteStatistics._meta.fields}
    assert set(COLUMNS) <= fields
    assert set(stored.COUNTED) == fields - {"id", *stored._IDENTITY}


def test_the_latency_of_an_event_starts_when_it_is_due():
    event, *_ = settled(at=1_800_000_000.0)
    assert event.age(1_800_000_060.0) == 60
    event.due_epoch = 1_800_000_050.0
    assert event.age(1_800_000_060.0) == 10
    assert event.age(1_800_000_040.0) == 0, "an operator let it run before it was due"
    event.due_epoch = 0.0
    assert event.age(1_800_000_060.0) == 60


COMPLETED = Completed(1)


def settled(*, settlement=COMPLETED, seconds=0.001, at=1_800_000_000.0):
    claim = Claim(uuid.uuid4(), uuid.uuid4(), "default", "default", "default")
    nothing = dict.fromkeys(ClaimedEvent.__dataclass_fields__)
    event = ClaimedEvent(**nothing | {"claim": claim, "started_epoch": at, "created_epoch": at})
    return event, settlement, [Outcome("bill", 1, seconds)]


def failing(error):
    def fail(*args):
        raise error

    return fail


@pytest.mark.django_db
def test_a_handler_held_by_a_pause_is_not_counted_as_failed():
    """One of two handlers is paused: the event is held without a failure."""
    handler("x", name="runs")(lambda event: None)
    handler("x", name="waits")(lambda event: None)
    pauses.pause(handler="waits")
    publish("x", {})
    drain()
    rows = MinuteStatistics.objects.values_list("handler", "done", "retried", "dead")
    assert [row for row in rows if any(row[1:])] == [("runs", 1, 0, 0)]
