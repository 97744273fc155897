"""counted, coalesce: the number of events under a limit, and replacing the payload of one."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus.models import QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from django_eventbus.store import NewEvent
from tests.plans import make_tables_as_new
from tests.store.rows_read import rows_read

pytestmark = pytest.mark.django_db

QUEUE = "django_eventbus_queuedevent"


@pytest.fixture(autouse=True)
def limits(settings):
    def limit(max_size=10**9, overflow="halt"):
        options = {"max_size": max_size, "overflow": overflow}
        settings.EVENTBUS = {"LIMITS": {"type:tick": options}}

    limit()
    return limit


def test_counting_stops_at_the_given_bound(store):
    publish_many(("tick", n) for n in range(30))
    publish_many(("other", n) for n in range(30))
    assert store.count_limited("type:tick", at_most=100) == 30
    assert store.count_limited("type:tick", at_most=7) == 7
    assert store.count_limited("type:other", at_most=100) == 0


@pytest.mark.costly
def test_a_count_reads_only_the_rows_it_counts(store):
    publish_many(("other", n) for n in range(1000))
    publish_many(("tick", n) for n in range(1000))
    publish_many(("other", n) for n in range(1000))
    few = rows_read(lambda: store.count_limited("type:tick", at_most=10))
    more = rows_read(lambda: store.count_limited("type:tick", at_most=20))
    assert few < more < 3 * few


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="PostgreSQL's planner")
@pytest.mark.parametrize("analyzed", ["never", "when all were ticks", "when none was"])
def test_a_count_uses_its_own_index_with_any_statistics(store, analyzed):
    """The planner settings of the publisher stay, so the statement itself must use its index."""
    make_tables_as_new()
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {QUEUE} SET (autovacuum_enabled = off)")
        if analyzed != "never":
            publish_many(
                ((analyzed == "when none was" and "other") or "tick", 1) for _ in range(5000)
            )
            cursor.execute(f"ANALYZE {QUEUE}")
            QueuedEvent.objects.all().delete()
        publish_many(("other", n) for n in range(5000))
        publish_many(("tick", n) for n in range(100))
        with CaptureQueriesContext(connection) as queries:
            store.count_limited("type:tick", at_most=50)
        cursor.execute("EXPLAIN " + queries.captured_queries[-1]["sql"])
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "eventbus_counted" in plan, plan
    assert f"{QUEUE}_pkey" not in plan


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="PostgreSQL's partial indexes")
def test_an_event_without_a_limit_is_in_no_index_for_limits():
    def index_size():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_relation_size('eventbus_counted')")
            return cursor.fetchone()[0]

    make_tables_as_new()  # The index may have free pages from earlier tests.
    before = index_size()
    publish_many(("other", n) for n in range(5000))
    assert index_size() == before
    publish_many(("tick", n) for n in range(5000))
    assert index_size() > before


def test_coalescing_stores_the_version_of_the_new_payload(store):
    publish("tick", {"price": 1})
    new = QueuedEvent(**NewEvent(None, "tick", 2, {"cents": 100}, None)._asdict())
    new.namespace = new.queue = "default"
    new.counted_as = "type:tick"
    assert store.coalesce(new).version == 2
    stored = QueuedEvent.objects.get()
    assert (stored.version, stored.payload) == (2, {"cents": 100})


def test_coalescing_an_equal_payload_succeeds(limits):
    """MySQL reports no changed row for an equal value."""
    limits(1, "coalesce")
    first = publish("tick", 1)
    assert publish("tick", 1).pk == first.pk
    assert QueuedEvent.objects.count() == 1


def test_a_held_event_can_be_coalesced(limits):
    """A limit also holds while its type is paused."""
    limits(1, "coalesce")
    first = publish("tick", 1)
    QueuedEvent.objects.update(held_by=7)
    assert publish("tick", 2).pk == first.pk
    assert QueuedEvent.objects.values_list("payload", "held_by").get() == (2, 7)
