"""A worker whose clock is wrong or in another time zone (F35).

The clock of the database decides; a worker uses only its monotonic clock.
"""

import itertools
import time
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from django_eventbus import handler, publish
from django_eventbus.models import EventLane, EventWorker, QueuedEvent
from django_eventbus.store import store_for
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.bus import drain

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="its clock is this machine's"),
]

HOUR = 3600
RETRY = {"max_retries": 3, "base_delay": 60.0, "max_delay": 60.0, "jitter": 0}


@pytest.fixture(params=["an hour ahead", "an hour behind", "jumping", "elsewhere"])
def wrong_clock(request, monkeypatch):
    """Change the wall clock of this process, but not its monotonic clock."""
    offsets = {"an hour ahead": [HOUR], "an hour behind": [-HOUR], "jumping": [HOUR, -HOUR]}
    offset = itertools.cycle(offsets.get(request.param, [0]))
    now, seconds, nanoseconds = timezone.now, time.time, time.time_ns
    monkeypatch.setattr(timezone, "now", lambda: now() + timedelta(seconds=next(offset)))
    monkeypatch.setattr(time, "time", lambda: seconds() + next(offset))
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + next(offset) * 10**9)
    if request.param == "elsewhere":
        monkeypatch.setenv("TZ", "Pacific/Kiritimati")
        time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def seconds_from_now(moment):
    return (moment - store_for().read_clock()).total_seconds()


def register(store):
    registration = new_registration(WorkerOptions(using="default", queues=("default",)))
    store.register(registration)
    return registration.pk


def test_a_delay_does_not_depend_on_the_clock_of_the_worker(wrong_clock):
    publish("x", {}, delay=60)
    handler("x", name="h")(lambda event: None)
    drain()
    assert 50 < seconds_from_now(QueuedEvent.objects.get().available_at) <= 60


@pytest.mark.parametrize("key", [None, "k"])
def test_a_retry_delay_does_not_depend_on_the_clock_of_the_worker(wrong_clock, key):
    @handler("x", name="h", retry=RETRY)
    def fail(event):
        raise ValueError

    publish("x", {}, key=key)
    drain()
    row = QueuedEvent.objects.get()
    waits_until = row.available_at if key is None else EventLane.objects.get().ready_at
    assert 50 < seconds_from_now(waits_until) <= 60
    assert row.attempts == 1


def test_a_lease_does_not_depend_on_the_clock_of_the_worker(wrong_clock):
    store = store_for()
    worker = register(store)
    publish("x", {})
    assert len(store.claim("default", limit=1, worker_id=worker)) == 1
    assert 50 < seconds_from_now(EventWorker.objects.get().expires_at) <= 60
    assert store.recover() == 0
    assert store.renew([worker]) == {worker}
    assert store.next_due(["default"]) is None
