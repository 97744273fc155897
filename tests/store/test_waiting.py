"""Waiting events cost nothing and urgent events are not delayed, counted in rows read."""

import secrets

import pytest
from django.db import connection

from django_eventbus.models import QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from django_eventbus.store import AttentionQuery, postgresql_sql, store_for
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.store.rows_read import rows_read

pytestmark = pytest.mark.django_db

MANY = 2000


@pytest.fixture
def project(settings):
    """The store and the worker id of a new namespace.

    No other test has left dead entries in its part of an index.
    """

    def begin():
        settings.EVENTBUS = {"NAMESPACE": secrets.token_hex(8)}
        store = store_for()
        registration = new_registration(WorkerOptions(using="default", queues=("default",)))
        store.register(registration)
        return store, registration.pk

    return begin


def claim_reads(store, worker_id, limit):
    claimed = []
    if connection.vendor == "postgresql":
        # A claim outside of the test's transaction does the same.
        with connection.cursor() as cursor:
            cursor.execute(postgresql_sql.ON_INDEXES)
    read = rows_read(
        lambda: claimed.extend(store.claim("default", limit=limit, worker_id=worker_id))
    )
    assert len(claimed) == limit
    return read


@pytest.mark.parametrize("key", [None, "k"], ids=["without a key", "with a key"])
@pytest.mark.costly
def test_a_claim_reads_no_delayed_events(project, key):
    """The number of delayed events does not matter."""
    store, worker_id = project()
    publish_many(("x", n) for n in range(100))
    alone = claim_reads(store, worker_id, 50)
    store, worker_id = project()
    publish_many((("x", n) for n in range(MANY)), delay=3600, key=key)
    publish_many(("x", n) for n in range(100))
    publish_many((("x", n) for n in range(MANY)), delay=3600, key=key)
    assert claim_reads(store, worker_id, 50) <= alone * 1.5 + 50


@pytest.mark.costly
def test_an_idle_worker_reads_only_the_first_delayed_event(project):
    """attention, promote and next_due read the first of them, not all."""
    store, worker_id = project()
    publish("x", 1, delay=3600)

    def idle():
        found = store.attention(AttentionQuery(worker_id=worker_id, queues=("default",)))
        assert found.wait > 3000
        assert store.promote() == 0
        assert store.next_due(["default"]) > 3000

    alone = rows_read(idle)
    store, worker_id = project()
    publish_many((("x", n) for n in range(MANY)), delay=3600)
    assert rows_read(idle) <= alone * 1.5 + 50


def test_a_high_priority_overtakes_a_backlog_without_reading_it(project):
    store, worker_id = project()
    publish("x", "urgent", priority=5)
    alone = claim_reads(store, worker_id, 1)
    store, worker_id = project()
    publish_many(("x", n) for n in range(MANY))
    urgent = publish("x", "urgent", priority=5)
    assert claim_reads(store, worker_id, 1) <= alone * 1.5 + 50
    assert QueuedEvent.objects.get(pk=urgent.pk).status == "PROCESSING"


def test_a_high_priority_overtakes_in_the_middle_of_a_drain(project):
    """This includes a worker that remembers the floor of its last claim."""
    store, worker_id = project()
    publish_many(("x", n) for n in range(500))
    for _ in range(3):
        store.claim("default", limit=50, worker_id=worker_id)
    urgent = publish("x", "urgent", priority=5)
    first, *_ = store.claim("default", limit=50, worker_id=worker_id)
    assert first.row_id == urgent.pk


def test_a_low_priority_waits_for_the_backlog(project):
    store, worker_id = project()
    publish("x", "whenever", priority=-5)
    publish_many(("x", n) for n in range(20))
    *_, last = store.claim("default", limit=21, worker_id=worker_id)
    assert last.priority == -5
