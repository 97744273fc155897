"""An idle worker process sends at most two statements per second at any concurrency."""

import time

import pytest
from django.db import connection

from django_eventbus import handler, publish, publish_many
from django_eventbus.models import EventLog
from django_eventbus.worker.dispatcher import Dispatcher
from django_eventbus.worker.registration import WorkerOptions
from django_eventbus.worker.worker import Worker

pytestmark = pytest.mark.django_db

WARM_UP, MEASURED = 5.0, 100.0
#: The listener checks its connection every ten seconds.
OF_THE_LISTENER = 0.1


class Idle:
    """Makes the dispatcher wait without real time, by moving the clock."""

    def __init__(self, monkeypatch, dispatcher):
        self.now = time.monotonic()
        self.statements = self.seconds = 0
        self.dispatcher = dispatcher
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(dispatcher.bell, "wait", self.wait)

    def wait(self, seconds):
        self.now += seconds
        if self.now > self.ends_at:
            self.dispatcher.worker.stop()
        return False

    def count(self, execute, sql, params, many, context):
        self.statements += self.now > self.begins_at
        return execute(sql, params, many, context)

    def statements_per_second(self):
        self.begins_at = self.now + WARM_UP
        self.ends_at = self.begins_at + MEASURED
        with connection.execute_wrapper(self.count):
            self.dispatcher._work()
        return self.statements / MEASURED


@pytest.fixture
def make_idle(worker_id, monkeypatch):
    def make(**options):
        chosen = {"using": "default", "queues": ("default",), **options}
        dispatcher = Dispatcher(Worker(WorkerOptions(**chosen), worker_id))
        # Databases without notifications are polled more often at first.
        return Idle(monkeypatch, dispatcher)

    return make


@pytest.mark.parametrize("concurrency", [1, 10])
@pytest.mark.parametrize("queues", [("default",), ("default", "mail", "slow")])
def test_an_idle_worker_sends_two_statements_per_second_at_most(make_idle, concurrency, queues):
    idle = make_idle(concurrency=concurrency, queues=queues)
    assert 0 < idle.statements_per_second() <= 2 - OF_THE_LISTENER


def test_declared_limits_cost_an_idle_worker_no_statements(make_idle):
    handler("x", name="h", rate="10/s", max_running=3)(lambda event: None)
    assert make_idle().statements_per_second() <= 2 - OF_THE_LISTENER


def test_delayed_events_and_waiting_keys_cost_an_idle_worker_no_statements(make_idle, store):
    publish("x", 1, delay=10_000)
    publish("x", 1, delay=10_000, key="k")
    assert make_idle().statements_per_second() <= 2 - OF_THE_LISTENER


def test_an_event_locked_by_another_transaction_does_not_keep_a_worker_busy(make_idle, monkeypatch):
    """The event looks ready, but no claim can lock it."""
    publish("x", 1)
    idle = make_idle()
    monkeypatch.setattr(idle.dispatcher.store, "claim", lambda *args, **kwargs: [])
    assert idle.statements_per_second() <= 2 - OF_THE_LISTENER


def test_an_idle_worker_handles_new_events(make_idle):
    handler("x", name="h")(lambda event: None)
    idle = make_idle()
    wait = idle.wait

    def publish_and_wait(seconds):
        publish_many([("x", 1), ("x", 2)])
        idle.dispatcher.bell.wait = wait
        return wait(seconds)

    idle.dispatcher.bell.wait = publish_and_wait
    idle.statements_per_second()
    assert EventLog.objects.count() == 2
