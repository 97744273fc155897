"""Checks of what delays events: each finds its fault, and is ok without it."""

from datetime import timedelta

import pytest

from django_eventbus import CircuitBreaker, handler, pauses, publish
from django_eventbus.models import EventLane, EventLog, FlowControl, FlowControlKind, QueuedEvent
from tests.bus import drain

pytestmark = pytest.mark.django_db


def fails(event):
    raise ValueError("broken")


@pytest.mark.parametrize("check_id", ["EB014", "EB015", "EB016", "EB017", "EB018"])
def test_an_idle_bus_is_ok(check_id, diagnose):
    assert diagnose(check_id).verdict == "ok"


@pytest.fixture
def blocked(settings):
    settings.EVENTBUS = {"DEAD_HEAD": "block"}
    handler("step", name="step", retry={"max_retries": 0})(fails)
    publish("step", 1, key="order:7")
    publish("step", 2, key="order:7")
    drain()
    assert EventLane.objects.get().blocked_by


@pytest.mark.parametrize(("hours", "verdict"), [(0, "ok"), (2, "warn"), (30, "fail")])
def test_a_blocked_lane(diagnose, blocked, now, hours, verdict):
    EventLog.objects.update(finished_at=now - timedelta(hours=hours))
    found = diagnose("EB014")
    assert found.verdict == verdict
    dead = EventLog.objects.get()
    assert (found.results[0].fix == f"manage.py dead_events retry {dead.event_id}") == bool(hours)
    assert "order:7" not in found.results[0].summary


def test_a_lane_whose_dead_letter_is_gone(diagnose, blocked):
    EventLog.objects.all().delete()
    found = diagnose("EB014")
    assert found.verdict == "fail"
    assert "django_eventbus.lanes.release()" in found.results[0].fix


@pytest.mark.parametrize(("hours", "verdict"), [(1, "ok"), (30, "warn")])
def test_a_pause_that_was_forgotten(diagnose, now, hours, verdict):
    pauses.pause(queue="default", by="anna")
    FlowControl.objects.update(paused_at=now - timedelta(hours=hours))
    found = diagnose("EB015")
    assert found.verdict == verdict
    if verdict == "warn":
        assert found.results[0].fix == "manage.py event_pause queue default --resume"
        assert "by anna" in found.results[0].summary


@pytest.mark.parametrize(("hours", "verdict"), [(0.5, "ok"), (2, "warn")])
def test_a_circuit_breaker_that_stays_open(diagnose, now, hours, verdict):
    breaker = CircuitBreaker(min_calls=1, failure_rate=0.5)
    handler("a", name="shop.charge", breaker=breaker)(fails)
    publish("a", 1)
    drain()
    assert FlowControl.objects.update(opened_at=now - timedelta(hours=hours)) == 1
    found = diagnose("EB016")
    assert found.verdict == verdict


@pytest.mark.parametrize(("minutes", "verdict"), [(1, "ok"), (10, "fail")])
def test_a_broker_that_is_unavailable(diagnose, now, minutes, verdict):
    FlowControl.objects.create(
        namespace="default",
        kind=FlowControlKind.EXECUTOR,
        name="celery",
        opened_at=now - timedelta(minutes=minutes),
    )
    assert diagnose("EB017").verdict == verdict


def test_messages_of_a_handler_that_cannot_be_sent(diagnose, now):
    handler("a", name="shop.mail", executor="celery")(fails)
    FlowControl.objects.create(
        namespace="default",
        kind=FlowControlKind.HANDLER,
        name="shop.mail",
        unsent_since=now - timedelta(minutes=10),
        send_error="NotFound: no exchange",
    )
    found = diagnose("EB017")
    assert found.verdict == "fail"
    assert "NotFound: no exchange" in found.results[0].summary


@pytest.mark.parametrize(("minutes", "verdict"), [(0, "ok"), (5, "warn"), (120, "fail")])
def test_events_that_wait(diagnose, now, minutes, verdict):
    publish("a", 1)
    QueuedEvent.objects.update(created_at=now - timedelta(minutes=minutes))
    assert diagnose("EB018").verdict == verdict
