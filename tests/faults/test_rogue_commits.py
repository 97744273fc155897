"""Handlers that try to end the shared transaction (F15): no other event is handled twice.

PostgreSQL and SQLite refuse the COMMIT themselves. On MariaDB an unrecognised COMMIT is detected
afterwards; then the committed work is settled, and the handler is charged.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_eventbus import dead_letters, handler, publish_many
from django_eventbus.delivery import group, grouped
from django_eventbus.delivery.group import GroupTransaction
from django_eventbus.delivery.statements import Effects
from django_eventbus.internals.django import create_savepoint
from django_eventbus.models import EventLog, GroupGuard, QueuedEvent
from tests.bus import drain
from tests.faults import invariants
from tests.log_rows import log_refuses
from tests.shop.models import Effect, Order

pytestmark = pytest.mark.django_db(transaction=True)

NEIGHBOURS = 10
GUILTY = 6
PROCEDURE = "CREATE PROCEDURE rogue() {language} BEGIN COMMIT; END{end}"


def execute(sql):
    with connection.cursor() as cursor:
        cursor.execute(sql)


def raw(sql):
    """On the driver's own connection, which no execute wrapper sees."""
    with contextlib.closing(connection.connection.cursor()) as cursor:
        cursor.execute(sql)


def compose(text):
    from psycopg import sql

    return sql.SQL(text)


def swallow(attack, *args):
    with contextlib.suppress(Exception):
        attack(*args)


def commit_and_write():
    raw("COMMIT")
    raw("SELECT 1")


def executescript():
    with connection.cursor() as cursor:
        cursor.executescript("SELECT 1")


EVERYWHERE = {
    "COMMIT": lambda: execute("COMMIT"),
    "in another case, after comments": lambda: execute("/* x */ -- y\n CoMmIt"),
    "the driver's commit()": lambda: connection.connection.commit(),
    "COMMIT on the driver's connection": lambda: raw("COMMIT"),
    "commit and go on": commit_and_write,
    "the driver's commit(), swallowed": lambda: swallow(connection.connection.commit),
    "COMMIT, swallowed": lambda: swallow(raw, "COMMIT"),
    "the driver's rollback()": lambda: connection.connection.rollback(),
    "rollback and begin": lambda: (raw("ROLLBACK"), raw("BEGIN")),
}
ON = {
    "postgresql": {
        "a composed COMMIT": lambda: execute(compose("COMMIT")),
        "bytes": lambda: execute(b"COMMIT"),
        "END after another": lambda: execute("SELECT 1; END"),
        "BEGIN after another": lambda: execute("SELECT 1; abort; BEGIN"),
        "a nested comment": lambda: execute("/* a /* b */ c */ commit"),
        "a composed COMMIT past Django": lambda: connection.connection.execute(compose("COMMIT")),
        "COMMIT AND CHAIN past Django": lambda: raw("COMMIT AND CHAIN"),
        "ROLLBACK AND CHAIN past Django": lambda: raw("ROLLBACK AND CHAIN"),
        "several past Django": lambda: raw("SELECT 1; COMMIT; BEGIN"),
        "two phases past Django": lambda: raw("PREPARE TRANSACTION 'rogue'"),
        "a procedure": lambda: execute("CALL rogue()"),
        "an anonymous block": lambda: execute("DO $$ BEGIN COMMIT; END $$"),
    },
    "sqlite": {
        "END": lambda: raw("END TRANSACTION"),
        "executescript()": executescript,
    },
    "mysql": {
        "bytes": lambda: execute(b"COMMIT"),
        "after another": lambda: execute("SELECT 1; COMMIT"),
        "a versioned comment": lambda: execute("/*! COMMIT */"),
        "a comment of MariaDB alone": lambda: execute("/*M!100000 COMMIT */"),
        "ANALYZE": lambda: execute("ANALYZE TABLE shop_customer"),
        "OPTIMIZE": lambda: execute("OPTIMIZE TABLE shop_customer"),
        "CHECK": lambda: execute("CHECK TABLE shop_customer"),
        "REPAIR": lambda: execute("REPAIR TABLE shop_customer"),
        "FLUSH": lambda: execute("FLUSH TABLES"),
        "SET autocommit": lambda: execute("SET @@session.autocommit = 1"),
        "CREATE USER that fails": lambda: execute("CREATE USER root@localhost"),
        "CREATE TABLE": lambda: execute("CREATE TABLE IF NOT EXISTS shop_customer (id int)"),
        "a procedure": lambda: execute("CALL rogue()"),
        "EXECUTE IMMEDIATE": lambda: execute("EXECUTE IMMEDIATE 'COMMIT'"),
        "a compound statement": lambda: execute("IF 1 THEN COMMIT; END IF"),
        "ANALYZE past Django": lambda: raw("ANALYZE TABLE shop_customer"),
        "autocommit past Django": lambda: connection.connection.autocommit(True),
        "COMMIT AND CHAIN past Django": lambda: raw("COMMIT AND CHAIN"),
    },
}
ATTACKS = EVERYWHERE | ON[connection.vendor]


@pytest.fixture(autouse=True)
def one_group(monkeypatch):
    monkeypatch.setattr(grouped, "GROUP_SECONDS", float("inf"))


@pytest.fixture(autouse=True)
def procedure():
    """A stored procedure that commits, if the database has procedures."""
    language = {"postgresql": "LANGUAGE plpgsql AS $$", "mysql": ""}.get(connection.vendor)
    if language is None:
        yield
        return
    end = " $$" if language else ""
    execute("DROP PROCEDURE IF EXISTS rogue")
    execute(PROCEDURE.format(language=language, end=end))
    yield
    connection.close()
    execute("DROP PROCEDURE rogue")


@pytest.fixture(params=[True, False], ids=["recognised", "not recognised"])
def recognition(request, monkeypatch):
    """With and without the recognition of SQL that ends a transaction."""
    if not request.param:
        monkeypatch.setattr(group, "effects_of", lambda sql, connection: Effects())
    return request.param


def effects():
    """The number of effects per event."""
    notes = list(Effect.objects.values_list("note", flat=True))
    return {int(note): notes.count(note) for note in notes}


def run_with(attack):
    @handler("x", name="h", retry={"max_retries": 0})
    def write(event):
        Effect.objects.create(event_id=event.id, handler="h", note=str(event.payload))
        if event.payload == GUILTY:
            attack()

    publish_many(("x", n) for n in range(NEIGHBOURS + 1))
    drain()
    connection.close()


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_other_event_of_the_group_is_handled_twice_after_a_rogue_commit(attack, recognition):
    run_with(ATTACKS[attack])
    assert not QueuedEvent.objects.exists()
    assert not GroupGuard.objects.exists()
    left = effects()
    of_the_guilty = left.pop(GUILTY, 0)
    assert left == {n: 1 for n in range(NEIGHBOURS + 1) if n != GUILTY}
    charged = [dead.payload for dead in dead_letters.list()]
    if connection.vendor == "sqlite" and "swallowed" in attack:
        # SQLite refuses the COMMIT and keeps the transaction open.
        assert (charged, of_the_guilty) == ([], 1)
    else:
        assert charged == [GUILTY]
        assert of_the_guilty == 0 or connection.vendor == "mysql"
    assert EventLog.objects.count() == NEIGHBOURS + 1
    invariants.check()


@pytest.mark.parametrize("attack", ["COMMIT on the driver's connection", "the driver's commit()"])
def test_a_rogue_commit_of_a_handler_that_runs_alone_is_refused(attack, recognition):
    """Its writes and its settlement are committed together, or not at all."""

    @handler("x", name="h", isolated=True, retry={"max_retries": 0})
    def write(event):
        Effect.objects.create(event_id=event.id, handler="h")
        ATTACKS[attack]()

    publish_many([("x", 1)])
    drain()
    (dead,) = dead_letters.list()
    assert dead.error_type.endswith("BrokenTransactionError")
    assert "atomic=False" in dead.errors[0]["message"]
    assert not GroupGuard.objects.exists()
    if connection.features.can_defer_constraint_checks:
        assert not Effect.objects.exists()


@pytest.mark.parametrize("how", ["commit", "rollback"])
def test_a_handler_that_only_uses_the_drivers_connection_cannot_end_the_group(how, capture):
    """It opens no cursor through Django, so there is no savepoint whose loss could be detected."""

    @handler("x", name="h", retry={"max_retries": 0})
    def write(event):
        if event.payload == GUILTY:
            getattr(connection.connection, how)()
        else:
            Effect.objects.create(event_id=event.id, handler="h", note=str(event.payload))

    publish_many(("x", n) for n in range(NEIGHBOURS + 1))
    drain()
    connection.close()
    assert effects() == {n: 1 for n in range(NEIGHBOURS + 1) if n != GUILTY}
    assert EventLog.objects.count() == NEIGHBOURS + 1
    assert not GroupGuard.objects.exists()
    if how == "commit" and not connection.features.can_defer_constraint_checks:
        assert "a handler committed the transaction of its group" in capture.text


def test_events_that_failed_before_a_rogue_commit_keep_their_failure():
    """Their writes were rolled back before; only their retry is due."""

    @handler("x", name="h")
    def write(event):
        Effect.objects.create(event_id=event.id, handler="h", note=str(event.payload))
        if event.payload == 1:
            raise ValueError("of its own")
        if event.payload == GUILTY:
            raw("COMMIT")

    publish_many(("x", n) for n in range(NEIGHBOURS + 1))
    drain()
    connection.close()
    waiting = {event.payload: event.errors for event in QueuedEvent.objects.all()}
    assert waiting.keys() == {1, GUILTY}
    assert [error["message"] for error in waiting[1]] == ["of its own"]
    assert "atomic=False" in waiting[GUILTY][0]["message"]
    assert all(effects().get(n) == 1 for n in range(NEIGHBOURS + 1) if n not in (1, GUILTY))
    assert 1 not in effects()


def test_the_other_handlers_of_an_event_with_a_rogue_commit_run_once():
    """They run before and after the handler that commits."""

    def write(event):
        name = event.handler_name
        Effect.objects.create(event_id=event.id, handler=name, note=f"{event.payload}{name}")

    @handler("x", name="2", retry={"max_retries": 0})
    def commit(event):
        write(event)
        if event.payload == 1:
            raw("COMMIT")

    for name, priority in (("1", 1), ("3", -1)):
        handler("x", name=name, priority=priority)(write)
    handler("x", name="4", atomic=False)(write)
    publish_many(("x", n) for n in range(3))
    drain()
    connection.close()
    left = effects()
    assert left.pop(12, 0) == (0 if connection.features.can_defer_constraint_checks else 1)
    assert left == dict.fromkeys([1, 2, 3, 4, 11, 13, 14, 21, 22, 23, 24], 1)
    assert not QueuedEvent.objects.exists()
    (dead,) = dead_letters.list()
    assert (dead.payload, dead.status, dead.dead_handler) == (1, "COMPLETED_WITH_ERRORS", "2")
    invariants.check()


def test_an_event_that_the_log_refuses_does_not_affect_the_others_of_a_committed_group():
    """It waits with its error; the others are settled once, in the group or after it."""

    @handler("*", name="h", retry={"max_retries": 0})
    def write(event):
        Effect.objects.create(event_id=event.id, handler="h", note=str(event.payload))
        if event.payload == GUILTY:
            raw("COMMIT")

    publish_many(("bad" if n == 1 else "x", n) for n in range(NEIGHBOURS + 1))
    with log_refuses("type = 'bad'"):
        drain()
        connection.close()
    left = QueuedEvent.objects.get()
    assert (left.type, left.status, left.interruptions) == ("bad", "PENDING", 1)
    assert "no_bad" in left.errors[0]["message"]
    neighbours = [n for n in range(NEIGHBOURS + 1) if n not in (1, GUILTY)]
    assert {n: effects()[n] for n in neighbours} == dict.fromkeys(neighbours, 1)
    assert EventLog.objects.count() == NEIGHBOURS
    assert set(EventLog.objects.values_list("crashes", "interruptions")) == {(0, 0)}
    assert not GroupGuard.objects.exists()


def test_a_handler_may_check_the_constraints_of_its_transaction():
    """loaddata does this. The guard must not be reported as a broken reference."""
    if not connection.features.can_defer_constraint_checks:
        pytest.skip("constraints that are checked at commit")

    @handler("x", name="h", retry={"max_retries": 0})
    def write(event):
        Effect.objects.create(event_id=event.id, handler="h", note=str(event.payload))
        if event.payload == 3:
            with contextlib.suppress(ValueError), transaction.atomic():
                connection.check_constraints()
                raise ValueError("rolled back, and the guard is back")
        if event.payload >= 2:
            connection.check_constraints()
        if event.payload == 4:
            raise ValueError("of its own")

    publish_many(("x", n) for n in range(6))
    drain()
    assert [dead.payload for dead in dead_letters.list()] == [4]
    assert dead_letters.list()[0].errors[0]["message"] == "of its own"
    assert effects() == dict.fromkeys((0, 1, 2, 3, 5), 1)
    assert not GroupGuard.objects.exists()


def test_a_broken_reference_of_a_handler_is_not_reported_as_a_refused_commit():
    """A deferred constraint of the handler's own rows fails at the commit as well."""
    if connection.vendor != "postgresql":
        pytest.skip("SQLite does not name the table")

    @handler("x", name="h", retry={"max_retries": 0})
    def write(event):
        Effect.objects.create(event_id=event.id, handler="h", note=str(event.payload))
        if event.payload == 1:
            Order.objects.create(customer_id=10**6)

    publish_many(("x", n) for n in range(3))
    drain()
    (dead,) = dead_letters.list()
    assert (dead.payload, dead.error_type) == (1, "django.db.utils.IntegrityError")
    assert effects() == {0: 1, 2: 1}


def test_handlers_without_queries_insert_no_guard():
    handler("x", name="h")(lambda event: None)
    publish_many(("x", n) for n in range(3))
    with CaptureQueriesContext(connection) as queries:
        drain()
    sent = " ".join(query["sql"] for query in queries)
    assert GroupGuard._meta.db_table not in sent
    assert "SAVEPOINT" not in sent
    assert EventLog.objects.count() == 3


def test_a_group_inserts_one_guard_for_all_its_handlers():
    handler("x", name="h")(lambda event: Effect.objects.create(event_id=event.id, handler="h"))
    publish_many(("x", n) for n in range(10))
    with CaptureQueriesContext(connection) as queries:
        drain()
    table = GroupGuard._meta.db_table
    about_guards = [query["sql"] for query in queries if table in query["sql"]]
    assert len(about_guards) == 2
    assert "INSERT" in about_guards[0]
    assert "DELETE" in about_guards[1]


def test_the_guards_of_two_groups_do_not_conflict(store, monkeypatch):
    """At SERIALIZABLE any read of the table could conflict with other groups."""
    if connection.vendor != "postgresql":
        pytest.skip("serialization failures")
    serializable = {"options": "-c default_transaction_isolation=serializable"}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", serializable)
    connection.close()
    execute("VACUUM ANALYZE django_eventbus_groupguard")
    with ThreadPoolExecutor(1) as pool, transaction.atomic():
        other = pool.submit(transaction.atomic).result()
        pool.submit(other.__enter__).result()
        guard, guard_of_other = store.raise_guard(), pool.submit(store.raise_guard).result()
        assert store.lower_guard(guard)
        assert pool.submit(store.lower_guard, guard_of_other).result()
        pool.submit(other.__exit__, None, None, None).result()
        pool.submit(connections.close_all).result()
    assert not GroupGuard.objects.exists()
    connection.close()


# -- without the guard, the attacks succeed


def test_without_the_guard_a_rogue_commit_repeats_the_work_of_other_events(monkeypatch):
    monkeypatch.setattr(GroupTransaction, "_take_savepoint", without_guard)
    run_with(ATTACKS["COMMIT on the driver's connection"])
    assert 2 in effects().values()


def without_guard(group):
    create_savepoint(group.connection, group._sid)
    group._savepoint_pending = False
    group.savepoints += 1
