"""Stored and logged errors contain no row data and no passwords (S10)."""

import contextlib
import json
import signal
import sqlite3

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.db import OperationalError, connection, connections

from django_eventbus import handler, publish
from django_eventbus.errors import introspection, redaction
from django_eventbus.errors.failures import in_a_line
from django_eventbus.errors.redaction import redacted
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
    """The text of this error contains the whole row."""
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
        if connection.vendor != "postgresql":  # The other databases accept any text as a number.
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
def test_the_record_of_a_database_error_contains_no_row_data(fail, value, capture):
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
def test_a_redacted_error_still_names_the_constraint_and_the_function():
    try:
        insert_twice(SECRET)
    except Exception as error:
        found = record(error)
    assert "username" in found["message"]
    assert "insert_twice" in found["traceback"]


class DatabaseError(Exception):
    """The class name that PEP 249 prescribes for every driver."""


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
def test_values_are_redacted_anywhere_in_the_exception_chain(text, wrap):
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


def test_an_error_that_is_not_from_the_database_keeps_its_text():
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
        "postgresql://shop:a@b/{}@db.example/shop has an @ in its password",
        "redis://:one@h1,redis://:{}@h2",
        "DB_PASSWORD={} is not accepted",
        r"connect(password='it\'s {}')",
        "connect(password='{} is not terminated",
    ],
)
def test_passwords_in_connection_strings_are_redacted(text):
    found = record(caught(ValueError(text.format(SECRET))))
    assert SECRET not in json.dumps(found)
    assert found["message"].startswith(text[:8].replace("{{", "{"))


@pytest.mark.parametrize("shift", range(40))
@pytest.mark.parametrize(
    "text", ["https://shop:{}@db.example/", "password='{}'", "password={}", "pwd: {}"]
)
def test_cutting_a_long_text_leaves_no_part_of_a_password(text, shift):
    secret = "0123456789abcdef"
    start = "x " * redaction.MAX_MESSAGE
    long = start[shift:] + text.format(secret) + " y" * 5000
    found = redacted(ValueError(), long)
    assert len(found) <= 2 * redaction.MAX_MESSAGE + 1
    assert "0123" not in found
    assert "cdef" not in found


@contextlib.contextmanager
def linear_time():
    """Fail after a minute. Linear patterns need milliseconds here, quadratic ones days."""

    def give_up(signum, frame):
        raise AssertionError("this takes more than linear time")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


HOSTILE = [
    "://:",
    "://",
    "://a:",
    "://a:@",
    "@",
    "password",
    "password ",
    "password=",
    "password='",
    "password='\"",
    "password=\\",
    "pwd='\\",
    "pwd : ",
    ": '",
    "near '",
    'value: "',
    "\n",
    " |",
]


@pytest.mark.parametrize("unit", HOSTILE)
@pytest.mark.parametrize("end", ["", "@", "'", " ", "\\"])
def test_no_text_takes_more_than_linear_time(unit, end):
    text = unit * (1_000_000 // len(unit)) + end
    with linear_time():
        redaction._without_credentials(text)
        redaction._without_values(caught(DatabaseError(text)), text)
        record(caught(ValueError(text)))
        record(caught(DatabaseError(text)))


def test_a_database_error_with_many_lines_takes_linear_time():
    text = "\n".join(f"line {number}" for number in range(100_000))
    with linear_time():
        found = record(caught(DatabaseError(text)))
    assert found["message"] == "line 0\n…"


def test_a_very_long_database_error_keeps_no_value():
    row = f"DETAIL: {SECRET}"
    for text in (
        "\n".join(["no", *[row] * 200_000]),
        f"value: '{SECRET * 200_000}'",
        f"value: '{'x' * 2_000_000}{SECRET}'",
    ):
        assert SECRET not in json.dumps(record(caught(DatabaseError(text))))


seen_by_hook = []


def look(text):
    seen_by_hook.append(len(text))
    return text


def test_the_redacting_function_of_the_project_gets_texts_of_bounded_length(settings):
    settings.EVENTBUS = {"REDACT_ERRORS": f"{__name__}.look", "MAX_ERROR_BYTES": 5000}
    seen_by_hook.clear()
    record(caught(ValueError("x" * 1_000_000)))
    assert len(seen_by_hook) == 2
    assert max(seen_by_hook) <= 2 * 5000 + 1


@pytest.mark.django_db
def test_a_failed_connection_logs_no_password():
    """The message of the driver is redacted before it is logged."""
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


def test_the_redacting_function_of_the_project_runs_last(settings):
    settings.EVENTBUS = {"REDACT_ERRORS": f"{__name__}.hide_names"}
    found = record(caught(ValueError("Jane cannot be reached")))
    assert found["message"] == "… cannot be reached"
    assert "Jane" not in found["traceback"]


def test_no_text_is_kept_if_the_redacting_function_fails(settings):
    settings.EVENTBUS = {"REDACT_ERRORS": f"{__name__}.stumble"}
    found = record(caught(ValueError(f"Jane's {SECRET}")))
    assert found["message"] == "<withheld: redacting the text raised KeyError>"
    assert found["type"] == "ValueError"
    assert SECRET not in json.dumps(found)


@pytest.mark.parametrize("character", ["\r", "\n", "\x1b", "\u2028", "\u2029", "\x85", "\x00"])
def test_an_error_in_the_log_is_one_line(character):
    """S14: no forged record, no control of a terminal."""
    line = in_a_line(ValueError(f"a{character}CRITICAL forged"))
    assert line.splitlines() == [line]
    assert line.isprintable()


def test_a_raw_driver_error_is_recognised_by_its_class():
    error = caught(sqlite3.IntegrityError(f"UNIQUE failed\nDETAIL: {SECRET}"))
    assert SECRET not in redacted(error, str(error))
    assert introspection.is_database_error(error)


def test_no_log_record_of_the_bus_carries_a_raw_traceback():
    """A traceback has many lines of unredacted text; ``in_a_line`` replaces it."""
    source = [path.read_text() for path in PACKAGE.rglob("*.py")]
    assert not [text for text in source if "logger.exception(" in text or "exc_info" in text]
