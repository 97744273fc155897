"""The clock of the database is read in UTC, in any time zone of its server."""

from datetime import timedelta

import pytest
from django.db import connection
from django.db.models import F
from django.utils import timezone

from django_eventbus import handler, publish, schedule
from django_eventbus.models import EventWorker, QueuedEvent
from django_eventbus.store import store_for
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.bus import drain

pytestmark = pytest.mark.django_db

LONG = timedelta(minutes=10)


@pytest.fixture(params=["+05:00", "-05:00"])
def far_away(db, request):
    """A session whose local time is not UTC."""
    sql = {"postgresql": "SET TIME ZONE %s", "mysql": "SET time_zone = %s"}.get(connection.vendor)
    if sql is None:
        pytest.skip("SQLite's sessions have no time zone")
    with connection.cursor() as cursor:
        cursor.execute(sql, [request.param])
        yield
        cursor.execute(sql, ["+00:00"])


def test_times_set_by_the_database_are_correct_in_any_session_time_zone(far_away):
    event = publish("x", {})
    later = publish("x", {}, delay=60)
    registration = new_registration(WorkerOptions(using="default", queues=("default",)))
    store_for().register(registration)
    worker = EventWorker.objects.get(pk=registration.pk)
    now = timezone.now()
    assert abs(store_for().read_clock() - now) < LONG
    assert abs(QueuedEvent.objects.get(pk=event.pk).created_at - now) < LONG
    assert abs(QueuedEvent.objects.get(pk=later.pk).available_at - now) < LONG
    assert abs(worker.started_at - now) < LONG
    assert abs(worker.expires_at - now) < LONG


def test_an_event_is_not_handled_before_it_is_due(far_away):
    handled = []
    handler("x", name="h")(lambda event: handled.append(event.payload))
    publish("x", "past", at=timezone.now() - timedelta(seconds=1))
    publish("x", "future", at=timezone.now() + timedelta(hours=1))
    drain()
    assert handled == ["past"]


def test_the_session_time_zone_does_not_cause_a_tick(far_away):
    schedule("x", cron="0 0 1 1 *", tz="UTC")
    drain()
    assert not QueuedEvent.objects.exists()


def test_a_time_that_is_due_now_is_not_later_than_the_clock(worker_id):
    """SQLite compares times as text: both need the same number of decimals."""
    store = store_for()
    workers = EventWorker.objects.annotate(now=store.now, due_at=store.after(0))
    assert workers.filter(due_at__lte=F("now")).exists()
