"""event_doctor finds each fault of PostgreSQL, and its fix removes the fault."""

import re
import threading
from contextlib import suppress

import psycopg
import pytest
from django.db import connection

from django_eventbus.diagnosis import (
    postgresql_server,
    postgresql_sessions,
    postgresql_tables,
    watching,
)
from django_eventbus.diagnosis.catalogue import CHECKS, selected
from django_eventbus.diagnosis.examination import Bus, Verdict, examine
from django_eventbus.integrations.django_triggers import BridgeTrigger
from django_eventbus.models import EventLane, EventLog, GroupGuard, QueuedEvent
from django_eventbus.registry import subscribe
from django_eventbus.store import store_for
from tests.faults import server as servers
from tests.faults.doctor import (
    POSTGRESQL,
    apply,
    assert_ok,
    diagnose,
    eventually_ok,
    finding,
    process_id,
    run,
    session,
)
from tests.faults.proxy import through
from tests.shop.models import Order
from tests.workers import eventually

OK, WARN, FAIL, SKIPPED = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.SKIPPED
QUEUE, LANE, LOG, GUARD = (
    model._meta.db_table for model in (QueuedEvent, EventLane, EventLog, GroupGuard)
)
LOW = "eventbus_low"
ORDER = Order._meta.db_table
IDS = [each.id for each in CHECKS if each.id.startswith(POSTGRESQL)]

pytestmark = pytest.mark.skipif("connection.vendor != 'postgresql'", reason="PostgreSQL")


@pytest.fixture(scope="module")
def checked_server(template, tmp_path_factory):
    """A server for the tests of this module, with healthy settings."""
    with servers.directory() as root:
        made = servers.Cluster(template, root, tmp_path_factory.mktemp("doctor"))
        try:
            yield made.primary.start()
        finally:
            made.end()


@pytest.fixture
def database(checked_server, monkeypatch, django_db_blocker):
    """A migrated database for this test only. The models in the test process use it too."""
    name = "doctored"
    create = f"CREATE DATABASE {name} TEMPLATE {servers.NAME}"
    checked_server.sql(create, database="postgres")
    here = {"NAME": name, "USER": "postgres", "HOST": str(checked_server.sockets)}
    for key, value in {**here, "PASSWORD": "", "PORT": ""}.items():
        monkeypatch.setitem(connection.settings_dict, key, value)
    connection.close()
    try:
        with django_db_blocker.unblock():
            yield name
    finally:
        connection.close()
        checked_server.sql(f"DROP DATABASE {name} WITH (FORCE)", database="postgres")


@pytest.fixture
def low_role(database, monkeypatch):
    """Connect as a role that has rights on the tables of the bus only."""
    run(f"CREATE ROLE {LOW} LOGIN", f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {LOW}")
    connection.close()
    monkeypatch.setitem(connection.settings_dict, "USER", LOW)
    yield LOW
    connection.close()
    with session(f"REVOKE pg_read_all_stats FROM {LOW}", user="postgres") as other:
        other.execute(f"DROP OWNED BY {LOW}")
        other.execute(f"DROP ROLE {LOW}")


def test_a_fresh_database_is_healthy(database):
    for check_id in IDS:
        assert_ok(check_id)


@pytest.mark.django_db
@pytest.mark.parametrize("check_id", IDS)
def test_a_check_runs_on_any_server_and_in_a_transaction_of_the_caller(check_id):
    """The server of the tests may have any version, and faults of its own."""
    diagnosis = diagnose(check_id)
    assert diagnosis.verdict is not SKIPPED
    assert not [each for each in diagnosis.results if "raised" in each.summary], diagnosis
    assert connection.in_atomic_block
    run("CREATE TABLE writable (id int)")


@pytest.mark.django_db
def test_faults_in_an_open_transaction_are_seen():
    """A migration can run the checks before its commit."""
    run("DROP INDEX eventbus_ready", f"ALTER TABLE {LANE} SET (fillfactor = 100)")
    run(f"ALTER TABLE {LOG} SET (autovacuum_enabled = off)")
    run(f"ALTER TABLE {GUARD} DISABLE TRIGGER ALL")
    finding("EB065", FAIL, "index eventbus_ready")
    finding("EB063", WARN, f"{LANE} has fillfactor = 100")
    finding("EB062", FAIL, f"autovacuum is off for {LOG}")
    assert diagnose("EB068").verdict is FAIL


def test_a_check_leaves_no_setting_in_the_session(database):
    before = run("SELECT name, setting FROM pg_settings ORDER BY name")
    list(examine(Bus(store_for()), selected(POSTGRESQL)))
    assert run("SELECT name, setting FROM pg_settings ORDER BY name") == before


# -- sessions


def test_an_idle_transaction_is_named_and_its_end_is_the_fix(database, monkeypatch):
    with session("BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT 1") as other:
        assert_ok("EB050")
        monkeypatch.setattr(postgresql_sessions, "IDLE_SECONDS", 0.0)
        found = finding("EB050", WARN, f"session {process_id(other)} of postgres (a report)")
        assert "idle in transaction" in found.summary
        monkeypatch.setattr(postgresql_sessions, "FAILING_SECONDS", 0.0)
        finding("EB050", FAIL)
        apply(found.fix)
        eventually_ok("EB050")


def test_a_long_query_is_an_old_snapshot(database, monkeypatch):
    with session() as other:
        waiting = threading.Thread(target=sleep_in, args=(other,))
        waiting.start()
        monkeypatch.setattr(postgresql_sessions, "SNAPSHOT_SECONDS", 0.0)
        eventually(lambda: "state: active" in str(diagnose("EB050").results))
        apply(diagnose("EB050").results[0].fix)
        waiting.join()
    eventually_ok("EB050")


def sleep_in(other):
    with suppress(psycopg.Error):
        other.execute("SELECT pg_sleep(600)")


def test_a_transaction_without_a_snapshot_holds_nothing(database, monkeypatch):
    monkeypatch.setattr(postgresql_sessions, "IDLE_SECONDS", 0.0)
    with session("BEGIN", "SELECT 1"):
        assert_ok("EB050")


def test_a_forgotten_prepared_transaction_is_rolled_back(cluster, monkeypatch):
    assert_ok("EB051")
    cluster.primary.configure(max_prepared_transactions=5)
    connection.close()
    cluster.primary.restart()
    run("BEGIN", f"LOCK TABLE {LANE} IN SHARE MODE", "PREPARE TRANSACTION 'it''s lost'")
    assert_ok("EB051")
    finding("EB054", FAIL, "a prepared transaction holds ShareLock", LANE)
    monkeypatch.setattr(postgresql_sessions, "IDLE_SECONDS", 0.0)
    found = finding("EB051", WARN, "it's lost")
    apply(found.fix)
    assert_ok("EB051")
    assert_ok("EB054")


def test_a_slot_without_its_standby_holds_rows(cluster, monkeypatch):
    run("SELECT pg_create_physical_replication_slot('lost')")
    standby = cluster.add_standby()
    standby.configure(primary_slot_name="lost", hot_standby_feedback="on")
    with_xmin = "SELECT 1 FROM pg_replication_slots WHERE xmin IS NOT NULL"
    eventually(lambda: run(with_xmin))
    assert_ok("EB052")
    standby.stop()
    eventually(lambda: diagnose("EB052").verdict is WARN)
    found = finding("EB052", WARN, "'lost' has no consumer")
    burn_transactions(1000)
    monkeypatch.setattr(postgresql_sessions, "HELD_TRANSACTIONS", 100)
    finding("EB052", FAIL, "'lost' has no consumer")
    apply(found.fix)
    assert_ok("EB052")


def test_a_long_query_on_a_standby_holds_rows(cluster):
    standby = cluster.add_standby()
    standby.configure(hot_standby_feedback="on")
    connect = {"host": str(standby.sockets), "user": "postgres", "dbname": servers.NAME}
    with psycopg.connect(**connect) as report:
        report.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        report.execute("SELECT 1")
        eventually(lambda: run("SELECT 1 FROM pg_stat_replication WHERE backend_xmin IS NOT NULL"))
        burn_transactions(postgresql_sessions.HELD_TRANSACTIONS)
        eventually(lambda: diagnose("EB052").verdict is WARN)
        finding("EB052", WARN, "the standby 'walreceiver' is connected", "row versions")
    eventually_ok("EB052")


def burn_transactions(number):
    """Use up transaction ids. Nothing is written, so no commit waits for the disk."""
    run(
        f"DO $$ BEGIN FOR i IN 1..{number} LOOP PERFORM pg_current_xact_id(); COMMIT; "
        "END LOOP; END $$"
    )


@pytest.mark.parametrize(
    ("blocked_by", "blocked"),
    [
        (f"LOCK TABLE {LANE} IN ACCESS EXCLUSIVE MODE", f"SELECT count(*) FROM {LANE}"),
        (f"SELECT * FROM {GUARD} FOR UPDATE", f"DELETE FROM {GUARD}"),
    ],
    ids=["table", "row"],
)
def test_a_lock_wait_names_the_blocker(database, monkeypatch, blocked_by, blocked):
    run(f"INSERT INTO {GUARD} (id) VALUES (7)")
    monkeypatch.setattr(postgresql_sessions, "WAIT_SECONDS", 0.0)
    with session("BEGIN", blocked_by) as holder, session() as waiter:
        waiting = threading.Thread(target=waiter.execute, args=(blocked,))
        waiting.start()
        eventually(lambda: diagnose("EB053").verdict is WARN)
        found = finding(
            "EB053",
            WARN,
            f"session {process_id(waiter)} of postgres (a report) has waited",
            f"blocked by session {process_id(holder)} of postgres (a report) (idle in transaction",
        )
        monkeypatch.setattr(postgresql_sessions, "FAILING_WAIT_SECONDS", 0.0)
        finding("EB053", FAIL)
        apply(found.fix)
        waiting.join()
    assert_ok("EB053")


@pytest.mark.parametrize("mode", ["SHARE", "EXCLUSIVE", "ACCESS EXCLUSIVE"])
def test_a_strong_lock_is_reported_after_some_seconds(database, monkeypatch, mode):
    with session("BEGIN", f"LOCK TABLE {QUEUE} IN {mode} MODE") as other:
        assert_ok("EB054")
        monkeypatch.setattr(postgresql_sessions, "STRONG_LOCK_SECONDS", 0.0)
        found = finding("EB054", FAIL, f"session {process_id(other)}", QUEUE)
        apply(found.fix)
        eventually_ok("EB054")


def test_a_weak_lock_is_not_reported(database, monkeypatch):
    monkeypatch.setattr(postgresql_sessions, "STRONG_LOCK_SECONDS", 0.0)
    with session("BEGIN", f"LOCK TABLE {QUEUE} IN ROW EXCLUSIVE MODE"):
        assert_ok("EB054")


def test_the_doctor_does_not_hang_on_a_locked_table(database, monkeypatch):
    """Each check that reads the table or its size gives up after a short wait for the lock."""
    monkeypatch.setattr(postgresql_sessions, "STRONG_LOCK_SECONDS", 0.0)
    with session("BEGIN", f"LOCK TABLE {QUEUE}, {LANE}, {LOG} IN ACCESS EXCLUSIVE MODE"):
        found = {each.check.id: each for each in examine(Bus(store_for()), selected(POSTGRESQL))}
    assert found["EB054"].verdict is FAIL
    assert found["EB061"].verdict is SKIPPED
    assert "lock timeout" in found["EB061"].results[0].summary
    wrong = [each.results for each in found.values() if each.verdict is FAIL]
    assert len(wrong) == 1, wrong


def test_the_overview_names_the_holder_of_a_lock(database, monkeypatch):
    """The time of all checks together is limited there, and many of them wait for the lock."""
    monkeypatch.setattr(postgresql_sessions, "STRONG_LOCK_SECONDS", 0.0)
    monkeypatch.setattr(watching, "_last", {})
    with session("BEGIN", f"LOCK TABLE {QUEUE}, {LANE}, {LOG} IN ACCESS EXCLUSIVE MODE") as other:
        holder = f"session {process_id(other)} "
        found = watching.examined(Bus(store_for()))
    (by_lock,) = [each for each in found.diagnoses if each.check.id == "EB054"]
    assert holder in by_lock.results[0].summary, found


@pytest.mark.parametrize("limited", ["DATABASE doctored", "ROLE postgres"])
def test_a_connection_limit_is_reported_before_it_is_reached(database, limited):
    kind = limited.partition(" ")[0].lower()
    run(f"ALTER {limited} CONNECTION LIMIT 1")
    try:
        found = finding("EB055", FAIL, "1 of 1 connections", f"the {kind}")
        run(f"ALTER {limited} CONNECTION LIMIT 100")
        finding("EB055", OK, "1 of 100 connections", f"the {kind}")
    finally:
        apply(found.fix)
    assert len(diagnose("EB055").results) == 1


def test_the_connections_of_the_server_are_counted(cluster):
    cluster.primary.configure(max_connections=10, superuser_reserved_connections=2)
    connection.close()
    cluster.primary.restart()
    used = int(re.match(r"(\d+) of \d+", diagnose("EB055").results[0].summary)[1])
    allowed = int(re.search(r"of (\d+)", diagnose("EB055").results[0].summary)[1])
    spare = [connection.copy() for _ in range(allowed - used)]
    for each in spare:
        each.connect()
    finding("EB055", FAIL, f"{allowed} of {allowed} connections of the server")
    for each in spare:
        each.close()


def test_a_pooler_in_transaction_mode_is_found(pooler, settings):
    assert_ok("EB056")
    with through(pooler):
        found = finding("EB056", WARN, "same server process")
        assert found.fix == 'EVENTBUS["NOTIFY"] = False'
        settings.EVENTBUS = {**settings.EVENTBUS, "NOTIFY": False}
        assert_ok("EB056")


def test_a_server_without_free_connections_is_no_pooler(database):
    run(f"CREATE ROLE {LOW} LOGIN CONNECTION LIMIT 1")
    connection.close()
    connection.settings_dict["USER"] = LOW
    try:
        finding("EB056", SKIPPED, "too many connections for role")
    finally:
        connection.close()
        connection.settings_dict["USER"] = "postgres"
        run(f"DROP ROLE {LOW}")


def test_a_listener_in_a_transaction_fills_the_notify_queue(database):
    with session("LISTEN nothing", "BEGIN", "SELECT 1") as other:
        run("SELECT pg_notify('nothing', i || repeat('x', 7900)) FROM generate_series(1, 12000) i")
        found = finding("EB057", WARN, "of the NOTIFY queue")
        (oldest,) = run(found.fix)
        assert oldest[0] == process_id(other)
    run("NOTIFY nothing")
    eventually_ok("EB057")


# -- tables


def test_dead_rows_are_counted(database):
    """Autovacuum must not come first, so it is off for the table."""
    run(f"ALTER TABLE {LANE} SET (autovacuum_vacuum_threshold = 1000, autovacuum_enabled = off)")
    insert_lanes(15_000)
    assert_ok("EB060")
    run(f"DELETE FROM {LANE}")
    eventually(lambda: diagnose("EB060").verdict is WARN)
    found = finding("EB060", WARN, f"{LANE} has 15000 dead rows", "no VACUUM so far")
    run(f"ALTER TABLE {LANE} SET (autovacuum_vacuum_threshold = 100)")
    finding("EB060", FAIL, "autovacuum should start at 100 dead rows")
    apply(found.fix)
    eventually_ok("EB060")


def insert_lanes(number):
    run(
        f"INSERT INTO {LANE} (namespace, queue, key, version) "
        f"SELECT 'default', 'default', i, 0 FROM generate_series(1, {number}) i",
    )
    flush_statistics()


def flush_statistics():
    """The statistics of a session are visible at the latest when it ends."""
    connection.close()


def test_a_bloated_table_is_found(database, monkeypatch):
    monkeypatch.setattr(postgresql_tables, "BLOATED_BYTES", 1024**2)
    insert_lanes(20_000)
    eventually_ok("EB061")
    run(f"DELETE FROM {LANE}", f"VACUUM {LANE}")
    flush_statistics()
    eventually(lambda: diagnose("EB061").verdict is WARN)
    fixes = [
        finding("EB061", WARN, f"the {what} of {LANE} takes", "for 0 live rows").fix
        for what in ("indexes", "table")
    ]
    for each in fixes:
        apply(each)
    eventually_ok("EB061")


@pytest.mark.parametrize("prefix", ["", "toast."])
def test_autovacuum_of_a_table_is_off(database, prefix):
    run(f"ALTER TABLE {LOG} SET ({prefix}autovacuum_enabled = false)")
    apply(finding("EB062", FAIL, f"autovacuum is off for {LOG}").fix)
    assert_ok("EB062")


def test_autovacuum_of_the_server_is_off(cluster):
    cluster.primary.configure(autovacuum="off")
    found = finding("EB062", FAIL, "autovacuum is off for the whole server")
    apply(found.fix)
    eventually_ok("EB062")


@pytest.mark.parametrize(
    ("change", "now"),
    [
        ("SET (fillfactor = 100)", "fillfactor = 100; the migration sets fillfactor = 40"),
        ("RESET (vacuum_truncate)", "vacuum_truncate = unset"),
        ("SET (autovacuum_vacuum_scale_factor = 0.2)", "autovacuum_vacuum_scale_factor = 0.2"),
    ],
)
def test_changed_storage_parameters_are_found(database, change, now):
    run(f"ALTER TABLE {QUEUE} {change}")
    apply(finding("EB063", WARN, f"{QUEUE} has {now}").fix)
    assert_ok("EB063")


def test_other_notations_of_the_same_storage_parameters_are_equal(database):
    run(f"ALTER TABLE {QUEUE} SET (vacuum_truncate = false, autovacuum_vacuum_scale_factor = 0)")
    assert_ok("EB063")


def test_stale_planner_statistics_are_found(database, monkeypatch):
    run(f"ALTER TABLE {LANE} SET (autovacuum_enabled = off)")
    insert_lanes(20_000)
    eventually(lambda: diagnose("EB064").verdict is WARN)
    found = finding("EB064", WARN, LANE, "no ANALYZE so far")
    apply(found.fix)
    eventually_ok("EB064")
    run(f"UPDATE {LANE} SET version = 1")
    flush_statistics()
    assert_ok("EB064")
    for name in ("CHANGED_ROWS", "VACUUMED_WITHIN"):
        monkeypatch.setattr(postgresql_tables, name, 0)
    eventually(lambda: diagnose("EB064").verdict is WARN)
    apply(finding("EB064", WARN, f"20000 rows of {LANE} have changed", "last ANALYZE").fix)
    eventually_ok("EB064")


def test_every_index_and_constraint_of_the_migrations_is_missed(database):
    """The fix creates exactly what was dropped. Names that Django chose may differ."""
    before = schema()
    for definition in before:
        table, kind, _ = definition
        name = schema()[definition]
        drop = f"ALTER TABLE {table} DROP CONSTRAINT {name} CASCADE"
        run(f"DROP INDEX {name}" if kind == "i" else drop)
        results = [each for each in diagnose("EB065").results if each.verdict is FAIL]
        assert any(table in each.summary for each in results), name
        for each in results:
            apply(each.fix)
        assert_ok("EB065")
    assert schema().keys() == before.keys()


def schema():
    """The name of each index and constraint of the bus, by table, kind and definition.

    The checks of PositiveIntegerField are no part of the models and are omitted.
    """
    rows = run(
        """SELECT c.conrelid::regclass::text, c.conname::text, c.contype::text,
            pg_get_constraintdef(c.oid) FROM pg_constraint c
        WHERE c.conrelid::regclass::text LIKE 'django_eventbus_%'
          AND c.contype IN ('p', 'u', 'c', 'f') AND c.conname NOT LIKE '%_check'
        UNION ALL
        SELECT x.indrelid::regclass::text, i.relname::text, 'i', pg_get_indexdef(x.indexrelid)
        FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid
        WHERE x.indrelid::regclass::text LIKE 'django_eventbus_%'
          AND NOT EXISTS (SELECT FROM pg_constraint c WHERE c.conindid = x.indexrelid)"""
    )
    return {(table, kind, definition): name for table, name, kind, definition in rows}


def test_a_missing_table_is_created_by_the_migrations(database):
    run(f"DROP TABLE {LOG}")
    found = finding("EB065", FAIL, f"{LOG} has no table")
    assert found.fix == "manage.py migrate django_eventbus"


def test_a_foreign_key_that_is_not_deferred_guards_no_commit(database):
    name = run(
        f"SELECT conname FROM pg_constraint WHERE conrelid = '{GUARD}'::regclass AND contype = 'f'"
    )[0][0]
    run(f"ALTER TABLE {GUARD} ALTER CONSTRAINT {name} NOT DEFERRABLE")
    finding("EB065", FAIL, f"{GUARD} has no deferred foreign key")


def test_an_invalid_index_is_found(database):
    run(f"INSERT INTO {GUARD} (id) VALUES (1), (2)", "DROP INDEX eventbus_ready")
    with pytest.raises(Exception, match="could not create unique index"):
        run(f"CREATE UNIQUE INDEX CONCURRENTLY eventbus_ready ON {GUARD} ((1))")
    found = finding("EB066", FAIL, "eventbus_ready", "is invalid")
    assert found.fix == 'REINDEX INDEX CONCURRENTLY "eventbus_ready";'
    run(f"DELETE FROM {GUARD}")
    apply(found.fix)
    assert_ok("EB066")


def test_a_leftover_of_a_failed_reindex_is_dropped(database):
    run(f"INSERT INTO {GUARD} (id) VALUES (1), (2)")
    with pytest.raises(Exception, match="could not create unique index"):
        run(f"CREATE UNIQUE INDEX CONCURRENTLY eventbus_x_ccnew1 ON {GUARD} ((1))")
    apply(finding("EB066", FAIL, "eventbus_x_ccnew1", "is invalid").fix)
    assert_ok("EB066")


def test_a_table_that_is_not_frozen_in_time_is_found(database):
    run(f"ALTER TABLE {LANE} SET (autovacuum_freeze_max_age = 100000, autovacuum_enabled = off)")
    burn_transactions(130_000)
    found = finding("EB067", WARN, LANE, "autovacuum should freeze them after 100000")
    apply(found.fix)
    assert_ok("EB067")


def test_a_partitioned_log_is_no_fault(database):
    run(
        f"ALTER TABLE {LOG} RENAME TO not_partitioned",
        f"CREATE TABLE {LOG} (LIKE not_partitioned) PARTITION BY RANGE (finished_at)",
    )
    for check_id in ("EB060", "EB061", "EB062", "EB063", "EB064", "EB067"):
        assert_ok(check_id)


def test_a_disabled_trigger_of_a_bridge_is_found(database):
    operation = BridgeTrigger("Order", created="order.created", fields=["status"])
    for statement in store_for().trigger_sql(operation.trigger(Order), install=True):
        run(statement)
    finding("EB068", OK, "1 triggers of bridges")
    for how in ("DISABLE TRIGGER", "ENABLE REPLICA TRIGGER"):
        run(f"ALTER TABLE {ORDER} {how} eventbus_insert")
        apply(finding("EB068", FAIL, f"trigger eventbus_insert of {ORDER} is disabled").fix)
        assert_ok("EB068")


def test_a_disabled_commit_guard_is_found(database):
    run(f"ALTER TABLE {GUARD} DISABLE TRIGGER ALL")
    results = diagnose("EB068").results
    assert {each.verdict for each in results} == {FAIL}
    apply(results[0].fix)
    assert_ok("EB068")


def test_a_session_without_triggers_is_found(database):
    run("ALTER ROLE postgres SET session_replication_role = replica")
    connection.close()
    apply(finding("EB068", FAIL, "session_replication_role").fix)
    connection.close()
    assert_ok("EB068")


# -- the server


@pytest.mark.parametrize("name", ["fsync", "full_page_writes", "synchronous_commit"])
def test_commits_that_are_not_durable_are_found(cluster, name):
    cluster.primary.configure(**{name: "off"})
    apply(finding("EB070", FAIL, f"{name} is 'off'").fix)
    connection.close()
    eventually_ok("EB070")


def test_an_unlogged_table_is_found(database):
    run(f"ALTER TABLE {QUEUE} SET UNLOGGED")
    apply(finding("EB070", FAIL, f"{QUEUE} is UNLOGGED").fix)
    assert_ok("EB070")


def test_an_isolation_level_of_the_project_is_found(database, monkeypatch):
    level = psycopg.IsolationLevel.SERIALIZABLE
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "isolation_level", level)
    found = finding("EB071", WARN, "SERIALIZABLE")
    assert found.fix == "Remove isolation_level from OPTIONS of DATABASES['default']."


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_strict_isolation_level_is_found(database, level):
    run(f"ALTER DATABASE {database} SET default_transaction_isolation = '{level}'")
    connection.close()
    apply(finding("EB071", WARN, level.upper()).fix)
    connection.close()
    assert_ok("EB071")
    run("ALTER ROLE postgres RESET default_transaction_isolation")


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("idle_in_transaction_session_timeout", "an atomic handler may run for 45 s"),
        ("statement_timeout", "a statement of the bus may take"),
        ("idle_session_timeout", "an idle worker may be silent for"),
    ],
)
def test_a_timeout_that_is_shorter_than_a_handler_is_found(database, name, needed):
    subscribe("order.placed", print, name="slow", timeout=45)
    run(f"ALTER DATABASE {database} SET {name} = '4s'")
    connection.close()
    found = finding("EB072", WARN, f"{name} is 4.0 s", needed)
    apply(found.fix)
    connection.close()
    assert_ok("EB072")
    run(f"ALTER ROLE postgres RESET {name}")


@pytest.mark.parametrize(
    ("number", "verdict"),
    [(130012, FAIL), (140000, FAIL), (140003, FAIL), (140004, OK), (180001, OK)],
)
def test_versions(number, verdict):
    assert postgresql_server.version_result(number, "?").verdict is verdict


def test_statistics_that_are_off_are_found_and_other_checks_are_skipped(database):
    run(f"ALTER DATABASE {database} SET track_counts = off")
    connection.close()
    finding("EB074", FAIL, "track_counts is off")
    for check_id in ("EB060", "EB061", "EB064"):
        finding(check_id, SKIPPED, "track_counts is off")


def test_a_read_only_database_is_found(database):
    run(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    connection.close()
    finding("EB075", FAIL, "default_transaction_read_only")


def test_the_doctor_works_on_a_standby(cluster):
    standby = cluster.add_standby()
    connection.close()
    cluster.point_to(standby)
    found = {each.check.id: each for each in examine(Bus(store_for()), selected(POSTGRESQL))}
    assert found.pop("EB075").verdict is FAIL
    for check_id in ("EB060", "EB061", "EB064"):
        each = found.pop(check_id)
        assert each.verdict is SKIPPED
        assert "on the primary" in each.results[0].summary
    assert {each.verdict for each in found.values()} == {OK}, found


# -- privileges


def test_a_role_without_privileges_gets_no_error(low_role):
    found = list(examine(Bus(store_for()), selected(POSTGRESQL)))
    assert {each.verdict for each in found} == {OK}, found


@pytest.mark.parametrize(
    ("check_id", "verdict", "hidden"),
    [
        ("EB050", WARN, "1 sessions that hold a snapshot"),
        ("EB054", FAIL, "holds AccessExclusiveLock"),
    ],
)
def test_what_a_role_may_not_see_is_skipped_with_the_grant(
    low_role, monkeypatch, check_id, verdict, hidden
):
    for name in ("IDLE_SECONDS", "STRONG_LOCK_SECONDS"):
        monkeypatch.setattr(postgresql_sessions, name, 0.0)
    statements = (
        "BEGIN ISOLATION LEVEL REPEATABLE READ",
        f"LOCK TABLE {LANE} IN ACCESS EXCLUSIVE MODE",
        "SELECT 1",
    )
    with session(*statements, user="postgres") as other:
        found = finding(check_id, SKIPPED, f"session {process_id(other)} of postgres", hidden)
        grant = re.search(r"GRANT .*?;", found.summary)[0]
        with session(grant, user="postgres"):
            finding(check_id, verdict, f"session {process_id(other)} of postgres (a report)")


def test_a_blocker_of_another_role_is_named_without_its_state(low_role, monkeypatch):
    monkeypatch.setattr(postgresql_sessions, "WAIT_SECONDS", 0.0)
    lock = f"LOCK TABLE {LANE} IN ACCESS EXCLUSIVE MODE"
    with session("BEGIN", lock, user="postgres") as holder, session() as waiter:
        waiting = threading.Thread(target=waiter.execute, args=(f"SELECT 1 FROM {LANE}",))
        waiting.start()
        eventually(lambda: diagnose("EB053").verdict is WARN)
        finding("EB053", WARN, f"blocked by session {process_id(holder)} of postgres (a report)")
        holder.rollback()
        waiting.join()
