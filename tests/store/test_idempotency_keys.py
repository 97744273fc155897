"""add_key, delete_expired_keys: effects that happen once, without an end or for a time."""

import uuid
from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_eventbus.models import IdempotencyKey
from django_eventbus.store import idempotency_keys, store_for

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)


@pytest.fixture
def store(db, clock):
    return store_for(clock=clock)


def add(store, key="k", *, scope="shop.book", keep=None):
    """Return the id of the event that stores the key, and the key that exists already."""
    event_id = uuid.uuid4()
    return event_id, store.add_key(scope, key, event_id=event_id, keep=keep)


def test_the_first_event_stores_the_key_and_the_second_finds_it(store):
    first, existing = add(store)
    assert existing is None
    _, existing = add(store)
    assert existing.event_id == first
    assert IdempotencyKey.objects.count() == 1


@pytest.mark.parametrize("other", [{"key": "K"}, {"key": "ķ"}, {"scope": "shop.Book"}])
def test_keys_and_scopes_that_look_alike_are_different(store, other):
    add(store)
    assert add(store, **other)[1] is None


def test_another_namespace_has_its_own_keys(store, settings):
    """M8."""
    add(store)
    settings.EVENTBUS = {"NAMESPACE": "other"}
    assert add(store)[1] is None
    assert IdempotencyKey.objects.count() == 2


def test_a_key_without_an_end_is_kept(store, clock):
    add(store)
    clock.tick(10**9)
    assert add(store)[1] is not None
    assert store.delete_expired_keys() == 0


def test_an_expired_key_is_reused(store, clock):
    add(store, keep=HOUR)
    clock.tick(3599)
    assert add(store, keep=HOUR)[1] is not None
    clock.tick(1)
    second, existing = add(store, keep=HOUR)
    assert existing is None
    clock.tick(3599)
    assert add(store, keep=HOUR)[1].event_id == second


def test_a_rolled_back_key_does_not_exist(store):
    with transaction.atomic():
        add(store)
        transaction.set_rollback(True)
    assert add(store)[1] is None


def test_an_existing_key_leaves_the_transaction_usable(store):
    """On PostgreSQL a mere IntegrityError would break it."""
    add(store)
    with transaction.atomic():
        assert add(store)[1] is not None
        assert add(store, "other")[1] is None
    assert IdempotencyKey.objects.count() == 2


def test_the_database_refuses_a_second_row_of_a_key(store):
    _, _ = add(store)
    (key,) = IdempotencyKey.objects.all()
    key.pk = uuid.uuid4()
    with pytest.raises(IntegrityError), transaction.atomic():
        key.save(force_insert=True)


def test_expired_keys_are_deleted_in_chunks_oldest_first(store, clock, monkeypatch):
    monkeypatch.setattr(idempotency_keys, "DELETE_CHUNK", 2)
    for hours in (3, 1, 2, 100):
        add(store, str(hours), keep=hours * HOUR)
    clock.tick(4 * 3600)
    assert store.delete_expired_keys() == 2
    assert set(IdempotencyKey.objects.values_list("key", flat=True)) == {"3", "100"}
    assert store.delete_expired_keys() == 1
    assert store.delete_expired_keys() == 0


def test_deleting_no_expired_keys_is_one_query(store):
    add(store, keep=HOUR)
    with CaptureQueriesContext(connection) as queries:
        assert store.delete_expired_keys() == 0
    assert len(queries) == 1


def test_keys_of_other_projects_are_not_deleted(store, clock, settings):
    add(store, keep=HOUR)
    clock.tick(7200)
    settings.EVENTBUS = {"NAMESPACE": "other"}
    assert store.delete_expired_keys() == 0
    assert IdempotencyKey.objects.exists()


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="PostgreSQL's planner")
def test_the_search_for_expired_keys_uses_their_index(store):
    for number in range(300):
        add(store, str(number))
    with connection.cursor() as cursor, CaptureQueriesContext(connection) as queries:
        cursor.execute("SET LOCAL enable_seqscan = off")
        store.delete_expired_keys()
        cursor.execute("EXPLAIN " + queries.captured_queries[-1]["sql"])
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "eventbus_key_expiry" in plan
