"""The figures of each minute: what workers count, when they write it, what it costs."""

import uuid
from datetime import timedelta

import pytest
from django.db import DatabaseError, OperationalError, connection
from django.db.models import F, Sum
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_eventbus import Discard, RetryPolicy, gates, handler, poll, publish, publish_many
from django_eventbus.events import Claim, ClaimedEvent
from django_eventbus.histograms import COLUMNS
from django_eventbus.minutes import Minutes
from django_eventbus.models import EventMinute
from django_eventbus.polling import finalize
from django_eventbus.progress import Outcome
from django_eventbus.store import Completed, Held, Progressed
from django_eventbus.store import minutes as stored
from tests.bus import drain, drain_with_retries

pytestmark = pytest.mark.django_db

OUTCOMES = ("done", "retried", "dead", "discarded")


def figures(handler=""):
    """In sum over all minutes: how often what came out."""
    sums = EventMinute.objects.filter(handler=handler).aggregate(**{n: Sum(n) for n in OUTCOMES})
    return {name: count for name, count in sums.items() if count}


def timed(handler=""):
    """How many have their place in the histogram."""
    every = sum((F(name) for name in COLUMNS[1:]), start=F(COLUMNS[0]))
    return EventMinute.objects.filter(handler=handler).aggregate(n=Sum(every))["n"] or 0


def test_events_and_runs_are_counted_apart():
    handler("order.*", name="bill")(lambda event: None)
    handler("order.*", name="ship")(lambda event: None)
    for number in range(3):
        publish("order.placed", {"number": number})
    drain()
    assert figures() == {"done": 3}
    assert figures("bill") == figures("ship") == {"done": 3}
    assert timed() == timed("bill") == 3


def test_a_retry_a_death_and_a_discard_are_told_apart():
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
    assert timed() == 2, "an event has its time when it ends, not when it goes back"
    assert timed("bill") == 2, "a run that fails takes time as well"


def test_a_handler_outside_of_transactions_is_counted_once():
    handler("mail", name="send", atomic=False)(lambda event: None)
    publish("mail")
    drain()
    assert figures("send") == figures() == {"done": 1}


def test_an_event_that_killed_its_workers_is_a_dead_one(store, settings):
    handler("bomb", name="explode")(lambda event: None)
    event = publish("bomb")
    store.queued.filter(pk=event.pk).update(crashes=settings.EVENTBUS.get("MAX_CRASHES", 3))
    drain()
    assert figures() == {"dead": 1}
    assert figures("explode") == {}


def test_each_queue_and_each_worker_has_rows_of_its_own(settings):
    settings.EVENTBUS = {"QUEUES": ["default", "mail"]}
    handler("*", name="see")(lambda event: None)
    for queue in ("default", "mail", "mail"):
        publish("seen", queue=queue)
        drain()
    rows = EventMinute.objects.filter(handler="see")
    assert {row.queue: row.done for row in rows if row.queue == "default"} == {"default": 1}
    assert sum(row.done for row in rows if row.queue == "mail") == 2
    assert rows.values("worker_id").distinct().count() == 3


def test_handlers_whose_names_differ_in_case_are_two():
    handler("order", name="Bill")(lambda event: None)
    handler("order", name="bill")(lambda event: None)
    publish("order")
    drain()
    assert EventMinute.objects.exclude(handler="").count() == 2


def test_an_own_loop_is_not_counted():
    publish("order.placed")
    finalize(poll())
    assert not EventMinute.objects.exists()


# -- what it costs


def written(queries):
    table = EventMinute._meta.db_table
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


def test_what_is_written_every_few_seconds_replaces_what_was_written_before(store, clock):
    minutes = Minutes(uuid.uuid4())
    for total in (1, 2, 3):
        minutes.count("default", [settled(seconds=0.02)])
        minutes._write_at = 0.0
        with CaptureQueriesContext(connection) as queries:
            minutes.write_if_due(store)
            minutes.write_if_due(store)
        assert len(written(queries)) == 1
        assert figures("bill") == {"done": total}
    assert EventMinute.objects.get(handler="bill").up_to_30ms == 3


def test_a_minute_that_is_over_is_forgotten_when_it_is_written(store):
    """Else the memory of a worker would grow as long as it lives."""
    minutes = Minutes(uuid.uuid4())
    for number in range(10):
        minutes.count("default", [settled(at=1_800_000_000 + 60 * number)])
        minutes.write(store)
    assert EventMinute.objects.filter(handler="").count() == 10
    assert len(minutes._counts) <= 4


def test_what_could_not_be_written_is_written_later(store, monkeypatch):
    minutes = Minutes(uuid.uuid4())
    minutes.count("default", [settled()])
    minutes._write_at = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_minutes", failing(OperationalError("gone")))
        with pytest.raises(OperationalError):
            minutes.write_if_due(store)
    minutes.write(store)
    assert figures() == {"done": 1}


@pytest.mark.parametrize("error", [DatabaseError("no such table"), OperationalError("gone")])
def test_figures_never_bring_down_a_worker_that_ends(store, monkeypatch, capture, error):
    minutes = Minutes(uuid.uuid4())
    minutes.count("default", [settled()])
    monkeypatch.setattr(store, "write_minutes", failing(error))
    minutes.write(store)
    assert "the figures of this worker are not written" in capture.text


@pytest.mark.django_db(transaction=True)
def test_a_worker_that_ends_does_not_go_on_with_a_connection_that_failed(store, monkeypatch):
    minutes = Minutes(uuid.uuid4())
    minutes.count("default", [settled()])
    monkeypatch.setattr(store, "write_minutes", failing(OperationalError("gone")))
    connection.ensure_connection()
    minutes.write(store)
    assert connection.connection is None


def test_figures_without_their_table_never_bring_down_a_worker_at_work(store, monkeypatch, capture):
    minutes = Minutes(uuid.uuid4())
    minutes.count("default", [settled()])
    minutes._write_at = 0.0
    monkeypatch.setattr(store, "write_minutes", failing(DatabaseError("no such table")))
    minutes.write_if_due(store)
    assert "not written" in capture.text


def test_what_goes_on_or_waits_at_a_gate_is_no_event_that_ended(store):
    minutes = Minutes(uuid.uuid4())
    goes_on = Progressed(row_id=1, deliveries={}, errors=[])
    minutes.count("default", [settled(settlement=goes_on), settled(settlement=Held(1, 5.0))])
    minutes.write(store)
    assert figures() == {}
    assert figures("bill") == {"done": 2}


# -- how long it is kept


def test_workers_delete_what_is_older_than_the_setting(store, settings, monkeypatch):
    settings.EVENTBUS = {"MINUTES_KEPT": 90}
    monkeypatch.setattr(stored, "FORGET_CHUNK", 2)
    now = timezone.now()
    for age in (89, 92, 93, 94):
        EventMinute.objects.create(
            namespace="default",
            minute=now - timedelta(minutes=age),
            worker_id=uuid.uuid4(),
            queue="default",
        )
    EventMinute.objects.create(
        namespace="another", minute=now - timedelta(days=9), worker_id=uuid.uuid4(), queue="default"
    )
    assert [store.forget_minutes() for _ in range(3)] == [2, 1, 0]
    assert EventMinute.objects.filter(namespace="default").count() == 1
    assert EventMinute.objects.filter(namespace="another").count() == 1


def test_a_worker_goes_on_deleting_until_nothing_old_is_left(store, monkeypatch):
    asked = []
    monkeypatch.setattr(store, "forget_minutes", lambda: asked.append(1) or 3 - len(asked))
    minutes = Minutes(uuid.uuid4())
    for _ in range(5):
        minutes._write_at = 0.0
        minutes.write_if_due(store)
    assert len(asked) == 3, "at once while there is more, and then once a minute"


def test_the_histogram_has_a_column_for_each_of_its_places():
    fields = {field.name for field in EventMinute._meta.fields}
    assert set(COLUMNS) <= fields
    assert set(stored.COUNTED) == fields - {"id", *stored._WHICH}


def test_the_time_of_an_event_begins_when_it_is_due():
    event, *_ = settled(at=1_800_000_000.0)
    assert event.age(1_800_000_060.0) == 60
    event.due_epoch = 1_800_000_050.0
    assert event.age(1_800_000_060.0) == 10
    assert event.age(1_800_000_040.0) == 0, "somebody let it run before"
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
def test_who_only_waits_for_a_gate_has_not_failed():
    """One of two handlers is paused: the event goes back, and nothing went wrong."""
    handler("x", name="runs")(lambda event: None)
    handler("x", name="waits")(lambda event: None)
    gates.pause(handler="waits")
    publish("x", {})
    drain()
    rows = EventMinute.objects.values_list("handler", "done", "retried", "dead")
    assert [row for row in rows if any(row[1:])] == [("runs", 1, 0, 0)]
