"""Signals, and log messages that stay on one line."""

import logging

import pytest
from django.db import connection
from hypothesis import HealthCheck, given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from django_eventbus import Discard, Retry, handler, publish
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.signals import (
    delivery_failed,
    delivery_succeeded,
    event_dead_lettered,
    one_line,
)
from tests.bus import drain, drain_with_retries, make_due
from tests.test_events import claimed

# No deadline, because the machine may be busy.
unhurried = given_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def bus_lines(caplog, level):
    """The log records of the bus at this level."""
    return [
        each for each in caplog.records if each.name == "django_eventbus" and each.levelno == level
    ]


def failed_lines(caplog):
    """Without messages about limits, which a timer of an earlier test may log."""
    return [
        line for line in bus_lines(caplog, logging.WARNING) if " by the limit " not in line.message
    ]


def dead_lines(caplog):
    return bus_lines(caplog, logging.ERROR)


@pytest.fixture
def heard():
    """The name and arguments of each delivery signal."""
    sent = []
    signals = {
        "succeeded": delivery_succeeded,
        "failed": delivery_failed,
        "dead": event_dead_lettered,
    }
    receivers = {
        name: lambda sender, name=name, signal=None, **facts: sent.append((name, facts))
        for name in signals
    }
    for name, signal in signals.items():
        signal.connect(receivers[name])
    yield sent
    for name, signal in signals.items():
        signal.disconnect(receivers[name])


@pytest.mark.django_db
def test_an_event_that_crashed_too_many_workers_sends_the_signal_of_a_dead_letter(heard):
    handler("x", name="h")(lambda event: None)
    event = publish("x", {})
    QueuedEvent.objects.update(crashes=3)
    drain()
    ((name, facts),) = heard
    assert (name, facts["event"].event_id, facts["status"]) == ("dead", event.event_id, "FAILED")


# -- log lines of deliveries


@pytest.mark.django_db
def test_every_failed_attempt_is_one_structured_line_the_last_included(capture):
    """M18."""

    @handler("order.placed", name="stock", retry={"max_retries": 2, "base_delay": 4, "jitter": 0})
    def reserve(event):
        raise ValueError("no stock")

    event = publish("order.placed", {})
    drain_with_retries()
    lines = failed_lines(capture)
    start = f"stock failed on order.placed {event.event_id}, attempt"
    assert [each.getMessage() for each in lines] == [
        f"{start} 1: ValueError: no stock; retry in 4.0 s",
        f"{start} 2: ValueError: no stock; retry in 8.0 s",
        f"{start} 3: ValueError: no stock; gave up",
    ]
    assert [each.attempt for each in lines] == ["1", "2", "3"]
    assert [each.retry_in for each in lines] == [4.0, 8.0, None]
    for each in lines:
        assert each.event_id == str(event.event_id)
        assert each.event_type == "order.placed"
        assert each.handler == "stock"
        assert each.error_type == "ValueError"


@pytest.mark.django_db
def test_a_dead_letter_is_logged_on_one_line(capture):
    """M18."""

    @handler("order.placed", name="stock", retry={"max_retries": 1})
    def reserve(event):
        raise ValueError("no stock")

    event = publish("order.placed", {})
    drain()
    assert dead_lines(capture) == []
    make_due()
    drain()
    (line,) = dead_lines(capture)
    assert line.getMessage() == (
        f"order.placed {event.event_id} is a dead letter: FAILED after 2 attempts"
    )
    assert line.event_id == str(event.event_id)
    assert line.event_type == "order.placed"
    assert line.status == "FAILED"


@pytest.mark.django_db
def test_each_failed_handler_of_an_event_has_its_own_line(capture):
    """M18, M19."""
    for name in ("stock", "mail"):

        @handler("order.placed", name=name, retry={"max_retries": 0})
        def fail(event):
            raise ValueError(event.handler_name)

    handler("order.placed", name="fine")(lambda event: None)
    publish("order.placed", {})
    drain()
    assert [each.handler for each in failed_lines(capture)] == ["stock", "mail"]
    (line,) = dead_lines(capture)
    assert line.status == "COMPLETED_WITH_ERRORS"


@pytest.mark.django_db
def test_a_successful_delivery_is_not_logged(capture):
    handler("order.placed", name="fine")(lambda event: None)
    publish("order.placed", {})
    drain()
    assert failed_lines(capture) == dead_lines(capture) == []


@pytest.mark.django_db
def test_an_unhandled_event_is_logged(capture):
    """M12, M18."""
    publish("order.placed", {})
    drain()
    (line,) = failed_lines(capture)
    assert "no handler is registered for 'order.placed'" in line.getMessage()


@pytest.mark.django_db
def test_a_discarded_event_is_logged_as_given_up(capture):
    """M18."""

    @handler("order.placed", name="stock")
    def reserve(event):
        raise Discard("spam")

    publish("order.placed", {})
    drain()
    (line,) = failed_lines(capture)
    assert line.getMessage().endswith("Discard: spam; gave up")
    assert dead_lines(capture)[0].status == "DISCARDED"


# -- signals of deliveries


@pytest.mark.django_db
def test_every_outcome_of_a_delivery_sends_a_signal_with_its_arguments(heard):
    answers = [Retry("later", delay=7), None]

    @handler("order.placed", name="stock")
    def reserve(event):
        if answer := answers.pop(0):
            raise answer

    event = publish("order.placed", {})
    drain()
    make_due()
    drain()
    assert [name for name, _ in heard] == ["failed", "succeeded"]
    failed, succeeded = (facts for _, facts in heard)
    assert failed["event"].event_id == event.event_id
    assert failed["handler"] == "stock"
    assert failed["attempt"] == 1
    assert failed["retry_in"] == 7
    assert failed["error"]["message"] == "later"
    assert isinstance(failed["exception"], Retry)
    assert failed["seconds"] >= 0
    assert succeeded["attempt"] == 2
    assert succeeded["handler"] == "stock"


@pytest.mark.django_db
def test_the_signal_of_a_dead_letter_is_sent_after_that_of_its_failure(heard):
    @handler("order.placed", name="stock", retry={"max_retries": 0})
    def reserve(event):
        raise ValueError("no stock")

    event = publish("order.placed", {})
    drain()
    assert [name for name, _ in heard] == ["failed", "dead"]
    assert heard[1][1]["event"].event_id == event.event_id
    assert heard[1][1]["status"] == "FAILED"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("signal", [delivery_failed, event_dead_lettered])
def test_a_signal_is_sent_after_the_commit(signal):
    """A receiver that notifies other systems must not be contradicted by a rollback."""
    seen = []

    def receive(sender, event, **facts):
        logged = EventLog.objects.filter(event_id=event.event_id).exists()
        seen.append((logged, connection.in_atomic_block))

    @handler("order.placed", name="stock", retry={"max_retries": 0})
    def reserve(event):
        raise ValueError("no stock")

    signal.connect(receive)
    try:
        publish("order.placed", {})
        drain()
    finally:
        signal.disconnect(receive)
    assert seen == [(True, False)]


@pytest.mark.django_db
@pytest.mark.parametrize("signal", [delivery_succeeded, delivery_failed, event_dead_lettered])
def test_a_failing_receiver_does_not_affect_an_event(signal, caplog):
    def receive(sender, **facts):
        raise RuntimeError("not my day")

    handler("order.placed", name="fine")(lambda event: None)

    @handler("order.placed", name="stock", retry={"max_retries": 0})
    def reserve(event):
        raise ValueError("no stock")

    signal.connect(receive)
    try:
        publish("order.placed", 1)
        publish("order.placed", 2)
        drain()
    finally:
        signal.disconnect(receive)
    statuses = set(EventLog.objects.values_list("status", flat=True))
    assert statuses == {"COMPLETED_WITH_ERRORS"}
    assert EventLog.objects.count() == 2
    assert "not my day" in caplog.text


# -- text from outside

HOSTILE = [
    "a\nERROR forged record",
    "a\r\nERROR forged record",
    "a\x1b[2J\x1b[31mred",
    "a\u2028b\u2029c",
    "a\x85b",
    "a\x00b",
    "a\u202edetrever",
    "a\ud800b",
    "\t\v\f",
]


def log_failure(event_type="order.placed", error_type="ValueError", message="no"):
    delivery_failed.send_robust(
        None,
        event=claimed(type=event_type, attempts=1),
        handler="stock",
        attempt=1,
        seconds=0.1,
        error={"type": error_type, "message": message},
        retry_in=None,
    )


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("place", ["event_type", "error_type", "message"])
def test_a_line_about_a_failure_stays_one_printable_line(capture, place, text):
    """M18: no forged records, no terminal control."""
    log_failure(**{place: text})
    (line,) = failed_lines(capture)
    assert line.getMessage().isprintable()
    assert len(line.getMessage().splitlines()) == 1


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_line_about_a_dead_letter_stays_one_printable_line(capture, text):
    event = claimed(type=text, attempts=4)
    event_dead_lettered.send_robust(None, event=event, status="FAILED")
    (line,) = dead_lines(capture)
    assert line.getMessage().isprintable()


@pytest.mark.django_db
def test_the_line_about_a_hostile_error_of_a_handler_stays_one_line(capture):
    """M18."""

    @handler("order.placed", name="stock")
    def reserve(event):
        raise ValueError("line one\r\n\x1b[31mline two\x00")

    publish("order.placed", {})
    drain()
    (line,) = failed_lines(capture)
    assert "line one\\r\\n\\x1b[31mline two" in line.getMessage()
    assert line.getMessage().isprintable()


def test_a_long_message_is_cut(capture):
    log_failure(message="x" * 100_000)
    (line,) = failed_lines(capture)
    assert "xxx…" in line.getMessage()
    assert len(line.getMessage()) < 1000


def test_percent_signs_in_a_message_are_just_text(capture):
    log_failure(message="100 %s %d %(x)s")
    (line,) = failed_lines(capture)
    assert "100 %s %d %(x)s" in line.getMessage()


def test_a_line_is_cut_if_it_is_one_character_too_long():
    assert one_line("x" * 300) == "x" * 300
    assert one_line("x" * 301) == "x" * 300 + "…"
    assert one_line("abcd", 4) == "abcd"
    assert one_line("abcde", 4) == "abcd…"


@unhurried
@given(st.text(st.characters(), max_size=50), st.integers(1, 30))
def test_any_text_becomes_one_printable_line_of_limited_length(text, limit):
    line = one_line(text, limit)
    assert line.isprintable()
    if len(text) > limit:
        assert len(line) <= limit + 1


@unhurried
@given(st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=50))
def test_printable_text_is_unchanged(text):
    assert one_line(text) == text
