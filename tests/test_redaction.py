"""What is stored and logged of an error: never the contents of a row, never a password (S10)."""

import json
import sqlite3

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.db import OperationalError, connection, connections

from django_eventbus import failures, handler, publish
from django_eventbus.failures import in_a_line, redacted
from django_eventbus.models import EventLog
from tests.bus import drain
from tests.test_architecture import PACKAGE
from tests.test_failures import caught, record

SECRET = "hunter2"
ONCE = {"max_retries": 0}


def everything_stored():
    """All rows of all tables of the bus, as text."""
    return "\n".join(
        str(list(model.objects.values()))
        for model in apps.get_app_config("django_eventbus").get_models()
    )


def insert_twice(secret):
    User.objects.create(username=secret)
    User.objects.create(username=secret)


def break_a_check(secret):
    """The whole row stands in the text of this one."""
    table = User._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} (username, password, first_name, last_name, email, is_superuser,"
            f" is_staff, is_active, date_joined) VALUES (%s, '', '', '', '', %s, %s, %s, NULL)",
            [secret, False, False, True],
        )


def give_text_for_a_number(secret):
    with connection.cursor() as cursor:
        cursor.execute("SELECT CAST(%s AS integer) + 1", [secret])
        if connection.vendor != "postgresql":  # the others take any text for a number
            raise OperationalError(f'invalid input syntax for type integer: "{secret}"')


def write_bad_sql(secret):
    with connection.cursor() as cursor:
        cursor.execute("SELECT FROM FROM nowhere WHERE password = %s", [secret])


@pytest.mark.django_db
@pytest.mark.parametrize(
    "fail",
    [insert_twice, break_a_check, give_text_for_a_number, write_bad_sql],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize("value", [SECRET, f"two\nlines of {SECRET}", f"it's {SECRET}"])
def test_an_error_of_the_database_says_nothing_of_the_row(fail, value, capture):
    @handler("x", name="h", retry=ONCE)
    def break_the_rules(event):
        fail(value)

    publish("x", {})
    drain()
    log = EventLog.objects.get()
    assert log.status == "FAILED"
    assert log.error_type.startswith("django.db.utils.")
    assert SECRET not in everything_stored()
    assert SECRET not in capture.text
    assert "Traceback" in log.errors[0]["traceback"]


@pytest.mark.django_db
def test_what_is_left_still_says_what_is_wrong():
    try:
        insert_twice(SECRET)
    except Exception as error:
        found = record(error)
    assert "username" in found["message"]
    assert "insert_twice" in found["traceback"]


class DatabaseError(Exception):
    """As PEP 249 has every driver name it."""


POSTGRES = 'duplicate key value violates unique constraint "u"\nDETAIL:  Key (email)=({}) exists.'


@pytest.mark.parametrize(
    "text",
    [
        POSTGRES,
        'null value in column "a"\nDETAIL:  Failing row contains (1, {}, null).\nCONTEXT: {}',
        'invalid input syntax for type integer: "{}"\nLINE 1: SELECT {}\n               ^',
        'value "{}" is out of range for type integer',
        "(1062, \"Duplicate entry '{}' for key 'email'\")",
        "(1366, \"Incorrect integer value: '{}' for column `shop`.`n` at row 1\")",
        "(1292, \"Truncated incorrect DOUBLE value: '{}'\")",
        "(1064, \"You have an error in your SQL syntax near '{} FROM x' at line 1\")",
    ],
)
@pytest.mark.parametrize("wrap", ["plain", "cause", "context", "group"])
def test_values_are_left_out_wherever_in_the_chain_they_stand(text, wrap):
    error = caught(DatabaseError(text.format(SECRET, SECRET)))
    if wrap == "group":
        error = caught(ExceptionGroup("several", [error, ValueError("other")]))
    elif wrap != "plain":
        outer = ValueError("outer")
        setattr(outer, f"__{wrap}__", error)
        error = caught(outer)
    found = json.dumps(record(error))
    assert SECRET not in found
    assert text.split("{")[0].split("\n")[0][:12].split('"')[0] in found.replace('\\"', '"')


def test_an_error_of_another_kind_keeps_its_text():
    error = caught(ValueError("DETAIL:\n  Key (a)=(b) is 'fine'"))
    assert record(error)["message"] == "DETAIL:\n  Key (a)=(b) is 'fine'"


@pytest.mark.parametrize(
    "text",
    [
        "cannot connect to postgresql://shop:{}@db.example/shop",
        "redis://:{}@cache:6379/0 is away",
        "connect(host='db', password='{}', port=1)",
        'connect(password="{}")',
        "host=db password={} dbname=shop",
        "{{'USER': 'shop', 'PASSWORD': '{}'}}",
    ],
)
def test_passwords_of_connection_strings_are_left_out(text):
    found = record(caught(ValueError(text.format(SECRET))))
    assert SECRET not in json.dumps(found)
    assert found["message"].startswith(text[:8].replace("{{", "{"))


@pytest.mark.django_db
def test_a_connection_that_fails_tells_no_password():
    """Whatever the driver says of it goes through the same door before it is logged."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no password")
    fault = connections.create_connection("default")
    fault.settings_dict = {
        **connection.settings_dict,
        "HOST": "127.0.0.1",
        "PORT": "1",
        "PASSWORD": SECRET,
        "NAME": f"shop password={SECRET}",
    }
    with pytest.raises(OperationalError) as raised:
        fault.ensure_connection()
    line = in_a_line(raised.value)
    assert SECRET not in line
    assert SECRET not in json.dumps(record(raised.value))
    assert line.startswith("django.db.utils.OperationalError: ")
    assert line.isprintable()


def hide_names(text):
    return text.replace("Jane", "…")


def stumble(text):
    raise KeyError(SECRET)


def test_the_projects_own_function_has_the_last_word(settings):
    settings.EVENTBUS = {"REDACT_ERRORS": f"{__name__}.hide_names"}
    found = record(caught(ValueError("Jane cannot be reached")))
    assert found["message"] == "… cannot be reached"
    assert "Jane" not in found["traceback"]


def test_if_the_projects_function_fails_nothing_is_kept(settings):
    settings.EVENTBUS = {"REDACT_ERRORS": f"{__name__}.stumble"}
    found = record(caught(ValueError(f"Jane's {SECRET}")))
    assert found["message"] == "<withheld: redacting it raised KeyError>"
    assert found["type"] == "ValueError"
    assert SECRET not in json.dumps(found)


@pytest.mark.parametrize("character", ["\r", "\n", "\x1b", "\u2028", "\u2029", "\x85", "\x00"])
def test_an_error_in_the_log_is_one_line(character):
    """S14: no forged record, no control of a terminal."""
    line = in_a_line(ValueError(f"a{character}CRITICAL forged"))
    assert line.splitlines() == [line]
    assert line.isprintable()


def test_a_raw_driver_error_is_known_by_its_class():
    error = caught(sqlite3.IntegrityError(f"UNIQUE failed\nDETAIL: {SECRET}"))
    assert SECRET not in redacted(error, str(error))
    assert failures._is_of_a_database(error)


def test_no_record_of_the_bus_carries_a_traceback_of_its_own():
    """A traceback is lines, and of text that was not redacted: ``in_a_line`` stands in for it."""
    source = [path.read_text() for path in PACKAGE.rglob("*.py")]
    assert not [text for text in source if "logger.exception(" in text or "exc_info" in text]
