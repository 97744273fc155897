"""Retry policies: the number of attempts and the delays."""

from dataclasses import FrozenInstanceError
from datetime import timedelta
from decimal import Decimal
from functools import partial

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from django_eventbus import Discard, Retry, RetryPolicy
from django_eventbus.retries import GiveUp, GiveUpAtOnce, RetryIn, decide

# No deadline, because the machine may be busy.
unhurried = given_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

ERROR = ValueError("no")
POLICIES = st.builds(
    RetryPolicy,
    max_retries=st.integers(0, 50),
    base_delay=st.floats(0, 1e6),
    max_delay=st.floats(0, 1e6),
    multiplier=st.floats(1, 100),
    jitter=st.floats(0, 1),
)


def middle():
    """The random number that does not change a delay."""
    return 0.5


# -- the formula


@pytest.mark.parametrize(
    ("attempt", "seconds"), [(2, 1), (3, 2), (4, 4), (5, 8), (6, 16), (7, 30), (8, 30), (100, 30)]
)
def test_attempt_n_waits_base_times_multiplier_to_the_power_of_n_minus_2(attempt, seconds):
    """M18."""
    assert RetryPolicy().wait_before(attempt) == seconds


def test_the_formula_uses_every_value_of_the_policy():
    """M18."""
    policy = RetryPolicy(base_delay=3, multiplier=10, max_delay=1000)
    assert [policy.wait_before(n) for n in (2, 3, 4, 5)] == [3, 30, 300, 1000]


def test_the_defaults_are_those_of_the_design():
    """M18."""
    assert RetryPolicy() == RetryPolicy(
        max_retries=3, base_delay=1.0, max_delay=30.0, multiplier=2.0, jitter=0.1
    )


@unhurried
@given(POLICIES, st.integers(2, 10_000))
@example(RetryPolicy(multiplier=2.0), 10_000)
@example(RetryPolicy(multiplier=2), 10_000)
def test_delays_increase_up_to_max_delay(policy, attempt):
    """M18: without jitter, also if the power overflows a float."""
    wait = policy.wait_before(attempt)
    assert 0 <= wait <= policy.max_delay
    assert wait <= policy.wait_before(attempt + 1)


@unhurried
@given(POLICIES, st.integers(1, 60), st.floats(0, 1))
def test_jitter_changes_a_delay_by_at_most_its_share(policy, failures, chance):
    """M18."""
    decision = decide(policy, failures=failures, error=ERROR, rand=lambda: chance)
    if failures > policy.max_retries:
        assert type(decision) is GiveUp
        return
    wait = policy.wait_before(failures + 1)
    slack = 1e-9 * wait
    assert wait * (1 - policy.jitter) - slack <= decision.seconds
    assert decision.seconds <= wait * (1 + policy.jitter) + slack
    assert decision.seconds <= policy.max_delay * (1 + policy.jitter) + slack


def test_jitter_reaches_both_bounds_and_keeps_the_middle():
    """M18."""
    policy = RetryPolicy(base_delay=10, jitter=0.1)
    waits = [
        decide(policy, failures=1, error=ERROR, rand=lambda chance=chance: chance).seconds
        for chance in (0.0, 0.5, 1.0)
    ]
    assert waits == pytest.approx([9, 10, 11])


def test_random_jitter_spreads_retries_over_time():
    """M18."""
    policy = RetryPolicy(base_delay=10, jitter=0.5)
    waits = {decide(policy, failures=1, error=ERROR).seconds for _ in range(100)}
    assert len(waits) > 50
    assert all(5 <= wait <= 15 for wait in waits)


# -- the last attempt


def test_a_handler_is_dead_after_max_retries_plus_one_attempts():
    """M18."""
    policy = RetryPolicy(max_retries=3, jitter=0)
    decisions = [decide(policy, failures=n, error=ERROR) for n in (1, 2, 3, 4)]
    assert decisions[:3] == [RetryIn(1), RetryIn(2), RetryIn(4)]
    assert type(decisions[3]) is GiveUp


def test_without_retries_the_first_failure_is_the_last():
    """M18."""
    assert type(decide(RetryPolicy(max_retries=0), failures=1, error=ERROR)) is GiveUp


@unhurried
@given(POLICIES, st.integers(1, 60))
def test_a_failure_is_followed_by_a_retry_exactly_while_retries_are_left(policy, failures):
    """M18."""
    decision = decide(policy, failures=failures, error=ERROR)
    assert isinstance(decision, RetryIn) == (failures <= policy.max_retries)


# -- Retry and Discard


@pytest.mark.parametrize(
    ("delay", "seconds"),
    [(30, 30), (0, 0), (0.5, 0.5), (timedelta(minutes=2), 120), (10_000, 10_000)],
)
def test_a_handler_may_set_the_delay_of_its_retry(delay, seconds):
    """M18: exactly this delay, without jitter and even beyond max_delay."""
    decision = decide(RetryPolicy(), failures=1, error=Retry(delay=delay), rand=lambda: 1.0)
    assert decision == RetryIn(seconds)


IMPOSSIBLE_DELAYS = [
    10**400,
    10**5000,
    float("nan"),
    float("inf"),
    -5,
    timedelta(days=-1),
    1e300,
    "soon",
    "30",
    True,
    [30],
    Decimal("NaN"),
    object(),
]


@pytest.mark.parametrize("delay", IMPOSSIBLE_DELAYS, ids=lambda each: type(each).__name__)
def test_an_impossible_delay_is_refused_when_it_is_created(delay):
    with pytest.raises(ValueError, match=r"Retry\(delay=…\) must be a timedelta or a number"):
        Retry(delay=delay)


class DelayRaises(Retry):
    def __init__(self):
        """Without a call of the base class."""

    @property
    def delay(self):
        raise RuntimeError("no delay")


class NoDelay(Retry):
    def __init__(self):
        """Without a call of the base class, so there is no ``delay``."""


class ClassRaises(Exception):
    @property
    def __class__(self):
        raise RuntimeError("no class")


def with_delay(delay):
    error = Retry()
    error.delay = delay
    return error


@pytest.mark.parametrize(
    "make",
    [*(partial(with_delay, each) for each in IMPOSSIBLE_DELAYS), DelayRaises, NoDelay, ClassRaises],
)
def test_an_error_that_breaks_the_retry_decision_is_retried_by_the_policy(make):
    policy, error = RetryPolicy(base_delay=7, max_retries=1), make()
    assert decide(policy, failures=1, error=error, rand=middle) == RetryIn(7)
    assert type(decide(policy, failures=2, error=error)) is GiveUp


def test_a_retry_without_a_delay_uses_the_delay_of_the_policy():
    """M18."""
    policy = RetryPolicy(base_delay=7)
    assert decide(policy, failures=1, error=Retry(), rand=middle) == RetryIn(7)


def test_raising_retry_counts_as_a_failed_attempt():
    """M18: otherwise a handler could be retried for ever."""
    policy = RetryPolicy(max_retries=2)
    assert isinstance(decide(policy, failures=2, error=Retry(delay=1)), RetryIn)
    assert type(decide(policy, failures=3, error=Retry(delay=1))) is GiveUp


def test_a_handler_that_discards_is_dead_at_once():
    decision = decide(RetryPolicy(max_retries=100), failures=1, error=Discard("spam"))
    assert type(decision) is GiveUpAtOnce
    assert isinstance(decision, GiveUp)


def test_subclasses_of_retry_and_discard_behave_alike():
    class NotYet(Retry):
        pass

    class Never(Discard):
        pass

    assert decide(RetryPolicy(), failures=1, error=NotYet(delay=3)) == RetryIn(3)
    assert type(decide(RetryPolicy(), failures=1, error=Never())) is GiveUpAtOnce


def test_retry_and_discard_have_a_reason():
    assert str(Retry("the bank is closed", delay=5)) == "the bank is closed"
    assert str(Retry()) == "the handler asked to be retried"
    assert str(Discard("spam")) == "spam"


# -- policies


def test_a_policy_cannot_be_changed_and_takes_its_numbers_by_name():
    """Handlers share policies."""
    policy = RetryPolicy()
    with pytest.raises(FrozenInstanceError):
        policy.max_retries = 9
    with pytest.raises(TypeError, match="positional"):
        RetryPolicy(9)


def test_the_projects_policy_is_the_default(settings):
    """M18."""
    settings.EVENTBUS = {"RETRY": {"max_retries": 7, "base_delay": 0.5}}
    assert RetryPolicy.default() == RetryPolicy(max_retries=7, base_delay=0.5)


def test_single_values_override_the_projects_policy(settings):
    """M18."""
    settings.EVENTBUS = {"RETRY": {"max_retries": 7, "base_delay": 0.5}}
    merged = RetryPolicy.default(base_delay=9.0, jitter=0.0)
    assert merged == RetryPolicy(max_retries=7, base_delay=9.0, jitter=0.0)


def test_without_settings_the_policy_is_that_of_the_class():
    """M18."""
    assert RetryPolicy.default() == RetryPolicy()


@pytest.mark.parametrize(
    "values",
    [
        {"max_retries": -1},
        {"base_delay": -0.1},
        {"max_delay": -1},
        {"multiplier": 0.5},
        {"jitter": -0.1},
        {"jitter": 1.1},
        {"jitter": float("nan")},
        {"base_delay": float("nan")},
        {"max_delay": float("nan")},
        {"multiplier": float("nan")},
    ],
)
def test_an_invalid_policy_is_refused(values):
    (name,) = values
    with pytest.raises(ValueError, match=rf"RetryPolicy\.{name} must"):
        RetryPolicy(**values)
