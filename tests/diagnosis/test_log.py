"""Checks of dead letters and of the log: each finds its fault, and is ok without it."""

from datetime import timedelta

import pytest

from django_eventbus import handler, publish, publish_many
from django_eventbus.diagnosis import log
from django_eventbus.models import EventLog, QueuedEvent
from tests.bus import drain

pytestmark = pytest.mark.django_db


def fails(event):
    raise ValueError("broken")


@pytest.mark.parametrize("check_id", ["EB020", "EB021", "EB022"])
def test_an_idle_bus_is_ok(check_id, diagnose):
    assert diagnose(check_id).verdict == "ok"


@pytest.mark.parametrize(("days", "verdict"), [(1, "ok"), (20, "warn")])
def test_old_dead_letters(diagnose, now, days, verdict):
    handler("a", name="a", retry={"max_retries": 0})(fails)
    publish("a", 1)
    drain()
    EventLog.objects.update(finished_at=now - timedelta(days=days))
    found = diagnose("EB020")
    assert found.verdict == verdict
    if verdict == "warn":
        assert found.results[0].summary == "1 dead letters are older than 14 days"


@pytest.mark.parametrize(("interruptions", "verdict"), [(1, "warn"), (2, "fail")])
def test_events_whose_claim_was_interrupted(diagnose, interruptions, verdict):
    event = publish("a", 1)
    QueuedEvent.objects.update(interruptions=interruptions)
    found = diagnose("EB021")
    assert found.verdict == verdict
    assert str(event.event_id) in found.results[0].fix


@pytest.mark.parametrize(
    ("days", "count", "verdict"), [(100, 9, "ok"), (1, 10, "ok"), (100, 10, "warn")]
)
def test_a_log_that_is_never_purged(diagnose, monkeypatch, now, days, count, verdict):
    monkeypatch.setattr(log, "MANY_COMPLETED", 10)
    handler("a", name="a")(lambda event: None)
    publish_many(("a", n) for n in range(count))
    drain()
    EventLog.objects.update(finished_at=now - timedelta(days=days))
    assert diagnose("EB022").verdict == verdict
