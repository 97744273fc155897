"""What is wrong with the project's setup, told before an event can suffer from it.

The message says what is wrong, the hint what would be right. Ids are stable, because people
silence them; docs/reference/checks.md explains each. No check queries a database.
"""

from __future__ import annotations

import inspect
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, register
from django.core.checks import Warning as CheckWarning
from django.db import connections, router
from django.utils.module_loading import import_string

from django_eventbus import backpressure, conf, cron, schedules
from django_eventbus.conf import Settings, settings
from django_eventbus.events import LARGEST_PAYLOAD, Event
from django_eventbus.exceptions import MissingLibraryError
from django_eventbus.failures import one_line
from django_eventbus.models import EventSchedule, QueuedEvent
from django_eventbus.pacing import CircuitBreaker
from django_eventbus.registry import Handler, did_you_mean, registry
from django_eventbus.retries import RetryPolicy
from django_eventbus.store import default_alias, store_for

TAG = "eventbus"

#: Of a value: what would be right instead, or None if it is right.
Objection = Callable[[Any], str | None]

NAME_LENGTH = 64
MOST_PER_CLAIM = 10_000
#: Python's own parser and every database stop somewhere above.
DEEPEST = 200
#: Beyond a century dates overflow.
MOST_SECONDS = 100 * 365.25 * 24 * 3600
MOST_CRASHES = 32_767
SQLITE_OPTIONS = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL;",
}


@register(TAG)
def check_settings(**kwargs: Any) -> list[CheckMessage]:
    found = getattr(django_settings, "EVENTBUS", {})
    if not isinstance(found, Mapping):
        wrong = f"EVENTBUS is {_shown(found)}, which is not a dict."
        return [Error(wrong, hint="Write EVENTBUS = {…} with settings as keys.", id=_id("E001"))]
    return [*_unknown_settings(found), *_unfit_settings()]


def _unknown_settings(found: Mapping[Any, Any]) -> Iterator[CheckMessage]:
    for name in found:
        if name not in conf.names():
            meant = _closed(did_you_mean(str(name).upper(), conf.names()))
            yield Error(
                f"EVENTBUS has no setting {_shown(name)}.",
                hint=f"Correct it or remove it{meant}",
                id=_id("E002"),
            )


def _unfit_settings() -> Iterator[CheckMessage]:
    for name, (number, objection_to) in RULES.items():
        value = getattr(settings, name)
        right = objection_to(value)
        if right is not None:
            yield Error(
                f"EVENTBUS[{name!r}] is {_shown(value)}.",
                hint=f"{right} The default is {vars(Settings)[name]!r}.",
                id=_id(number),
            )


@register(TAG)
def check_admin(**kwargs: Any) -> list[CheckMessage]:
    if not apps.is_installed("django.contrib.admin") or apps.is_installed("rangefilter"):
        return []
    wrong = "The admin is installed, but the filters it needs for events are not."
    return [Error(wrong, hint="Add 'rangefilter' to INSTALLED_APPS.", id=_id("E003"))]


@register(TAG)
def check_time_zones(**kwargs: Any) -> list[CheckMessage]:
    if django_settings.USE_TZ:
        return []
    wrong = "USE_TZ is off: the bus compares moments with those of the database, in UTC."
    return [Error(wrong, hint="Set USE_TZ = True, which is Django's default.", id=_id("E006"))]


@register(TAG)
def check_databases(**kwargs: Any) -> list[CheckMessage]:
    if an_alias_list(settings.DATABASES) is not None:
        return []  # told as a wrong setting
    holders = list(settings.DATABASES)
    chosen = default_alias()
    if chosen not in (holders or connections):
        return [_misrouted(chosen, holders or list(connections))]
    return [message for alias in holders or [chosen] for message in _database_faults(alias)]


def _misrouted(chosen: str, holders: list[str]) -> CheckMessage:
    return Error(
        f"The database router sends events to {chosen!r}, which does not hold the bus.",
        hint="Name it in EVENTBUS['DATABASES'], or let db_for_write answer with another for the "
        f"app 'django_eventbus'{_closed(did_you_mean(chosen, holders))}",
        id=_id("E005"),
    )


def _database_faults(alias: str) -> Iterator[CheckMessage]:
    connection = connections[alias]
    if not connection.settings_dict["AUTOCOMMIT"]:
        yield Error(
            f"The database {alias!r} holds the bus, but has AUTOCOMMIT off: nothing commits.",
            hint=f"Remove DATABASES[{alias!r}]['AUTOCOMMIT'], or put the bus elsewhere.",
            id=_id("E004"),
        )
    # Only SQLite has transaction modes to choose from.
    mode = str(connection.settings_dict["OPTIONS"].get("transaction_mode"))
    if hasattr(connection, "transaction_modes") and mode.upper() not in ("IMMEDIATE", "EXCLUSIVE"):
        yield CheckWarning(
            f"The SQLite database {alias!r} holds the bus, but its transactions take the write "
            "lock late, where waiting for it is impossible: expect 'database is locked'.",
            hint=f"Add to DATABASES[{alias!r}]['OPTIONS']: {SQLITE_OPTIONS!r}",
            id=_id("W001"),
        )
    if connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS") and settings.NOTIFY is True:
        yield CheckWarning(
            f"The database {alias!r} holds the bus and seems to be behind a pooler in transaction "
            "mode, where nobody hears a NOTIFY: it only costs.",
            hint="Set EVENTBUS['NOTIFY'] = False; workers then look every POLL_INTERVAL seconds.",
            id=_id("W005"),
        )
    if not router.allow_migrate_model(alias, QueuedEvent):
        yield CheckWarning(
            f"The database {alias!r} holds the bus, but the router keeps its tables from there.",
            hint="Let the router's allow_migrate answer True for the app 'django_eventbus' on "
            f"{alias!r}, or change EVENTBUS['DATABASES'].",
            id=_id("W004"),
        )


@register(TAG)
def check_handlers(**kwargs: Any) -> list[CheckMessage]:
    return [*_handlers_imported_twice(), *_handlers_of_nothing()]


def _handlers_imported_twice() -> Iterator[CheckMessage]:
    """One function under two names on purpose is fine; in two modules it never is on purpose."""
    by_source: dict[str, list[Handler]] = defaultdict(list)
    for each in registry.all():
        if source := _source_of(each.func):
            by_source[source].append(each)
    for source, same in by_source.items():
        if len({each.func.__module__ for each in same}) > 1:
            names = " and ".join(repr(each.name) for each in same)
            yield CheckWarning(
                f"The handlers {names} are one function, imported as two: each event runs it "
                f"{len(same)} times.",
                hint=f"Import {source} by one path everywhere, that of INSTALLED_APPS.",
                id=_id("W002"),
            )


def _source_of(func: Callable[..., Any]) -> str | None:
    code = getattr(inspect.unwrap(func), "__code__", None)
    return f"{os.path.realpath(code.co_filename)}:{code.co_firstlineno}" if code else None


def _handlers_of_nothing() -> Iterator[CheckMessage]:
    for each in registry.all():
        for subject in each.subjects:
            if isinstance(subject, type) and not _has_a_type(subject):
                yield CheckWarning(
                    f"The handler {each.name!r} waits for {subject.__qualname__}, but no event "
                    "can be one.",
                    hint=f'Give {subject.__qualname__} or a subclass a type="…", and import it.',
                    id=_id("W003"),
                )


def _has_a_type(cls: type[Event]) -> bool:
    return cls.event_type is not None or any(map(_has_a_type, cls.__subclasses__()))


@register(TAG)
def check_schedules(**kwargs: Any) -> list[CheckMessage]:
    declared = schedules.declared()
    try:
        return [message for each in declared for message in _schedule_faults(each)]
    except MissingLibraryError as error:
        wrong = f"There are schedules ({declared[0].name!r}), but nothing to read cron lines with."
        return [Error(wrong, hint=f"{error}.", id=_id("E200"))]


def _schedule_faults(schedule: EventSchedule) -> Iterator[CheckMessage]:
    for field, wrong, right in cron.faults(schedule, deepest=store_for().deepest_json):
        yield Error(
            f"The schedule {schedule.name!r} cannot fire: {_closed(one_line(wrong))}",
            hint=right,
            id=_id(SCHEDULE_FIELDS[field]),
        )


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
    return f"Use 1 to {NAME_LENGTH} printable characters{commas}, without spaces at the ends."


def a_name_or_nothing(value: Any) -> str | None:
    return None if value == "" else a_name(value)


def a_queue(value: Any) -> str | None:
    if a_queue_list(settings.QUEUES) is not None or value in settings.QUEUES:
        return None
    return f"Use one of EVENTBUS['QUEUES']{_closed(did_you_mean(str(value), settings.QUEUES))}"


def a_queue_list(value: Any) -> str | None:
    if not isinstance(value, list | tuple) or not value:
        return "Give a list of queue names, at least one."
    for each in value:
        # The option --queues separates names by commas.
        if right := a_name(each, without=","):
            return f"{_shown(each)} is no name for a queue. {right}"
        if value.count(each) > 1:
            return f"Name {each!r} once."
    return None


def an_alias_list(value: Any) -> str | None:
    if not isinstance(value, list | tuple):
        return "Give a list of keys of DATABASES."
    for each in value:
        if each not in list(connections):
            meant = _closed(did_you_mean(str(each), connections))
            return f"There is no database {_shown(each)}{meant}"
    return None


def a_function_or_nothing(value: Any) -> str | None:
    try:
        if value == "" or callable(import_string(value)):
            return None
    except (ImportError, AttributeError, TypeError):
        pass
    return "Use the dotted path of a function that takes a text and returns one."


def a_word_list(value: Any) -> str | None:
    if isinstance(value, list | tuple) and all(isinstance(each, str) and each for each in value):
        return None
    return "Give a list of words, such as ['password', 'iban']."


def a_switch(value: Any) -> str | None:
    return None if isinstance(value, bool) else "Use True or False."


def one_of(*choices: str) -> Objection:
    def objection(value: Any) -> str | None:
        return None if value in choices else f"Use one of {', '.join(map(repr, choices))}."

    return objection


def a_whole_number(least: int, most: int | None = None) -> Objection:
    def objection(value: Any) -> str | None:
        if _is_whole(value) and least <= value and (most is None or value <= most):
            return None
        return f"Use a whole number from {least}{f' to {most}' if most else ' up'}."

    return objection


def seconds(*, least: float = 0.0, above: float = -1.0) -> Objection:
    def objection(value: Any) -> str | None:
        if _is_number(value) and least <= value and above < value:
            return None
        floor = f"more than {above:g}" if above >= least else f"{least:g} or more"
        return f"Use a number of seconds, {floor}, within a century."

    return objection


def limits(value: Any) -> str | None:
    if a_queue_list(settings.QUEUES) is not None:
        return None  # limits name queues: their list has to be put right first
    wrong = backpressure.objection_to(value)
    return wrong and _closed(wrong)


def options_of(policy: type[RetryPolicy | CircuitBreaker], example: str) -> Objection:
    """A dict of arguments of a policy; its whole numbers are told by its defaults."""
    known = {each.name: each.default for each in fields(policy)}

    def objection(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return f"Give a dict of arguments of {policy.__name__}, such as {example}."
        for name, given in value.items():
            if name not in known:
                meant = _closed(did_you_mean(str(name), known))
                return f"{policy.__name__} takes no {_shown(name)}{meant}"
            whole = isinstance(known[name], int)
            if not (_is_whole(given) if whole else _is_number(given)):
                kind = "whole number" if whole else "number"
                return f"{policy.__name__}.{name} must be a {kind}, not {_shown(given)}."
        try:
            policy(**value)
        except ValueError as error:
            return f"{error}."
        return None

    return objection


retry_options = options_of(RetryPolicy, "{'max_retries': 5}")
_breaker_options = options_of(CircuitBreaker, "{'failure_rate': 0.5}")


def breaker_options_or_nothing(value: Any) -> str | None:
    return None if value is None else _breaker_options(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    whole_or_real = _is_whole(value) or isinstance(value, float)
    return whole_or_real and math.isfinite(value) and abs(value) <= MOST_SECONDS


def _shown(value: Any) -> str:
    return one_line(repr(value), 80)


def _closed(clause: str) -> str:
    return clause if clause.endswith("?") else f"{clause}."


def _id(number: str) -> str:
    return f"django_eventbus.{number}"


RULES: dict[str, tuple[str, Objection]] = {
    "NAMESPACE": ("E101", a_name),
    "QUEUE": ("E102", a_queue),
    "QUEUES": ("E103", a_queue_list),
    "DATABASES": ("E104", an_alias_list),
    "FOREIGN_TRANSACTION": ("E105", one_of("warn", "error", "allow")),
    "PRODUCER": ("E106", a_name_or_nothing),
    "BATCH_SIZE": ("E107", a_whole_number(1, MOST_PER_CLAIM)),
    "POLL_INTERVAL": ("E108", seconds(above=0)),
    # Registrations are renewed four times in that time, by a supervisor that looks every 0.2 s.
    "ABANDON_AFTER": ("E109", seconds(least=0.5)),
    "HANDLER_TIMEOUT": ("E110", seconds(above=0)),
    "RETRY": ("E111", retry_options),
    "ATOMIC": ("E112", one_of("handler", "event")),
    "UNHANDLED": ("E113", one_of("retry", "complete")),
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
    # The overview shows an hour.
    "MINUTES_KEPT": ("E130", a_whole_number(60, 10_000_000)),
    "MAX_EVENTS_PER_TRANSACTION": ("E131", a_whole_number(1)),
}

SCHEDULE_FIELDS = {
    "name": "E201",
    "type": "E202",
    "cron": "E203",
    "tz": "E204",
    "payload": "E205",
    "key": "E206",
    "queue": "E207",
    "priority": "E208",
    "headers": "E209",
    "misfire": "E210",
}
