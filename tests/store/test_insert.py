"""insert: one row, in the caller's transaction."""

import uuid
from datetime import UTC, datetime

import pytest
from django.db.models import F

from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from django_eventbus.store import Completed, NewEvent

pytestmark = pytest.mark.django_db


def test_an_inserted_event_is_pending_and_has_an_id_and_a_time():
    event = publish("order.placed", {"order": 7})
    event.refresh_from_db()
    assert (event.status, event.attempts, event.available_at) == ("PENDING", 0, None)
    assert event.pk is not None
    assert event.created_at is not None


def test_many_events_keep_their_order(store):
    publish_many(("order.placed", {"n": n}) for n in range(2500))
    numbers = [event.payload["n"] for event in QueuedEvent.objects.order_by("id")]
    assert numbers == list(range(2500))


def test_many_events_share_their_common_options(store):
    publish_many([("a", 1), ("b", [2])], key="k", queue="default", priority=3, headers={"h": 1})
    rows = QueuedEvent.objects.order_by("id").values_list(
        "type", "payload", "key", "priority", "headers", "version", "status"
    )
    assert list(rows) == [
        ("a", 1, "k", 3, {"h": 1}, 1, "PENDING"),
        ("b", [2], "k", 3, {"h": 1}, 1, "PENDING"),
    ]


@pytest.mark.parametrize("how", [{"delay": 60}, {"at": datetime(2040, 1, 1, tzinfo=UTC)}])
def test_a_delayed_event_is_due_when_it_is_available(store, how):
    publish_many([("a", 1), ("a", 2)], **how)
    publish("a", 3, **how)
    publish("a", 4, dedup_key="k", **how)
    assert QueuedEvent.objects.filter(due_at=F("available_at")).count() == 4


def test_an_event_that_already_ended_is_not_inserted_again(store, worker_id):
    event = publish("order.placed", {}, event_id=uuid.uuid4())
    (claimed,) = store.claim("default", limit=1, worker_id=worker_id)
    store.settle(claimed.claim.token, [Completed(claimed.row_id)])
    again = publish("order.placed", {}, event_id=event.event_id)
    assert again.event_id == event.event_id
    assert not QueuedEvent.objects.exists()
    assert EventLog.objects.count() == 1


def test_a_new_event_names_its_fields_as_the_model_does():
    fields = {field.name for field in QueuedEvent._meta.fields}
    assert set(NewEvent._fields) <= fields
