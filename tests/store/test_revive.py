"""revive and purge: retry and delete events of the log."""

from datetime import timedelta

import pytest
from django.db.models import F

from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from django_eventbus.store import Completed, Finished

pytestmark = pytest.mark.django_db

ERROR = {"handler": "h", "attempt": 1, "at": "", "type": "E", "message": "m", "traceback": "t"}


def bury(store, worker_id, deliveries=None):
    claimed = store.claim("default", limit=100, worker_id=worker_id)
    store.settle(
        claimed[0].claim.token,
        [
            Finished(row_id=e.row_id, status="FAILED", deliveries=deliveries, errors=[ERROR])
            for e in claimed
        ],
    )
    return [event.row_id for event in claimed]


def test_a_revived_event_has_no_attempts_and_no_errors(store, worker_id):
    """M26: pending, attempts 0, errors cleared; M15: with its key."""
    event = publish("order.placed", {"order": 7}, key="order:7", headers={"h": 1})
    ids = bury(store, worker_id)
    assert store.revive(ids) == 1
    row = QueuedEvent.objects.get()
    assert (row.pk, row.event_id, row.status) == (event.pk, event.event_id, "PENDING")
    assert (row.attempts, row.crashes, row.errors, row.deliveries) == (0, 0, None, None)
    assert (row.payload, row.key, row.headers) == ({"order": 7}, "order:7", {"h": 1})
    assert (row.available_at, row.claim_token, row.lane_id) == (None, None, None)
    assert not EventLog.objects.exists()


def test_handlers_that_were_done_stay_done(store, worker_id):
    publish("order.placed", {})
    states = {
        "good": {"state": "done", "failures": 0},
        "bad": {"state": "dead", "failures": 4},
    }
    store.revive(bury(store, worker_id, states))
    assert QueuedEvent.objects.get().deliveries == {"good": states["good"]}


def test_a_completed_event_is_not_revived(store, worker_id):
    publish("order.placed", {})
    (claimed,) = store.claim("default", limit=1, worker_id=worker_id)
    store.settle(claimed.claim.token, [Completed(claimed.row_id)])
    assert store.revive([claimed.row_id]) == 0
    assert EventLog.objects.count() == 1


def test_reviving_twice_revives_once(store, worker_id):
    publish("order.placed", {})
    ids = bury(store, worker_id)
    assert (store.revive(ids), store.revive(ids)) == (1, 0)
    assert QueuedEvent.objects.count() == 1


def test_a_revived_event_can_be_delayed(store, worker_id):
    publish("order.placed", {})
    store.revive(bury(store, worker_id), delay=60)
    assert QueuedEvent.objects.get().available_at is not None


@pytest.mark.parametrize("how", [{}, {"delay": 60.0}, {"every": 30.0}])
def test_the_lag_of_a_revived_event_starts_at_its_revival(store, worker_id, how):
    """The time as a dead letter does not count as lag."""
    publish_many([("order.placed", 1), ("order.placed", 2)])
    ids = bury(store, worker_id)
    EventLog.objects.update(created_at=F("created_at") - timedelta(days=5))
    before = store.read_clock() - timedelta(milliseconds=1)  # The resolution of SQLite.
    assert store.revive(ids, **how) == 2
    for event in QueuedEvent.objects.all():
        assert event.due_at >= before
        assert event.available_at in (None, event.due_at)


def test_purge_deletes_the_oldest_first_up_to_its_limit(store, worker_id):
    publish_many(("order.placed", n) for n in range(5))
    ids = bury(store, worker_id)
    for age, row_id in enumerate(ids):
        EventLog.objects.filter(pk=row_id).update(finished_at=f"2020-01-{20 - age:02}T00:00:00Z")
    assert store.purge(store.dead, limit=2) == 2
    assert set(EventLog.objects.values_list("pk", flat=True)) == set(ids[:3])


def test_a_revived_event_keeps_its_row_id_while_new_events_arrive(store, worker_id):
    old = publish("order.placed", {})
    ids = bury(store, worker_id)
    new = publish("order.placed", {})
    store.revive(ids)
    rows = QueuedEvent.objects.order_by("id").annotate(same=F("id")).values_list("same", flat=True)
    assert list(rows) == [old.pk, new.pk]
