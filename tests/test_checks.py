"""System checks: one test per way of getting it wrong. The message says what is wrong, the hint
what would be right."""

import functools
import types
from contextlib import suppress

import pytest
from django.core import checks as django_checks
from django.core.management import call_command
from django.db import connection, connections

from django_eventbus import Event, RetryPolicy, checks, conf, handler, subscribe
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
    ("MAX_PAYLOAD_BYTES", "E116", 0, "a whole number from 1 up"),
    ("MAX_PAYLOAD_BYTES", "E116", "256k", "a whole number from 1 up"),
    ("MAX_PAYLOAD_DEPTH", "E117", 0, "a whole number from 1"),
    ("MAX_PAYLOAD_DEPTH", "E117", 201, "to 200"),
    ("MAX_ERROR_BYTES", "E118", -1, "a whole number from 0 up"),
    ("SHUTDOWN_TIMEOUT", "E119", -1, "0 or more"),
    ("SHUTDOWN_TIMEOUT", "E119", None, "a number of seconds"),
    ("NOTIFY", "E120", "no", "True or False"),
    ("NOTIFY", "E120", 0, "True or False"),
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
