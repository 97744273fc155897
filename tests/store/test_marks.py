"""take_mark, forget_marks: what happens once, for good or for a while."""

import uuid
from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_eventbus.models import EventMark
from django_eventbus.store import marks, store_for

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)


@pytest.fixture
def store(db, clock):
    return store_for(clock=clock)


def take(store, key="k", *, scope="shop.book", keep=None):
    """The id under which the mark was made, and the mark that stood in the way."""
    event_id = uuid.uuid4()
    return event_id, store.take_mark(scope, key, event_id=event_id, keep=keep)


def test_the_first_makes_the_mark_and_the_second_finds_it(store):
    first, in_the_way = take(store)
    assert in_the_way is None
    _, standing = take(store)
    assert standing.event_id == first
    assert EventMark.objects.count() == 1


@pytest.mark.parametrize("other", [{"key": "K"}, {"key": "ķ"}, {"scope": "shop.Book"}])
def test_keys_and_scopes_that_look_alike_are_different(store, other):
    take(store)
    assert take(store, **other)[1] is None


def test_another_namespace_has_marks_of_its_own(store, settings):
    """M8."""
    take(store)
    settings.EVENTBUS = {"NAMESPACE": "other"}
    assert take(store)[1] is None
    assert EventMark.objects.count() == 2


def test_a_mark_without_an_end_stands_for_good(store, clock):
    take(store)
    clock.tick(10**9)
    assert take(store)[1] is not None
    assert store.forget_marks() == 0


def test_a_mark_whose_time_is_over_is_taken_by_the_next(store, clock):
    take(store, keep=HOUR)
    clock.tick(3599)
    assert take(store, keep=HOUR)[1] is not None
    clock.tick(1)
    second, in_the_way = take(store, keep=HOUR)
    assert in_the_way is None
    clock.tick(3599)
    assert take(store, keep=HOUR)[1].event_id == second


def test_a_mark_rolled_back_was_never_made(store):
    with transaction.atomic():
        take(store)
        transaction.set_rollback(True)
    assert take(store)[1] is None


def test_a_mark_in_the_way_leaves_the_transaction_usable(store):
    """On PostgreSQL a mere IntegrityError would break it."""
    take(store)
    with transaction.atomic():
        assert take(store)[1] is not None
        assert take(store, "other")[1] is None
    assert EventMark.objects.count() == 2


def test_the_database_itself_refuses_a_second_mark(store):
    _, _ = take(store)
    (mark,) = EventMark.objects.all()
    mark.pk = uuid.uuid4()
    with pytest.raises(IntegrityError), transaction.atomic():
        mark.save(force_insert=True)


def test_expired_marks_are_forgotten_oldest_first_and_some_at_a_time(store, clock, monkeypatch):
    monkeypatch.setattr(marks, "FORGET_CHUNK", 2)
    for hours in (3, 1, 2, 100):
        take(store, str(hours), keep=hours * HOUR)
    clock.tick(4 * 3600)
    assert store.forget_marks() == 2
    assert set(EventMark.objects.values_list("key", flat=True)) == {"3", "100"}
    assert store.forget_marks() == 1
    assert store.forget_marks() == 0


def test_nothing_to_forget_is_one_look(store):
    take(store, keep=HOUR)
    with CaptureQueriesContext(connection) as queries:
        assert store.forget_marks() == 0
    assert len(queries) == 1


def test_marks_of_other_projects_are_not_forgotten(store, clock, settings):
    take(store, keep=HOUR)
    clock.tick(7200)
    settings.EVENTBUS = {"NAMESPACE": "other"}
    assert store.forget_marks() == 0
    assert EventMark.objects.exists()


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="PostgreSQL's planner")
def test_a_look_for_expired_marks_walks_their_index(store):
    for number in range(300):
        take(store, str(number))
    with connection.cursor() as cursor, CaptureQueriesContext(connection) as queries:
        cursor.execute("SET LOCAL enable_seqscan = off")
        store.forget_marks()
        cursor.execute("EXPLAIN " + queries.captured_queries[-1]["sql"])
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "eventbus_mark_expiry" in plan
