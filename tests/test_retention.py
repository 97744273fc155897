"""Purging ended events from the log."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import Discard, dead_letters, handler, publish, publish_many, retention
from django_eventbus.models import DeadEvent, EventLog, LogStatus, QueuedEvent
from django_eventbus.store import store_for
from tests.bus import drain, drain_with_retries

pytestmark = pytest.mark.django_db


def ago(**period):
    return store_for().read_clock() - timedelta(**period)


def do_nothing(event):
    """All went well."""


def completed(count=1, *, ended=None, **options):
    """Completed events, the oldest first."""
    before = set(EventLog.objects.values_list("id", flat=True))
    handler("fine", name="fine")(do_nothing)
    publish_many((("fine", number) for number in range(count)), **options)
    drain()
    made = EventLog.objects.exclude(id__in=before).order_by("id")
    if ended is not None:
        for position, event in enumerate(made):
            EventLog.objects.filter(id=event.id).update(
                finished_at=ended + timedelta(seconds=position)
            )
    return list(made)


def one_of_each(ended):
    """One event of every status of the log."""

    @handler("failed", "partly", name="fails", retry={"max_retries": 0})
    def fail(event):
        raise ValueError("no stock")

    @handler("discarded", name="discards")
    def discard(event):
        raise Discard("nobody wants it")

    handler("partly", "completed", name="works")(do_nothing)
    for each in ("completed", "failed", "partly", "discarded"):
        publish(each, {})
    drain_with_retries()
    EventLog.objects.update(finished_at=ended)
    assert set(statuses()) == set(LogStatus.values)


def statuses():
    return list(EventLog.objects.values_list("status", flat=True))


def test_only_completed_events_are_purged_by_default():
    one_of_each(ago(days=40))
    assert retention.purge(timedelta(days=30)) == 1
    assert len(statuses()) == 3
    assert LogStatus.COMPLETED not in statuses()


@pytest.mark.parametrize(
    ("status", "gone"),
    [
        ("completed", {"COMPLETED"}),
        ("failed", {"FAILED"}),
        ("discarded", {"DISCARDED"}),
        ("completed_with_errors", {"COMPLETED_WITH_ERRORS"}),
        ("dead", {"FAILED", "DISCARDED", "COMPLETED_WITH_ERRORS"}),
    ],
)
def test_a_status_selects_the_events_to_purge(status, gone):
    one_of_each(ago(days=40))
    assert retention.purge(timedelta(days=30), status=status) == len(gone)
    assert set(LogStatus.values) - set(statuses()) == gone


def test_a_status_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"one of completed, dead, .*not 'COMPLETED'"):
        retention.purge(timedelta(days=30), status="COMPLETED")


def test_events_that_ended_later_are_kept():
    old, new = completed(ended=ago(days=31)) + completed(ended=ago(days=29))
    assert retention.purge(timedelta(days=30)) == 1
    assert list(EventLog.objects.all()) == [new]
    assert retention.purge(ago(days=0)) == 1
    assert old not in EventLog.objects.all()


def test_purging_does_not_change_the_queue():
    publish("fine", {})
    assert retention.purge(timedelta(0)) == 0
    assert QueuedEvent.objects.count() == 1


def test_another_project_in_the_same_database_keeps_its_log(settings):
    settings.EVENTBUS = {"NAMESPACE": "neighbour"}
    completed(ended=ago(days=40))
    settings.EVENTBUS = {}
    assert retention.purge(timedelta(days=30)) == 0
    assert EventLog.objects.count() == 1


def test_a_limit_stops_the_run_at_the_oldest():
    events = completed(5, ended=ago(days=40))
    done = []
    assert retention.purge(timedelta(days=30), limit=3, batch_size=2, progress=done.append) == 3
    assert done == [2, 3]
    assert list(EventLog.objects.order_by("id")) == events[3:]


@pytest.mark.django_db(transaction=True)
def test_each_batch_has_its_own_transaction():
    completed(5, ended=ago(days=40))
    open_transactions = []

    def look(done):
        open_transactions.append(connection.in_atomic_block)

    retention.purge(timedelta(days=30), batch_size=2, progress=look)
    assert open_transactions == [False, False, False]


def test_a_batch_starts_where_the_previous_one_ended():
    """Otherwise each batch would read all deleted rows that an old snapshot still sees."""
    first = ago(days=40)
    completed(5, ended=first)
    starts = []

    def note(execute, sql, params, many, context):
        if sql.startswith("SELECT") and "FOR UPDATE" not in sql and "ORDER BY" in sql:
            starts.append(sql.count(">="))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        retention.purge(timedelta(days=30), batch_size=2)
    assert starts[0] == 0
    assert starts[-1] == 1


def test_the_number_of_statements_grows_with_the_batches_only():
    def statements(count):
        completed(count, ended=ago(days=40))
        with CaptureQueriesContext(connection) as captured:
            assert retention.purge(timedelta(days=30), batch_size=100) == count
        return len(captured)

    assert statements(2) == statements(90)


def test_events_that_ended_at_the_same_moment_are_all_purged():
    completed(5)
    EventLog.objects.update(finished_at=ago(days=40))
    assert retention.purge(timedelta(days=30), batch_size=2) == 5


def test_dead_letters_are_purged_by_the_same_batches(monkeypatch):
    monkeypatch.setattr(dead_letters, "CHUNK", 2)
    one_of_each(ago(days=40))
    done = []
    assert dead_letters.purge(timedelta(days=30), progress=done.append) == 3
    assert done == [2, 3]
    assert DeadEvent.objects.count() == 0
    assert statuses() == ["COMPLETED"]
