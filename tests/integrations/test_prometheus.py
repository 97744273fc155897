"""The metrics for Prometheus, compared with the database (M20, M35)."""

import os
import shutil
import signal
import subprocess
from datetime import timedelta

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.db.models import Count
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import include, path
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as open_metrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from django_eventbus import handler, lanes, pauses, publish, publish_many, retention
from django_eventbus.counters.process import write_at_exit
from django_eventbus.integrations.metrics import METRICS, QUEUED_STATES
from django_eventbus.integrations.prometheus import EventBusCollector, render
from django_eventbus.models import (
    EventCounter,
    EventLog,
    EventWorker,
    FlowControl,
    LogStatus,
    QueuedEvent,
)
from django_eventbus.store import store_for
from tests.bus import drain, drain_with_retries
from tests.publishers import Publishers
from tests.workers import PATIENT, eventually

pytestmark = pytest.mark.django_db

urlpatterns = [path("metrics/", include("django_eventbus.integrations.prometheus_urls"))]

LONG_AGO = "2000-01-01T00:00:00Z"


def scrape():
    """The samples of a scrape as {name: {(label values in the order of their names): value}}."""
    write_at_exit()
    found = {}
    for family in text_string_to_metric_families(render()[0].decode()):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_every_metric_is_described_with_its_labels():
    described = {each.name: each for each in EventBusCollector().describe()}
    assert set(described) == {each.name for each in METRICS}
    for each in METRICS:
        assert each.name.startswith("eventbus_")
        assert set(each.labels) <= {"queue", "type", "handler", "state"}
        assert each.help.endswith(".")


def test_registration_needs_no_database(django_assert_num_queries):
    with django_assert_num_queries(0):
        CollectorRegistry().register(EventBusCollector())


def test_gauges_have_the_numbers_of_the_queue(settings):
    settings.EVENTBUS = {"QUEUES": ["default", "mail"], "DEAD_HEAD": "block"}

    @handler("bad", name="bad", retry={"max_retries": 0}, breaker=True)
    def bad(event):
        raise ValueError

    @handler("again", name="again")
    def again(event):
        raise ValueError

    publish("bad", key="a")
    publish("bad", queue="mail")
    publish("again")
    drain()
    publish("bad", key="a")
    publish_many([("bad", None)] * 3, queue="mail")
    publish("bad", delay=timedelta(hours=1))
    pauses.pause(queue="mail")
    pauses.pause(handler="again")
    pauses.pause(type="order.7.*")
    found = scrape()
    assert found["eventbus_up"] == {(): 1}
    events = found["eventbus_queue_events"]
    assert {key: n for key, n in events.items() if n} == {
        ("default", "pending"): 1,
        ("default", "retrying"): 1,
        ("default", "scheduled"): 1,
        ("mail", "pending"): 3,
    }
    assert len(events) == 2 * len(QUEUED_STATES)
    assert found["eventbus_dead_letters"] == {("default",): 1, ("mail",): 1}
    assert found["eventbus_lanes_blocked"] == {("default",): 1, ("mail",): 0}
    assert len(lanes.list()) == 1
    assert found["eventbus_queue_oldest_pending_age_seconds"]["mail",] > 0
    assert found["eventbus_queue_paused"] == {("default",): 0, ("mail",): 1}
    assert found["eventbus_handler_paused"] == {("again",): 1, ("bad",): 0}
    assert found["eventbus_type_paused"] == {("other",): 1}
    assert found["eventbus_breaker_state"] == {
        ("bad", "closed"): 1,
        ("bad", "open"): 0,
        ("bad", "half-open"): 0,
    }


def test_an_open_breaker_is_shown():
    handler("bad", name="bad", breaker=True)(lambda event: None)
    FlowControl.objects.create(
        namespace="default", kind="handler", name="bad", opened_at=LONG_AGO, probe_at=LONG_AGO
    )
    states = scrape()["eventbus_breaker_state"]
    assert [state for (_, state), value in states.items() if value] == ["open"]


def test_only_live_workers_and_their_slots_are_counted(worker_id):
    EventWorker.objects.update(slots=4, busy=9, queues=["default"])
    for slots, expires in ((3, LONG_AGO), (0, "2100-01-01T00:00:00Z")):
        EventWorker.objects.create(
            namespace="default",
            host="h",
            pid=1,
            queues=["default"],
            slots=slots,
            expires_at=expires,
        )
    found = scrape()
    assert found["eventbus_workers"] == {(): 1}, "without expired ones and processes of executors"
    assert found["eventbus_queue_workers"] == {("default",): 1}
    assert found["eventbus_worker_slots"] == {("busy",): 4, ("idle",): 0}


def test_the_renewal_writes_how_many_handlers_run(store, worker_id):
    store.renew([worker_id], busy={worker_id: 3})
    assert EventWorker.objects.get(pk=worker_id).busy == 3
    store.renew([worker_id])
    assert EventWorker.objects.get(pk=worker_id).busy == 3


def test_outstanding_hand_offs_are_counted_by_handler(store):
    handler("mail", name="send", executor="celery")(lambda event: None)
    publish_many([("mail", None)] * 2)
    QueuedEvent.objects.update(handed_off_to="send", available_at="2100-01-01T00:00:00Z")
    found = scrape()
    assert found["eventbus_handler_handed_off_events"] == {("send",): 2}
    assert found["eventbus_queue_events"]["default", "handed_off"] == 2


@pytest.mark.parametrize("events", [0, 50])
def test_a_scrape_costs_few_queries_for_any_number_of_events(events, settings):
    settings.EVENTBUS = {"QUEUES": [f"queue{n}" for n in range(20)], "QUEUE": "queue0"}
    handler("mail", name="send", executor="celery")(lambda event: None)
    publish_many(("other", None) for _ in range(events))
    with CaptureQueriesContext(connection) as queries:
        render()
    statements = [each["sql"] for each in queries]
    assert len([each for each in statements if "django_eventbus_" in each]) == 5
    assert len(statements) <= 16, "with the clock and the settings of the planner"


def test_counts_of_queued_events_stop_at_a_maximum(monkeypatch):
    monkeypatch.setattr("django_eventbus.integrations.metrics.COUNTED_UP_TO", 5)
    publish_many(("mail", None) for _ in range(9))
    assert scrape()["eventbus_queue_events"]["default", "pending"] == 5


def test_the_buckets_of_a_histogram_are_cumulative():
    handler("mail", name="send")(lambda event: None)
    publish_many(("mail", None) for _ in range(4))
    drain()
    found = scrape()
    for name in ("event_duration", "event_start_delay", "handler_duration"):
        buckets = found[f"eventbus_{name}_seconds_bucket"]
        (count,) = found[f"eventbus_{name}_seconds_count"].values()
        assert list(buckets.values()) == sorted(buckets.values())
        assert list(buckets.values())[-1] == count == 4
        assert sum(found[f"eventbus_{name}_seconds_sum"].values()) > 0


@pytest.mark.django_db(transaction=True)
def test_without_the_database_only_up_is_exported(monkeypatch, capture):
    connection.close()
    unreachable = {"PORT": "1"} if connection.vendor != "sqlite" else {"NAME": "/no/such/file"}
    with monkeypatch.context() as patch:
        for name, value in unreachable.items():
            patch.setitem(connection.settings_dict, name, value)
        assert scrape() == {"eventbus_up": {(): 0}}
        assert "metrics could not be read" in capture.text
    assert scrape()["eventbus_up"] == {(): 1}


def test_open_metrics_is_offered():
    text, content_type = render(accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert {each.name for each in open_metrics_families(text.decode())} >= {"eventbus_up"}


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_accepts_a_scrape():
    handler("mail", name="send", executor="celery", breaker=True)(lambda event: None)
    publish("mail")
    drain()
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=render()[0], capture_output=True, check=False
    )
    assert (checked.returncode, checked.stderr, checked.stdout) == (0, b"", b"")


# -- the view


@pytest.fixture
def client(settings):
    settings.ROOT_URLCONF = __name__
    settings.EVENTBUS = {"METRICS_TOKEN": "a-token-of-prometheus"}
    return Client()


def test_the_view_needs_the_token(client):
    answer = client.get("/metrics/")
    assert (answer.status_code, answer["WWW-Authenticate"]) == (401, "Bearer")
    for wrong in ("Bearer wrong", "Bearer ", "Basic a-token-of-prometheus", "Bearer ä"):
        assert client.get("/metrics/", headers={"Authorization": wrong}).status_code == 401
    answer = client.get("/metrics/", headers={"Authorization": "Bearer a-token-of-prometheus"})
    assert answer.status_code == 200
    assert b"eventbus_up 1.0" in answer.content
    assert answer["Content-Type"].startswith("text/plain")
    assert "no-store" in answer["Cache-Control"]


def test_without_a_token_in_the_settings_no_token_is_accepted(client, settings):
    settings.EVENTBUS = {}
    for given in ("Bearer ", "Bearer", "Bearer a-token-of-prometheus"):
        assert client.get("/metrics/", headers={"Authorization": given}).status_code == 401


def test_users_who_may_view_the_overview_may_read_the_metrics(client):
    user = User.objects.create_user("ann", is_staff=True)
    client.force_login(user)
    assert client.get("/metrics/").status_code == 401
    user.user_permissions.add(Permission.objects.get(codename="view_minutestatistics"))
    assert client.get("/metrics/").status_code == 200
    assert client.post("/metrics/").status_code == 405


# -- a real worker


def log_counts():
    """The numbers of the log, under the names of the metrics."""
    by_status = dict(EventLog.objects.values_list("status").annotate(n=Count("id")))
    return {
        "eventbus_events_completed_total": by_status.get(LogStatus.COMPLETED, 0),
        "eventbus_events_dead_total": by_status.get(LogStatus.FAILED, 0),
        "eventbus_event_duration_seconds_count": sum(by_status.values()),
        "eventbus_event_start_delay_seconds_count": sum(by_status.values()),
        "eventbus_handler_duration_seconds_count": sum(by_status.values()),
    }


def counters(names):
    found = scrape()
    return {name: sum(found.get(name, {}).values()) for name in names}


def wait_until_counted(expected, log):
    eventually(
        lambda: counters(expected) == expected,
        lambda: f"{counters(expected)} instead of {expected}\n{log()}",
    )


@pytest.mark.django_db(transaction=True)
def test_the_counters_of_two_children_agree_with_the_database(start_worker, tmp_path):
    """M20, M35: after a kill -9, after purging the log and after restarts, nothing is missing.

    A killed process loses the counts of its last seconds, so the test waits until they are written.
    """
    worker = start_worker("--processes", "2", eventbus=PATIENT)
    with Publishers(tmp_path, 2, "process.effect", count=40) as publishers:
        publishers.publish()
    eventually(lambda: EventLog.objects.count() == 80, lambda: worker.log)
    expected = {**log_counts(), "eventbus_events_published_total": 80}
    assert expected["eventbus_events_completed_total"] == 80
    wait_until_counted(expected, lambda: worker.log)
    eventually(lambda: scrape()["eventbus_workers"] == {(): 2}, lambda: worker.log)
    assert sum(scrape()["eventbus_worker_slots"].values()) == 2

    killed = EventWorker.objects.exclude(pid=worker.process.pid).first().pid
    os.kill(killed, signal.SIGKILL)
    eventually(
        lambda: (
            EventWorker.objects.exclude(pid=killed).count() == 2
            and not EventWorker.objects.filter(pid=killed).exists()
        ),
        lambda: worker.log,
    )
    publish_many(("process.effect", None) for _ in range(30))
    eventually(lambda: EventLog.objects.count() == 110, lambda: worker.log)
    expected = {**log_counts(), "eventbus_events_published_total": 110}
    wait_until_counted(expected, lambda: worker.log)
    # The supervisor kills the process of this handler and counts its death.
    publish("process.hold_the_gil")
    eventually(lambda: EventLog.objects.count() == 111, lambda: worker.log)
    expected = {**log_counts(), "eventbus_events_published_total": 111}
    assert expected["eventbus_events_dead_total"] == 1
    wait_until_counted(expected, lambda: worker.log)

    retention.purge(older_than=timedelta(0))
    EventLog.objects.all().delete()
    assert counters(expected) == expected, "purging the log changes no counter"
    worker.signal(signal.SIGTERM)
    worker.wait()
    EventCounter.objects.update(written_at=LONG_AGO)
    while store_for().fold_counters():
        pass
    assert counters(expected) == expected, "folding the rows of ended processes changes no counter"


def test_drain_with_retries_counts_each_failed_attempt():
    @handler("bad", name="bad", retry={"max_retries": 2})
    def bad(event):
        raise ValueError

    publish("bad")
    drain_with_retries()
    found = scrape()
    assert found["eventbus_handler_failures_total"] == {("bad", "default"): 3}
    assert found["eventbus_events_retried_total"] == {("default",): 2}
    assert found["eventbus_events_dead_total"] == {("default",): 1}
