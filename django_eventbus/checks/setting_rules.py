"""The rules for the values of settings."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from django.db import connections
from django.utils.module_loading import import_string

from django_eventbus.checks.messages import closed, shown
from django_eventbus.conf import settings
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.exceptions import InvalidPayloadError
from django_eventbus.policies import CircuitBreaker
from django_eventbus.publishing import limits as queue_limits
from django_eventbus.registry import UNHANDLED_POLICIES
from django_eventbus.retries import RetryPolicy
from django_eventbus.schema.names import check_name
from django_eventbus.schema.payloads import LARGEST_PAYLOAD

#: A function that takes the value of a setting. It returns None if the value is valid, otherwise a
#: sentence about the allowed values.
Rule = Callable[[Any], str | None]

NAME_LENGTH = 64
MOST_PER_CLAIM = 10_000
#: The largest value of MAX_PAYLOAD_DEPTH. Python's JSON parser accepts a larger depth. If the limit
#: of the database is lower (``Store.deepest_json``), publish() applies the lower limit.
DEEPEST = 200
#: A hundred years. If a longer duration is added to a date, the result may overflow.
MOST_SECONDS = 100 * 365.25 * 24 * 3600
MOST_CRASHES = 32_767
SHORTEST_TOKEN = 16


def a_name(value: Any, *, without: str = "") -> str | None:
    if (
        isinstance(value, str)
        and 0 < len(value) <= NAME_LENGTH
        and value.isprintable()
        and value == value.strip()
        and not set(without) & set(value)
    ):
        return None
    commas = ", without commas" if without else ""
    return (
        f"Use 1 to {NAME_LENGTH} printable characters{commas}, "
        "without leading or trailing whitespace."
    )


def a_name_or_nothing(value: Any) -> str | None:
    return None if value == "" else a_name(value)


def a_queue(value: Any) -> str | None:
    if a_queue_list(settings.QUEUES) is not None or value in settings.QUEUES:
        return None
    return f"Use one of EVENTBUS['QUEUES']{closed(did_you_mean(str(value), settings.QUEUES))}"


def a_queue_list(value: Any) -> str | None:
    if not isinstance(value, list | tuple) or not value:
        return "Use a list of queue names, at least one."
    for each in value:
        # A queue name has no commas, because the option --queues separates names by commas.
        if right := a_name(each, without=","):
            return f"{shown(each)} is not a queue name. {right}"
        if value.count(each) > 1:
            return f"{each!r} is in the list twice: remove one."
    return None


def an_alias_list(value: Any) -> str | None:
    if not isinstance(value, list | tuple):
        return "Use a list of keys of DATABASES."
    for each in value:
        if each not in list(connections):
            meant = closed(did_you_mean(str(each), connections))
            return f"There is no database {shown(each)}{meant}"
    return None


def a_function_or_nothing(value: Any) -> str | None:
    try:
        if value == "" or callable(import_string(value)):
            return None
    except (ImportError, AttributeError, TypeError):
        pass
    return "Use the dotted path of a function that takes and returns a string."


def a_word_list(value: Any) -> str | None:
    if isinstance(value, list | tuple) and all(isinstance(each, str) and each for each in value):
        return None
    return "Use a list of words, such as ['password', 'iban']."


def a_token_or_nothing(value: Any) -> str | None:
    is_token = (
        isinstance(value, str) and value.isascii() and not set(value) & set(string.whitespace)
    )
    if is_token and (not value or len(value) >= SHORTEST_TOKEN):
        return None
    return (
        f"Use a string of at least {SHORTEST_TOKEN} ASCII characters without whitespace, "
        "such as the output of secrets.token_urlsafe()."
    )


def a_switch(value: Any) -> str | None:
    return None if isinstance(value, bool) else "Use True or False."


def one_of(*choices: str) -> Rule:
    def rule(value: Any) -> str | None:
        return None if value in choices else f"Use one of {', '.join(map(repr, choices))}."

    return rule


def unhandled_policies(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return one_of(*UNHANDLED_POLICIES)(value)
    for pattern, policy in value.items():
        try:
            check_name(pattern, "the event type")
        except InvalidPayloadError as error:
            return f"Use event types or patterns as keys: {error}."
        if policy not in UNHANDLED_POLICIES:
            meant = closed(did_you_mean(str(policy), UNHANDLED_POLICIES))
            return f"{shown(pattern)} has the unknown policy {shown(policy)}{meant}"
    return None


def a_whole_number(least: int, most: int | None = None) -> Rule:
    def rule(value: Any) -> str | None:
        if _is_whole(value) and least <= value and (most is None or value <= most):
            return None
        return f"Use a whole number from {least}{f' to {most}' if most else ' up'}."

    return rule


def seconds(*, least: float = 0.0, above: float = -1.0) -> Rule:
    def rule(value: Any) -> str | None:
        if _is_number(value) and least <= value and above < value:
            return None
        floor = f"more than {above:g}" if above >= least else f"{least:g} or more"
        return f"Use a number of seconds, {floor}, at most a century."

    return rule


def limits(value: Any) -> str | None:
    if a_queue_list(settings.QUEUES) is not None:
        return None  # Limits refer to queues, so the list of queues has to be corrected first.
    wrong = queue_limits.objection_to(value)
    return wrong and closed(wrong)


def options_of(policy: type[RetryPolicy | CircuitBreaker], example: str) -> Rule:
    """Return a rule for a dict with arguments of a policy.

    An argument must be a whole number if its default in the policy is an int.
    """
    known = {each.name: each.default for each in fields(policy)}

    def rule(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return f"Use a dict of arguments of {policy.__name__}, such as {example}."
        for name, given in value.items():
            if name not in known:
                meant = closed(did_you_mean(str(name), known))
                return f"{policy.__name__} takes no {shown(name)}{meant}"
            whole = isinstance(known[name], int)
            if not (_is_whole(given) if whole else _is_number(given)):
                kind = "whole number" if whole else "number"
                return f"{policy.__name__}.{name} must be a {kind}, not {shown(given)}."
        try:
            policy(**value)
        except ValueError as error:
            return f"{error}."
        return None

    return rule


retry_options = options_of(RetryPolicy, "{'max_retries': 5}")
_breaker_options = options_of(CircuitBreaker, "{'failure_rate': 0.5}")


def breaker_options_or_nothing(value: Any) -> str | None:
    return None if value is None else _breaker_options(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    whole_or_real = _is_whole(value) or isinstance(value, float)
    return whole_or_real and math.isfinite(value) and abs(value) <= MOST_SECONDS


RULES: dict[str, tuple[str, Rule]] = {
    "NAMESPACE": ("E101", a_name),
    "QUEUE": ("E102", a_queue),
    "QUEUES": ("E103", a_queue_list),
    "DATABASES": ("E104", an_alias_list),
    "FOREIGN_TRANSACTION": ("E105", one_of("warn", "error", "allow")),
    "PRODUCER": ("E106", a_name_or_nothing),
    "BATCH_SIZE": ("E107", a_whole_number(1, MOST_PER_CLAIM)),
    "POLL_INTERVAL": ("E108", seconds(above=0)),
    # A registration is renewed every ABANDON_AFTER / 4 seconds, but the thread that renews it
    # wakes only every 0.2 seconds. With a value below 0.5 seconds, a registration could expire
    # between two renewals.
    "ABANDON_AFTER": ("E109", seconds(least=0.5)),
    "HANDLER_TIMEOUT": ("E110", seconds(above=0)),
    "RETRY": ("E111", retry_options),
    "ATOMIC": ("E112", one_of("handler", "event")),
    "UNHANDLED": ("E113", unhandled_policies),
    "UNHANDLED_RETRY": ("E114", retry_options),
    "MAX_CRASHES": ("E115", a_whole_number(1, MOST_CRASHES)),
    "MAX_PAYLOAD_BYTES": ("E116", a_whole_number(1, LARGEST_PAYLOAD)),
    "MAX_PAYLOAD_DEPTH": ("E117", a_whole_number(1, DEEPEST)),
    "MAX_ERROR_BYTES": ("E118", a_whole_number(0)),
    "SHUTDOWN_TIMEOUT": ("E119", seconds()),
    "NOTIFY": ("E120", a_switch),
    "LIMITS": ("E121", limits),
    "BLOCK_TIMEOUT": ("E122", seconds(above=0)),
    "DEAD_HEAD": ("E123", one_of("skip", "block")),
    "STRICT_ORDER": ("E124", a_switch),
    "REDACT_ERRORS": ("E125", a_function_or_nothing),
    "BREAKER": ("E126", breaker_options_or_nothing),
    "MAX_MEMORY": ("E127", a_whole_number(0)),
    "REDACT_FIELDS": ("E129", a_word_list),
    # The minimum is 60, because the overview shows the last 60 minutes.
    "STATISTICS_MINUTES": ("E130", a_whole_number(60, 10_000_000)),
    "MAX_EVENTS_PER_TRANSACTION": ("E131", a_whole_number(1)),
    "MAX_INTERRUPTIONS": ("E132", a_whole_number(1, MOST_CRASHES)),
    # A message needs some time to reach an executor. With a shorter deadline, events would be
    # handed off again while their first messages are on their way.
    "HANDOFF_DEADLINE": ("E133", seconds(least=5)),
    "HANDOFF_WINDOW": ("E134", a_whole_number(1)),
    "CELERY_DRAIN": ("E135", a_switch),
    "METRICS_TOKEN": ("E136", a_token_or_nothing),
    "TRACE_PARENT": ("E137", one_of("link", "parent")),
}
