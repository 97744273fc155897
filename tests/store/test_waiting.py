"""What waits costs nothing, and what is urgent waits for nobody: counted in rows read."""

import secrets

import pytest
from django.db import connection

from django_eventbus.models import QueuedEvent
from django_eventbus.publishing import publish, publish_many
from django_eventbus.store import postgresql, store_for
from django_eventbus.worker import WorkerOptions, new_registration
from tests.store.rows_read import rows_read

pytestmark = pytest.mark.django_db

MANY = 2000


@pytest.fixture
def project(settings):
    """A namespace of its own: no other test has left dead entries in its part of an index.

    Gives its store and the id of a worker.
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
        with connection.cursor() as cursor:  # as in a claim outside of a test's transaction
            cursor.execute(postgresql._ON_INDEXES)
    read = rows_read(
        lambda: claimed.extend(store.claim("default", limit=limit, worker_id=worker_id))
    )
    assert len(claimed) == limit
    return read


@pytest.mark.parametrize("key", [None, "k"], ids=["without a key", "with a key"])
@pytest.mark.costly
def test_delayed_events_cost_a_claim_nothing(project, key):
    """However many: not one of them is read."""
    store, worker_id = project()
    publish_many(("x", n) for n in range(100))
    alone = claim_reads(store, worker_id, 50)
    store, worker_id = project()
    publish_many((("x", n) for n in range(MANY)), delay=3600, key=key)
    publish_many(("x", n) for n in range(100))
    publish_many((("x", n) for n in range(MANY)), delay=3600, key=key)
    assert claim_reads(store, worker_id, 50) <= alone * 1.5 + 50


@pytest.mark.costly
def test_delayed_events_cost_an_idle_worker_nothing(project):
    """promote and next_due read the first of them, not all."""
    store, _ = project()
    publish("x", 1, delay=3600)

    def idle():
        assert store.promote() == 0
        assert store.next_due(["default"]) > 3000

    alone = rows_read(idle)
    store, _ = project()
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
    """Also a worker that remembers where its last claim began."""
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
