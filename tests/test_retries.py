"""How often, and when again."""

from dataclasses import FrozenInstanceError
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from django_eventbus import Discard, Retry, RetryPolicy
from django_eventbus.retries import GiveUp, GiveUpAtOnce, RetryIn, decide

# A busy machine is no failure.
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
    """The random number that leaves a wait as it is."""
    return 0.5


# -- the formula


@pytest.mark.parametrize(
    ("attempt", "seconds"), [(2, 1), (3, 2), (4, 4), (5, 8), (6, 16), (7, 30), (8, 30), (100, 30)]
)
def test_attempt_n_waits_base_times_multiplier_to_the_power_of_n_minus_2(attempt, seconds):
    """M18."""
    assert RetryPolicy().wait_before(attempt) == seconds


def test_the_formula_takes_all_its_numbers_from_the_policy():
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
def test_waits_grow_and_never_exceed_the_longest(policy, attempt):
    """M18: without jitter; not even where the power is too large for a number."""
    wait = policy.wait_before(attempt)
    assert 0 <= wait <= policy.max_delay
    assert wait <= policy.wait_before(attempt + 1)


@unhurried
@given(POLICIES, st.integers(1, 60), st.floats(0, 1))
def test_jitter_moves_a_wait_by_its_share_and_no_more(policy, failures, chance):
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


def test_jitter_reaches_both_ends_and_leaves_the_middle():
    """M18."""
    policy = RetryPolicy(base_delay=10, jitter=0.1)
    waits = [
        decide(policy, failures=1, error=ERROR, rand=lambda chance=chance: chance).seconds
        for chance in (0.0, 0.5, 1.0)
    ]
    assert waits == pytest.approx([9, 10, 11])


def test_real_chance_spreads_retries_so_that_they_do_not_return_all_at_once():
    """M18."""
    policy = RetryPolicy(base_delay=10, jitter=0.5)
    waits = {decide(policy, failures=1, error=ERROR).seconds for _ in range(100)}
    assert len(waits) > 50
    assert all(5 <= wait <= 15 for wait in waits)


# -- the end


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


# -- what the handler itself asks for


@pytest.mark.parametrize(
    ("delay", "seconds"),
    [(30, 30), (0, 0), (0.5, 0.5), (timedelta(minutes=2), 120), (-5, 0), (10_000, 10_000)],
)
def test_a_handler_may_say_when_it_wants_to_be_called_again(delay, seconds):
    """M18: exactly then, without jitter and beyond max_delay."""
    decision = decide(RetryPolicy(), failures=1, error=Retry(delay=delay), rand=lambda: 1.0)
    assert decision == RetryIn(seconds)


def test_a_handler_that_asks_for_a_retry_without_a_delay_gets_its_policys():
    """M18."""
    policy = RetryPolicy(base_delay=7)
    assert decide(policy, failures=1, error=Retry(), rand=middle) == RetryIn(7)


def test_asking_for_a_retry_counts_as_a_failed_attempt():
    """M18: else a handler could go on for ever."""
    policy = RetryPolicy(max_retries=2)
    assert isinstance(decide(policy, failures=2, error=Retry(delay=1)), RetryIn)
    assert type(decide(policy, failures=3, error=Retry(delay=1))) is GiveUp


def test_a_handler_that_discards_is_dead_at_once():
    decision = decide(RetryPolicy(max_retries=100), failures=1, error=Discard("spam"))
    assert type(decision) is GiveUpAtOnce
    assert isinstance(decision, GiveUp)


def test_subclasses_of_retry_and_discard_steer_alike():
    class NotYet(Retry):
        pass

    class Never(Discard):
        pass

    assert decide(RetryPolicy(), failures=1, error=NotYet(delay=3)) == RetryIn(3)
    assert type(decide(RetryPolicy(), failures=1, error=Never())) is GiveUpAtOnce


def test_retry_and_discard_tell_why():
    assert str(Retry("the bank is closed", delay=5)) == "the bank is closed"
    assert str(Retry()) == "the handler asked to be retried"
    assert str(Discard("spam")) == "spam"


# -- policies


def test_a_policy_cannot_be_changed_and_takes_its_numbers_by_name():
    """Handlers share it."""
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
def test_a_policy_that_makes_no_sense_is_refused(values):
    (name,) = values
    with pytest.raises(ValueError, match=rf"RetryPolicy\.{name} must"):
        RetryPolicy(**values)
