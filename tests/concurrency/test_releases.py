"""A worker releases a claim while another transaction has locked one of its events."""

from contextlib import ExitStack

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import publish_many
from django_eventbus.flow.controls import FlowControls
from django_eventbus.models import QueuedEvent
from django_eventbus.worker import claiming
from django_eventbus.worker.claiming import Claims
from django_eventbus.worker.registration import WorkerOptions
from tests.threads import a_session_waits_for_a_lock, in_thread, while_another_transaction
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

ERROR = {"handler": "", "type": "E", "message": "", "traceback": ""}


def lock_the_first_event():
    QueuedEvent.objects.select_for_update().get(id=QueuedEvent.objects.earliest("id").id)


def pending():
    return QueuedEvent.objects.filter(status="PENDING", claim_token=None).count()


@pytest.fixture
def claims(store, worker_id):
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("this database has no row locks")
    publish_many(("x", n) for n in range(3))
    options = WorkerOptions(using="default", queues=("default",))
    return Claims(store, options, worker_id, FlowControls())


def test_an_interrupted_claim_waits_for_a_locked_event_and_leaves_none_claimed(claims, store):
    token = claims.claim(3).token
    with ExitStack() as interrupting, while_another_transaction(lock_the_first_event):
        interrupting.enter_context(in_thread(store.interrupt_claim, token, error=ERROR))
        eventually(a_session_waits_for_a_lock)
    assert pending() == 3


def test_an_interrupted_claim_locks_its_events_in_order(claims, store):
    """Transactions that wait for locks in different orders can end in a deadlock."""
    token = claims.claim(3).token
    with CaptureQueriesContext(connection) as queries:
        store.interrupt_claim(token, error=ERROR)
    locking = [each["sql"] for each in queries if "FOR UPDATE" in each["sql"]]
    assert len(locking) == 1
    assert "ORDER BY" in locking[0]


def test_a_claim_with_a_locked_event_is_released_again_by_a_later_claim(claims, monkeypatch):
    monkeypatch.setattr(claiming, "RELEASE_AGAIN_AFTER", 0.0)
    batch = claims.claim(3)
    with while_another_transaction(lock_the_first_event):
        claims.release(batch)
        assert pending() == 2
        assert batch.token in claims.tokens
    assert len(claims.claim(3).events) == 3
    assert batch.token not in claims.tokens


def test_a_claim_with_a_locked_event_is_released_again_by_an_idle_worker(claims, monkeypatch):
    """No new event arrives, so the worker does not claim."""
    monkeypatch.setattr(claiming, "RELEASE_AGAIN_AFTER", 0.0)
    batch = claims.claim(3)
    claims.mark_in_doubt(batch)
    with while_another_transaction(lock_the_first_event):
        assert len(claims.claim(3).events) == 2
        assert claims.claim(3) is None
        claims.release_late()
        assert batch.token in claims.tokens
    assert not claims.are_possible()
    claims.release_late()
    assert (pending(), batch.token in claims.tokens) == (1, False)
    assert claims.are_possible()


def test_a_lock_does_not_make_every_claim_scan_the_queue(claims, monkeypatch):
    batch = claims.claim(3)
    with while_another_transaction(lock_the_first_event):
        claims.release(batch)
        monkeypatch.setattr(claims.store, "release_claim", pytest.fail)
        assert len(claims.claim(3).events) == 2
