"""The database's clock is in UTC, wherever its server stands."""

from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from django_eventbus import handler, publish, schedule
from django_eventbus.models import EventWorker, QueuedEvent
from django_eventbus.store import store_for
from django_eventbus.worker import WorkerOptions, new_registration
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


def test_what_the_database_makes_of_now_is_now(far_away):
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


def test_an_event_is_handled_when_its_time_has_come_and_not_before(far_away):
    handled = []
    handler("x", name="h")(lambda event: handled.append(event.payload))
    publish("x", "past", at=timezone.now() - timedelta(seconds=1))
    publish("x", "future", at=timezone.now() + timedelta(hours=1))
    drain()
    assert handled == ["past"]


def test_a_schedule_fires_no_tick_of_another_time_zone(far_away):
    schedule("x", cron="0 0 1 1 *", tz="UTC")
    drain()
    assert not QueuedEvent.objects.exists()
