"""The Celery task that handles events, and the requests to run it."""

import atexit
import os
import threading

import pytest
from django.db import transaction

from django_eventbus import publish, publish_many, subscribe
from django_eventbus.exceptions import UnknownQueueError
from django_eventbus.integrations import celery_broker, celery_drain
from django_eventbus.models import EventLog, EventWorker, QueuedEvent
from tests.celery_messages import CLOSED_PORT, messages
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def requests(app, monkeypatch, settings):
    """Requests of its own for a test, without a pause between them."""
    settings.EVENTBUS = {**settings.EVENTBUS, "CELERY_DRAIN": True}
    monkeypatch.setattr(celery_drain, "REQUEST_EVERY", 0.0)
    new = celery_drain.Requests()
    monkeypatch.setattr(celery_drain, "_requests", new)
    yield new
    atexit.unregister(new.finish)


def handle(calls):
    return subscribe("x", lambda event: calls.append(event.payload), name="x")


def requested(app):
    return [kwargs for name, _, _, kwargs in messages(app) if name == celery_drain.DRAIN]


def test_the_task_handles_all_events_that_are_ready():
    calls = []
    handle(calls)
    publish_many(("x", n) for n in range(3))
    assert celery_drain.drain() == 3
    assert calls == [0, 1, 2]
    assert EventLog.objects.count() == 3


def test_the_task_refuses_an_unknown_queue():
    with pytest.raises(UnknownQueueError, match="did you mean 'default'"):
        celery_drain.drain(queues=["defualt"])
    assert not EventWorker.objects.exists()


def test_the_task_stops_after_its_events_and_requests_another_run(app, requests):
    handle([])
    publish_many(("x", n) for n in range(50))
    requests._sent.wait(10)
    messages(app)
    assert 5 <= celery_drain.drain(max_events=5) < 50
    assert QueuedEvent.objects.exists()
    assert eventually(lambda: requested(app)) == [{"using": "default"}]


def test_the_task_stops_after_its_seconds():
    handle([])
    publish_many(("x", n) for n in range(50))
    celery_drain.drain(max_seconds=0.0)
    assert QueuedEvent.objects.exists()


def test_a_commit_requests_a_run_and_a_rollback_does_not(app, requests):
    with transaction.atomic():
        publish("x")
        transaction.set_rollback(True)
    assert not requests._process
    with transaction.atomic():
        publish("x")
        assert not requests._process
    assert eventually(lambda: requested(app)) == [{"using": "default"}]


def test_many_commits_need_few_requests(app, requests, monkeypatch):
    monkeypatch.setattr(celery_drain, "REQUEST_EVERY", 60.0)
    for _ in range(20):
        publish("x")
    assert eventually(lambda: requested(app)) == [{"using": "default"}]


def test_a_commit_while_a_request_is_sent_causes_another_request(app, requests, monkeypatch):
    sends = threading.Semaphore(0)
    began = []

    def send(*args, **kwargs):
        began.append(args)
        sends.acquire()

    monkeypatch.setattr(celery_broker.broker, "send", send)
    publish("x")
    eventually(lambda: len(began) == 1)
    publish("x")
    sends.release(2)
    eventually(lambda: len(began) == 2)


def test_a_broker_that_is_unavailable_does_not_affect_publishers(use, requests, caplog):
    use(broker=CLOSED_PORT)
    publish("x")
    eventually(lambda: "the next task that Celery's beat starts" in caplog.text)
    assert QueuedEvent.objects.count() == 1


def test_nothing_is_requested_unless_the_setting_is_on(app, monkeypatch):
    new = celery_drain.Requests()
    monkeypatch.setattr(celery_drain, "_requests", new)
    publish("x")
    assert not new._process


def test_a_process_that_exits_sends_its_last_request(app, requests, monkeypatch):
    monkeypatch.setattr(celery_drain, "REQUEST_EVERY", 60.0)
    publish("x")
    eventually(lambda: requested(app))
    publish("x")
    requests.finish()
    assert eventually(lambda: requested(app)) == [{"using": "default"}]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_sends_its_own_requests(app, requests):
    publish("x")
    eventually(lambda: requested(app))
    assert requests._process == os.getpid()
    requests._process = -1  # as in a forked process
    publish("x")
    assert eventually(lambda: requested(app)) == [{"using": "default"}]
