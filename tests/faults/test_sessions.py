"""Handlers that change the session they run in (F16).

Changes that a handler makes to its session end with its transaction. A handler that breaks its own
settlement has failed; the next handler or event gets an unchanged session.
"""

import pytest
from django.db import connection, connections, transaction

from django_eventbus import handler
from django_eventbus.publishing.publisher import publish
from tests.bus import drain, logged
from tests.faults import invariants
from tests.shop.models import Effect

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("on_postgresql"),
]


def execute(sql):
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone() if cursor.description else None


def session():
    """The session state that could affect the next handler."""
    settings = ("role", "search_path", "statement_timeout", "lock_timeout", "TimeZone")
    return execute(
        "SELECT current_user, "
        + ", ".join(f"current_setting('{name}')" for name in settings)
        + ", current_setting('default_transaction_read_only')"
        ", (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory')"
        ", (SELECT count(*) FROM pg_listening_channels()), to_regclass('pg_temp.scratch')"
    )


def die_quietly():
    try:
        execute("SELECT pg_terminate_backend(pg_backend_pid())")
    except Exception:
        return


def SQL(text):
    """SQL that str() does not show as it is sent."""
    from psycopg import sql

    return sql.SQL(text)


DEEDS = {
    "closes all connections": connections.close_all,
    "ends its backend": lambda: execute("SELECT pg_terminate_backend(pg_backend_pid())"),
    "ends its backend and says nothing": die_quietly,
    "takes another role": lambda: execute("SET ROLE pg_monitor"),
    "takes another role for now": lambda: execute("SET LOCAL ROLE pg_monitor"),
    "looks elsewhere for tables": lambda: execute("SET search_path = nowhere"),
    "sets a timeout": lambda: execute("SET statement_timeout = '10min'"),
    "sets a timeout for now": lambda: execute("SET LOCAL lock_timeout = '10min'"),
    "sets a timeout by function": lambda: execute(
        "SELECT set_config('statement_timeout', '10min', false)"
    ),
    "turns to reading only": lambda: execute("/* x */ SET default_transaction_read_only = on"),
    "lives in another time zone": lambda: execute("SELECT 1; SET TimeZone = 'Asia/Tokyo'"),
    "looks elsewhere by a composed statement": lambda: execute(SQL("SET search_path = nowhere")),
    "sets a timeout by a composed statement": lambda: execute(SQL("SET lock_timeout = '10min'")),
    "sets a timeout by bytes": lambda: execute(b"SET lock_timeout = '10min'"),
    "sets a timeout in another case": lambda: execute("/* a /* b */ */ sEt lock_timeout = '10min'"),
    "sets a timeout by function in another case": lambda: execute(
        "SELECT Set_Config('statement_timeout', '10min', false)"
    ),
    "sets a timeout past a literal": lambda: execute("SELECT ';'; SET lock_timeout = '10min'"),
    "keeps an advisory lock": lambda: execute("SELECT pg_advisory_lock(16)"),
    "listens": lambda: execute("LISTEN f16"),
    "makes a temporary table": lambda: execute("CREATE TEMP TABLE scratch (id int)"),
}
#: These break their settlement, if it is in the same transaction.
BREAK_THEIR_TRANSACTION = {
    "closes all connections",
    "ends its backend",
    "ends its backend and says nothing",
    "takes another role",
    "takes another role for now",
    "looks elsewhere for tables",
    "looks elsewhere by a composed statement",
}
FAIL_OUTSIDE = {"ends its backend", "ends its backend and says nothing"}


@pytest.mark.parametrize("atomic", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("deed", DEEDS)
def test_a_handler_cannot_change_the_session_of_others(deed, atomic):
    seen = []

    @handler("mischief", atomic=atomic, priority=1, retry={"max_retries": 0})
    def do_it(event):
        Effect.objects.create(event_id=event.id, handler="do_it")
        DEEDS[deed]()

    @handler("mischief", "harmless", name="witness", atomic=atomic)
    def witness(event):
        seen.append(session())
        Effect.objects.create(event_id=event.id, handler="witness")

    pristine = session()
    before = publish("harmless", {})
    guilty = publish("mischief", {})
    after = publish("harmless", {})
    drain()
    assert set(seen) == {pristine}
    assert logged(before).status == logged(after).status == "COMPLETED"
    failed = deed in (BREAK_THEIR_TRANSACTION if atomic else FAIL_OUTSIDE)
    assert logged(guilty).status == ("COMPLETED_WITH_ERRORS" if failed else "COMPLETED")
    assert Effect.objects.filter(handler="witness").count() == 3
    # Outside of a transaction the effect is not rolled back.
    assert Effect.objects.filter(handler="do_it").count() == (not atomic or not failed)
    assert session() == pristine
    invariants.check()


@pytest.mark.parametrize("deed", DEEDS)
def test_a_callback_cannot_change_the_session_of_others(deed):
    """Changes that an on_commit callback makes to its session end with the callback."""
    seen = []

    @handler("mischief", name="register")
    def register(event):
        transaction.on_commit(DEEDS[deed])
        transaction.on_commit(lambda: seen.append(session()))

    @handler("harmless", name="witness")
    def witness(event):
        seen.append(session())
        Effect.objects.create(event_id=event.id, handler="witness")

    pristine = session()
    publish("mischief", {})
    publish("harmless", {})
    drain(batch_size=1)
    assert seen == [pristine, pristine]
    assert Effect.objects.count() == 1
    assert session() == pristine
    invariants.check()


def test_a_query_is_cancelled_at_its_deadline_on_a_new_connection():
    """In a thread there is no signal that could interrupt the query."""

    @handler("close", retry={"max_retries": 0})
    def close(event):
        connection.close()

    @handler("sleep", timeout=0.3, retry={"max_retries": 0})
    def sleep(event):
        execute("SELECT pg_sleep(100)")

    closed = publish("close", {})
    slept = publish("sleep", {})
    drain(concurrency=2)
    assert logged(closed).status == "FAILED"
    assert logged(slept).error_type == "TimeoutError"
    invariants.check()
