"""Checks of handlers: each finds its fault, and is ok without it."""

import uuid
from datetime import timedelta

import pytest

from django_eventbus import handler, pauses, publish, subscribe, unsubscribe
from django_eventbus.flow.fleet import digest_of
from django_eventbus.models import EventSchedule, MinuteStatistics
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.bus import drain, drain_with_retries

pytestmark = pytest.mark.django_db


def fails(event):
    raise ValueError("broken")


@pytest.fixture
def remote(store):
    """Register a live worker with these handlers."""

    def register(handlers):
        registration = new_registration(WorkerOptions(using="default", queues=("default",)))
        store.register(registration)
        store.note_handlers(registration.pk, handlers, digest_of(handlers))

    return register


def calls(now, *, hours_ago, minutes=6, handler="h", **counts):
    for minute in range(minutes):
        MinuteStatistics.objects.create(
            namespace="default",
            minute=(now - timedelta(hours=hours_ago, minutes=-minute - 2)).replace(
                second=0, microsecond=0
            ),
            worker_id=uuid.uuid4(),
            queue="default",
            handler=handler,
            **counts,
        )


@pytest.mark.parametrize("check_id", ["EB010", "EB011", "EB012", "EB013"])
def test_an_idle_bus_is_ok(check_id, diagnose):
    assert diagnose(check_id).verdict == "ok"


@pytest.mark.parametrize("check_id", ["EB010", "EB011", "EB012"])
def test_a_failing_event_of_a_known_handler_is_ok(check_id, diagnose):
    handler("order.paid", name="shop.charge")(fails)
    publish("order.paid", 1)
    drain()
    assert diagnose(check_id).verdict == "ok"


def test_a_queued_event_that_waits_for_a_removed_handler(diagnose):
    subscription = subscribe("order.paid", fails, name="shop.charge")
    publish("order.paid", 1)
    drain()
    unsubscribe(subscription)
    (result,) = diagnose("EB010").results
    assert result.verdict == "warn"
    assert result.summary == "no process registers the handler shop.charge (1 queued events)"


def test_a_dead_letter_and_a_pause_of_a_removed_handler(diagnose):
    subscription = subscribe("order.paid", fails, name="shop.charge", retry={"max_retries": 0})
    publish("order.paid", 1)
    drain()
    pauses.pause(handler="shop.charge")
    unsubscribe(subscription)
    (result,) = diagnose("EB010").results
    assert "(1 dead letters, 1 flow controls)" in result.summary


def test_a_handler_that_only_a_live_worker_has_is_registered(diagnose, remote):
    subscription = subscribe("order.paid", fails, name="shop.charge")
    publish("order.paid", 1)
    drain()
    unsubscribe(subscription)
    remote({"shop.charge": ["order.*"]})
    assert diagnose("EB010").verdict == diagnose("EB011").verdict == "ok"


def test_events_without_a_handler(diagnose):
    for n in range(3):
        publish("order.misspelt", n)
    (result,) = diagnose("EB011").results
    assert result.verdict == "warn"
    assert "the type order.misspelt: 3 of the 3 queued events" in result.summary


def test_events_that_need_no_handler_are_ok(diagnose, settings):
    settings.EVENTBUS = {"UNHANDLED": {"audit.*": "complete"}}
    publish("audit.login", 1)
    assert diagnose("EB011").verdict == "ok"


def test_a_schedule_whose_event_has_no_handler(diagnose):
    EventSchedule.objects.create(name="nightly", type="report.due", cron="0 3 * * *")
    (result,) = diagnose("EB011").results
    assert "the type report.due of the schedule nightly" in result.summary


def test_a_handler_that_never_succeeded(diagnose, now):
    handler("order.paid", name="shop.charge")(fails)
    publish("order.paid", 1)
    drain_with_retries()
    (result,) = diagnose("EB012").results
    assert result.verdict == "fail"
    assert result.summary.startswith("the handler shop.charge failed 4 times and never succeeded ")
    calls(now, hours_ago=1, minutes=1, handler="shop.charge", done=1)
    assert diagnose("EB012").verdict == "ok"


@pytest.fixture
def regular(now):
    """A handler that ran regularly at this time yesterday."""
    handler("a", name="h")(lambda event: None)
    calls(now, hours_ago=24, done=5)


def test_a_handler_that_went_quiet(diagnose, regular):
    (result,) = diagnose("EB013").results
    assert result.verdict == "warn"
    assert "yesterday it ran 30 times" in result.summary


def test_a_handler_that_still_runs_is_not_quiet(diagnose, regular, now):
    calls(now, hours_ago=1, minutes=1, done=1)
    assert diagnose("EB013").verdict == "ok"


def test_a_paused_handler_is_not_quiet(diagnose, regular):
    pauses.pause(handler="h")
    assert diagnose("EB013").verdict == "ok"


def test_without_statistics_of_yesterday_the_check_is_skipped(diagnose, regular, settings):
    settings.EVENTBUS = {"STATISTICS_MINUTES": 60}
    assert diagnose("EB013").verdict == "skipped"


def test_a_removed_handler_is_not_quiet(diagnose, now):
    calls(now, hours_ago=24, done=5)
    assert diagnose("EB013").verdict == "ok"
