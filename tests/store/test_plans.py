"""PostgreSQL's plans: the claim must stay on its index whatever the statistics say."""

import uuid

import pytest
from django.db import connection

from django_eventbus.publishing import publish_many
from django_eventbus.store import postgresql

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="PostgreSQL's planner"),
]

QUEUE = "django_eventbus_queuedevent"


@pytest.fixture
def wrong_statistics(request, settings):
    """The table as ANALYZE saw it, and as it is now."""
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
    store._keep_planner_on_indexes()
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


@pytest.mark.parametrize("wrong_statistics", ["analyzed when empty"], indirect=True)
def test_a_lane_is_read_from_its_own_index(wrong_statistics, store):
    store._keep_planner_on_indexes()
    explained = "\n".join(row[0] for row in run(f"EXPLAIN {postgresql._HEADS}", ([7, 8], 10)))
    assert "eventbus_lane" in explained
    assert f"{QUEUE}_pkey" not in explained


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


def test_the_queue_table_leaves_room_for_updates_in_place():
    options = run("SELECT reloptions FROM pg_class WHERE relname = %s", [QUEUE])[0][0]
    assert "fillfactor=50" in options
    assert "vacuum_truncate=off" in options
