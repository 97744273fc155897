"""settle: only under a valid claim token, and all rows in one transaction."""

import uuid

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_eventbus.exceptions import ClaimLostError
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from django_eventbus.store import After, Completed, Finished, Postponed, Progressed
from tests.shop.models import Effect

pytestmark = pytest.mark.django_db

ERROR = {"handler": "h", "attempt": 1, "at": "", "type": "E", "message": "m", "traceback": "t"}


def claim(store, worker_id, limit=100):
    return store.claim("default", limit=limit, worker_id=worker_id)


def test_a_completed_event_moves_to_the_log_unchanged(store, worker_id):
    """M2: the row moves from the queue to the log with the same ids."""
    event = publish("order.placed", {"a": [1, "ü", None]}, headers={"h": 1}, priority=2)
    (claimed,) = claim(store, worker_id)
    store.settle(claimed.claim.token, [Completed(claimed.row_id)])
    assert not QueuedEvent.objects.exists()
    log = EventLog.objects.get()
    assert (log.pk, log.event_id, log.status) == (event.pk, event.event_id, "COMPLETED")
    assert (log.payload, log.headers, log.priority) == ({"a": [1, "ü", None]}, {"h": 1}, 2)
    assert (log.deliveries, log.errors, log.attempts) == (None, None, 1)
    assert log.finished_at >= log.processing_started_at >= log.created_at


def test_a_finished_event_keeps_its_records(store, worker_id):
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


def test_a_postponed_event_returns_to_the_queue_and_waits(store, worker_id):
    publish("order.placed", {})
    (claimed,) = claim(store, worker_id)
    store.settle(
        claimed.claim.token,
        [Postponed(row_id=claimed.row_id, deliveries={"h": {}}, errors=[ERROR], wait=After(60))],
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
    """Nothing may be written under a token that is no longer the token of the row."""
    publish("order.placed", {})
    (claimed,) = claim(store, worker_id)
    QueuedEvent.objects.update(claim_token=uuid.uuid4())
    row_id = claimed.row_id
    settlement = {
        "completed": Completed(row_id),
        "finished": Finished(row_id=row_id, deliveries=None, errors=[ERROR], status="FAILED"),
        "postponed": Postponed(row_id=row_id, deliveries={}, errors=[], wait=After(1)),
        "progressed": Progressed(row_id=row_id, deliveries={}, errors=[]),
    }[kind]
    with pytest.raises(ClaimLostError), transaction.atomic():
        store.settle(claimed.claim.token, [settlement])
    assert not EventLog.objects.exists()
    assert QueuedEvent.objects.get().status == "PROCESSING"


def test_one_lost_claim_rolls_back_the_whole_settlement(store, worker_id):
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


def test_still_held_returns_the_unsettled_events(store, worker_id):
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


ENDS = {
    "finished": lambda row_id: Finished(
        row_id=row_id, status="FAILED", deliveries={"h": {"n": row_id}}, errors=[ERROR]
    ),
    # Another test may have raised the next id of MariaDB's table beyond what a date can hold.
    "postponed": lambda row_id: Postponed(
        row_id=row_id,
        deliveries={"h": {"n": row_id}},
        errors=[ERROR],
        wait=After(float(row_id % 1000 + 1)),
    ),
    "progressed": lambda row_id: Progressed(
        row_id=row_id, deliveries={"h": {"n": row_id}}, errors=[]
    ),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_many_records_need_as_many_statements_as_one(store, worker_id, end):
    """An outage causes hundreds of failures at once. Each event keeps its own records."""
    publish_many(("order.placed", n) for n in range(51))
    claimed = claim(store, worker_id)
    token, ids = claimed[0].claim.token, [event.row_id for event in claimed]
    with CaptureQueriesContext(connection) as for_one:
        store.settle(token, [end(ids.pop())])
    with CaptureQueriesContext(connection) as for_many:
        store.settle(token, map(end, ids))
    assert len(for_many) == len(for_one)
    rows = {row.pk: row for model in (QueuedEvent, EventLog) for row in model.objects.all()}
    assert {row_id: row.deliveries for row_id, row in rows.items()} == {
        event.row_id: {"h": {"n": event.row_id}} for event in claimed
    }


def test_events_of_one_settlement_can_end_differently(store, worker_id):
    publish_many(("order.placed", n) for n in range(4))
    claimed = claim(store, worker_id)
    kinds = ["KeyError", "ValueError", "KeyError", "TypeError"]
    ends = [
        Finished(
            row_id=event.row_id,
            status="FAILED",
            deliveries=None,
            errors=[{**ERROR, "type": kind}],
            dead_handler=f"h{index}",
            error_type=kind,
        )
        for index, (event, kind) in enumerate(zip(claimed, kinds, strict=True))
    ]
    store.settle(claimed[0].claim.token, ends)
    found = EventLog.objects.order_by("id").values_list("dead_handler", "error_type", "errors")
    assert list(found) == [
        (f"h{index}", kind, [{**ERROR, "type": kind}]) for index, kind in enumerate(kinds)
    ]


def test_each_postponed_event_has_its_own_delay(store, worker_id):
    publish_many(("order.placed", n) for n in range(3))
    claimed = claim(store, worker_id)
    ends = [
        Postponed(row_id=event.row_id, deliveries={}, errors=[], wait=After(delay))
        for event, delay in zip(claimed, [0.0, 60.0, 3600.0], strict=True)
    ]
    before = store.read_clock()
    store.settle(claimed[0].claim.token, ends)
    at_once, *later = QueuedEvent.objects.order_by("id").values_list("available_at", flat=True)
    assert at_once is None
    for moment, delay in zip(later, [60.0, 3600.0], strict=True):
        assert delay - 1 <= (moment - before).total_seconds() <= delay + 60
