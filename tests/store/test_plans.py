"""PostgreSQL's plans: the claim must stay on its index whatever the statistics say."""

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import retention
from django_eventbus.models import EventLog
from django_eventbus.publishing import publish, publish_many
from django_eventbus.store import postgresql
from tests.plans import make_tables_as_new

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="PostgreSQL's planner"),
]

QUEUE = "django_eventbus_queuedevent"


@pytest.fixture
def wrong_statistics(request, settings):
    """The table as ANALYZE saw it, and as it is now."""
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
    run(postgresql._ON_INDEXES)
    known = {
        "namespace": "default",
        "queue": "default",
        "limit": 100,
        "token": uuid.uuid4(),
        "worker_id": uuid.uuid4(),
        "now": None,
        "priority": 0,
        "floor": 10,
    }
    return "\n".join(row[0] for row in run(f"EXPLAIN {sql}", {**known, **params}))


@pytest.mark.parametrize(
    "wrong_statistics",
    [
        "never analyzed",
        "analyzed when empty",
        "analyzed when all was delayed",
        "analyzed when the other queue was alone",
        "analyzed when nothing was pending",
    ],
    indirect=True,
)
@pytest.mark.parametrize(
    "sql", [postgresql._CLAIM_FROM_START, postgresql._CLAIM_ABOVE_FLOOR], ids=["start", "floor"]
)
def test_a_claim_walks_the_ready_index_whatever_analyze_saw(wrong_statistics, store, sql):
    explained = plan(store, sql)
    assert f"Seq Scan on {QUEUE}" not in explained, explained
    assert "eventbus_ready" in explained
    # The update finds its rows by primary key, and nothing else uses it.
    assert explained.count(f"{QUEUE}_pkey") == 1, explained


@pytest.mark.parametrize(
    "wrong_statistics", ["analyzed when all was delayed", "analyzed when empty"], indirect=True
)
def test_a_claim_never_takes_more_than_its_limit_whatever_the_plan(
    wrong_statistics, store, worker_id
):
    for limit in (1, 10, 100):
        assert len(store.claim("default", limit=limit, worker_id=worker_id)) == limit


@pytest.mark.django_db(transaction=True)
def test_a_claim_leaves_the_planner_as_it_was(store, worker_id):
    store.claim("default", limit=1, worker_id=worker_id)
    assert run("SHOW enable_seqscan") == [("on",)]


def test_a_claim_inside_of_somebody_elses_transaction_leaves_the_planner_alone(store, worker_id):
    store.claim("default", limit=1, worker_id=worker_id)
    assert run("SHOW enable_seqscan") == [("on",)]


@pytest.mark.parametrize(
    "wrong_statistics", ["never analyzed", "analyzed when nothing was pending"], indirect=True
)
def test_a_look_for_keys_stays_on_its_indexes(wrong_statistics, store):
    explained = plan(store, postgresql._KEYS_WAIT)
    assert "eventbus_unrouted" in explained
    assert "eventbus_lane_ready" in explained


@pytest.mark.parametrize(
    "wrong_statistics", ["analyzed when empty", "analyzed when all was delayed"], indirect=True
)
def test_a_router_reads_no_events_but_those_with_a_new_key(wrong_statistics, store):
    explained = plan(store, postgresql._ROUTE, routed=100)
    assert "eventbus_unrouted" in explained, explained
    # The update finds its rows by primary key, and nothing else uses it.
    assert explained.count(f"{QUEUE}_pkey") == 1, explained


@pytest.mark.parametrize("wrong_statistics", ["analyzed when empty"], indirect=True)
def test_a_lane_is_read_from_its_own_index(wrong_statistics, store):
    explained = plan(store, postgresql._CLAIM_RUNS, owned=[7, 8], run=10)
    assert "eventbus_lane" in explained
    # The update finds its rows by primary key, and nothing else uses it.
    assert explained.count(f"{QUEUE}_pkey") == 1, explained


@pytest.mark.parametrize(
    "wrong_statistics", ["never analyzed", "analyzed when empty"], indirect=True
)
@pytest.mark.parametrize(
    ("sql", "index"),
    [
        (postgresql._ROUTE, "eventbus_unrouted"),
        (postgresql._OWN_LANES, "eventbus_lane_ready"),
        (postgresql._FREE_LANES, "eventbus_lane"),
    ],
    ids=["route", "own lanes", "free lanes"],
)
def test_what_lanes_cost_is_found_by_index(wrong_statistics, store, sql, index):
    explained = plan(
        store, sql, routed=100, lanes=10, owned=[7, 8], waits=[0.0, 1.0], parked=[None, None]
    )
    assert index in explained
    assert "Seq Scan on django_eventbus" not in explained, explained


def test_a_claim_changes_no_index(store, worker_id):
    """Updates in place (HOT) are what a claim's speed hangs on."""
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


def test_every_update_of_a_claim_finds_room_on_its_page(store, worker_id):
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
    """In the handlers' transaction the planner is left alone: the statement must be safe itself."""
    explained = "\n".join(row[0] for row in run(f"EXPLAIN {sql}", params))
    assert f"Seq Scan on {QUEUE}" not in explained, explained
    assert f"{QUEUE}_pkey" in explained


@whatever_analyze_saw
def test_a_settlement_finds_its_events_by_primary_key(wrong_statistics):
    ids = "{" + ",".join(map(str, range(1, 501))) + "}"
    assert_found_by_primary_key(
        postgresql._SETTLE, (ids, uuid.uuid4(), "COMPLETED", None, "", "", "")
    )


@whatever_analyze_saw
@pytest.mark.parametrize("sql", [postgresql._TELL, postgresql._POSTPONE], ids=["told", "postponed"])
def test_stories_find_their_events_by_primary_key(wrong_statistics, sql):
    told = {"ids": list(range(1, 501)), "stories": "{}", "token": uuid.uuid4(), "now": None}
    assert_found_by_primary_key(sql, told)


@pytest.mark.django_db(transaction=True)
def test_a_claim_of_events_without_keys_is_one_round_trip(store, worker_id):
    publish_many(("x", n) for n in range(5))
    with CaptureQueriesContext(connection) as spoken:
        assert len(store.claim("default", limit=5, worker_id=worker_id)) == 5
    assert len(spoken) == 1, spoken.captured_queries


@pytest.mark.django_db(transaction=True)
def test_keys_are_noticed_by_a_claim_that_did_not_look_for_them(store, worker_id):
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
def test_a_purge_walks_the_log_from_its_old_end(status, index):
    make_tables_as_new()
    long_ago = datetime(2026, 3, 1, tzinfo=UTC)
    EventLog.objects.bulk_create(
        EventLog(
            id=n,
            namespace="default",
            type="x",
            # Rows of some size: what fits on a few pages, PostgreSQL rather reads whole.
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
