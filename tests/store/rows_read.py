"""How much does a statement read? Counted by the database, so that no test has to take time."""

from django.db import connection

QUEUE = "django_eventbus_queuedevent"


def rows_read(action):
    """Rows of the queue (SQLite: steps of its machine, some per row) that the action reads."""
    if connection.vendor == "sqlite":
        return _steps(action)
    counter = {"postgresql": _postgresql, "mysql": _mariadb}[connection.vendor]
    before = counter()
    action()
    return counter() - before


def _steps(action):
    steps = 0

    def count():
        nonlocal steps
        steps += 1

    connection.ensure_connection()
    connection.connection.set_progress_handler(count, 1)
    try:
        action()
    finally:
        connection.connection.set_progress_handler(None, 1)
    return steps


def _postgresql():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_stat_get_xact_tuples_returned(%s::regclass) + sum("
            "pg_stat_get_xact_tuples_returned(indexrelid)) FROM pg_index "
            "WHERE indrelid = %s::regclass",
            [QUEUE, QUEUE],
        )
        return int(cursor.fetchone()[0])


def _mariadb():
    with connection.cursor() as cursor:
        cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
        return sum(int(value) for _, value in cursor.fetchall())
