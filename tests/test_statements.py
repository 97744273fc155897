"""Recognise SQL that ends its transaction or changes its session."""

import pytest
from django.db import connection

from django_eventbus.delivery.statements import Effects, _effects, effects_of, text_of

ENDS = (
    "COMMIT",
    "commit work",
    " \n\tCoMmIt;",
    "END",
    "abort",
    "BEGIN",
    "START TRANSACTION",
    "ROLLBACK",
    "rollback and chain",
    "PREPARE TRANSACTION 'x'",
    "SELECT 1; END",
    "SELECT 1;;abort",
    "SELECT 1; /* x */ BEGIN",
    "SELECT ';'; COMMIT",
    "-- x\n-- y\ncommit",
    "/* x ' */ COMMIT",
    "SELECT 'it''s'; COMMIT",
)
ENDS_ELSEWHERE = (
    "/* a /* nested */ comment */ COMMIT",
    "SELECT $$ ; $$; COMMIT",
    "SELECT $a$ $b$ $a$; COMMIT",
    r"SELECT 'a\'; COMMIT",
    r"SELECT E'a\''; COMMIT",
    'SELECT "; x"; COMMIT',
    "CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; END; COMMIT",
    "--x\nCOMMIT",
)
ENDS_ON_MARIADB = (
    "/*! COMMIT */",
    "/*!50000 commit */",
    "/*M! COMMIT */",
    "/*M!100100 COMMIT */ SELECT 1",
    "/*!*/ COMMIT",
    "# x\nCOMMIT",
    r"SELECT 'a\''; COMMIT",
    "SELECT `;`; COMMIT",
    "XA START 'x'",
    "ANALYZE TABLE t",
    "analyze local table t",
    "OPTIMIZE TABLE t",
    "CHECK TABLE t",
    "REPAIR TABLE t",
    "FLUSH TABLES",
    "RESET QUERY CACHE",
    "CACHE INDEX t IN hot",
    "LOAD INDEX INTO CACHE t",
    "INSTALL SONAME 'x'",
    "UNINSTALL PLUGIN x",
    "CREATE USER x",
    "ALTER USER x ACCOUNT LOCK",
    "DROP USER x",
    "CREATE ROLE x",
    "DROP ROLE x",
    "RENAME USER x TO y",
    "SET PASSWORD = ''",
    "SET autocommit = 1",
    "SET @@autocommit = 1",
    "SET SESSION autocommit=1",
    "set @x = 1, @@session.autocommit = 1",
    "START SLAVE",
    "START ALL SLAVES",
    "STOP REPLICA",
    "CHANGE MASTER TO MASTER_HOST='x'",
    "LOCK TABLES t READ",
    "UNLOCK TABLES",
    "GRANT ALL ON *.* TO x",
    "REVOKE ALL ON *.* FROM x",
    "TRUNCATE t",
    "CREATE TABLE t (id int)",
    "CREATE OR REPLACE TABLE t (id int)",
    "DROP TABLE t",
    "ALTER TABLE t ADD x int",
    "SHUTDOWN",
)
HARMLESS = (
    "SELECT 1",
    "INSERT INTO t VALUES ('a; commit')",
    "INSERT INTO t VALUES ('it''s; commit; set x')",
    "UPDATE t SET \"end\" = 'x; END;'",
    "SELECT 1 -- ; commit",
    "SELECT 1 /* ; COMMIT; */",
    "SAVEPOINT x",
    "RELEASE SAVEPOINT x",
    "ROLLBACK TO x",
    "rollback work to savepoint x",
    "SELECT committed FROM t",
    "committed",
    "CALL work()",
    "EXPLAIN SELECT 1",
    "",
)
HARMLESS_ELSEWHERE = (
    "/*! COMMIT */ SELECT 1",
    "DO $$ BEGIN PERFORM 1; END; $$",
    "SELECT $x$; commit; $$; $x$",
    r"SELECT E'\'; COMMIT'",
    "CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; SELECT 2; END",
    "CREATE TRIGGER t AFTER INSERT ON x BEGIN DELETE FROM y; END",
    "TRUNCATE t",
    "ANALYZE t",
)
HARMLESS_ON_MARIADB = (
    r"SELECT 'a\'; COMMIT'",
    'SELECT "a\'; COMMIT"',
    "SELECT 1 # ; COMMIT",
    "SELECT 5--1; SELECT 2",
    "ANALYZE FORMAT=JSON SELECT 1",
    "CREATE TEMPORARY TABLE t (id int)",
    "CREATE OR REPLACE TEMPORARY TABLE t (id int)",
    "DROP TEMPORARY TABLE t",
    "SET @note = 'autocommit'",
)


@pytest.mark.parametrize("sql", [*ENDS, *ENDS_ELSEWHERE])
def test_sql_that_ends_the_transaction_is_recognised(sql):
    assert _effects(sql, False).ends_transaction


@pytest.mark.parametrize("sql", [*ENDS, *ENDS_ON_MARIADB])
def test_sql_that_ends_the_transaction_on_mariadb_is_recognised(sql):
    assert _effects(sql, True).ends_transaction


@pytest.mark.parametrize("sql", [*HARMLESS, *HARMLESS_ELSEWHERE])
def test_sql_that_only_resembles_the_end_of_a_transaction_is_accepted(sql):
    assert not _effects(sql, False).ends_transaction


@pytest.mark.parametrize("sql", [*HARMLESS, *HARMLESS_ON_MARIADB])
def test_sql_that_only_resembles_the_end_of_a_transaction_on_mariadb_is_accepted(sql):
    assert not _effects(sql, True).ends_transaction


@pytest.mark.parametrize(
    "sql",
    [
        "SET search_path = x",
        "sEt Role x",
        "/* x */ SET x = 1",
        "SELECT 1; SET x = 1",
        "SELECT SET_CONFIG('x', 'y', false)",
        "select Pg_Advisory_Lock(1)",
        "SELECT GET_LOCK('x', 1)",
        "RESET ALL",
        "DISCARD ALL",
        "LISTEN x",
        "USE other",
        "ATTACH 'x' AS y",
        "PRAGMA cache_size = 5",
        "CREATE TEMP TABLE x (id int)",
        "CREATE TEMPORARY TABLE x (id int)",
    ],
)
def test_sql_that_changes_its_session_is_recognised(sql):
    assert _effects(sql, False).changes_session


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE t SET x = 1",
        "INSERT INTO t VALUES ('; SET x')",
        "SET LOCAL x = 1",
        "SET CONSTRAINTS ALL DEFERRED",
        "PRAGMA table_info(t)",
        "SELECT pg_advisory_xact_lock(1)",
    ],
)
def test_sql_that_does_not_change_its_session_is_accepted(sql):
    assert not _effects(sql, False).changes_session


def test_settings_and_checks_of_a_transaction_are_recognised():
    assert _effects("SET LOCAL x = 1", False) == Effects(sets=True)
    checks = _effects("SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL DEFERRED", False)
    assert checks == Effects(sets=True, checks_constraints=True)
    assert _effects("PRAGMA foreign_key_check", False) == Effects(checks_constraints=True)


class Composed:
    """Like psycopg's sql.SQL, whose str() is not the SQL that is sent."""

    def as_string(self, context):
        return f"COMMIT -- {context is connection.connection}"


def test_the_text_that_is_checked_is_the_text_that_is_sent():
    assert text_of("a", connection) == "a"
    assert text_of(b"COMMIT \xff", connection) == "COMMIT \ufffd"
    assert text_of(bytearray(b"x"), connection) == "x"
    assert text_of(Composed(), connection) == "COMMIT -- True"
    assert effects_of(Composed(), connection).ends_transaction
    assert effects_of(b"commit", connection).ends_transaction


def test_long_sql_is_read_to_its_end():
    literal = "x" * 1_000_000
    assert effects_of(f"SELECT '{literal}'; COMMIT", connection).ends_transaction
    assert not effects_of(f"SELECT '{literal}; COMMIT'", connection).ends_transaction


@pytest.mark.parametrize(
    "piece", ["'", '"', "`", "$", "$a$", "/*", "*/", "e'\\", "--", ";", "create begin;", "set "]
)
@pytest.mark.parametrize("mariadb", [False, True])
def test_hostile_sql_is_read_in_linear_time(piece, mariadb):
    """A quadratic pattern would take minutes and exceed the time limit of the test."""
    _effects(piece * 300_000, mariadb)
