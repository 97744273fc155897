"""Tables for the planner to look at."""

from django.db import connection

from django_eventbus.models import EventLane, EventLog, QueuedEvent


def make_tables_as_new():
    """Give them new files until the test's transaction is rolled back (PostgreSQL).

    Rows of earlier tests are gone, but not the room they took: an index that is mostly empty is a
    dear one to the planner, and reading the whole table may look cheaper. Nor can the autovacuum
    write statistics of its own in between.
    """
    tables = ", ".join(model._meta.db_table for model in (QueuedEvent, EventLane, EventLog))
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {tables}")
