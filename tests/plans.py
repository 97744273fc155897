"""Tables and plans of PostgreSQL."""

from contextlib import contextmanager

from django.db import connection

from django_eventbus.models import EventLane, EventLog, QueuedEvent

TABLES = [model._meta.db_table for model in (QueuedEvent, EventLane, EventLog)]


def make_tables_as_new():
    """Truncate the tables until the test's transaction is rolled back (PostgreSQL).

    Rows of earlier tests are deleted, but their pages are not: the planner considers a mostly empty
    index expensive and may prefer a sequential scan. Autovacuum cannot write statistics of the new
    files either.
    """
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {', '.join(TABLES)}")


@contextmanager
def explaining(*, analyze=False):
    """Collect (statement, plan) of every query on these tables.

    Each plan is made at the time of the query, with the planner settings that the store has set.
    With ``analyze`` it includes the number of rows of each node.
    """
    found = []
    how = "EXPLAIN (ANALYZE, TIMING OFF)" if analyze else "EXPLAIN"

    def explain(execute, sql, params, many, context):
        if sql.lstrip().startswith(("SELECT", "WITH")) and any(table in sql for table in TABLES):
            execute(f"{how} {sql}", params, many, context)
            found.append((sql, "\n".join(row[0] for row in context["cursor"].fetchall())))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(explain):
        yield found


def that_read(queries):
    """The captured queries without savepoints and settings of the planner."""
    return [query for query in queries if " FROM " in query["sql"]]
