"""Rows that tests put into the log, or that the log refuses."""

import contextlib

from django.db import connection

from django_eventbus.events import uuid7
from django_eventbus.models import EventLog

#: The producer of rows that were in the log before the test published anything.
EARLIER = "an earlier life"


def log_entry(**columns):
    """Insert a row that was in the log before the test."""
    facts = {
        "id": 10**12,
        "event_id": uuid7(),
        "namespace": "default",
        "queue": "default",
        "type": "x",
        "producer": EARLIER,
        "status": "COMPLETED",
        "created_at": "2026-01-01T00:00:00Z",
        "finished_at": "2026-01-01T00:00:00Z",
    }
    return EventLog.objects.create(**facts | columns)


@contextlib.contextmanager
def log_refuses(condition):
    """Add a constraint ``no_bad`` that refuses rows of the log that meet the condition.

    MariaDB commits before it changes a table, so tests need ``transaction=True``.
    """
    table = EventLog._meta.db_table
    if connection.vendor == "sqlite":
        _execute(
            f"CREATE TRIGGER no_bad BEFORE INSERT ON {table} WHEN EXISTS "
            f"(SELECT 1 FROM (SELECT NEW.type AS type, NEW.status AS status) WHERE {condition}) "
            "BEGIN SELECT RAISE(ABORT, 'no_bad'); END"
        )
    else:
        _execute(f"ALTER TABLE {table} ADD CONSTRAINT no_bad CHECK (NOT ({condition}))")
    try:
        yield
    finally:
        if connection.vendor == "sqlite":
            _execute("DROP TRIGGER no_bad")
        else:
            _execute(f"ALTER TABLE {table} DROP CONSTRAINT no_bad")


def _execute(sql):
    with connection.cursor() as cursor:
        cursor.execute(sql)
