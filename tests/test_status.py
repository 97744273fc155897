"""The status of the bus: correct, bounded, and cheap."""

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import (
    CircuitBreaker,
    RetryPolicy,
    handler,
    pauses,
    publish,
    publish_many,
    status,
)
from django_eventbus.models import (
    EventLane,
    EventLog,
    EventSchedule,
    EventWorker,
    FlowControl,
    MinuteStatistics,
    QueuedEvent,
)
from django_eventbus.statistics import problems
from tests.bus import drain, drain_with_retries
from tests.plans import make_tables_as_new

pytestmark = pytest.mark.django_db


def figures():
    return status.look().metrics


def attention():
    return [each.text for each in problems.find_problems(status.look())]


@pytest.fixture
def now(store):
    return store.read_clock()


@pytest.fixture
def worker(worker_id):
    """A live worker that serves all queues."""
    return worker_id


def minute(now, ago=0, *, worker=None, handler="", queue="default", **counts):
    return MinuteStatistics.objects.create(
        namespace="default",
        minute=now.replace(second=0, microsecond=0) - timedelta(minutes=ago),
        worker_id=worker or uuid.uuid4(),
        queue=queue,
        handler=handler,
        **counts,
    )


# -- waiting events


def test_an_empty_bus_has_nothing_to_count():
    found = figures()
    assert {name: value for name, value in found.items() if value} == {}
    assert [name for name, value in found.items() if value is None] == [
        "failure_rate",
        "p50",
        "p95",
    ]


def test_events_with_and_without_a_key_count_as_pending(store, worker_id):
    publish("a")
    publish("b", key="k")
    assert figures()["pending"] == 2, "before its key is known to have a lane"
    store.route("default", 10)
    assert figures()["pending"] == 2
    store.claim("default", limit=10, worker_id=worker_id)
    assert (figures()["pending"], figures()["running"]) == (0, 2)


def test_a_delayed_event_counts_as_scheduled_and_a_failed_one_as_retrying():
    @handler("bad", name="fails", retry=RetryPolicy(base_delay=30))
    def fail(event):
        raise ValueError

    publish("bad")
    publish("bad", key="k")
    publish("later", delay=60)
    drain()
    found = figures()
    assert (found["retrying"], found["scheduled"], found["pending"]) == (2, 1, 0)


def test_an_event_held_by_a_pause_counts_as_held():
    handler("x", name="handles")(lambda event: None)
    pauses.pause(handler="handles")
    publish("x")
    publish("x", key="k")
    drain()
    assert (figures()["held"], figures()["scheduled"], figures()["paused"]) == (2, 0, 1)


def test_dead_letters_are_counted_and_completed_events_are_not():
    @handler("bad", name="fails", retry=RetryPolicy(max_retries=0))
    def fail(event):
        raise ValueError

    handler("good", name="works")(lambda event: None)
    publish("bad")
    publish("good")
    drain()
    assert figures()["dead"] == 1


def test_the_lag_is_the_age_of_the_oldest_event_without_an_attempt(store, now):
    old, new = publish("a"), publish("b", key="k")
    QueuedEvent.objects.filter(pk=old.pk).update(created_at=now - timedelta(seconds=90))
    QueuedEvent.objects.filter(pk=new.pk).update(created_at=now - timedelta(seconds=10))
    assert 89 < figures()["lag"] < 120
    QueuedEvent.objects.filter(pk=old.pk).update(deliveries={"h": {"state": "retry"}})
    assert 9 < figures()["lag"] < 60


@pytest.mark.parametrize("key", [None, "k"])
def test_a_delayed_event_has_no_lag_before_it_is_due(store, now, key):
    event = publish("a", key=key, at=now - timedelta(seconds=10))
    QueuedEvent.objects.filter(pk=event.pk).update(created_at=now - timedelta(days=1))
    assert store.promote() == 1
    assert 9 < figures()["lag"] < 60


def test_the_lag_of_an_event_for_a_past_time_starts_at_its_publishing(store):
    publish("a", at=datetime(1980, 1, 1, tzinfo=UTC))
    assert store.promote() == 1
    assert figures()["lag"] < 60


def test_another_project_in_the_same_database_is_not_counted(settings, now):
    settings.EVENTBUS = {"NAMESPACE": "another"}
    publish("a")
    publish("b", key="k")
    publish("c", delay=60)
    pauses.pause(queue="default")
    EventWorker.objects.create(
        namespace="another", host="h", pid=1, queues=["default"], expires_at=now + timedelta(days=1)
    )
    settings.EVENTBUS = {}
    MinuteStatistics.objects.create(
        namespace="another", minute=now, worker_id=uuid.uuid4(), queue="default", done=5
    )
    found = figures()
    assert {name: value for name, value in found.items() if value} == {}


def test_counting_stops_at_a_bound_and_reports_it(monkeypatch):
    monkeypatch.setattr(status, "COUNTED_UP_TO", 3)
    publish_many(("a", n) for n in range(3))
    assert figures()["pending"] == 3
    publish_many(("a", n) for n in range(10))
    publish_many((("b", n) for n in range(10)), key="k")
    assert figures()["pending"] == 4
    assert (status.shown_count(3), status.shown_count(4)) == ("3", "3+")


# -- statistics


def test_tiles_cover_the_last_minutes_of_all_workers(now):
    minute(now, ago=6, done=1000)
    minute(now, ago=5, done=20, up_to_1s=20)
    minute(now, ago=1, done=15, retried=10, dead=5, up_to_1s=20)
    minute(now, ago=1, done=30, up_to_1s=30, queue="mail")
    minute(now, ago=1, handler="bill", done=999)
    found = figures()
    assert found["events_per_minute"] == (20 + 20 + 30) / 5
    assert found["failure_rate"] == pytest.approx(100 * 15 / 80)
    assert 0.3 < found["p50"] < found["p95"] <= 1.0


def test_the_current_minute_counts_for_the_failure_rate_but_not_for_averages(now):
    minute(now, retried=1)
    assert (figures()["failure_rate"], figures()["events_per_minute"]) == (100.0, 0)


def test_the_last_hour_has_an_entry_for_every_minute(now):
    minute(now, ago=59, done=1)
    minute(now, ago=60, done=7)
    minute(now, done=2)
    seen = status.look().last_hour
    assert [each.done for each in seen] == [1, *[0] * 58, 2]


def test_the_handlers_are_those_that_ran_and_those_registered_here(now):
    handler("x", name="idle")(lambda event: None)
    minute(now, ago=30, handler="busy", done=3, retried=1, up_to_3ms=4)
    minute(now, ago=2, handler="busy", done=4, up_to_3ms=4)
    idle, busy = sorted(status.look().handlers, key=lambda each: each.runs.total)
    assert (idle.name, idle.runs.total, idle.is_registered) == ("idle", 0, True)
    assert (busy.name, busy.runs.total, busy.is_registered) == ("busy", 8, False)
    assert busy.runs.failure_rate == 12.5


# -- problems


def test_there_is_no_problem_while_a_worker_is_live(worker):
    assert attention() == []


def test_a_project_without_any_worker_has_a_problem():
    assert attention() == ["No worker is running: run manage.py run_event_worker"]


def test_a_project_that_drains_in_celery_needs_no_worker(settings, now):
    settings.EVENTBUS = {"CELERY_DRAIN": True, "QUEUES": ["default", "mail"]}
    publish("order.placed")
    assert attention() == []
    EventWorker.objects.create(
        namespace="default",
        host="box",
        pid=7,
        queues=["mail"],
        renewed_at=now,
        expires_at=now + timedelta(minutes=1),
    )
    assert attention() == [], "a Celery process that handles one queue is no problem"


def test_an_event_that_no_drain_handles_is_a_problem(settings, now):
    settings.EVENTBUS = {"CELERY_DRAIN": True}
    publish("order.placed")
    QueuedEvent.objects.update(created_at=now - timedelta(minutes=4))
    assert attention() == ["The oldest pending event has been waiting for 4 min."]


def test_workers_that_are_all_silent_are_a_problem(worker, now):
    EventWorker.objects.update(renewed_at=now - timedelta(minutes=4), expires_at=now)
    assert attention() == [
        "No worker has sent a heartbeat for 4 min: run manage.py run_event_worker"
    ]


def test_one_silent_worker_of_two_is_a_problem(worker, now):
    EventWorker.objects.create(
        namespace="default",
        host="box",
        pid=7,
        queues=["default"],
        renewed_at=now - timedelta(minutes=3),
        expires_at=now,
    )
    assert attention() == ["Worker box:7 has sent no heartbeat for 3 min."]


def test_a_queue_without_a_worker_is_a_problem(worker, settings):
    settings.EVENTBUS = {"QUEUES": ["default", "mail"]}
    (text,) = attention()
    assert text == ("No worker serves the queue mail: run manage.py run_event_worker --queues mail")


def test_dead_letters_with_the_same_error_are_one_problem():
    @handler("bad", name="billing.charge", retry=RetryPolicy(max_retries=0))
    def fail(event):
        raise ValueError("no money")

    @handler("worse", name="mail.send", retry=RetryPolicy(max_retries=0))
    def fail_too(event):
        raise KeyError("to")

    publish_many(("bad", n) for n in range(4))
    publish("worse")
    drain_with_retries()
    assert attention()[1:] == [
        "4 dead letters in billing.charge, same error: ValueError",
        "1 dead letter in mail.send: KeyError",
    ]


def test_keys_that_a_dead_letter_blocks_are_a_problem(worker, settings):
    settings.EVENTBUS = {"DEAD_HEAD": "block"}

    @handler("bad", name="fails", retry=RetryPolicy(max_retries=0))
    def fail(event):
        raise ValueError

    for key in ("a", "b"):
        publish("bad", key=key)
    drain()
    assert figures()["blocked_keys"] == 2
    assert any(text.startswith("2 keys are blocked by dead letters") for text in attention())


def test_a_late_schedule_is_a_problem(worker, now):
    soon = EventSchedule(name="nightly", type="x", cron="0 3 * * *")
    soon.save()
    assert attention() == []
    EventSchedule.objects.update(next_at=now - timedelta(minutes=12))
    assert attention() == ["The schedule nightly should have run 12 min ago."]
    EventSchedule.objects.update(enabled=False)
    assert attention() == []


def test_an_event_that_has_waited_too_long_is_a_problem(worker, now):
    publish("a")
    QueuedEvent.objects.update(created_at=now - timedelta(hours=3))
    assert attention() == ["The oldest pending event has been waiting for 3 h."]


def test_pauses_are_listed_after_problems_with_user_and_reason(worker, now):
    handler("x", name="pays", breaker=CircuitBreaker())(lambda event: None)
    pauses.pause(queue="default", by="ann", reason="disk full")
    FlowControl.objects.update(paused_at=now - timedelta(hours=3))
    FlowControl.objects.create(
        namespace="default", kind="handler", name="pays", opened_at=now - timedelta(minutes=5)
    )
    assert figures()["open_breakers"] == 1
    assert attention() == [
        "The circuit breaker of pays has been open for 5 min.",
        "The queue default was paused 3 h ago by ann: disk full",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0 ms"),
        (0.25, "250 ms"),
        (1.5, "1.5 s"),
        (40, "40 s"),
        (240, "4 min"),
        (7300, "2 h"),
        (200_000, "2 d"),
    ],
)
def test_durations_are_shown_in_words(seconds, words):
    assert status.in_words(seconds) == words


# -- number of queries


def test_the_status_costs_eight_queries(worker, now):
    with CaptureQueriesContext(connection) as empty:
        seen = status.look()
        problems.find_problems(seen)
        assert seen.metrics
        assert seen.handlers == []
    publish_many(("a", n) for n in range(20))
    publish_many((("b", n) for n in range(5)), key="k")
    for ago in range(70):
        minute(now, ago, handler=f"h{ago}", done=1)
        minute(now, ago, done=1)
    with CaptureQueriesContext(connection) as full:
        problems.find_problems(status.look())
    # SQLite needs no query for the time. PostgreSQL has a savepoint and restores planner settings.
    expected = {"sqlite": 7, "mysql": 8, "postgresql": 8 + 5}
    assert len(empty) == len(full) == expected[connection.vendor]


@pytest.mark.skipif(connection.vendor != "postgresql", reason="reads PostgreSQL's plans")
@pytest.mark.costly
def test_no_count_reads_a_table_from_its_start(store):
    """This includes tables whose statistics are outdated. Small tables are not checked."""
    make_tables_as_new()
    publish_many(("a", n) for n in range(3000))
    publish_many((("b", n) for n in range(3000)), key="k")
    publish_many((("c", n) for n in range(3000)), delay=60)
    store.route("default", 5000)
    EventLane.objects.bulk_create(
        EventLane(namespace="default", queue="default", key=f"k{n}") for n in range(3000)
    )
    EventLog.objects.bulk_create(
        EventLog(
            id=n,
            namespace="default",
            queue="default",
            type="x",
            producer="p",
            status="COMPLETED" if n % 20 else "FAILED",
            finished_at=store.read_clock(),
        )
        for n in range(4000)
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    kinds = {
        name: rows[:10]
        for name, rows in {
            "eventbus_ready": store._ready_rows(),
            "eventbus_unrouted": store._unrouted_rows(),
            "eventbus_lane": store._laned_rows(),
            "eventbus_delayed": store._delayed_rows(),
            "eventbus_held": store._held_rows(),
            "eventbus_log_dead": store._dead_rows(),
        }.items()
    }
    for index, rows in kinds.items():
        plan = rows.explain()
        assert index in plan, plan
        assert "Sort" not in plan, plan
        assert "Seq Scan" not in plan, plan
    for lanes in (store._held_lanes(), store._blocked_lanes()):
        plan = lanes[:10].explain()
        assert "eventbus_lane_ready" in plan, plan
