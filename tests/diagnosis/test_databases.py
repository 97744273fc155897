"""Checks of SQLite and MariaDB: each finds its fault, and is ok without it."""

import pytest
from django.db import connection, connections

from django_eventbus.models import EventWorker

only_sqlite = pytest.mark.skipif(connection.vendor != "sqlite", reason="a check of SQLite")
only_mariadb = pytest.mark.skipif(connection.vendor != "mysql", reason="a check of MariaDB")
# A PRAGMA and ALTER TABLE do not run inside the transaction of a test.
pytestmark = pytest.mark.django_db(transaction=True)


def execute(statement, *values):
    with connection.cursor() as cursor:
        cursor.execute(statement, values or None)


@pytest.fixture
def own_session():
    """Reconnect after the test: a new session has the settings of the project again."""
    yield
    connection.close()


@only_sqlite
@pytest.mark.parametrize("check_id", ["EB030", "EB032", "EB033"])
def test_the_recommended_options_of_sqlite_are_ok(check_id, diagnose, own_session):
    execute("PRAGMA journal_mode=WAL")
    assert diagnose(check_id).verdict == "ok"


@only_sqlite
def test_sqlite_without_wal(diagnose, own_session):
    execute("PRAGMA journal_mode=DELETE")
    found = diagnose("EB030")
    assert found.verdict == "fail"
    assert found.results[0].summary == "the journal mode is DELETE"


@only_sqlite
@pytest.mark.parametrize(
    ("level", "verdict"), [("FULL", "ok"), ("NORMAL", "warn"), ("OFF", "fail")]
)
def test_sqlite_that_may_lose_commits(diagnose, own_session, level, verdict):
    execute(f"PRAGMA synchronous={level}")
    assert diagnose("EB031").verdict == verdict


@only_sqlite
def test_sqlite_with_a_short_busy_timeout(diagnose, own_session):
    execute("PRAGMA busy_timeout=5000")
    found = diagnose("EB032")
    assert found.verdict == "warn"
    assert found.results[0].summary == "a connection waits 5 seconds for the write lock"


@only_sqlite
def test_sqlite_with_deferred_transactions(diagnose, monkeypatch):
    connection.ensure_connection()  # A new connection reads the mode from the settings.
    monkeypatch.setattr(connections["default"], "transaction_mode", None)
    assert diagnose("EB033").verdict == "warn"


@only_sqlite
def test_the_examination_keeps_the_settings_of_the_session(diagnose):
    diagnose("EB030")
    with connection.cursor() as cursor:
        assert cursor.execute("PRAGMA query_only").fetchone() == (0,)
        assert cursor.execute("PRAGMA busy_timeout").fetchone() == (20_000,)


@only_mariadb
@pytest.mark.parametrize("check_id", ["EB040", "EB042", "EB043", "EB044"])
def test_a_usual_mariadb_is_ok(check_id, diagnose):
    assert diagnose(check_id).verdict == "ok"


@only_mariadb
def test_mariadb_with_repeatable_read(diagnose, own_session):
    execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    found = diagnose("EB040")
    assert found.verdict == "warn"
    assert found.results[0].summary == "the isolation level is REPEATABLE READ"


@pytest.fixture
def flush_at_commit():
    """Change the setting, which is global, and restore it."""
    name = "innodb_flush_log_at_trx_commit"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT @@{name}")
        (before,) = cursor.fetchone()
    yield lambda value: execute(f"SET GLOBAL {name} = {value}")
    execute(f"SET GLOBAL {name} = {before}")


@only_mariadb
@pytest.mark.parametrize(("value", "verdict"), [(1, "ok"), (2, "warn"), (0, "warn")])
def test_mariadb_that_may_lose_commits(diagnose, flush_at_commit, value, verdict):
    flush_at_commit(value)
    found = diagnose("EB041")
    assert found.verdict == verdict
    assert found.results[0].summary == f"innodb_flush_log_at_trx_commit is {value}"


@only_mariadb
def test_mariadb_without_strict_mode(diagnose, own_session):
    execute("SET SESSION sql_mode = 'NO_ENGINE_SUBSTITUTION'")
    found = diagnose("EB042")
    assert found.verdict == "fail"


@only_mariadb
def test_mariadb_with_small_packets(diagnose, settings):
    settings.EVENTBUS = {"MAX_PAYLOAD_BYTES": 64 * 1024 * 1024}
    assert diagnose("EB043").verdict == "warn"


@only_mariadb
def test_a_table_without_transactions(diagnose):
    table = EventWorker._meta.db_table
    execute(f"ALTER TABLE {table} ENGINE=Aria")
    try:
        found = diagnose("EB044")
    finally:
        execute(f"ALTER TABLE {table} ENGINE=InnoDB")
    assert found.verdict == "fail"
    assert found.results[0].fix == f"Run: ALTER TABLE {table} ENGINE=InnoDB;"


@only_mariadb
def test_the_examination_keeps_the_timeouts_of_the_session(diagnose):
    def timeouts():
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@max_statement_time, @@lock_wait_timeout")
            return cursor.fetchone()

    before = timeouts()
    diagnose("EB040")
    assert timeouts() == before
