"""Factories create events that the bus can handle."""

import subprocess
import sys

import pytest

from django_eventbus import dead_letters, handler
from django_eventbus.integrations.factory_boy import EventLogFactory, QueuedEventFactory
from django_eventbus.models import DeadEvent, EventLog
from django_eventbus.testing import drain

pytestmark = pytest.mark.django_db


def test_a_queued_event_can_be_handled():
    seen = []
    handler("order.placed", name="h")(lambda event: seen.append(event.payload))
    QueuedEventFactory(type="order.placed", payload={"n": 1})
    QueuedEventFactory(type="order.placed", delayed=True)
    assert drain().handled == 1
    assert seen == [{"n": 1}]


def test_events_have_the_namespace_of_the_project(settings):
    settings.EVENTBUS = {"NAMESPACE": "shop", "QUEUE": "mail", "QUEUES": ["mail"]}
    event = QueuedEventFactory()
    assert (event.namespace, event.queue) == ("shop", "mail")


def test_an_ended_event_is_not_a_dead_letter():
    EventLogFactory.create_batch(3)
    assert EventLog.objects.count() == 3
    assert not DeadEvent.objects.exists()


def test_a_dead_letter_can_be_retried():
    dead = EventLogFactory(dead=True, dead_handler="shop.ship", error_type="shop.NoStock")
    assert dead_letters.list(handler="shop.ship", error_type="shop.NoStock") == [dead]
    assert dead.errors[0]["type"] == "shop.NoStock"
    assert len(dead.error_fingerprint) == 16
    QueuedEventFactory()
    assert dead_letters.retry(dead.event_id) == 1
    handler("*", name="shop.ship")(lambda event: None)
    assert drain().handled == 2


@pytest.mark.processes
def test_a_missing_library_is_named():
    code = (
        "import sys, django; sys.modules['factory'] = None; django.setup(); "
        "import django_eventbus.integrations.factory_boy"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "need factory_boy: pip install factory-boy" in run.stderr
