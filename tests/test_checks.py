"""System checks: one test per way of getting it wrong. The message says what is wrong, the hint
what would be right."""

import functools
import sqlite3
import sys
import types
from contextlib import closing, suppress

import pytest
from django.core import checks as django_checks
from django.core.management import call_command
from django.db import connection, connections

from django_eventbus import Event, RetryPolicy, checks, conf, handler, schedule, subscribe
from django_eventbus.models import QueuedEvent


def found():
    return django_checks.run_checks(tags=[checks.TAG])


def the_one_found():
    (message,) = found()
    return message


def assert_wrong(message, number, wrong, right):
    assert message.id == f"django_eventbus.{number}"
    assert wrong in message.msg
    assert right in message.hint
    serious = number.startswith("E")
    assert message.is_serious() == serious


def test_the_defaults_are_clean():
    assert found() == []


def test_moments_without_a_time_zone(settings):
    settings.USE_TZ = False
    assert_wrong(the_one_found(), "E006", "USE_TZ is off", "USE_TZ = True")


def test_no_setting_at_all_is_clean(settings):
    del settings.EVENTBUS
    assert found() == []


def test_every_setting_given_well_is_clean(settings):
    settings.EVENTBUS = {
        "NAMESPACE": "shop",
        "QUEUE": "mail",
        "QUEUES": ["orders", "mail"],
        "DATABASES": ["default"],
        "FOREIGN_TRANSACTION": "error",
        "PRODUCER": "web-1",
        "BATCH_SIZE": 1,
        "POLL_INTERVAL": 0.01,
        "ABANDON_AFTER": 0.5,
        "HANDLER_TIMEOUT": 7 * 24 * 3600,
        "RETRY": {"max_retries": 0, "base_delay": 0, "multiplier": 1.5, "jitter": 1},
        "ATOMIC": "event",
        "UNHANDLED": "complete",
        "UNHANDLED_RETRY": {},
        "MAX_CRASHES": 1,
        "MAX_PAYLOAD_BYTES": 1,
        "MAX_PAYLOAD_DEPTH": 1,
        "MAX_ERROR_BYTES": 0,
        "SHUTDOWN_TIMEOUT": 0,
        "NOTIFY": False,
        "DEAD_HEAD": "block",
        "STRICT_ORDER": True,
        "MAX_MEMORY": 512,
        "MINUTES_KEPT": 60,
        "MAX_EVENTS_PER_TRANSACTION": 1,
        "REDACT_ERRORS": "django_eventbus.failures.one_line",
        "REDACT_FIELDS": ["iban"],
        "BREAKER": {"failure_rate": 1, "window": 5, "min_calls": 1, "open_for": 0.5},
        "LIMITS": {
            "mail": {"max_size": 1, "overflow": "block", "timeout": 0.5},
            "queue:orders": {"max_size": 10**9, "overflow": "halt"},
            "queue:*": {"max_size": 10, "overflow": "halt"},
            "key:order:*": {"max_size": 10, "overflow": "drop"},
            "type:*": {"max_size": 10, "overflow": "coalesce"},
        },
        "BLOCK_TIMEOUT": 0.1,
    }
    assert set(settings.EVENTBUS) == set(conf.names())
    assert found() == []


def test_every_setting_has_a_check_with_an_id_of_its_own():
    assert set(checks.RULES) == set(conf.names())
    numbers = [number for number, _ in checks.RULES.values()]
    assert len(set(numbers)) == len(numbers)


def test_the_checks_can_be_run_by_their_tag(capsys):
    call_command("check", tags=["eventbus"])
    assert "no issues" in capsys.readouterr().out


def test_the_checks_ask_no_database(django_assert_num_queries, db):
    with django_assert_num_queries(0):
        found()


@pytest.mark.parametrize("value", [None, ["BATCH_SIZE"], "BATCH_SIZE", 5])
def test_settings_that_are_no_dict(settings, value):
    settings.EVENTBUS = value
    assert_wrong(the_one_found(), "E001", f"EVENTBUS is {value!r}", "EVENTBUS = {")


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("BATCHSIZE", "did you mean 'BATCH_SIZE'?"),
        ("batch_size", "did you mean 'BATCH_SIZE'?"),
        ("HANDLER_TIMEOUT_SECONDS", "did you mean 'HANDLER_TIMEOUT'?"),
        ("CELERY", "choose from 'ABANDON_AFTER', "),
        (7, "choose from 'ABANDON_AFTER', "),
        ("producer", "did you mean 'PRODUCER'?"),
    ],
)
def test_an_unknown_setting(settings, name, right):
    settings.EVENTBUS = {name: 1}
    assert_wrong(the_one_found(), "E002", f"no setting {name!r}", right)


def test_every_unknown_setting_is_told(settings):
    settings.EVENTBUS = {"FOO": 1, "BAR": 2}
    assert [message.id for message in found()] == ["django_eventbus.E002"] * 2


A_NAME = "1 to 64 printable characters"
CENTURY = 3_155_760_001
NOT_A_NUMBER = float("nan")
INFINITE = float("inf")
DROP = {"max_size": 1, "overflow": "drop"}
BLOCK = {"max_size": 1, "overflow": "block"}

WRONG_VALUES = [
    ("NAMESPACE", "E101", "", A_NAME),
    ("NAMESPACE", "E101", None, A_NAME),
    ("NAMESPACE", "E101", b"shop", A_NAME),
    ("NAMESPACE", "E101", "n" * 65, A_NAME),
    ("NAMESPACE", "E101", "sh\nop", A_NAME),
    ("NAMESPACE", "E101", "shop ", "without spaces at the ends"),
    ("NAMESPACE", "E101", "\ud800", A_NAME),
    ("QUEUE", "E102", "mail", "choose from 'default'"),
    ("QUEUE", "E102", "defautl", "did you mean 'default'?"),
    ("QUEUE", "E102", None, "choose from 'default'"),
    ("BREAKER", "E126", True, "a dict of arguments of CircuitBreaker"),
    ("BREAKER", "E126", {"failrate": 0.5}, "did you mean 'failure_rate'?"),
    ("BREAKER", "E126", {"min_calls": 2.5}, "min_calls must be a whole number"),
    ("BREAKER", "E126", {"failure_rate": 0}, "failure_rate must be a number from 0.01 to 1"),
    ("QUEUES", "E103", [], "at least one"),
    ("QUEUES", "E103", (), "at least one"),
    ("QUEUES", "E103", "default", "a list of queue names"),
    ("QUEUES", "E103", None, "a list of queue names"),
    ("QUEUES", "E103", {"default": {}}, "a list of queue names"),
    ("QUEUES", "E103", ["default", ""], A_NAME),
    ("QUEUES", "E103", ["default", 7], "7 is no name"),
    ("QUEUES", "E103", ["default", "q" * 65], A_NAME),
    ("QUEUES", "E103", ["default", "tab\t"], A_NAME),
    ("QUEUES", "E103", ["default", "a,b"], "without commas"),
    ("QUEUES", "E103", ["default", "mail", "default"], "Name 'default' once"),
    ("DATABASES", "E104", "default", "a list of keys of DATABASES"),
    ("DATABASES", "E104", None, "a list of keys of DATABASES"),
    ("DATABASES", "E104", ["defautl"], "did you mean 'default'?"),
    ("DATABASES", "E104", ["default", "warehouse"], "no database 'warehouse'"),
    ("DATABASES", "E104", [["default"]], "no database ['default']"),
    ("FOREIGN_TRANSACTION", "E105", "raise", "'warn', 'error', 'allow'"),
    ("FOREIGN_TRANSACTION", "E105", None, "'warn', 'error', 'allow'"),
    ("PRODUCER", "E106", None, A_NAME),
    ("PRODUCER", "E106", "p" * 65, A_NAME),
    ("PRODUCER", "E106", "\x00", A_NAME),
    ("BATCH_SIZE", "E107", 0, "a whole number from 1 to 10000"),
    ("BATCH_SIZE", "E107", -5, "a whole number from 1"),
    ("BATCH_SIZE", "E107", 10_001, "to 10000"),
    ("BATCH_SIZE", "E107", 2.5, "a whole number"),
    ("BATCH_SIZE", "E107", "500", "a whole number"),
    ("BATCH_SIZE", "E107", True, "a whole number"),
    ("POLL_INTERVAL", "E108", 0, "more than 0"),
    ("POLL_INTERVAL", "E108", -1.0, "more than 0"),
    ("POLL_INTERVAL", "E108", "1", "a number of seconds"),
    ("POLL_INTERVAL", "E108", NOT_A_NUMBER, "a number of seconds"),
    ("POLL_INTERVAL", "E108", INFINITE, "within a century"),
    ("ABANDON_AFTER", "E109", 0.4, "0.5 or more"),
    ("ABANDON_AFTER", "E109", 0, "0.5 or more"),
    ("ABANDON_AFTER", "E109", CENTURY, "within a century"),
    ("ABANDON_AFTER", "E109", None, "a number of seconds"),
    ("HANDLER_TIMEOUT", "E110", 0, "more than 0"),
    ("HANDLER_TIMEOUT", "E110", None, "a number of seconds"),
    ("HANDLER_TIMEOUT", "E110", True, "a number of seconds"),
    ("RETRY", "E111", None, "a dict of arguments of RetryPolicy"),
    ("RETRY", "E111", 3, "a dict of arguments of RetryPolicy"),
    ("RETRY", "E111", RetryPolicy(), "a dict of arguments of RetryPolicy"),
    ("RETRY", "E111", {"max_retrys": 3}, "did you mean 'max_retries'?"),
    ("RETRY", "E111", {7: 3}, "RetryPolicy takes no 7"),
    ("RETRY", "E111", {"max_retries": -1}, "max_retries must be a number from 0"),
    ("RETRY", "E111", {"max_retries": 2.5}, "max_retries must be a whole number"),
    ("RETRY", "E111", {"max_retries": "3"}, "max_retries must be a whole number"),
    ("RETRY", "E111", {"base_delay": -1}, "base_delay must be a number from 0"),
    ("RETRY", "E111", {"base_delay": NOT_A_NUMBER}, "base_delay must be a number"),
    ("RETRY", "E111", {"max_delay": INFINITE}, "max_delay must be a number"),
    ("RETRY", "E111", {"max_delay": None}, "max_delay must be a number"),
    ("RETRY", "E111", {"multiplier": 0.5}, "multiplier must be a number from 1"),
    ("RETRY", "E111", {"jitter": 2}, "jitter must be a number from 0 to 1"),
    ("ATOMIC", "E112", True, "'handler', 'event'"),
    ("ATOMIC", "E112", "events", "'handler', 'event'"),
    ("UNHANDLED", "E113", "drop", "'retry', 'complete'"),
    ("UNHANDLED_RETRY", "E114", {"retries": 3}, "did you mean 'max_retries'?"),
    ("UNHANDLED_RETRY", "E114", {"jitter": -1}, "jitter must be a number from 0 to 1"),
    ("MAX_CRASHES", "E115", 0, "a whole number from 1"),
    ("MAX_CRASHES", "E115", 32_768, "to 32767"),
    ("MAX_PAYLOAD_BYTES", "E116", 0, "a whole number from 1 to 1048576"),
    ("MAX_PAYLOAD_BYTES", "E116", "256k", "a whole number from 1 to 1048576"),
    ("MAX_PAYLOAD_BYTES", "E116", 2**20 + 1, "a whole number from 1 to 1048576"),
    ("MAX_PAYLOAD_DEPTH", "E117", 0, "a whole number from 1"),
    ("MAX_PAYLOAD_DEPTH", "E117", 201, "to 200"),
    ("MAX_ERROR_BYTES", "E118", -1, "a whole number from 0 up"),
    ("SHUTDOWN_TIMEOUT", "E119", -1, "0 or more"),
    ("SHUTDOWN_TIMEOUT", "E119", None, "a number of seconds"),
    ("LIMITS", "E121", None, "Give a dict such as {'mail': "),
    ("LIMITS", "E121", [("default", {})], "Give a dict such as"),
    ("LIMITS", "E121", {"default": 500}, "'default': Give a dict such as {'max_size'"),
    ("LIMITS", "E121", {"defualt": DROP}, "did you mean 'default'?"),
    ("LIMITS", "E121", {"mail": DROP}, "choose from 'default', 'key:…', 'queue:…', 'type:…'."),
    ("LIMITS", "E121", {"queue:mail": DROP}, "There is no such queue in EVENTBUS['QUEUES']"),
    ("LIMITS", "E121", {"queue:m*": DROP}, "There is no such queue"),
    ("LIMITS", "E121", {"kye:order:*": DROP}, "'key:…'"),
    ("LIMITS", "E121", {"key:": DROP}, "must be a non-empty string"),
    ("LIMITS", "E121", {"key:" + "k" * 201: DROP}, "201 characters, 200 are allowed"),
    ("LIMITS", "E121", {"type:a\n": DROP}, "must be printable"),
    ("LIMITS", "E121", {7: DROP}, "Use a string"),
    ("LIMITS", "E121", {"default": DROP, "queue:default": DROP}, "is the same as 'default'"),
    ("LIMITS", "E121", {"default": {}}, "max_size must be a whole number from 1 up, not None"),
    ("LIMITS", "E121", {"default": {**DROP, "max_size": 0}}, "from 1 up, not 0"),
    ("LIMITS", "E121", {"default": {**DROP, "max_size": -1}}, "from 1 up, not -1"),
    ("LIMITS", "E121", {"default": {**DROP, "max_size": 1.5}}, "from 1 up, not 1.5"),
    ("LIMITS", "E121", {"default": {**DROP, "max_size": True}}, "from 1 up, not True"),
    ("LIMITS", "E121", {"default": {**DROP, "max_size": "5"}}, "from 1 up, not '5'"),
    ("LIMITS", "E121", {"default": {"max_size": 1}}, "'block', 'coalesce', 'drop', 'halt'"),
    ("LIMITS", "E121", {"default": {**DROP, "overflow": "colaesce"}}, "did you mean 'coalesce'?"),
    ("LIMITS", "E121", {"default": {**DROP, "overflow": ["drop"]}}, "overflow must be a policy"),
    ("LIMITS", "E121", {"default": {**DROP, "maxsize": 5}}, "did you mean 'max_size'?"),
    ("LIMITS", "E121", {"default": {**DROP, "timeout": 5}}, "only overflow 'block' waits"),
    ("LIMITS", "E121", {"default": {**BLOCK, "timeout": 0}}, "more than 0, not 0"),
    ("LIMITS", "E121", {"default": {**BLOCK, "timeout": None}}, "a number of seconds"),
    ("LIMITS", "E121", {"default": {**BLOCK, "timeout": NOT_A_NUMBER}}, "a number of seconds"),
    ("BLOCK_TIMEOUT", "E122", 0, "more than 0"),
    ("BLOCK_TIMEOUT", "E122", None, "a number of seconds"),
    ("NOTIFY", "E120", "no", "True or False"),
    ("NOTIFY", "E120", 0, "True or False"),
    ("DEAD_HEAD", "E123", "halt", "'skip', 'block'"),
    ("STRICT_ORDER", "E124", 1, "True or False"),
    ("MAX_MEMORY", "E127", -1, "0"),
    ("MINUTES_KEPT", "E130", 59, "60 to"),
    ("MAX_EVENTS_PER_TRANSACTION", "E131", 0, "a whole number from 1 up"),
    ("REDACT_ERRORS", "E125", "no.such.module", "the dotted path of a function"),
    ("REDACT_ERRORS", "E125", "django_eventbus.failures.MAX_FRAMES", "the dotted path"),
    ("REDACT_ERRORS", "E125", "redact", "the dotted path of a function"),
    ("REDACT_ERRORS", "E125", None, "the dotted path of a function"),
    ("REDACT_FIELDS", "E129", "password", "a list of words"),
    ("REDACT_FIELDS", "E129", ["password", ""], "a list of words"),
]


@pytest.mark.parametrize(("name", "number", "value", "right"), WRONG_VALUES)
def test_a_setting_with_a_wrong_value(settings, name, number, value, right):
    settings.EVENTBUS = {name: value}
    message = the_one_found()
    assert_wrong(message, number, f"EVENTBUS['{name}'] is ", right)
    assert f"The default is {vars(conf.Settings)[name]!r}." in message.hint


def test_every_setting_can_be_got_wrong():
    assert {name for name, *_ in WRONG_VALUES} == set(conf.names())


def test_a_default_queue_that_the_project_does_not_have(settings):
    """QUEUES without the word "default", and QUEUE left as it is."""
    settings.EVENTBUS = {"QUEUES": ["orders", "mail"]}
    assert_wrong(the_one_found(), "E102", "EVENTBUS['QUEUE'] is 'default'", "'mail', 'orders'")


def test_limits_wait_until_the_queues_they_name_are_put_right(settings):
    settings.EVENTBUS = {"QUEUES": None, "LIMITS": {"mail": DROP}}
    assert "django_eventbus.E121" not in {message.id for message in found()}


def test_every_wrong_value_is_told(settings):
    settings.EVENTBUS = {"BATCH_SIZE": 0, "ATOMIC": "no", "FOO": 1}
    assert {message.id.rpartition(".")[2] for message in found()} == {"E107", "E112", "E002"}


def test_a_value_of_any_length_makes_a_short_message(settings):
    settings.EVENTBUS = {"NAMESPACE": "\x1b" * 10_000}
    message = the_one_found()
    assert len(message.msg) < 200
    assert "\x1b" not in message.msg


@pytest.mark.parametrize("column", ["namespace", "queue", "producer"])
def test_the_longest_name_fits_its_column(column):
    assert QueuedEvent._meta.get_field(column).max_length == checks.NAME_LENGTH


def test_the_admin_without_its_range_filters(settings):
    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app != "rangefilter"]
    assert_wrong(the_one_found(), "E003", "filters", "Add 'rangefilter' to INSTALLED_APPS")


def test_a_project_without_the_admin_needs_no_range_filters(settings):
    unwanted = ("rangefilter", "django.contrib.admin")
    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app not in unwanted]
    assert found() == []


def test_a_database_that_does_not_commit(monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)
    assert_wrong(
        the_one_found(), "E004", "'default' holds the bus", "DATABASES['default']['AUTOCOMMIT']"
    )


@pytest.fixture
def second_database(monkeypatch):
    """An alias "archive", as DATABASES would make it; no connection to it is opened."""

    def add(**changes):
        configured = {
            **connections.settings["default"],
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": ":memory:",
            "OPTIONS": {"transaction_mode": "IMMEDIATE"},
            **changes,
        }
        monkeypatch.setitem(connections.settings, "archive", configured)

    yield add
    with suppress(AttributeError):
        del connections["archive"]


def sends_events_to(alias):
    return types.SimpleNamespace(
        db_for_write=lambda model, **hints: alias if model is QueuedEvent else None
    )


def test_a_database_that_does_not_hold_the_bus_may_be_as_it_likes(second_database):
    second_database(AUTOCOMMIT=False, OPTIONS={})
    assert found() == []


def test_every_database_that_holds_the_bus_is_looked_at(settings, second_database):
    second_database(AUTOCOMMIT=False)
    settings.EVENTBUS = {"DATABASES": ["default", "archive"]}
    assert_wrong(the_one_found(), "E004", "'archive' holds the bus", "'archive'")


def test_the_database_the_router_chooses_is_looked_at(settings, second_database):
    second_database(AUTOCOMMIT=False)
    settings.DATABASE_ROUTERS = [sends_events_to("archive")]
    assert_wrong(the_one_found(), "E004", "'archive' holds the bus", "'archive'")


def test_a_router_that_sends_events_where_the_bus_is_not(settings, second_database):
    second_database()
    settings.EVENTBUS = {"DATABASES": ["archive"]}
    assert_wrong(
        the_one_found(),
        "E005",
        "sends events to 'default', which does not hold the bus",
        "EVENTBUS['DATABASES']",
    )


def test_a_router_that_sends_events_to_a_database_there_is_not(settings):
    settings.DATABASE_ROUTERS = [sends_events_to("defautl")]
    assert_wrong(the_one_found(), "E005", "sends events to 'defautl'", "did you mean 'default'?")


def test_a_router_that_sends_events_where_the_bus_is(settings, second_database):
    second_database()
    settings.EVENTBUS = {"DATABASES": ["archive"]}
    settings.DATABASE_ROUTERS = [sends_events_to("archive")]
    assert found() == []


@pytest.mark.parametrize("options", [{}, {"transaction_mode": "DEFERRED"}, {"timeout": 20}])
def test_sqlite_that_takes_its_write_lock_late(settings, second_database, options):
    second_database(OPTIONS=options)
    settings.DATABASE_ROUTERS = [sends_events_to("archive")]
    message = the_one_found()
    assert_wrong(message, "W001", "SQLite database 'archive'", "DATABASES['archive']['OPTIONS']")
    assert "'transaction_mode': 'IMMEDIATE'" in message.hint
    assert "'init_command': 'PRAGMA journal_mode=WAL;" in message.hint


@pytest.mark.parametrize("mode", ["IMMEDIATE", "immediate", "EXCLUSIVE"])
def test_sqlite_that_takes_its_write_lock_at_once(settings, second_database, mode):
    second_database(OPTIONS={"transaction_mode": mode})
    settings.DATABASE_ROUTERS = [sends_events_to("archive")]
    assert found() == []


def test_the_options_in_the_hint_are_those_django_takes(second_database, settings):
    second_database(OPTIONS=checks.SQLITE_OPTIONS)
    parameters = connections["archive"].get_connection_params()
    assert parameters["timeout"] == 20
    settings.DATABASE_ROUTERS = [sends_events_to("archive")]
    assert found() == []


def test_the_options_in_the_hint_wait_for_the_disk(tmp_path):
    """With synchronous=NORMAL a power cut may take commits back that were acknowledged."""
    with closing(sqlite3.connect(tmp_path / "db.sqlite3")) as opened:
        opened.executescript(checks.SQLITE_OPTIONS["init_command"])
        assert opened.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        full = 2
        assert opened.execute("PRAGMA synchronous").fetchone() == (full,)


def test_notifications_behind_a_pooler_that_nobody_would_hear(settings, second_database):
    second_database(DISABLE_SERVER_SIDE_CURSORS=True)
    settings.DATABASE_ROUTERS = [sends_events_to("archive")]
    assert_wrong(the_one_found(), "W005", "behind a pooler", "EVENTBUS['NOTIFY'] = False")
    settings.EVENTBUS = {"NOTIFY": False}
    assert found() == []


def test_a_router_that_keeps_the_tables_from_their_database(settings):
    def allow_migrate(db, app_label, **hints):
        return False if app_label == "django_eventbus" else None

    settings.DATABASE_ROUTERS = [types.SimpleNamespace(allow_migrate=allow_migrate)]
    assert_wrong(the_one_found(), "W004", "keeps its tables from there", "allow_migrate")


@pytest.mark.parametrize("retry", [None, {}, {"max_retries": 0}, RetryPolicy(max_retries=7)])
def test_a_handler_with_a_good_retry_policy(retry):
    subscribe("order.placed", print, name="shop.ship", retry=retry)
    assert found() == []


def imported_as(module, *, decorated=False):
    """Run the same source as this module: every import by another path makes new functions."""
    source = "\n\ndef ship(event):\n    pass\n"
    namespace = {"__name__": module}
    exec(compile(source, "/srv/project/shop/handlers.py", "exec"), namespace)
    ship = namespace["ship"]
    return functools.wraps(ship)(lambda event: ship(event)) if decorated else ship


@pytest.mark.parametrize("decorated", [False, True])
def test_a_function_imported_by_two_paths(decorated):
    for module in ("shop.handlers", "project.shop.handlers"):
        subscribe("order.placed", imported_as(module, decorated=decorated))
    message = the_one_found()
    assert_wrong(
        message,
        "W002",
        "'shop.ship' and 'project.shop.ship' are one function",
        "/srv/project/shop/handlers.py:3",
    )
    assert "2 times" in message.msg


def test_a_function_under_two_names_on_purpose():
    ship = imported_as("shop.handlers")
    subscribe("order.placed", ship, name="ship orders")
    subscribe("refund.asked", ship, name="ship refunds")
    assert found() == []


def test_different_functions_behind_the_same_decorator():
    def decorator(func):
        return functools.wraps(func)(lambda event: func(event))

    def ship(event):
        """One line."""

    def bill(event):
        """Another."""

    ship.__module__, bill.__module__ = "shop.handlers", "bank.handlers"
    for func in (ship, bill):
        subscribe("order.placed", decorator(func), name=func.__name__)
    assert found() == []


def test_a_handler_that_is_no_function_has_no_source_to_compare():
    subscribe("order.placed", functools.partial(print, "shop"), name="one")
    subscribe("order.placed", functools.partial(print, "bank"), name="two")
    assert found() == []


def test_a_handler_of_an_event_class_that_no_event_can_be():
    class OrderEvent(Event):
        order_id: int

    class PaidOrderEvent(OrderEvent):
        amount: int

    handler(OrderEvent, name="shop.audit")(print)
    message = the_one_found()
    assert_wrong(message, "W003", "'shop.audit' waits for ", 'type="…"')
    assert "OrderEvent" in message.msg


def test_a_handler_of_a_base_class_with_a_published_descendant():
    class ParcelEvent(Event):
        pass

    class LostParcelEvent(ParcelEvent):
        pass

    class ParcelStolen(LostParcelEvent, type="test_checks.parcel_stolen"):
        pass

    handler(ParcelEvent, name="audit")(print)
    handler(ParcelStolen, name="police")(print)
    assert found() == []


def test_a_handler_of_a_type_without_a_class_is_fine():
    handler("order.placed", "*.shipped", name="shop.ship")(print)
    assert found() == []


# -- schedules


def test_good_schedules_are_clean():
    schedule("x", cron="0 6 * * *", tz="Europe/Berlin", payload={"a": 1}, misfire="skip")
    assert found() == []


@pytest.mark.parametrize(
    ("number", "options", "wrong", "right"),
    [
        ("E203", {"cron": "0 0 31 2 *"}, "can never fire", "five fields"),
        ("E203", {"cron": "6 o'clock"}, "is no cron line", "such as '0 6 * * *'"),
        ("E204", {"tz": "Europe/Berlim"}, "did you mean 'Europe/Berlin'?", "IANA"),
        ("E205", {"payload": {"a": object()}}, "payload.a is a", "JSON"),
        ("E206", {"key": ""}, "the key must be", "1 to 200"),
        ("E207", {"queue": "defualt"}, "did you mean 'default'?", "EVENTBUS['QUEUES']"),
        ("E208", {"priority": 99_999}, "99999", "whole number"),
        ("E209", {"headers": {"scheduler": 1}}, "headers", "without the key 'scheduler'"),
        ("E210", {"misfire": "fire_one"}, "did you mean 'fire_once'?", "'skip'"),
    ],
)
def test_a_schedule_that_cannot_fire(number, options, wrong, right):
    """S23: told before the first tick, not at it."""
    schedule("report.daily", **({"cron": "0 6 * * *"} | options))
    message = the_one_found()
    assert_wrong(message, number, wrong, right)
    assert "'report.daily'" in message.msg


def test_a_schedule_of_an_event_type_that_is_none():
    schedule("", cron="0 6 * * *", name="report")
    assert_wrong(the_one_found(), "E202", "the event type must be", "printable")


def test_schedules_without_the_library_that_reads_them(monkeypatch):
    schedule("x", cron="0 6 * * *")
    monkeypatch.setitem(sys.modules, "cronsim", None)
    assert_wrong(the_one_found(), "E200", "nothing to read cron lines with", "[cron]")


def test_the_library_is_not_missed_where_nothing_is_scheduled(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    assert found() == []
