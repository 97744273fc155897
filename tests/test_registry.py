"""The registry: patterns, order, names, and subscriptions at run time."""

import functools
import inspect
import re
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from django_eventbus import (
    Event,
    EventBusError,
    InvalidPayloadError,
    RetryPolicy,
    handler,
    subscribe,
    unsubscribe,
)
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.exceptions import DuplicateHandlerError
from django_eventbus.registry import HandlerOptions, covers, default_name, registry
from django_eventbus.schema.patterns import matches

# No deadline, because the machine may be busy.
unhurried = given_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def names_for(type_name):
    return [each.name for each in registry.handlers_for(type_name).all]


def ignore(event):
    """A handler."""


def ignore_too(event):
    """Another."""


async def ignore_async(event):
    """One that overlaps."""


# -- patterns


@pytest.mark.parametrize(
    ("pattern", "type_name", "answer"),
    [
        # The table of seed 004.
        ("user.created", "user.created", True),
        ("user.created", "user.updated", False),
        ("user.*", "user.created", True),
        ("user.*", "user.updated", True),
        ("user.*", "order.created", False),
        ("*", "user.created", True),
        ("*", "x", True),
        ("order.*.shipped", "order.123.shipped", True),
        ("order.*.shipped", "order.shipped", False),
        # Not in the table: a star matches one character or more, dots included.
        ("user.*", "user.", False),
        ("user.*", "user", False),
        ("user.*", "user.address.changed", True),
        ("*.created", "user.created", True),
        ("*.created", ".created", False),
        ("order.*.shipped", "order..shipped", False),
        ("order.*.shipped", "order.1.2.shipped", True),
        ("order.*.shipped", "order.1.shipped.twice", False),
        ("a*a", "aa", False),
        ("a*a", "aaa", True),
        ("*a*", "xax", True),
        ("*a*", "ax", False),
        ("*a*b", "aab", False),
        ("*a*b", "aaxb", True),
        ("a**b", "axb", True),
        ("a**b", "ab", False),
        ("**", "x", True),
        # Nothing else is special.
        ("user.?", "user.x", False),
        ("user.[ab]", "user.a", False),
        ("user.created", "userxcreated", False),
        ("user.+", "user.+", True),
        (r"user.\d", "user.5", False),
        ("User.*", "user.created", False),
    ],
)
def test_a_star_matches_one_or_more_characters(pattern, type_name, answer):
    """M24."""
    assert matches(pattern, type_name) is answer
    assert covers(pattern, type_name) is answer


def oracle(pattern, type_name):
    pieces = re.split(r"\*+", pattern)
    return re.fullmatch(".+".join(map(re.escape, pieces)), type_name, re.DOTALL) is not None


@unhurried
@given(st.text("ab.*", max_size=8), st.text("ab.", max_size=10))
@example("a*ab*b", "aabab")
@example("*ab*", "abab")
def test_the_matcher_agrees_with_a_regular_expression(pattern, type_name):
    """M24."""
    assert matches(pattern, type_name) == oracle(pattern, type_name)


@unhurried
@given(st.text(min_size=1, max_size=8), st.text(max_size=10))
def test_the_matcher_agrees_with_a_regular_expression_on_any_text(pattern, type_name):
    """M24."""
    assert matches(pattern, type_name) == oracle(pattern, type_name)


class CountingText(str):
    """A type name that counts its searches."""

    searches = 0

    def find(self, *args):
        self.searches += 1
        return super().find(*args)


@pytest.mark.parametrize("pattern", ["a*" * 30 + "b", "*a" * 30 + "*b", "*" * 30 + "b"])
def test_thirty_stars_against_ten_thousand_characters_take_one_pass(pattern):
    """M24: a backtracking matcher would take exponential time."""
    text = CountingText("a" * 10_000)
    assert matches(pattern, text) is False
    assert text.searches <= 31
    assert matches(pattern, "a" * 10_000 + "b") is True


# -- order


def test_handlers_run_by_priority_then_by_registration_order():
    """M11."""
    for name, priority in [("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", 0)]:
        subscribe("order.*", ignore, name=name, priority=priority)
    assert names_for("order.placed") == ["b", "d", "a", "e", "c"]


def test_a_handler_without_a_priority_has_priority_zero():
    """M11."""
    subscribe("x", ignore, name="lower", priority=-1)
    subscribe("x", ignore, name="none")
    subscribe("x", ignore, name="higher", priority=1)
    assert names_for("x") == ["higher", "none", "lower"]


@pytest.mark.parametrize("priority", ["high", 1.5, None, True])
def test_a_priority_that_is_not_an_integer_is_refused(priority):
    """M11: it would break sorting for all handlers."""
    with pytest.raises(EventBusError, match="the priority of"):
        subscribe("x", ignore, priority=priority)


def test_the_handlers_of_a_type_are_looked_up_once():
    """M22: a worker looks them up for every event."""
    subscribe("x", ignore)
    assert registry.handlers_for("x") is registry.handlers_for("x")


def test_only_handlers_with_a_matching_pattern_are_called():
    subscribe("order.*", ignore, name="orders")
    subscribe("user.*", ignore, name="users")
    subscribe("*", ignore, name="all")
    assert names_for("order.placed") == ["orders", "all"]
    assert names_for("user.created") == ["users", "all"]
    assert names_for("x") == ["all"]


def test_a_handler_of_several_patterns_that_match_is_called_once():
    subscribe(("order.*", "*.placed", "order.placed"), ignore, name="once")
    assert names_for("order.placed") == ["once"]


def test_handlers_without_a_transaction_are_listed_separately_in_the_same_order():
    for name, atomic in [("a", True), ("b", False), ("c", True), ("d", False)]:
        subscribe("x", ignore, name=name, atomic=atomic)
    found = registry.handlers_for("x")
    assert [each.name for each in found.atomic] == ["a", "c"]
    assert [each.name for each in found.outside] == ["b", "d"]
    assert found.names == {"a", "b", "c", "d"}


# -- subscribing and unsubscribing


def test_a_subscription_has_an_id_and_both_can_be_unsubscribed():
    """M21, M23."""
    first = subscribe("x", ignore, name="first")
    second = subscribe("x", ignore, name="second")
    assert isinstance(first.id, str)
    assert first.id != second.id
    assert names_for("x") == ["first", "second"]
    unsubscribe(first)
    assert names_for("x") == ["second"]
    unsubscribe(second.id)
    assert names_for("x") == []


def test_a_later_subscriber_is_found_although_the_type_was_looked_up_before():
    """M21."""
    assert names_for("x") == []
    subscribe("x", ignore, name="late")
    assert names_for("x") == ["late"]


def test_unsubscribing_an_unknown_or_removed_handler_is_ignored():
    """M21."""
    subscription = subscribe("x", ignore, name="first")
    subscribe("x", ignore_too, name="second")
    unsubscribe("no such id")
    unsubscribe(subscription)
    unsubscribe(subscription)
    assert names_for("x") == ["second"]


def test_a_name_is_free_again_after_unsubscribing():
    """M21."""
    unsubscribe(subscribe("x", ignore, name="stock"))
    subscribe("x", ignore_too, name="stock")
    assert registry.get("stock").func is ignore_too


def test_the_decorator_registers_and_returns_the_function():
    @handler("order.*", "user.created", name="both", priority=3)
    def both(event):
        return "called"

    assert both("event") == "called"
    found = registry.get("both")
    assert found.func is both
    assert found.subjects == ("order.*", "user.created")
    assert found.priority == 3
    assert names_for("user.created") == ["both"]


class InterruptedPattern(str):
    """A pattern that lets another thread subscribe while it is matched."""

    thread = None

    def split(self, *args):
        if self.thread is None:
            late = functools.partial(subscribe, "x", ignore, name="late")
            self.thread = threading.Thread(target=late)
            self.thread.start()
            self.thread.join(1)  # Returns early, unless the lookup blocks subscriptions.
        return super().split(*args)


def test_a_subscription_during_a_lookup_neither_breaks_it_nor_gets_lost():
    """M21."""
    pattern = InterruptedPattern("x")
    subscribe(pattern, ignore, name="early")
    assert names_for("x")[:1] == ["early"]
    pattern.thread.join(10)
    assert names_for("x") == ["early", "late"]


def test_threads_may_subscribe_while_others_look_handlers_up():
    """M21: a worker's threads deliver while the program subscribes."""
    barrier = threading.Barrier(8)

    def subscribe_and_look(number):
        barrier.wait(10)
        for index in range(50):
            subscribe("x", ignore, name=f"{number}-{index}")
            assert f"{number}-{index}" in names_for("x")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(subscribe_and_look, range(8)))
    found = registry.handlers_for("x").all
    assert len(found) == 400
    assert len({each.position for each in found}) == 400


def test_the_cache_of_types_is_bounded():
    """M22: types may carry ids, and a worker runs for months."""
    subscribe("order.*", ignore, name="orders")
    for number in range(10_050):
        assert names_for(f"order.{number}") == ["orders"]
    assert len(registry._by_type) <= 10_000


# -- typed events


class Shipment(Event):
    """Abstract base."""

    number: int


class ShipmentSent(Shipment, type="test-registry.shipment.sent"):
    pass


class ExpressSent(ShipmentSent, type="test-registry.express"):
    pass


class Unrelated(Event, type="test-registry.shipment.unrelated"):
    pass


def test_subscribing_to_a_base_class_gets_its_subclasses():
    """M19."""
    subscribe(Shipment, ignore, name="base")
    subscribe(ShipmentSent, ignore, name="sent")
    subscribe(ExpressSent, ignore, name="express")
    assert names_for("test-registry.shipment.sent") == ["base", "sent"]
    assert names_for("test-registry.express") == ["base", "sent", "express"]
    assert names_for("test-registry.shipment.unrelated") == []
    assert names_for("nobody.declared.this") == []


def test_subscribing_to_event_itself_gets_all_typed_events():
    """M19."""
    subscribe(Event, ignore, name="all")
    assert names_for("test-registry.express") == ["all"]
    assert names_for("test-registry.shipment.unrelated") == ["all"]


def test_classes_and_patterns_may_be_mixed():
    subscribe((Unrelated, "user.*"), ignore, name="mixed")
    assert names_for("test-registry.shipment.unrelated") == ["mixed"]
    assert names_for("user.created") == ["mixed"]
    assert names_for("order.created") == []


# -- names


def test_the_default_name_is_module_and_function():
    def local(event):
        """Nested."""

    assert subscribe("x", ignore).name == "tests.test_registry.ignore"
    assert default_name(local).endswith(".<locals>.local")


@pytest.mark.parametrize("module", ["shop.handlers", "shop.events", "shop"])
def test_the_default_name_omits_the_file_within_the_app(module):
    def reserve_stock(event):
        """As if declared in that module."""

    reserve_stock.__module__ = module
    reserve_stock.__qualname__ = "reserve_stock"
    assert default_name(reserve_stock) == "shop.reserve_stock"


def test_two_functions_cannot_have_the_same_name():
    subscribe("x", ignore, name="stock")
    with pytest.raises(DuplicateHandlerError, match=r"ignore_too and .*ignore both have .*name="):
        subscribe("x", ignore_too, name="stock")
    assert registry.get("stock").func is ignore


def test_one_function_cannot_be_registered_twice_under_one_name():
    subscribe("x", ignore)
    with pytest.raises(DuplicateHandlerError, match=r"registered twice .*patterns to one"):
        subscribe("y", ignore)
    assert names_for("x") == ["tests.test_registry.ignore"]
    assert names_for("y") == []


def test_one_function_may_be_registered_twice_under_different_names():
    subscribe("x", ignore, name="for x")
    subscribe("y", ignore, name="for y")
    assert names_for("x") == ["for x"]
    assert names_for("y") == ["for y"]


def test_a_module_that_is_imported_again_registers_its_handlers_once():
    reloaded = types.FunctionType(ignore.__code__, ignore.__globals__, "ignore")
    assert reloaded is not ignore
    subscribe("x", ignore)
    subscribe("x", reloaded)
    (found,) = registry.handlers_for("x").all
    assert found.func is reloaded


def test_the_same_closure_may_be_registered_again():
    closure = make_handler(1)
    subscribe("x", closure)
    subscribe("x", closure)
    assert len(registry.handlers_for("x").all) == 1


def make_handler(number):
    def handle(event):
        return number

    return handle


def test_functions_from_one_factory_need_explicit_names():
    """Otherwise the second would silently replace the first."""
    subscribe("x", make_handler(1))
    with pytest.raises(DuplicateHandlerError, match="name="):
        subscribe("x", make_handler(2))
    assert [each.func(None) for each in registry.handlers_for("x").all] == [1]


def test_two_lambdas_need_explicit_names():
    subscribe("x", lambda event: 1)
    with pytest.raises(DuplicateHandlerError, match="name="):
        subscribe("x", lambda event: 2)


def test_a_callable_without_a_name_must_be_given_one():
    part = functools.partial(ignore)
    with pytest.raises(EventBusError, match="name="):
        subscribe("x", part)
    assert subscribe("x", part, name="part").func is part


@pytest.mark.parametrize("name", ["", " a", "a\nb", "x" * 201, 7])
def test_a_name_that_cannot_be_stored_is_refused(name):
    with pytest.raises(InvalidPayloadError, match="the handler name"):
        subscribe("x", ignore, name=name)


# -- refusals, at the time of declaration


@pytest.mark.parametrize("pattern", ["", " x", "a\nb", "x" * 201])
def test_a_pattern_that_cannot_match_is_refused(pattern):
    with pytest.raises(InvalidPayloadError, match="the pattern"):
        subscribe(pattern, ignore)


@pytest.mark.parametrize("subject", [7, None, ["order.*"], int, ignore])
def test_a_value_that_is_neither_a_pattern_nor_an_event_class_is_refused(subject):
    with pytest.raises(EventBusError):
        subscribe(subject, ignore)
    assert registry.all() == []


def test_the_bare_decorator_is_refused_because_it_would_register_nothing():
    with pytest.raises(EventBusError):

        @handler
        def forgot_the_pattern(event):
            """Never called."""


def test_a_handler_without_patterns_is_refused():
    with pytest.raises(EventBusError, match="needs at least one event type or pattern"):
        handler()(ignore)


@pytest.mark.parametrize("options", [{"atomic": False}, {"func": ignore_async}])
def test_a_handler_without_a_transaction_cannot_be_isolated(options):
    func = options.pop("func", ignore)
    with pytest.raises(EventBusError, match="is isolated and not atomic"):
        handler("x", isolated=True, **options)(func)


def test_an_async_handler_cannot_be_atomic():
    with pytest.raises(EventBusError, match="ignore_async is async and cannot be atomic"):
        subscribe("x", ignore_async, atomic=True)


def test_an_async_handler_runs_outside_of_transactions_by_default():
    subscription = subscribe("x", ignore_async)
    assert subscription.is_async is True
    assert subscription.atomic is False


class AsyncCallable:
    async def __call__(self, event):
        """An async handler whose pattern overlaps."""


@pytest.mark.parametrize("func", [AsyncCallable(), functools.partial(ignore_async)])
def test_any_callable_that_returns_a_coroutine_is_an_async_handler(func):
    """Otherwise it would be called and never awaited, and the event completed."""
    subscription = subscribe("x", func, name="async")
    assert subscription.is_async is True
    assert subscription.atomic is False


def yields(event):
    yield


async def yields_async(event):
    yield


@pytest.mark.parametrize("func", [yields, yields_async])
def test_a_generator_is_refused_because_calling_it_runs_nothing(func):
    with pytest.raises(EventBusError, match="yield"):
        subscribe("x", func)


def test_a_plain_handler_is_atomic_by_default():
    assert subscribe("x", ignore).atomic is True
    assert subscribe("y", ignore_too, atomic=False).atomic is False


@pytest.mark.parametrize("timeout", [0, -1])
def test_a_timeout_that_is_not_positive_is_refused(timeout):
    with pytest.raises(EventBusError, match=r"timeout of \S*ignore must be a positive number"):
        subscribe("x", ignore, timeout=timeout)


@pytest.mark.parametrize("retry", [{"max_retry": 5}, {"jitter": 7}, {"base_delay": "1"}, 5])
def test_a_retry_policy_that_would_fail_at_the_first_failure_is_refused(retry):
    """M18: an invalid policy fails at start-up, not in a worker."""
    with pytest.raises(EventBusError, match=r"the retry of \S*ignore"):
        subscribe("x", ignore, retry=retry)


def test_an_unknown_argument_of_a_retry_policy_is_refused_with_a_hint():
    """M18."""
    with pytest.raises(EventBusError, match="'max_retry'; did you mean 'max_retries'"):
        subscribe("x", ignore, retry={"max_retry": 5})


# -- options and settings of a handler


def test_a_handler_without_a_timeout_has_the_timeout_of_the_project(settings):
    """M17."""
    plain = subscribe("x", ignore)
    quick = subscribe("y", ignore_too, timeout=0.5)
    settings.EVENTBUS = {"HANDLER_TIMEOUT": 7.0}
    assert plain.deadline == 7.0
    assert quick.deadline == 0.5


def test_a_handlers_own_policy_is_used_unchanged(settings):
    settings.EVENTBUS = {"RETRY": {"max_retries": 9}}
    policy = RetryPolicy(max_retries=1)
    assert subscribe("x", ignore, retry=policy).retry_policy is policy


def test_a_handlers_dict_overrides_the_projects_policy(settings):
    """M18."""
    subscription = subscribe("x", ignore, retry={"base_delay": 5.0})
    settings.EVENTBUS = {"RETRY": {"max_retries": 9, "base_delay": 2.0}}
    assert subscription.retry_policy == RetryPolicy(max_retries=9, base_delay=5.0)


def test_a_hint_names_the_closest_word_or_all_words():
    assert did_you_mean("defualt", ["default", "mail"]) == "; did you mean 'default'?"
    assert did_you_mean("zzz", ["mail", "default"]) == "; choose from 'default', 'mail'"
    assert did_you_mean("zzz", []) == ""


def test_a_class_declared_after_a_lookup_has_the_handlers_of_its_base():
    """M19."""

    class Base(Event):
        number: int

    subscribe(Base, ignore, name="base")
    assert names_for("late.declared") == []

    class Late(Base, type="late.declared"):
        pass

    assert names_for("late.declared") == ["base"]
    assert Late.event_type == "late.declared"


def test_an_unknown_option_is_refused_with_a_hint():
    with pytest.raises(EventBusError, match="no option 'timout'; did you mean 'timeout'"):
        handler("x", timout=3)


def test_type_checkers_know_every_option():
    """The options of handler() and subscribe() are annotated."""
    taken = inspect.signature(subscribe).parameters.keys() - {"subject", "func"}
    assert HandlerOptions.__annotations__.keys() == taken


def test_a_function_that_cannot_take_the_event_is_refused():
    with pytest.raises(EventBusError, match="must take the event as its only argument"):
        subscribe("x", lambda: None, name="h")
