"""Imported by a process that is to die during its second transaction on the queue."""

import os
import signal

from django.db.backends.signals import connection_created

QUEUE = "django_eventbus_queuedevent"
ENVIRONMENT = {"EVENTBUS_TEST_IMPORT": __name__}


def die_if_some_are_there(execute, sql, params, many, context):
    if f"{sql}".lstrip().startswith("INSERT") and QUEUE in sql and queued(context["connection"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return execute(sql, params, many, context)


def queued(connection):
    """Count the committed rows, on another connection."""
    other = connection.copy()
    with other.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM {QUEUE}")
        (found,) = cursor.fetchone()
    other.close()
    return found


def watch(connection, **_):
    connection.execute_wrappers.append(die_if_some_are_there)


if os.environ.get("EVENTBUS_TEST_IMPORT") == __name__:
    connection_created.connect(watch)
