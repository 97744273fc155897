"""Check ``EVENTBUS``, and the settings of Django that the event bus depends on."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, register

from django_eventbus import conf
from django_eventbus.checks.messages import TAG, check_id, closed, shown
from django_eventbus.checks.setting_rules import RULES
from django_eventbus.conf import Settings, settings
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.policies import CircuitBreaker
from django_eventbus.retries import RetryPolicy


@register(TAG)
def check_settings(**kwargs: Any) -> list[CheckMessage]:
    found = getattr(django_settings, "EVENTBUS", {})
    if not isinstance(found, Mapping):
        wrong = f"EVENTBUS is {shown(found)}, which is not a dict."
        return [
            Error(wrong, hint="Write EVENTBUS = {…} with settings as keys.", id=check_id("E001"))
        ]
    return [*_unknown_settings(found), *_unfit_settings()]


def _unknown_settings(found: Mapping[Any, Any]) -> Iterator[CheckMessage]:
    for name in found:
        if name not in conf.names():
            meant = closed(_setting_meant(str(name)))
            yield Error(
                f"EVENTBUS has no setting {shown(name)}.",
                hint=f"Correct it or remove it{meant}",
                id=check_id("E002"),
            )


def _setting_meant(name: str) -> str:
    """Return a hint for an unknown setting: a similar setting or a similar policy argument."""
    arguments = {
        each.name: f'EVENTBUS["{setting}"]["{each.name}"]'
        for setting, policy in (("RETRY", RetryPolicy), ("BREAKER", CircuitBreaker))
        for each in fields(policy)
    }
    close = difflib.get_close_matches(name.lower(), arguments, n=1, cutoff=0.8)
    if close and name.upper() not in conf.names():
        return f"; did you mean {arguments[close[0]]}?"
    return did_you_mean(name.upper(), conf.names())


def _unfit_settings() -> Iterator[CheckMessage]:
    for name, (number, rule) in RULES.items():
        value = getattr(settings, name)
        allowed = rule(value)
        if allowed is not None:
            yield Error(
                f"EVENTBUS[{name!r}] is {shown(value)}.",
                hint=f"{allowed} The default is {vars(Settings)[name]!r}.",
                id=check_id(number),
            )


@register(TAG)
def check_admin(**kwargs: Any) -> list[CheckMessage]:
    if not apps.is_installed("django.contrib.admin") or apps.is_installed("rangefilter"):
        return []
    wrong = "The admin is installed, but 'rangefilter', which the event admin needs, is not."
    return [Error(wrong, hint="Add 'rangefilter' to INSTALLED_APPS.", id=check_id("E003"))]


@register(TAG)
def check_time_zones(**kwargs: Any) -> list[CheckMessage]:
    if django_settings.USE_TZ:
        return []
    wrong = "USE_TZ is False, but the event bus compares times with UTC times of the database."
    return [Error(wrong, hint="Set USE_TZ = True, which is Django's default.", id=check_id("E006"))]
