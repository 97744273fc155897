"""System checks, one test per kind of error. The message names the error, the hint the solution."""

import functools
import sqlite3
import sys
import types
from contextlib import closing, suppress

import pytest
from django.core import checks as django_checks
from django.core.management import call_command
from django.db import connection, connections
from django.dispatch import Signal

from django_eventbus import (
    Event,
    RetryPolicy,
    bridge_model,
    bridge_signal,
    checks,
    conf,
    events,
    handler,
    schedule,
    subscribe,
)
from django_eventbus.checks import databases, setting_rules
from django_eventbus.models import QueuedEvent
from tests.shop.models import Customer, Order


@pytest.fixture(autouse=True)
def own_event_classes(monkeypatch):
    """Classes that other tests declared are not checked here."""
    monkeypatch.setattr(events, "_classes", {})


def found():
    """Without the types that have no handler: most tests here need none."""
    every = django_checks.run_checks(tags=[checks.TAG])
    return [each for each in every if each.id != "django_eventbus.W006"]


def unhandled():
    return {each.msg.split("'")[1]: each for each in checks.check_unhandled_types()}


def the_one_found():
    (message,) = found()
    return message


def assert_wrong(message, number, wrong, right):
    assert message.id == f"django_eventbus.{number}"
    assert wrong in message.msg
    assert right in message.hint
    serious = number.startswith("E")
    assert message.is_serious() == serious


def test_the_defaults_pass():
    assert found() == []


def test_use_tz_false_is_an_error(settings):
    settings.USE_TZ = False
    assert_wrong(the_one_found(), "E006", "USE_TZ is False", "USE_TZ = True")


def test_a_project_without_the_setting_passes(settings):
    del settings.EVENTBUS
    assert found() == []


def test_a_valid_value_for_every_setting_passes(settings):
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
        "HANDOFF_DEADLINE": 5,
        "HANDOFF_WINDOW": 1,
        "CELERY_DRAIN": False,
        "HANDLER_TIMEOUT": 7 * 24 * 3600,
        "RETRY": {"max_retries": 0, "base_delay": 0, "multiplier": 1.5, "jitter": 1},
        "ATOMIC": "event",
        "UNHANDLED": "complete",
        "UNHANDLED_RETRY": {},
        "MAX_CRASHES": 1,
        "MAX_INTERRUPTIONS": 1,
        "MAX_PAYLOAD_BYTES": 1,
        "MAX_PAYLOAD_DEPTH": 1,
        "MAX_ERROR_BYTES": 0,
        "SHUTDOWN_TIMEOUT": 0,
        "NOTIFY": False,
        "TRACE_PARENT": "parent",
        "DEAD_HEAD": "block",
        "STRICT_ORDER": True,
        "MAX_MEMORY": 512,
        "STATISTICS_MINUTES": 60,
        "MAX_EVENTS_PER_TRANSACTION": 1,
        "REDACT_ERRORS": "django_eventbus.errors.text.one_line",
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
        "METRICS_TOKEN": "0123456789abcdef",
    }
    assert set(settings.EVENTBUS) == set(conf.names())
    assert found() == []


def test_every_setting_has_a_check_with_its_own_id():
    assert set(setting_rules.RULES) == set(conf.names())
    numbers = [number for number, _ in setting_rules.RULES.values()]
    assert len(set(numbers)) == len(numbers)


def test_the_checks_can_be_run_by_their_tag(capsys):
    call_command("check", tags=["eventbus"])
    assert "no issues" in capsys.readouterr().out


def test_the_checks_send_no_queries(django_assert_num_queries, db):
    with django_assert_num_queries(0):
        found()


@pytest.mark.parametrize("value", [None, ["BATCH_SIZE"], "BATCH_SIZE", 5])
def test_settings_that_are_not_a_dict_are_an_error(settings, value):
    settings.EVENTBUS = value
    assert_wrong(the_one_found(), "E001", f"EVENTBUS is {value!r}", "EVENTBUS = {")


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("BATCHSIZE", "did you mean 'BATCH_SIZE'?"),
        ("batch_size", "did you mean 'BATCH_SIZE'?"),
        ("HANDLER_TIMEOUT_SECONDS", "did you mean 'HANDLER_TIMEOUT'?"),
        ("KAFKA", "choose from 'ABANDON_AFTER', "),
        (7, "choose from 'ABANDON_AFTER', "),
        ("producer", "did you mean 'PRODUCER'?"),
        ("MAX_RETRYS", """did you mean EVENTBUS["RETRY"]["max_retries"]?"""),
        ("FAILURE_RATE", """did you mean EVENTBUS["BREAKER"]["failure_rate"]?"""),
        ("MAX_MEMMORY", "did you mean 'MAX_MEMORY'?"),
    ],
)
def test_an_unknown_setting_is_an_error(settings, name, right):
    settings.EVENTBUS = {name: 1}
    assert_wrong(the_one_found(), "E002", f"no setting {name!r}", right)


def test_every_unknown_setting_is_reported(settings):
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
    ("NAMESPACE", "E101", "shop ", "without leading or trailing whitespace"),
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
    ("QUEUES", "E103", ["default", 7], "7 is not a queue name"),
    ("QUEUES", "E103", ["default", "q" * 65], A_NAME),
    ("QUEUES", "E103", ["default", "tab\t"], A_NAME),
    ("QUEUES", "E103", ["default", "a,b"], "without commas"),
    ("QUEUES", "E103", ["default", "mail", "default"], "'default' is in the list twice"),
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
    ("POLL_INTERVAL", "E108", INFINITE, "at most a century"),
    ("ABANDON_AFTER", "E109", 0.4, "0.5 or more"),
    ("ABANDON_AFTER", "E109", 0, "0.5 or more"),
    ("ABANDON_AFTER", "E109", CENTURY, "at most a century"),
    ("ABANDON_AFTER", "E109", None, "a number of seconds"),
    ("HANDOFF_DEADLINE", "E133", 4.9, "5 or more"),
    ("HANDOFF_DEADLINE", "E133", 0, "5 or more"),
    ("HANDOFF_DEADLINE", "E133", None, "a number of seconds"),
    ("HANDOFF_DEADLINE", "E133", INFINITE, "at most a century"),
    ("HANDOFF_WINDOW", "E134", 0, "a whole number from 1 up"),
    ("HANDOFF_WINDOW", "E134", 2.5, "a whole number from 1 up"),
    ("HANDOFF_WINDOW", "E134", None, "a whole number from 1 up"),
    ("CELERY_DRAIN", "E135", "yes", "True or False"),
    ("TRACE_PARENT", "E137", "child", "'link', 'parent'"),
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
    ("UNHANDLED", "E113", None, "'retry', 'complete'"),
    (
        "UNHANDLED",
        "E113",
        {"a.*": "compete"},
        "'a.*' has the unknown policy 'compete'; did you mean 'complete'?",
    ),
    (
        "UNHANDLED",
        "E113",
        {"a.*": None},
        "'a.*' has the unknown policy None; choose from 'complete', 'retry'.",
    ),
    ("UNHANDLED", "E113", {"": "retry"}, "must be a non-empty string"),
    ("UNHANDLED", "E113", {7: "retry"}, "event types or patterns as keys"),
    ("UNHANDLED_RETRY", "E114", {"retries": 3}, "did you mean 'max_retries'?"),
    ("UNHANDLED_RETRY", "E114", {"jitter": -1}, "jitter must be a number from 0 to 1"),
    ("MAX_CRASHES", "E115", 0, "a whole number from 1"),
    ("MAX_CRASHES", "E115", 32_768, "to 32767"),
    ("MAX_INTERRUPTIONS", "E132", 0, "a whole number from 1"),
    ("MAX_PAYLOAD_BYTES", "E116", 0, "a whole number from 1 to 1048576"),
    ("MAX_PAYLOAD_BYTES", "E116", "256k", "a whole number from 1 to 1048576"),
    ("MAX_PAYLOAD_BYTES", "E116", 2**20 + 1, "a whole number from 1 to 1048576"),
    ("MAX_PAYLOAD_DEPTH", "E117", 0, "a whole number from 1"),
    ("MAX_PAYLOAD_DEPTH", "E117", 201, "to 200"),
    ("MAX_ERROR_BYTES", "E118", -1, "a whole number from 0 up"),
    ("SHUTDOWN_TIMEOUT", "E119", -1, "0 or more"),
    ("SHUTDOWN_TIMEOUT", "E119", None, "a number of seconds"),
    ("LIMITS", "E121", None, "Use a dict such as {'mail': "),
    ("LIMITS", "E121", [("default", {})], "Use a dict such as"),
    ("LIMITS", "E121", {"default": 500}, "'default': Use a dict such as {'max_size'"),
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
    (
        "LIMITS",
        "E121",
        {"default": {**DROP, "timeout": 5}},
        "timeout is only valid with overflow 'block'",
    ),
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
    ("STATISTICS_MINUTES", "E130", 59, "60 to"),
    ("MAX_EVENTS_PER_TRANSACTION", "E131", 0, "a whole number from 1 up"),
    ("REDACT_ERRORS", "E125", "no.such.module", "the dotted path of a function"),
    ("REDACT_ERRORS", "E125", "django_eventbus.errors.failures.MAX_FRAMES", "the dotted path"),
    ("REDACT_ERRORS", "E125", "redact", "the dotted path of a function"),
    ("REDACT_ERRORS", "E125", None, "the dotted path of a function"),
    ("REDACT_FIELDS", "E129", "password", "a list of words"),
    ("REDACT_FIELDS", "E129", ["password", ""], "a list of words"),
    ("METRICS_TOKEN", "E136", "too short", "at least 16 ASCII characters"),
    ("METRICS_TOKEN", "E136", "with a space in between", "without whitespace"),
    ("METRICS_TOKEN", "E136", None, "a string"),
]


@pytest.mark.parametrize(("name", "number", "value", "right"), WRONG_VALUES)
def test_a_setting_with_an_invalid_value_is_an_error(settings, name, number, value, right):
    settings.EVENTBUS = {name: value}
    message = the_one_found()
    assert_wrong(message, number, f"EVENTBUS['{name}'] is ", right)
    assert f"The default is {vars(conf.Settings)[name]!r}." in message.hint


def test_every_setting_has_an_invalid_value_in_these_tests():
    assert {name for name, *_ in WRONG_VALUES} == set(conf.names())


def test_a_default_queue_that_is_not_in_queues_is_an_error(settings):
    """QUEUES does not contain "default", and QUEUE has its default value."""
    settings.EVENTBUS = {"QUEUES": ["orders", "mail"]}
    assert_wrong(the_one_found(), "E102", "EVENTBUS['QUEUE'] is 'default'", "'mail', 'orders'")


def test_limits_are_not_checked_while_queues_is_invalid(settings):
    settings.EVENTBUS = {"QUEUES": None, "LIMITS": {"mail": DROP}}
    assert "django_eventbus.E121" not in {message.id for message in found()}


def test_every_invalid_value_is_reported(settings):
    settings.EVENTBUS = {"BATCH_SIZE": 0, "ATOMIC": "no", "FOO": 1}
    assert {message.id.rpartition(".")[2] for message in found()} == {"E107", "E112", "E002"}


def test_a_long_value_is_shortened_in_the_message(settings):
    settings.EVENTBUS = {"NAMESPACE": "\x1b" * 10_000}
    message = the_one_found()
    assert len(message.msg) < 200
    assert "\x1b" not in message.msg


@pytest.mark.parametrize("column", ["namespace", "queue", "producer"])
def test_the_longest_name_fits_its_column(column):
    assert QueuedEvent._meta.get_field(column).max_length == setting_rules.NAME_LENGTH


def test_the_admin_without_the_range_filter_app_is_an_error(settings):
    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app != "rangefilter"]
    assert_wrong(
        the_one_found(),
        "E003",
        "'rangefilter', which the event admin needs, is not",
        "Add 'rangefilter' to INSTALLED_APPS",
    )


def test_a_project_without_the_admin_needs_no_range_filters(settings):
    unwanted = ("rangefilter", "django.contrib.admin")
    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app not in unwanted]
    assert found() == []


def test_a_database_without_autocommit_is_an_error(monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)
    assert_wrong(
        the_one_found(),
        "E004",
        "'default' holds the event tables",
        "DATABASES['default']['AUTOCOMMIT']",
    )


def test_a_database_without_a_store_is_an_error(monkeypatch):
    monkeypatch.setattr(connections["default"], "vendor", "oracle")
    assert_wrong(the_one_found(), "E007", "of the vendor 'oracle'", "EVENTBUS['DATABASES']")


@pytest.fixture
def second_database(monkeypatch):
    """Add an alias "archive" as in DATABASES, without opening a connection to it."""

    def add(**changes):
        configured = {
            **connections.settings["default"],
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": ":memory:",
            "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
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


def test_a_database_without_the_event_tables_is_not_checked(second_database):
    second_database(AUTOCOMMIT=False, OPTIONS={})
    assert found() == []


def test_every_database_with_the_event_tables_is_checked(settings, second_database):
    second_database(AUTOCOMMIT=False)
    settings.EVENTBUS = {"DATABASES": ["default", "archive"]}
    assert_wrong(the_one_found(), "E004", "'archive' holds the event tables", "'archive'")


def test_the_database_that_the_router_chooses_is_checked(settings, second_database):
    second_database(AUTOCOMMIT=False)
    settings.DATABASE_ROUTERS = [sends_events_to("archive")]
    assert_wrong(the_one_found(), "E004", "'archive' holds the event tables", "'archive'")


def test_a_router_to_a_database_without_the_event_tables_is_an_error(settings, second_database):
    second_database()
    settings.EVENTBUS = {"DATABASES": ["archive"]}
    assert_wrong(
        the_one_found(),
        "E005",
        "sends events to 'default', which is not in EVENTBUS['DATABASES']",
        "EVENTBUS['DATABASES']",
    )


def test_a_router_to_an_unknown_database_is_an_error(settings):
    settings.DATABASE_ROUTERS = [sends_events_to("defautl")]
    assert_wrong(the_one_found(), "E005", "sends events to 'defautl'", "did you mean 'default'?")


def test_a_router_to_a_database_with_the_event_tables_passes(settings, second_database):
    second_database()
    settings.EVENTBUS = {"DATABASES": ["archive"]}
    settings.DATABASE_ROUTERS = [sends_events_to("archive")]
    assert found() == []


@pytest.mark.parametrize("options", [{}, {"transaction_mode": "DEFERRED"}, {"timeout": 20}])
def test_sqlite_with_deferred_transactions_is_reported(settings, second_database, options):
    second_database(OPTIONS=options)
    settings.DATABASE_ROUTERS = [sends_events_to("archive")]
    message = the_one_found()
    assert_wrong(message, "W001", "SQLite database 'archive'", "DATABASES['archive']['OPTIONS']")
    assert "'transaction_mode': 'IMMEDIATE'" in message.hint
    assert "'init_command': 'PRAGMA journal_mode=WAL;" in message.hint


@pytest.mark.parametrize("mode", ["IMMEDIATE", "immediate", "EXCLUSIVE"])
def test_sqlite_with_immediate_transactions_passes(settings, second_database, mode):
    second_database(OPTIONS={"transaction_mode": mode, "timeout": 20})
    settings.DATABASE_ROUTERS = [sends_events_to("archive")]
    assert found() == []


@pytest.mark.parametrize(("options", "seconds"), [({}, 5), ({"timeout": 9.5}, 9.5)])
def test_sqlite_with_a_short_lock_timeout_is_reported(settings, second_database, options, seconds):
    second_database(OPTIONS={"transaction_mode": "IMMEDIATE", **options})
    settings.DATABASE_ROUTERS = [sends_events_to("archive")]
    wrong = f"'archive' holds the event tables, but a connection waits only {seconds}"
    right = "DATABASES['archive']['OPTIONS']['timeout'] = 20"
    assert_wrong(the_one_found(), "W007", wrong, right)


def test_django_accepts_the_options_in_the_hint(second_database, settings):
    second_database(OPTIONS=databases.SQLITE_OPTIONS)
    parameters = connections["archive"].get_connection_params()
    assert parameters["timeout"] == 20
    settings.DATABASE_ROUTERS = [sends_events_to("archive")]
    assert found() == []


def test_the_options_in_the_hint_keep_synchronous_full(tmp_path):
    """With synchronous=NORMAL a power cut may lose acknowledged commits."""
    with closing(sqlite3.connect(tmp_path / "db.sqlite3")) as opened:
        opened.executescript(databases.SQLITE_OPTIONS["init_command"])
        assert opened.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        full = 2
        assert opened.execute("PRAGMA synchronous").fetchone() == (full,)


def test_notifications_behind_a_pooler_are_a_warning(settings, second_database):
    second_database(DISABLE_SERVER_SIDE_CURSORS=True)
    settings.DATABASE_ROUTERS = [sends_events_to("archive")]
    assert_wrong(the_one_found(), "W005", "behind a pooler", "EVENTBUS['NOTIFY'] = False")
    settings.EVENTBUS = {"NOTIFY": False}
    assert found() == []


def test_a_router_that_does_not_migrate_the_tables_is_a_warning(settings):
    def allow_migrate(db, app_label, **hints):
        return False if app_label == "django_eventbus" else None

    settings.DATABASE_ROUTERS = [types.SimpleNamespace(allow_migrate=allow_migrate)]
    assert_wrong(the_one_found(), "W004", "router does not allow the migrations", "allow_migrate")


@pytest.mark.parametrize("retry", [None, {}, {"max_retries": 0}, RetryPolicy(max_retries=7)])
def test_a_handler_with_a_valid_retry_policy_passes(retry):
    subscribe("order.placed", print, name="shop.ship", retry=retry)
    assert found() == []


def imported_as(module, *, decorated=False):
    """Execute the same source as another module, which creates new functions."""
    source = "\n\ndef ship(event):\n    pass\n"
    namespace = {"__name__": module}
    exec(compile(source, "/srv/project/shop/handlers.py", "exec"), namespace)
    ship = namespace["ship"]
    return functools.wraps(ship)(lambda event: ship(event)) if decorated else ship


@pytest.mark.parametrize("decorated", [False, True])
def test_a_function_imported_by_two_paths_is_reported(decorated):
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


def test_a_function_with_two_explicit_names_passes():
    ship = imported_as("shop.handlers")
    subscribe("order.placed", ship, name="ship orders")
    subscribe("refund.asked", ship, name="ship refunds")
    assert found() == []


def test_different_functions_behind_the_same_decorator_pass():
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


def test_a_handler_that_is_not_a_function_passes():
    subscribe("order.placed", functools.partial(print, "shop"), name="one")
    subscribe("order.placed", functools.partial(print, "bank"), name="two")
    assert found() == []


def test_a_handler_of_an_abstract_class_without_subclasses_is_reported():
    class OrderEvent(Event):
        order_id: int

    class PaidOrderEvent(OrderEvent):
        amount: int

    handler(OrderEvent, name="shop.audit")(print)
    message = the_one_found()
    assert_wrong(
        message,
        "W003",
        "declares no event type, so the handler 'shop.audit' would never run",
        'type="…"',
    )
    assert "OrderEvent" in message.msg


def test_a_handler_of_a_base_class_with_a_concrete_subclass_passes():
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


def test_good_schedules_pass():
    schedule("x", cron="0 6 * * *", tz="Europe/Berlin", payload={"a": 1}, misfire="skip")
    assert found() == []


@pytest.mark.parametrize(
    ("number", "options", "wrong", "right"),
    [
        ("E203", {"cron": "0 0 31 2 *"}, "can never fire", "five fields"),
        ("E203", {"cron": "6 o'clock"}, "is not a cron line", "such as '0 6 * * *'"),
        ("E204", {"tz": "Europe/Berlim"}, "did you mean 'Europe/Berlin'?", "IANA"),
        ("E205", {"payload": {"a": object()}}, "payload.a has the type object", "JSON"),
        ("E206", {"key": ""}, "the key must be", "1 to 200"),
        ("E207", {"queue": "defualt"}, "did you mean 'default'?", "EVENTBUS['QUEUES']"),
        ("E208", {"priority": 99_999}, "99999", "whole number"),
        ("E209", {"headers": {"scheduler": 1}}, "headers", "without the key 'scheduler'"),
        ("E210", {"misfire": "fire_one"}, "did you mean 'fire_once'?", "'skip'"),
    ],
)
def test_a_schedule_that_cannot_fire_is_an_error(number, options, wrong, right):
    """S23: the error is reported before the first tick."""
    schedule("report.daily", **({"cron": "0 6 * * *"} | options))
    message = the_one_found()
    assert_wrong(message, number, wrong, right)
    assert "'report.daily'" in message.msg


def test_a_schedule_with_an_invalid_event_type_is_an_error():
    schedule("", cron="0 6 * * *", name="report")
    assert_wrong(the_one_found(), "E202", "the event type must be", "printable")


def test_schedules_without_cronsim_are_an_error(monkeypatch):
    schedule("x", cron="0 6 * * *")
    monkeypatch.setitem(sys.modules, "cronsim", None)
    assert_wrong(the_one_found(), "E200", "need a library that is not installed", "[cron]")


def test_cronsim_is_not_required_without_schedules(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    assert found() == []


# -- types without a handler


def test_an_event_class_without_a_handler_is_named():
    class OrderPaid(Event, type="order.paid"):
        pass

    handler("order.payed", name="h")(print)
    assert_wrong(
        unhandled()["order.paid"],
        "W006",
        "'order.paid' (the class tests.test_checks.test_an_event_class_without_a_handler_is_named."
        "<locals>.OrderPaid) has no handler: its events will be dead letters.",
        "Did you mean 'order.payed', which has a handler? If its events need no handler, set "
        "EVENTBUS['UNHANDLED'] = {'order.paid': 'complete'}.",
    )


def test_scheduled_types_without_a_handler_are_named():
    schedule("report.daily", cron="0 6 * * *")
    assert "(the schedule 'report.daily')" in unhandled()["report.daily"].msg


def test_bridged_types_without_a_handler_are_named_until_the_bridge_is_disconnected():
    opened = Signal()
    bridges = [
        bridge_model(Order, created="order.made", deleted="order.gone", fields=[]),
        bridge_signal(opened, "shop.opened", serialize=lambda **_: {}),
        bridge_signal(opened, "shop.closed", serialize=lambda **_: {}, sender=Customer),
    ]
    try:
        named = {name: each.msg.split("(")[1].split(")")[0] for name, each in unhandled().items()}
    finally:
        for each in bridges:
            each.disconnect()
    assert named == {
        "order.made": "the bridge from shop.Order",
        "order.gone": "the bridge from shop.Order",
        "shop.opened": "the bridge from a signal",
        "shop.closed": "the bridge from a signal of Customer",
    }
    assert unhandled() == {}


@pytest.mark.parametrize("by", ["class", "base", "type", "pattern"])
def test_a_type_with_any_handler_is_fine(by):
    class Paid(Event):
        pass

    class OrderPaid(Paid, type="order.paid"):
        pass

    subjects = {"class": OrderPaid, "base": Paid, "type": "order.paid", "pattern": "order.*"}
    handler(subjects[by], name="h")(print)
    assert unhandled() == {}


def test_an_event_class_without_a_type_needs_no_handler():
    class Paid(Event):
        pass

    assert unhandled() == {}


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("retry", ["order.paid", "order.sent"]),
        ("complete", []),
        ({"order.paid": "complete"}, ["order.sent"]),
        ({"order.*": "complete", "order.sent": "retry"}, ["order.sent"]),
        ({"order.*": "compelte"}, []),
    ],
    ids=str,
)
def test_types_that_are_completed_without_a_handler_are_fine(settings, setting, named):
    settings.EVENTBUS = {"UNHANDLED": setting}
    schedule("order.paid", cron="0 6 * * *")
    schedule("order.sent", cron="0 6 * * *")
    assert sorted(unhandled()) == named


def test_a_schedule_with_an_invalid_type_is_reported_once():
    schedule(7, cron="0 6 * * *", name="s")
    assert unhandled() == {}
