"""settle: only what is still ours, and all of it in one transaction."""

import uuid

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_eventbus.exceptions import ClaimLostError
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing import publish, publish_many
from django_eventbus.store import Completed, Finished, Postponed, Progressed
from tests.shop.models import Effect

pytestmark = pytest.mark.django_db

ERROR = {"handler": "h", "attempt": 1, "at": "", "type": "E", "message": "m", "traceback": "t"}


def claim(store, worker_id, limit=100):
    return store.claim("default", limit=limit, worker_id=worker_id)


def test_a_completed_event_moves_to_the_log_as_it_was(store, worker_id):
    """M2: the row leaves the queue and stands in the log under the same ids."""
    event = publish("order.placed", {"a": [1, "ü", None]}, headers={"h": 1}, priority=2)
    (claimed,) = claim(store, worker_id)
    store.settle(claimed.claim.token, [Completed(claimed.row_id)])
    assert not QueuedEvent.objects.exists()
    log = EventLog.objects.get()
    assert (log.pk, log.event_id, log.status) == (event.pk, event.event_id, "COMPLETED")
    assert (log.payload, log.headers, log.priority) == ({"a": [1, "ü", None]}, {"h": 1}, 2)
    assert (log.deliveries, log.errors, log.attempts) == (None, None, 1)
    assert log.finished_at >= log.processing_started_at >= log.created_at


def test_a_finished_event_keeps_its_story(store, worker_id):
    publish("order.placed", {})
    (claimed,) = claim(store, worker_id)
    states = {"h": {"state": "dead", "failures": 1}}
    store.settle(
        claimed.claim.token,
        [
            Finished(
                row_id=claimed.row_id,
                status="FAILED",
                deliveries=states,
                errors=[ERROR],
                dead_handler="h",
                error_type="E",
                error_fingerprint="f" * 16,
            )
        ],
    )
    log = EventLog.objects.get()
    assert (log.status, log.deliveries, log.errors) == ("FAILED", states, [ERROR])
    assert (log.dead_handler, log.error_type, log.error_fingerprint) == ("h", "E", "f" * 16)


def test_a_postponed_event_returns_and_waits(store, worker_id):
    publish("order.placed", {})
    (claimed,) = claim(store, worker_id)
    store.settle(
        claimed.claim.token,
        [Postponed(row_id=claimed.row_id, deliveries={"h": {}}, errors=[ERROR], delay=60)],
    )
    row = QueuedEvent.objects.get()
    assert (row.status, row.attempts, row.claim_token) == ("PENDING", 1, None)
    assert (row.deliveries, row.errors) == ({"h": {}}, [ERROR])
    assert row.available_at is not None
    assert claim(store, worker_id) == []


def test_progress_is_kept_together_with_the_claim(store, worker_id):
    publish("order.placed", {})
    (claimed,) = claim(store, worker_id)
    token = claimed.claim.token
    store.settle(token, [Progressed(row_id=claimed.row_id, deliveries={"h": {}}, errors=[])])
    row = QueuedEvent.objects.get()
    assert (row.status, row.claim_token, row.deliveries) == ("PROCESSING", token, {"h": {}})


@pytest.mark.parametrize("kind", ["completed", "finished", "postponed", "progressed"])
def test_a_lost_claim_is_not_settled(store, worker_id, kind):
    """The fence: nothing may be written under a token that is not the row's any more."""
    publish("order.placed", {})
    (claimed,) = claim(store, worker_id)
    QueuedEvent.objects.update(claim_token=uuid.uuid4())
    row_id = claimed.row_id
    settlement = {
        "completed": Completed(row_id),
        "finished": Finished(row_id=row_id, deliveries=None, errors=[ERROR], status="FAILED"),
        "postponed": Postponed(row_id=row_id, deliveries={}, errors=[], delay=1),
        "progressed": Progressed(row_id=row_id, deliveries={}, errors=[]),
    }[kind]
    with pytest.raises(ClaimLostError), transaction.atomic():
        store.settle(claimed.claim.token, [settlement])
    assert not EventLog.objects.exists()
    assert QueuedEvent.objects.get().status == "PROCESSING"


def test_one_lost_claim_takes_the_whole_settle_back(store, worker_id):
    publish_many(("order.placed", n) for n in range(3))
    claimed = claim(store, worker_id)
    QueuedEvent.objects.filter(pk=claimed[1].row_id).update(claim_token=None, status="PENDING")

    @transaction.atomic
    def work():
        Effect.objects.create(event_id=uuid.uuid4(), handler="h")
        store.settle(claimed[0].claim.token, [Completed(event.row_id) for event in claimed])

    with pytest.raises(ClaimLostError):
        work()
    assert (EventLog.objects.count(), QueuedEvent.objects.count()) == (0, 3)
    assert not Effect.objects.exists()


def test_an_event_is_settled_once(store, worker_id):
    publish("order.placed", {})
    (claimed,) = claim(store, worker_id)
    store.settle(claimed.claim.token, [Completed(claimed.row_id)])
    with pytest.raises(ClaimLostError), transaction.atomic():
        store.settle(claimed.claim.token, [Completed(claimed.row_id)])
    assert EventLog.objects.count() == 1


def test_what_is_still_held_is_known(store, worker_id):
    publish_many(("order.placed", n) for n in range(3))
    claimed = claim(store, worker_id)
    token, ids = claimed[0].claim.token, [event.row_id for event in claimed]
    store.settle(token, [Completed(ids[0])])
    store.release(token, [ids[1]])
    assert store.still_held(token, ids) == {ids[2]: None}


def test_a_released_event_is_not_charged(store, worker_id):
    publish("order.placed", {})
    (claimed,) = claim(store, worker_id)
    assert store.release(claimed.claim.token, [claimed.row_id]) == 1
    row = QueuedEvent.objects.get()
    assert (row.status, row.attempts, row.claimed_by) == ("PENDING", 0, None)


def test_a_stale_token_releases_nothing(store, worker_id):
    publish("order.placed", {})
    (claimed,) = claim(store, worker_id)
    assert store.release(uuid.uuid4(), [claimed.row_id]) == 0
    assert QueuedEvent.objects.get().status == "PROCESSING"


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="one statement on PostgreSQL only")
def test_a_batch_is_settled_by_one_statement(store, worker_id):
    publish_many(("order.placed", n) for n in range(50))
    claimed = claim(store, worker_id)
    with CaptureQueriesContext(connection) as queries:
        store.settle(claimed[0].claim.token, [Completed(event.row_id) for event in claimed])
    assert len(queries) == 1
    assert EventLog.objects.count() == 50
