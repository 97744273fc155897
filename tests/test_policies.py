"""Policies that handlers declare, and the pure decisions about flow control."""

import math
from datetime import UTC, datetime, timedelta

import pytest

from django_eventbus import CircuitBreaker, EventBusError, subscribe
from django_eventbus.flow.decisions import (
    RELEASED_AT_ONCE,
    RELEASED_PER_SLOT,
    Report,
    count_calls,
    free_slots,
    record,
    refilled,
    room_for_held,
    should_open,
    totals,
)
from django_eventbus.models import FlowControl
from django_eventbus.policies import Limits, Rate


def ignore(event):
    pass


@pytest.mark.parametrize(
    ("calls", "failures", "opens"),
    [(9, 9, False), (10, 4, False), (10, 5, True), (100, 49, False), (100, 100, True)],
)
def test_a_breaker_opens_at_its_failure_rate_after_enough_calls(calls, failures, opens):
    assert should_open(CircuitBreaker(failure_rate=0.5, min_calls=10), calls, failures) == opens


def test_calls_are_forgotten_when_their_window_is_over():
    slices = count_calls({}, window=60, now=1000, calls=5, failures=2)
    slices = count_calls(slices, window=60, now=1030, calls=1, failures=1)
    assert totals(slices) == (6, 3)
    assert totals(count_calls(slices, window=60, now=1065)) == (1, 1)
    assert totals(count_calls(slices, window=60, now=2000)) == (0, 0)


def test_calls_in_one_slice_are_added():
    slices = count_calls({}, window=60, now=1000.1, calls=5)
    assert count_calls(slices, window=60, now=1000.2, calls=1, failures=1) == {"166": (6, 1)}


def test_calls_from_the_future_are_dropped_when_the_clock_is_set_back():
    slices = count_calls({}, window=60, now=2000, calls=5, failures=5)
    assert totals(count_calls(slices, window=60, now=1000)) == (0, 0)


@pytest.mark.parametrize(
    ("text", "per_second"),
    [("5/s", 5), ("120/m", 2), ("7200/h", 2), ("86400/d", 1), (" 3 / s ", 3)],
)
def test_a_rate_is_a_number_per_unit(text, per_second):
    assert Rate.parse(text) == Rate(per_second)


@pytest.mark.parametrize("text", ["", "5", "/s", "0/s", "-1/s", "1.5/s", "5/week", "5/s/s", "٣/s"])
def test_an_invalid_rate_is_refused(text):
    with pytest.raises(ValueError, match="such as '100/m'"):
        Rate.parse(text)


def test_a_bucket_fills_evenly_and_holds_one_second_of_tokens_plus_one():
    rate = Rate(2.0)
    assert refilled(rate, None, seconds=0) == 3
    assert refilled(rate, 0.0, seconds=0.5) == 1
    assert refilled(rate, 0.0, seconds=3600) == 3
    assert refilled(rate, 1.0, seconds=-5) == 1


NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
LATER = NOW + timedelta(seconds=30)


def control(**columns):
    return FlowControl(kind="handler", name="h", **columns)


@pytest.mark.parametrize(
    ("columns", "limits", "room"),
    [
        ({}, None, RELEASED_AT_ONCE),
        ({"paused_at": NOW}, None, 0),
        ({"opened_at": NOW, "probe_at": LATER}, Limits(breaker=CircuitBreaker()), 0),
        ({"opened_at": NOW, "probe_at": NOW}, Limits(breaker=CircuitBreaker()), 1),
        ({"opened_at": NOW, "probe_at": LATER}, Limits(max_running=1), RELEASED_PER_SLOT),
        ({"running": {"a": 2}}, Limits(max_running=3), RELEASED_PER_SLOT),
        ({"running": {"a": 3}}, Limits(max_running=3), 0),
        ({"tokens": 0.0, "tokens_at": NOW}, Limits(rate=Rate(2.0)), 0),
        ({"tokens": 2.5, "tokens_at": NOW}, Limits(rate=Rate(2.0)), 2),
        ({"tokens": 2.5, "tokens_at": NOW}, Limits(), RELEASED_AT_ONCE),
    ],
)
def test_only_as_many_held_events_are_released_as_may_run(columns, limits, room):
    assert room_for_held(control(**columns), limits, NOW) == room


def test_a_report_that_changes_nothing_writes_nothing():
    report = Report(calls=1, failures=1)
    was_open = control(opened_at=NOW, probe_at=LATER, probe_by="other/0")
    limits = Limits(breaker=CircuitBreaker(), max_running=1)
    assert record(was_open, NOW, limits=limits, holder="me/0", report=report).changes == {}


def test_the_free_slots_are_max_running_minus_the_running_calls():
    assert free_slots(Limits(max_running=3), {"a": 1, "b": 1}) == 1
    assert free_slots(Limits(max_running=1), {"a": 1, "b": 1}) == 0
    assert free_slots(Limits(max_running=1), {}) == 1
    assert free_slots(Limits(), {"a": 100}) == math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"failure_rate": 0}, "failure_rate must be a number from 0.01 to 1, not 0"),
        ({"failure_rate": 2}, "failure_rate"),
        ({"window": 0}, "window must be a number from 1 to 86400"),
        ({"min_calls": 2.5}, "min_calls must be a whole number"),
        ({"min_calls": True}, "min_calls"),
        ({"open_for": -1}, "open_for"),
        ({"open_for": float("nan")}, "open_for"),
    ],
)
def test_an_invalid_breaker_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CircuitBreaker(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running": 0}, "whole number from 1 up, not 0; use pauses.pause"),
        ({"max_running": "3"}, "max_running of .*ignore"),
        ({"max_running": True}, "max_running of .*ignore"),
        ({"rate": "100"}, "the rate of .*ignore: a rate is a number per s, m, h or d"),
        ({"rate": 100}, "the rate of .*ignore"),
        ({"breaker": 5}, "must be a CircuitBreaker or a dict"),
        ({"breaker": {"failrate": 0.5}}, "unknown key 'failrate'; did you mean 'failure_rate'"),
        ({"breaker": {"window": 0}}, "the breaker of .*ignore: CircuitBreaker.window"),
    ],
)
def test_an_invalid_limit_is_refused_when_it_is_declared(options, message):
    with pytest.raises(EventBusError, match=message):
        subscribe("x", ignore, **options)


def test_a_handler_without_limits_has_none():
    assert subscribe("x", ignore).limits is None
    assert subscribe("x", ignore, name="off", breaker=False).limits is None


def test_a_handlers_breaker_values_override_those_of_the_project(settings):
    settings.EVENTBUS = {"BREAKER": {"window": 5}}
    assert subscribe("x", ignore).limits == Limits(breaker=CircuitBreaker(window=5))
    own = subscribe("x", ignore, name="own", breaker={"min_calls": 3}).limits
    assert own.breaker == CircuitBreaker(window=5, min_calls=3)
    assert subscribe("x", ignore, name="off", breaker=False).limits is None


def test_breaker_true_means_a_breaker_with_the_defaults():
    assert subscribe("x", ignore, breaker=True).limits.breaker == CircuitBreaker()
