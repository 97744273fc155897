"""Breakers, rates and slots as pure decisions."""

import math

import pytest

from django_eventbus import CircuitBreaker, EventBusError, subscribe
from django_eventbus.pacing import Limits, Rate, counted, totals


def ignore(event):
    pass


@pytest.mark.parametrize(
    ("calls", "failures", "opens"),
    [(9, 9, False), (10, 4, False), (10, 5, True), (100, 49, False), (100, 100, True)],
)
def test_a_breaker_opens_at_its_rate_when_it_has_seen_enough(calls, failures, opens):
    assert CircuitBreaker(failure_rate=0.5, min_calls=10).opens_at(calls, failures) == opens


def test_calls_are_forgotten_when_their_window_is_over():
    slices = counted({}, window=60, now=1000, calls=5, failures=2)
    slices = counted(slices, window=60, now=1030, calls=1, failures=1)
    assert totals(slices) == (6, 3)
    assert totals(counted(slices, window=60, now=1065)) == (1, 1)
    assert totals(counted(slices, window=60, now=2000)) == (0, 0)


def test_calls_of_one_slice_are_added_up():
    slices = counted({}, window=60, now=1000.1, calls=5)
    assert counted(slices, window=60, now=1000.2, calls=1, failures=1) == {"166": (6, 1)}


def test_a_clock_that_was_set_back_leaves_no_calls_of_the_future_behind():
    slices = counted({}, window=60, now=2000, calls=5, failures=5)
    assert totals(counted(slices, window=60, now=1000)) == (0, 0)


@pytest.mark.parametrize(
    ("text", "per_second"),
    [("5/s", 5), ("120/m", 2), ("7200/h", 2), ("86400/d", 1), (" 3 / s ", 3)],
)
def test_a_rate_is_a_number_per_unit(text, per_second):
    assert Rate.parse(text) == Rate(per_second)


@pytest.mark.parametrize("text", ["", "5", "/s", "0/s", "-1/s", "1.5/s", "5/week", "5/s/s", "٣/s"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError, match="such as '100/m'"):
        Rate.parse(text)


def test_a_bucket_fills_evenly_and_holds_what_a_second_brings_and_one():
    rate = Rate(2.0)
    assert rate.tokens(None, seconds=0) == 3
    assert rate.tokens(0.0, seconds=0.5) == 1
    assert rate.tokens(0.0, seconds=3600) == 3
    assert rate.tokens(1.0, seconds=-5) == 1


def test_free_slots():
    assert Limits(max_running=3).free_slots({"a": 1, "b": 1}) == 1
    assert Limits(max_running=1).free_slots({"a": 1, "b": 1}) == 0
    assert Limits(max_running=1).free_slots({}) == 1
    assert Limits().free_slots({"a": 100}) == math.inf


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
def test_a_breaker_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CircuitBreaker(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running": 0}, "whole number from 1 up, not 0; gates.pause"),
        ({"max_running": "3"}, "max_running of .*ignore"),
        ({"max_running": True}, "max_running of .*ignore"),
        ({"rate": "100"}, "the rate of .*ignore: a rate is a number per s, m, h or d"),
        ({"rate": 100}, "the rate of .*ignore"),
        ({"breaker": 5}, "must be a CircuitBreaker or a dict"),
        ({"breaker": {"failrate": 0.5}}, "unknown key 'failrate'; did you mean 'failure_rate'"),
        ({"breaker": {"window": 0}}, "the breaker of .*ignore: CircuitBreaker.window"),
    ],
)
def test_a_bad_pace_is_refused_where_it_is_declared(options, message):
    with pytest.raises(EventBusError, match=message):
        subscribe("x", ignore, **options)


def test_a_handler_without_limits_has_none():
    assert subscribe("x", ignore).limits is None
    assert subscribe("x", ignore, name="off", breaker=False).limits is None


def test_the_breaker_of_a_handler_is_that_of_the_project_with_its_own_values(settings):
    settings.EVENTBUS = {"BREAKER": {"window": 5}}
    assert subscribe("x", ignore).limits == Limits(breaker=CircuitBreaker(window=5))
    own = subscribe("x", ignore, name="own", breaker={"min_calls": 3}).limits
    assert own.breaker == CircuitBreaker(window=5, min_calls=3)
    assert subscribe("x", ignore, name="off", breaker=False).limits is None


def test_a_breaker_with_the_defaults_is_asked_for_with_true():
    assert subscribe("x", ignore, breaker=True).limits.breaker == CircuitBreaker()
