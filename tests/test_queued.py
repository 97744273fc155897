"""Actions of operators on waiting events."""

from datetime import timedelta

import pytest

from django_eventbus import dead_letters, handler, lanes, publish, queued
from django_eventbus.models import DeadEvent, EventLane, EventLog, QueuedEvent
from django_eventbus.store import store_for
from tests.bus import drain, logged

pytestmark = pytest.mark.django_db

PATIENT = {"max_retries": 3, "base_delay": 600.0, "max_delay": 600.0, "jitter": 0.0}


@pytest.fixture
def seen():
    """The payloads that were handled."""
    payloads = []
    handler("x", name="h")(lambda event: payloads.append(event.payload))
    return payloads


def fails_at_first(name="h"):
    runs = []

    @handler("x", name=name, retry=PATIENT)
    def fail_at_first(event):
        runs.append(event.payload)
        if event.attempt == 1:
            raise ValueError

    return runs


def test_a_delayed_event_can_run_now(seen):
    event = publish("x", 1, delay=3600)
    drain()
    assert seen == []
    assert queued.run_now([event.event_id]) == 1
    drain()
    assert seen == [1]
    ended = EventLog.objects.get()
    assert ended.created_at < ended.due_at < ended.finished_at, (
        "it was due when the operator said so"
    )


def test_an_event_that_waits_for_its_retry_can_run_now():
    runs = fails_at_first()
    event = publish("x", 1)
    drain()
    assert queued.run_now([event.event_id]) == 1
    drain()
    assert runs == [1, 1]
    assert logged(event).status == "COMPLETED"


def test_the_first_event_of_a_key_can_run_now_and_the_others_follow():
    runs = fails_at_first()
    first, second = publish("x", 1, key="k"), publish("x", 2, key="k")
    drain()
    assert runs == [1]
    assert queued.run_now([second.event_id]) == 0
    assert queued.run_now([first.event_id, second.event_id]) == 1
    drain()
    assert runs == [1, 1, 2]


def test_run_now_skips_an_event_that_is_ready(seen):
    event = publish("x", 1)
    assert queued.run_now([event.event_id]) == 0


def test_an_event_that_is_being_handled_cannot_be_changed(store, worker_id):
    event = publish("x", 1)
    store.claim("default", limit=1, worker_id=worker_id)
    assert queued.run_now([event.event_id]) == 0
    assert queued.cancel([event.event_id]) == 0
    assert QueuedEvent.objects.get().status == "PROCESSING"


def test_a_cancelled_event_is_a_dead_letter_that_can_be_retried(seen):
    event = publish("x", 1, delay=3600)
    assert queued.cancel([event.event_id], reason="the shop is closed") == 1
    assert not QueuedEvent.objects.exists()
    letter = DeadEvent.objects.get(event_id=event.event_id)
    assert (letter.status, letter.error_type) == ("DISCARDED", "Cancelled")
    assert letter.errors[-1]["message"] == "the shop is closed"
    assert [each.count for each in dead_letters.groups()] == [1]
    dead_letters.retry(letter)
    drain()
    assert seen == [1]


def test_a_cancelled_event_keeps_the_record_of_its_handlers():
    fails_at_first()
    handler("x", name="fine")(lambda event: None)
    event = publish("x", 1)
    drain()
    assert queued.cancel([event.event_id]) == 1
    letter = logged(event)
    assert {name: state["state"] for name, state in letter.deliveries.items()} == {
        "h": "retry",
        "fine": "done",
    }
    assert [each["type"] for each in letter.errors] == ["ValueError", "Cancelled"]


def test_cancelling_the_first_event_of_a_key_unblocks_the_next_one():
    runs = fails_at_first()
    first, second = publish("x", 1, key="k"), publish("x", 2, key="k")
    drain()
    assert queued.cancel([first.event_id]) == 1
    drain()
    assert runs == [1, 2]
    assert queued.cancel([second.event_id]) == 1
    drain()
    assert not EventLane.objects.exists()


def test_cancelling_a_later_event_of_a_key_does_not_wake_the_first():
    fails_at_first()
    publish("x", 1, key="k")
    second = publish("x", 2, key="k")
    drain()
    assert queued.cancel([second.event_id]) == 1
    (lane,) = lanes.list()
    assert (lane.state, lane.depth) == ("waiting", 1)


def test_several_events_are_cancelled_at_once(seen):
    events = [publish("x", number, delay=60) for number in range(3)]
    kept = publish("x", 3)
    assert queued.cancel([each.event_id for each in events]) == 3
    assert QueuedEvent.objects.get().event_id == kept.event_id
    assert EventLog.objects.count() == 3


def test_events_of_other_namespaces_cannot_be_changed(settings):
    event = publish("x", 1, delay=60)
    settings.EVENTBUS = {"NAMESPACE": "theirs"}
    assert queued.run_now([event.event_id]) == queued.cancel([event.event_id]) == 0


def test_a_blocked_lane_stays_blocked_until_its_dead_letter_is_retried(settings):
    settings.EVENTBUS = {"DEAD_HEAD": "block"}
    handler("x", name="h", retry={"max_retries": 0})(lambda event: 1 / 0)
    publish("x", 1, key="k")
    second = publish("x", 2, key="k")
    drain()
    assert queued.run_now([second.event_id]) == 0
    assert lanes.list()[0].state == "blocked"
    dead_letters.retry(type="*", per_minute=60, delay=30)
    lane = EventLane.objects.get()
    assert lane.blocked_by is None
    assert lane.ready_at > store_for().read_clock() + timedelta(seconds=20)
