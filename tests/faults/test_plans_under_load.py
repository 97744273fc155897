"""The number of blocks that a claim reads: F26, F28."""

import os
import re
import uuid

import psycopg
import pytest
from django.db import connection

from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing.publisher import publish_many
from django_eventbus.store import (
    AT_ONCE,
    LOWEST_ID,
    Completed,
    postgresql,
    postgresql_sql,
    store_for,
)
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.faults import invariants

pytestmark = pytest.mark.long

EVENTS = int(os.environ.get("EVENTBUS_FAULT_EVENTS", 2000)) * 10
ROWS = int(os.environ.get("EVENTBUS_FAULT_ROWS", 200_000))
LIMIT = 100
QUEUE = QueuedEvent._meta.db_table
LOG = EventLog._meta.db_table


def run(sql, params=None):
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        return cursor.fetchall() if cursor.description else None


def registered():
    registration = new_registration(WorkerOptions(using="default", queues=("default",)))
    store_for().register(registration)
    return registration.pk


def blocks_read():
    """Blocks of the queue and its indexes that this session has read so far."""
    run("SELECT pg_stat_force_next_flush()")
    return run(
        "SELECT heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read "
        "FROM pg_statio_user_tables WHERE relname = %s",
        [QUEUE],
    )[0][0]


def test_an_old_snapshot_does_not_increase_the_blocks_a_claim_reads(cluster, figures, monkeypatch):
    """F26: dead rows that vacuum cannot remove are not read again by every claim."""
    # Once a second a claim starts at the floor and reads them all, which would distort the count.
    monkeypatch.setattr(postgresql, "SWEEP_EVERY", float("inf"))
    cluster.primary.configure(synchronous_commit="off")
    store, worker_id, costs = store_for(), registered(), []
    publish_many(("x", n) for n in range(EVENTS))
    with psycopg.connect(host=str(cluster.address), user="postgres", dbname="eventbus") as snapshot:
        snapshot.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        snapshot.execute(f"SELECT count(*) FROM {LOG}")
        for _ in range(EVENTS // LIMIT):
            before = blocks_read()
            events = store.claim("default", limit=LIMIT, worker_id=worker_id)
            costs.append(blocks_read() - before)
            with store.atomic():
                store.settle(events[0].claim.token, [Completed(e.row_id) for e in events])
        run(f"VACUUM {QUEUE}")
        dead = run(f"SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = '{QUEUE}'")[0][0]
        assert dead >= EVENTS, "the snapshot kept no dead rows, so the test proves nothing"
    tenth = len(costs) // 10
    early, late = sum(costs[1 : tenth + 1]) / tenth, sum(costs[-tenth:]) / tenth
    figures(f"{EVENTS} events, {dead} dead rows; blocks per claim: {early:.0f}, then {late:.0f}")
    invariants.check()
    assert EventLog.objects.count() == EVENTS
    assert late < early * 1.5


@pytest.fixture
def full_of_others(cluster):
    """Many logged, delayed and keyed events, and few ready ones."""
    cluster.primary.configure(fsync="off", synchronous_commit="off", max_wal_size="4GB")
    publish_many([("x", 0)])
    run(f"CREATE TEMP TABLE pattern AS SELECT * FROM {QUEUE}")
    columns = ", ".join(postgresql_sql.MOVED_COLUMNS)
    others = columns.replace("event_id", "gen_random_uuid()")
    run(
        f"INSERT INTO {LOG} (id, {columns}, status, finished_at, dead_handler, error_type, "
        f"error_fingerprint) SELECT -n, {others}, 'COMPLETED', now(), '', '', '' "
        f"FROM pattern, generate_series(1, {ROWS}) AS n"
    )
    deep = re.sub(r"\bkey\b", "'deep'", others)
    for values, moment in ((others, "now() + interval '1 hour'"), (deep, "NULL")):
        run(
            f"INSERT INTO {QUEUE} ({columns}, status, available_at) "
            f"SELECT {values}, status, {moment} FROM pattern, generate_series(1, {ROWS // 10})"
        )
    publish_many(("x", n) for n in range(1000))
    for table in (QUEUE, LOG):
        run(f"ANALYZE {table}")


PARAMETERS = {
    "namespace": "text",
    "queue": "text",
    "limit": "int",
    "token": "uuid",
    "worker_id": "uuid",
    "now": "timestamptz",
    "priority": "smallint",
    "floor": "bigint",
    "routed": "int",
    "above": "bigint",
    "skip_locked": "boolean",
    "held": "text[]",
}


def explained(sql, **values):
    """The generic plan and the blocks it read."""
    numbers = {name: f"${n}" for n, name in enumerate(PARAMETERS, 1)}
    given = {
        "namespace": "default",
        "queue": "default",
        "limit": LIMIT,
        "token": uuid.uuid4(),
        "worker_id": uuid.uuid4(),
        "now": None,
        "priority": 0,
        "floor": 1,
        "routed": LIMIT,
        "above": LOWEST_ID,
        "skip_locked": False,
        "held": [],
        **values,
    }
    run("SET LOCAL plan_cache_mode = force_generic_plan")
    run(postgresql_sql.ON_INDEXES)
    types = ", ".join(PARAMETERS.values())
    run(f"PREPARE guarded ({types}) AS {sql % numbers}")
    holes = ", ".join(["%s"] * len(given))
    plan = "\n".join(
        row[0]
        for row in run(
            f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF) EXECUTE guarded ({holes})",
            [given[name] for name in PARAMETERS],
        )
    )
    run("DEALLOCATE guarded")
    hit = re.search(r"Buffers: shared (?:hit=(\d+))?(?: ?read=(\d+))?", plan)
    return plan, sum(int(each or 0) for each in hit.groups())


def test_plans_stay_the_same_in_a_large_database(cluster, full_of_others, figures):
    """F28: no statement of a claim depends on statistics or reads events that are not due."""
    store, worker_id = store_for(), registered()
    costs = {}
    for name, sql, values in (
        ("claim from the start", postgresql_sql.CLAIM_FROM_START, {}),
        ("claim above the floor", postgresql_sql.CLAIM_ABOVE_FLOOR, {}),
        ("look for keys", postgresql_sql.KEYS_WAIT, {}),
        ("route", postgresql_sql.ROUTE, {}),
        ("route past locks", postgresql_sql.ROUTE, {"skip_locked": True}),
    ):
        with store.atomic():
            run("SET LOCAL django_eventbus.has_routing_lock = 'true'")
            plan, costs[name] = explained(sql, worker_id=worker_id, **values)
            assert "Seq Scan" not in plan.replace("Seq Scan on django_eventbus_eventworker", "")
            store.connection.set_rollback(True)
    run(f"ANALYZE {QUEUE}")
    reads = {}
    for _ in range(20):
        before = blocks_read()
        events = store.claim("default", limit=LIMIT, worker_id=worker_id)
        kind = "keyed" if any(event.key for event in events) else "unkeyed"
        reads.setdefault(kind, []).append(blocks_read() - before)
        with store.atomic():
            store.settle(events[0].claim.token, [Completed(e.row_id) for e in events])
        store.release_lanes(
            events[0].claim.token, {e.lane_id: AT_ONCE for e in events if e.lane_id is not None}
        )
    worst = max(max(each) for each in reads.values())
    figures(
        f"{ROWS} log rows, {ROWS // 10} delayed, {ROWS // 10} of one key; blocks: {costs}, "
        f"at most {worst} in a whole claim of {LIMIT}"
    )
    invariants.check()
    assert "keyed" in reads
    assert max(costs.values()) < LIMIT * 12
    assert worst < (LIMIT + postgresql.ROUTED_AT_LEAST) * 12
