"""poll() and finalize(): handling events in a loop of the project."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction

from django_eventbus import dead_letters, finalize, handler, pauses, poll, publish
from django_eventbus.models import (
    DeadEvent,
    EventLane,
    EventLog,
    EventWorker,
    FlowControl,
    QueuedEvent,
)
from tests.bus import logged

pytestmark = pytest.mark.django_db

LEASE = 60


@pytest.fixture
def take(clock):
    """Call poll() with the clock of the test."""

    def take(*args, **options):
        return poll(*args, clock=clock, **options)

    return take


@pytest.fixture
def finish(clock):
    """Call finalize() with the clock of the test."""

    def finish(*args, **options):
        return finalize(*args, clock=clock, **options)

    return finish


def payloads(*events):
    return [event.payload for event in events]


# -- poll


def test_poll_of_an_empty_queue_returns_none_and_registers_no_worker():
    """M4."""
    assert poll() is None
    assert not EventWorker.objects.exists()


def test_poll_alternates_between_events_with_and_without_a_key():
    """A poll has no state of earlier polls."""
    for number in range(40):
        publish("x", number)
        publish("x", number, key=f"k{number}")
    polled = [poll() for _ in range(40)]
    keyed = sum(event.key is not None for event in polled)
    assert 0 < keyed < 40


def test_a_polled_event_has_all_its_attributes():
    """M4, M8."""
    published = publish("order.placed", {"order": 7}, priority=3, headers={"trace": "a"})
    event = poll()
    assert event.id == published.event_id
    assert event.type == "order.placed"
    assert event.payload == {"order": 7}
    assert event.headers == {"trace": "a"}
    assert event.priority == 3
    assert event.queue == "default"
    assert event.namespace == "default"
    assert event.attempt == 1
    assert event.delivery_count == 1
    assert event.created_at == published.created_at


def test_a_polled_event_is_processing_with_its_start_and_is_not_polled_again(take, clock):
    """M2, M4, M7."""
    publish("order.placed", {})
    assert take() is not None
    row = QueuedEvent.objects.get()
    assert row.status == "PROCESSING"
    assert row.attempts == 1
    assert row.processing_started_at == clock.now
    assert row.claim_token is not None
    assert take() is None


def test_events_are_polled_by_priority_then_in_order_of_publishing():
    """M4."""
    for number, priority in enumerate([0, 5, 0, 5, -1]):
        publish("order.placed", number, priority=priority)
    assert payloads(*(poll() for _ in range(5))) == [1, 3, 0, 2, 4]


def test_only_the_named_queue_is_polled(settings):
    """M8."""
    settings.EVENTBUS = {"QUEUES": ("default", "mail")}
    publish("mail.sent", {}, queue="mail")
    assert poll() is None
    assert poll("mail").type == "mail.sent"


def test_only_events_of_the_namespace_are_polled(settings):
    """M8."""
    publish("order.placed", {})
    settings.EVENTBUS = {"NAMESPACE": "other"}
    assert poll() is None
    settings.EVENTBUS = {}
    assert poll() is not None


def test_a_delayed_event_is_polled_when_its_time_has_come(take, clock):
    """M7."""
    publish("order.placed", {}, at=clock.now + timedelta(seconds=30))
    assert take() is None
    clock.tick(29)
    assert take() is None
    clock.tick(1)
    assert take() is not None


def test_no_registered_handler_runs():
    """M4."""
    ran = []
    handler("*", name="see")(ran.append)
    publish("order.placed", {})
    finalize(poll())
    assert ran == []


# -- finalize


def test_an_event_finalized_without_errors_is_completed(take, finish, clock):
    """M4, M5."""
    published = publish("order.placed", {"order": 7})
    event = take()
    clock.tick(5)
    assert finish(event) is True
    log = logged(published)
    assert log.status == "COMPLETED"
    assert log.payload == {"order": 7}
    assert log.attempts == 1
    assert log.errors is None
    assert log.finished_at == clock.now
    assert log.error_type == ""
    assert not QueuedEvent.objects.exists()
    assert not EventWorker.objects.exists()


def test_an_event_finalized_with_errors_is_completed_with_errors_and_keeps_them():
    """M5, M28."""
    published = publish("order.placed", {})
    assert finalize(poll(), [ValueError("first"), "second", KeyError("third")]) is True
    log = logged(published)
    assert log.status == "COMPLETED_WITH_ERRORS"
    assert [each["message"] for each in log.errors] == ["first", "second", "'third'"]
    assert [each["type"] for each in log.errors] == ["ValueError", "Exception", "KeyError"]
    assert log.error_type == "KeyError"
    assert log.error_fingerprint != ""


def test_an_event_finalized_as_failed_is_failed():
    """M5."""
    published = publish("order.placed", {})
    assert finalize(poll(), [ValueError("no")], failed=True) is True
    assert logged(published).status == "FAILED"
    assert DeadEvent.objects.get().event_id == published.event_id


def test_an_error_that_was_raised_is_kept_with_its_traceback():
    """M13."""
    published = publish("order.placed", {})
    event = poll()
    try:
        raise ValueError("no")
    except ValueError as error:
        finalize(event, [error])
    (record,) = logged(published).errors
    assert "test_polling.py" in record["traceback"]
    assert record["attempt"] == 1


def test_a_second_finalize_does_nothing():
    """M4."""
    published = publish("order.placed", {})
    event = poll()
    assert finalize(event) is True
    assert finalize(event) is False
    assert finalize(event, [ValueError("too late")], failed=True) is False
    assert EventLog.objects.count() == 1
    assert logged(published).status == "COMPLETED"


def test_a_late_finalize_leaves_the_transaction_of_the_caller_usable():
    """M4."""
    publish("order.placed", {})
    event = poll()
    finalize(event)
    with transaction.atomic():
        assert finalize(event) is False
        publish("still.usable", {})
    assert QueuedEvent.objects.get().type == "still.usable"


def test_a_rolled_back_finalize_has_no_effect():
    """M4: finalize() and the caller's writes are in one transaction."""
    publish("order.placed", {})
    event = poll()
    with transaction.atomic():
        assert finalize(event) is True
        transaction.set_rollback(True)
    assert not EventLog.objects.exists()
    assert QueuedEvent.objects.get().status == "PROCESSING"
    assert finalize(event) is True


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a\x00b\ud800"),
        ValueError("x" * 1_000_000),
        type("E" * 300, (Exception,), {})("a class with a name too long for its column"),
        "a\x00b",
    ],
    ids=["nul", "long", "long name", "text"],
)
def test_an_error_that_no_column_accepts_is_cleaned_and_stored(error):
    """M5."""
    published = publish("order.placed", {})
    assert finalize(poll(), [error]) is True
    assert logged(published).status == "COMPLETED_WITH_ERRORS"
    assert "\x00" not in json.dumps(logged(published).errors)


# -- abandoned


def test_an_abandoned_event_is_polled_again_with_the_next_attempt(take, finish, clock):
    """M3, M7."""
    published = publish("order.placed", {})
    first = take()
    clock.tick(LEASE)
    assert take() is None
    clock.tick(1)
    second = take()
    assert second.id == first.id == published.event_id
    assert second.delivery_count == 2
    assert second.attempt == 2
    assert finish(first) is False
    assert QueuedEvent.objects.get().status == "PROCESSING"
    assert finish(second) is True
    assert finish(first) is False
    log = logged(published)
    assert log.status == "COMPLETED"
    assert log.attempts == 2


def test_the_late_finalize_of_an_abandoned_event_does_not_affect_the_second_attempt(
    take, finish, clock
):
    """M3."""
    publish("order.placed", {})
    first = take()
    clock.tick(LEASE + 1)
    second = take()
    assert finish(first, [ValueError("too late")], failed=True) is False
    row = QueuedEvent.objects.get()
    assert row.claim_token == second._event.claim.token
    assert [each["type"] for each in row.errors] == ["WorkerLost"]


def test_a_late_caller_may_finalize_an_event_that_was_not_polled_again(take, finish, clock):
    """M3."""
    published = publish("order.placed", {})
    event = take()
    clock.tick(LEASE + 1)
    assert finish(event) is True
    assert logged(published).status == "COMPLETED"
    assert take() is None


def test_the_lease_is_a_setting(take, clock, settings):
    """M3."""
    settings.EVENTBUS = {"ABANDON_AFTER": 5.0}
    publish("order.placed", {})
    assert take() is not None
    clock.tick(6)
    assert take() is not None


def test_an_abandoned_event_keeps_an_error_record(take, finish, clock):
    """M3, M28."""
    published = publish("order.placed", {})
    take()
    clock.tick(LEASE + 1)
    finish(take(), [ValueError("then this")])
    types = [each["type"] for each in logged(published).errors]
    assert types == ["WorkerLost", "ValueError"]


def test_an_event_abandoned_too_often_is_dead_as_crashed(take, clock):
    """M6."""
    published = publish("order.placed", {"order": 7})
    for _ in range(3):
        assert take() is not None
        clock.tick(LEASE + 1)
    assert take() is None
    log = logged(published)
    assert log.status == "FAILED"
    assert log.error_type == "crashed"
    assert log.payload == {"order": 7}
    assert [each["type"] for each in log.errors] == ["WorkerLost"] * 3
    assert log.finished_at == clock.now
    assert not QueuedEvent.objects.exists()
    assert not EventWorker.objects.exists()


def test_an_event_that_is_dead_as_crashed_is_logged(take, clock, capture):
    """M6: no worker would report it."""
    published = publish("order.placed", {})
    for _ in range(3):
        take()
        clock.tick(LEASE + 1)
    take()
    (line,) = [each for each in capture.records if each.levelname == "ERROR"]
    assert f"{published.event_id} is a dead letter" in line.getMessage()


def test_a_dead_event_does_not_delay_the_next_one(take, clock):
    """M6."""
    publish("order.placed", "poison")
    for _ in range(3):
        take()
        clock.tick(LEASE + 1)
    publish("order.placed", "good")
    assert take().payload == "good"


def test_the_number_of_crashes_allowed_is_a_setting(take, clock, settings):
    """M6."""
    settings.EVENTBUS = {"MAX_CRASHES": 1}
    published = publish("order.placed", {})
    take()
    clock.tick(LEASE + 1)
    assert take() is None
    assert logged(published).error_type == "crashed"


# -- keys


def test_events_of_one_key_are_polled_one_at_a_time_and_in_order():
    """M15."""
    for number in range(3):
        publish("order.placed", number, key="order:7")
    for number in range(3):
        event = poll()
        assert event.payload == number
        assert event.key == "order:7"
        assert poll() is None
        assert finalize(event) is True
    assert poll() is None
    assert not EventLane.objects.exists()


def test_different_keys_do_not_wait_for_each_other():
    """M15."""
    publish("order.placed", "a1", key="a")
    publish("order.placed", "a2", key="a")
    publish("order.placed", "b1", key="b")
    publish("order.placed", "none")
    assert sorted(payloads(*(poll() for _ in range(3)))) == ["a1", "b1", "none"]
    assert poll() is None


def test_an_abandoned_event_of_a_key_comes_before_its_successors(take, finish, clock):
    """M3, M15."""
    publish("order.placed", 1, key="a")
    publish("order.placed", 2, key="a")
    first = take()
    assert first.payload == 1
    clock.tick(LEASE + 1)
    again = take()
    assert again.payload == 1
    assert take() is None
    assert finish(first) is False
    assert take() is None
    assert finish(again) is True
    assert take().payload == 2


def test_a_dead_event_of_a_key_does_not_block_its_successors(take, clock):
    """M6, M15."""
    publish("order.placed", "poison", key="a")
    for _ in range(3):
        take()
        clock.tick(LEASE + 1)
    publish("order.placed", "good", key="a")
    assert take().payload == "good"


@pytest.mark.parametrize("key", [None, "a"])
def test_poll_releases_events_whose_flow_control_was_deleted(key):
    published = publish("x", 1, key=key)
    pauses.pause(type="x")
    assert poll() is None
    FlowControl.objects.all().delete()
    assert poll().id == published.event_id


@pytest.mark.parametrize(("errors", "failed"), [([], True), (["no"], True), (["no"], False)])
def test_a_dead_letter_of_an_own_loop_blocks_its_key(settings, errors, failed):
    settings.EVENTBUS = {"DEAD_HEAD": "block"}
    first, second = publish("x", 1, key="a"), publish("x", 2, key="a")
    assert finalize(poll(), errors, failed=failed) is True
    assert poll() is None
    assert EventLane.objects.get().blocked_by == first.event_id
    dead_letters.retry(first.event_id)
    for each in (first, second):
        event = poll()
        assert event.id == each.event_id
        assert finalize(event) is True
    assert not EventLane.objects.exists()


def test_an_event_of_an_own_loop_that_succeeds_does_not_block_its_key(settings):
    settings.EVENTBUS = {"DEAD_HEAD": "block"}
    publish("x", 1, key="a")
    publish("x", 2, key="a")
    assert finalize(poll()) is True
    assert poll().payload == 2


# -- the loop


def run_loop(handle):
    """The loop in the docstring of the module, which ends instead of sleeping."""
    while True:
        event = poll()
        if event is None:
            return
        errors = []
        try:
            handle(event)
        except Exception as error:
            errors.append(error)
        finalize(event, errors)


@pytest.mark.django_db(transaction=True)
def test_a_simple_loop_with_poll_and_finalize_handles_every_event():
    """M4."""
    seen = []

    def handle(event):
        seen.append(event.payload)
        if event.payload == 3:
            raise ValueError("three")

    events = [publish("order.placed", number, key=f"k{number % 2}") for number in range(6)]
    run_loop(handle)
    assert sorted(seen) == [0, 1, 2, 3, 4, 5]
    assert [number for number in seen if number % 2] == [1, 3, 5]
    statuses = [logged(event).status for event in events]
    assert statuses == ["COMPLETED"] * 3 + ["COMPLETED_WITH_ERRORS"] + ["COMPLETED"] * 2
    assert not QueuedEvent.objects.exists()
    assert not EventWorker.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_the_clock_of_the_database_decides_unless_one_is_given():
    """M7."""
    publish("order.placed", {})
    poll()
    started = QueuedEvent.objects.get().processing_started_at
    assert abs(started - datetime.now(UTC)) < timedelta(minutes=5)
