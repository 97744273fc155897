"""PostgreSQL's plans: statements must use their indexes with any statistics."""

import re
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.db import DataError, connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import dead_letters, retention
from django_eventbus.models import EventLane, EventLog
from django_eventbus.publishing.publisher import publish, publish_many
from django_eventbus.store import AttentionQuery, postgresql_sql
from tests.plans import explaining, make_tables_as_new

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="PostgreSQL's planner"),
]

QUEUE = "django_eventbus_queuedevent"
LANES = "django_eventbus_eventlane"


@pytest.fixture
def wrong_statistics(request, settings):
    """A table whose statistics are outdated."""
    make_tables_as_new()
    settings.EVENTBUS = {"QUEUES": ["default", "mail"]}
    run(f"ALTER TABLE {QUEUE} SET (autovacuum_enabled = off)")
    if request.param == "analyzed when empty":
        run(f"ANALYZE {QUEUE}")
        publish_many(("x", n) for n in range(5000))
    elif request.param == "analyzed when all was delayed":
        publish_many((("x", n) for n in range(5000)), delay=60)
        run(f"ANALYZE {QUEUE}")
        run(f"UPDATE {QUEUE} SET available_at = NULL")
    elif request.param == "analyzed when all was held":
        publish_many(("x", n) for n in range(5000))
        run(f"UPDATE {QUEUE} SET held_by = 7")
        run(f"ANALYZE {QUEUE}")
        run(f"UPDATE {QUEUE} SET held_by = NULL")
    elif request.param == "analyzed when the other queue was alone":
        publish_many((("x", n) for n in range(50)), queue="default")
        run(f"ANALYZE {QUEUE}")
        publish_many((("x", n) for n in range(5000)), queue="mail")
    elif request.param == "analyzed when nothing was pending":
        publish_many(("x", n) for n in range(5000))
        run(f"UPDATE {QUEUE} SET status = 'PROCESSING'")
        run(f"ANALYZE {QUEUE}")
        run(f"UPDATE {QUEUE} SET status = 'PENDING'")
    else:
        publish_many(("x", n) for n in range(5000))
    for setting in ("enable_hashjoin", "enable_mergejoin"):
        run(f"SET LOCAL {setting} = off")


def run(sql, params=None):
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        return cursor.fetchall() if cursor.description else None


def plan(store, sql, **params):
    run(postgresql_sql.ON_INDEXES)
    run("SET LOCAL django_eventbus.has_routing_lock = 'true'")
    known = {
        "namespace": "default",
        "queue": "default",
        "limit": 100,
        "token": uuid.uuid4(),
        "worker_id": uuid.uuid4(),
        "now": None,
        "priority": 0,
        "floor": 10,
        "above": 0,
        "held": [],
        "skip_locked": True,
    }
    return "\n".join(row[0] for row in run(f"EXPLAIN {sql}", {**known, **params}))


@pytest.mark.parametrize(
    "wrong_statistics",
    [
        "never analyzed",
        "analyzed when empty",
        "analyzed when all was delayed",
        "analyzed when all was held",
        "analyzed when the other queue was alone",
        "analyzed when nothing was pending",
    ],
    indirect=True,
)
@pytest.mark.parametrize(
    "sql",
    [postgresql_sql.CLAIM_FROM_START, postgresql_sql.CLAIM_ABOVE_FLOOR],
    ids=["start", "floor"],
)
def test_a_claim_uses_the_ready_index_with_any_statistics(wrong_statistics, store, sql):
    explained = plan(store, sql)
    assert f"Seq Scan on {QUEUE}" not in explained, explained
    assert "eventbus_ready" in explained
    # The update finds its rows by primary key, and nothing else uses it.
    assert explained.count(f"{QUEUE}_pkey") == 1, explained


@pytest.mark.parametrize(
    "wrong_statistics",
    ["analyzed when all was delayed", "analyzed when all was held", "analyzed when empty"],
    indirect=True,
)
def test_a_claim_takes_at_most_its_limit_with_any_plan(wrong_statistics, store, worker_id):
    for limit in (1, 10, 100):
        assert len(store.claim("default", limit=limit, worker_id=worker_id)) == limit


@pytest.mark.django_db(transaction=True)
def test_a_claim_restores_the_planner_settings(store, worker_id):
    store.claim("default", limit=1, worker_id=worker_id)
    assert run("SHOW enable_seqscan") == [("on",)]


def test_a_claim_inside_of_an_open_transaction_does_not_change_the_planner(store, worker_id):
    store.claim("default", limit=1, worker_id=worker_id)
    assert run("SHOW enable_seqscan") == [("on",)]


@pytest.mark.parametrize(
    "wrong_statistics", ["never analyzed", "analyzed when nothing was pending"], indirect=True
)
def test_the_search_for_keys_uses_its_indexes(wrong_statistics, store):
    explained = plan(store, postgresql_sql.KEYS_WAIT)
    assert "eventbus_unrouted" in explained
    assert "eventbus_lane_ready" in explained


@pytest.mark.parametrize(
    "wrong_statistics", ["analyzed when empty", "analyzed when all was delayed"], indirect=True
)
def test_a_router_reads_only_events_with_a_new_key(wrong_statistics, store):
    explained = plan(store, postgresql_sql.ROUTE, routed=100)
    assert "eventbus_unrouted" in explained, explained
    # The lock and the update find their rows by primary key, and nothing else uses it.
    assert explained.count(f"{QUEUE}_pkey") == 2, explained


@pytest.mark.parametrize("wrong_statistics", ["analyzed when empty"], indirect=True)
def test_a_lane_is_read_from_its_own_index(wrong_statistics, store):
    explained = plan(store, postgresql_sql.CLAIM_RUNS, owned=[7, 8], run=10)
    assert "eventbus_lane" in explained
    # The lock and the update find their rows by primary key, and nothing else uses it.
    assert explained.count(f"{QUEUE}_pkey") == 2, explained


@pytest.mark.parametrize(
    "wrong_statistics", ["never analyzed", "analyzed when empty"], indirect=True
)
@pytest.mark.parametrize(
    ("sql", "index"),
    [
        (postgresql_sql.ROUTE, "eventbus_unrouted"),
        (postgresql_sql.OWN_LANES, "eventbus_lane_ready"),
        (postgresql_sql.FREE_LANES, "eventbus_lane"),
    ],
    ids=["route", "own lanes", "free lanes"],
)
def test_lane_statements_use_an_index(wrong_statistics, store, sql, index):
    explained = plan(
        store, sql, routed=100, lanes=10, owned=[7, 8], waits=[0.0, None], held_by=[None, 5]
    )
    assert index in explained
    assert "Seq Scan on django_eventbus" not in explained, explained


@pytest.mark.parametrize("analyzed", ["never", "when nothing was held", "when all was held"])
def test_statements_about_held_events_and_lanes_use_an_index(store, analyzed):
    """These statements run with the planner settings of the session."""
    make_tables_as_new()
    for table in (QUEUE, LANES):
        run(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    publish_many(("x", n) for n in range(5000))
    EventLane.objects.bulk_create(
        EventLane(namespace="default", queue="default", key=str(n)) for n in range(5000)
    )
    if analyzed == "when nothing was held":
        run(f"ANALYZE {QUEUE}, {LANES}")
    run(f"UPDATE {QUEUE} SET held_by = id %% 3 WHERE id %% 2 = 0", [])
    run(f"UPDATE {LANES} SET held_by = id %% 3, ready_at = NULL WHERE id %% 2 = 0", [])
    if analyzed == "when all was held":
        run(f"ANALYZE {QUEUE}, {LANES}")
    with explaining() as plans:
        assert store.ids_that_hold(["default"]) == {0, 1, 2}
        assert store.release_held(1, limit=50, queues=["default"]) == 100
    assert len(plans) == 10
    for sql, found in plans:
        assert ("eventbus_held" if QUEUE in sql else "eventbus_lane_ready") in found, found
        assert "Sort" not in found, found


@pytest.mark.parametrize("analyzed", ["never", "when nothing was held", "when all was held"])
def test_a_look_for_held_events_stays_on_their_index(store, worker_id, analyzed):
    make_tables_as_new()
    run(f"ALTER TABLE {QUEUE} SET (autovacuum_enabled = off)")
    publish_many(("x", n) for n in range(5000))
    if analyzed == "when nothing was held":
        run(f"ANALYZE {QUEUE}")
    elif analyzed == "when all was held":
        run(f"UPDATE {QUEUE} SET held_by = 7")
        run(f"ANALYZE {QUEUE}")
        run(f"UPDATE {QUEUE} SET held_by = NULL")
    run(postgresql_sql.ON_INDEXES)  # As outside of a test's transaction.
    asked = AttentionQuery(worker_id=worker_id, queues=("default",))
    with explaining() as plans:
        assert not store.attention(asked).holds
        run(f"UPDATE {QUEUE} SET held_by = 7 WHERE id = (SELECT max(id) FROM {QUEUE})")
        assert store.attention(asked).holds
    for _, found in plans:
        assert re.search("Index (Only )?Scan using eventbus_held", found), found
        assert f"Seq Scan on {QUEUE}" not in found, found
    assert len(plans) == 2


def test_a_claim_changes_no_index(store, worker_id):
    """HOT updates are essential for the speed of a claim."""
    columns = {
        row[0]
        for row in run(
            "SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indexrelid "
            "WHERE i.indrelid = %s::regclass",
            [QUEUE],
        )
    }
    conditions = " ".join(
        row[0] or ""
        for row in run(
            "SELECT pg_get_expr(indpred, indrelid) FROM pg_index WHERE indrelid = %s::regclass",
            [QUEUE],
        )
    )
    changed = {"status", "attempts", "claim_token", "claimed_by", "processing_started_at"}
    assert not changed & columns
    assert not any(column in conditions for column in changed)


def test_every_update_of_a_claim_stays_on_its_page(store, worker_id):
    publish_many(("x", {"n": n}) for n in range(500))
    hot = "SELECT pg_stat_get_xact_tuples_hot_updated(%s::regclass)"
    before = run(hot, [QUEUE])[0][0]
    assert len(store.claim("default", limit=500, worker_id=worker_id)) == 500
    assert run(hot, [QUEUE])[0][0] - before == 500


def test_the_queue_table_is_never_truncated_under_its_readers():
    options = run("SELECT reloptions FROM pg_class WHERE relname = %s", [QUEUE])[0][0]
    assert "vacuum_truncate=off" in options


whatever_analyze_saw = pytest.mark.parametrize(
    "wrong_statistics",
    ["never analyzed", "analyzed when empty", "analyzed when nothing was pending"],
    indirect=True,
)


def assert_found_by_primary_key(sql, params):
    """The planner settings of the handlers' transaction are not changed."""
    explained = "\n".join(row[0] for row in run(f"EXPLAIN {sql}", params))
    assert f"Seq Scan on {QUEUE}" not in explained, explained
    assert f"{QUEUE}_pkey" in explained


@whatever_analyze_saw
def test_a_settlement_finds_its_events_by_primary_key(wrong_statistics):
    ids = "{" + ",".join(map(str, range(1, 501))) + "}"
    assert_found_by_primary_key(
        postgresql_sql.SETTLE, (ids, uuid.uuid4(), "COMPLETED", None, "", "", "")
    )


@whatever_analyze_saw
@pytest.mark.parametrize(
    "sql", [postgresql_sql.WRITE_DELIVERIES, postgresql_sql.POSTPONE], ids=["written", "postponed"]
)
def test_deliveries_find_their_events_by_primary_key(wrong_statistics, sql):
    params = {"ids": list(range(1, 501)), "written": "{}", "token": uuid.uuid4(), "now": None}
    assert_found_by_primary_key(sql, params)


@pytest.mark.django_db(transaction=True)
def test_a_claim_of_events_without_keys_is_one_round_trip(store, worker_id):
    publish_many(("x", n) for n in range(5))
    with CaptureQueriesContext(connection) as spoken:
        assert len(store.claim("default", limit=5, worker_id=worker_id)) == 5
    assert len(spoken) == 1, spoken.captured_queries


@pytest.mark.django_db(transaction=True)
def test_a_claim_that_skipped_lanes_detects_new_keys(store, worker_id):
    publish("x", {}, key="a")
    publish("x", {})
    keys = [
        event.key
        for _ in range(2)
        for event in store.claim("default", limit=1, worker_id=worker_id)
    ]
    assert set(keys) == {None, "a"}


@pytest.mark.django_db(transaction=True)
def test_a_claim_works_with_parameters_bound_by_the_server(store, worker_id, monkeypatch):
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "server_side_binding", True)
    connection.close()
    try:
        publish_many(("x", n) for n in range(5))
        assert len(store.claim("default", limit=5, worker_id=worker_id)) == 5
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("status", "index"),
    [
        ("completed", "eventbus_log_finished"),
        ("dead", "eventbus_log_dead"),
        ("failed", "eventbus_log_dead"),
    ],
)
def test_a_purge_reads_the_log_from_its_oldest_entry(status, index):
    make_tables_as_new()
    long_ago = datetime(2026, 3, 1, tzinfo=UTC)
    EventLog.objects.bulk_create(
        EventLog(
            id=n,
            namespace="default",
            type="x",
            # Large rows, because PostgreSQL prefers to read a table of a few pages completely.
            payload="x" * 1500,
            queue="default",
            created_at=long_ago,
            status="COMPLETED" if n % 100 else "FAILED",
            finished_at=long_ago + timedelta(seconds=n),
        )
        for n in range(1, 5001)
    )
    run("ANALYZE django_eventbus_eventlog")
    ended = retention.ended(timedelta(days=1), status=status)
    explained = ended.order_by("finished_at")[:100].explain()
    assert index in explained
    assert "Sort" not in explained


@pytest.mark.parametrize("analyzed", [True, False], ids=["analyzed", "never analyzed"])
def test_a_page_of_dead_letters_reads_their_index_in_order(store, analyzed):
    """Otherwise each page would read all dead letters again."""
    make_tables_as_new()
    now = datetime(2026, 3, 1, tzinfo=UTC)
    EventLog.objects.bulk_create(
        EventLog(
            id=n,
            namespace="default",
            type=f"bad.{n % 50}",
            queue="default",
            created_at=now,
            status="FAILED" if n % 3 else "COMPLETED",
            finished_at=now + timedelta(seconds=n),
        )
        for n in range(1, 5001)
    )
    if analyzed:
        run("ANALYZE django_eventbus_eventlog")
    rows = dead_letters.matching(type="bad.1*")
    for page in (rows, rows.filter(finished_at__gte=now + timedelta(seconds=700))):
        with explaining() as plans:
            assert len(store.page_of_dead(page, limit=100)) == 100
        ((_, found),) = plans
        assert "eventbus_log_dead " in found, found
        assert "Sort" not in found, found
    assert "finished_at >=" in found.partition("Index Cond")[2].splitlines()[0]


WAYS = ("enable_seqscan", "enable_bitmapscan", "enable_sort")


def planner():
    return run("SELECT " + ", ".join(f"current_setting('{way}')" for way in WAYS))[0]


@pytest.mark.parametrize(
    ("may_sort", "meanwhile"), [(False, ("off", "off", "off")), (True, ("off", "on", "on"))]
)
@pytest.mark.parametrize("server_side_binding", [False, True])
def test_reading_by_index_inside_of_a_transaction_restores_the_planner(
    store, monkeypatch, may_sort, meanwhile, server_side_binding
):
    monkeypatch.setattr(store, "_binds_on_server", lambda: server_side_binding)
    with store.reading_by_index(may_sort=may_sort):
        assert planner() == meanwhile
        with store.reading_by_index():
            assert planner() == ("off", "off", "off")
        assert planner() == meanwhile
    assert planner() == ("on", "on", "on")


def test_an_error_while_reading_by_index_restores_the_planner(store):
    with pytest.raises(DataError), store.reading_by_index():
        run("SELECT 1 / 0")
    assert planner() == ("on", "on", "on")


@pytest.mark.django_db(transaction=True)
def test_reading_by_index_ends_with_its_own_transaction(store):
    with store.reading_by_index():
        assert planner() == ("off", "off", "off")
    assert planner() == ("on", "on", "on")
