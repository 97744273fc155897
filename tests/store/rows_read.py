"""The number of rows that a statement reads, counted by the database instead of measuring time."""

from django.db import connection

TABLES = ["django_eventbus_queuedevent", "django_eventbus_eventlane"]


def rows_read(action):
    """The rows of the queue and of lanes that the action reads.

    On SQLite it is the number of steps of its virtual machine, several per row.
    """
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
            "SELECT sum(pg_stat_get_xact_tuples_returned(oid)) FROM pg_class "
            "WHERE oid = ANY (%s::regclass[]) OR oid IN "
            "(SELECT indexrelid FROM pg_index WHERE indrelid = ANY (%s::regclass[]))",
            [TABLES, TABLES],
        )
        return int(cursor.fetchone()[0])


def _mariadb():
    with connection.cursor() as cursor:
        cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
        return sum(int(value) for _, value in cursor.fetchall())
