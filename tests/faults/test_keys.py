"""Events of one key that become visible in another order than that of their ids.

The id is assigned at the INSERT, but the row is visible at the COMMIT; and a retried dead letter
keeps its id. So an older event may appear at any moment of another worker's claim.
"""

import itertools
import threading
from contextlib import contextmanager

import pytest
from django.db import connection, connections, transaction

from django_eventbus import handler, publish
from django_eventbus.models import EventLane, EventLog, EventWorker, QueuedEvent
from django_eventbus.store import AT_ONCE, Finished, store_for
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.bus import drain

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif("connection.vendor == 'sqlite'", reason="SQLite has one writer at a time"),
]

PATIENCE = 30
A_MOMENT = 0.3
ERROR = {"handler": "h", "type": "WorkerCrashed", "message": "killed", "traceback": ""}


class SlowPublisher:
    """An open transaction with an event of the key, committed by ``appear()``."""

    def __init__(self):
        self._inserted, self._may_commit = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._publish)
        self._thread.start()
        assert self._inserted.wait(PATIENCE)

    def _publish(self):
        try:
            with transaction.atomic():
                publish("step", 1, key="k")
                self._inserted.set()
                self._may_commit.wait(PATIENCE)
        finally:
            connections.close_all()

    def appear(self):
        self._may_commit.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "a publisher had to wait for a claim"

    def finish(self):
        self._thread.join()


class DeadLetter:
    """A dead letter of the key, retried by ``appear()``."""

    def __init__(self):
        publish("step", 1, key="k")
        store, worker = a_worker()
        (event,) = store.claim("default", limit=1, worker_id=worker)
        settlement = Finished(row_id=event.row_id, status="FAILED", deliveries=None, errors=[])
        store.settle(event.claim.token, [settlement])
        store.release_lanes(event.claim.token, {event.lane_id: AT_ONCE})
        self.row_id = event.row_id

        self._thread = threading.Thread(target=self._revive)

    def _revive(self):
        try:
            store_for().revive([self.row_id])
        finally:
            connections.close_all()

    def appear(self):
        self._thread.start()
        # If the retry waits for a lane that the claim has locked, the claim must continue first.
        self._thread.join(A_MOMENT)

    def finish(self):
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "a retry waits for a claim that has ended"


def a_worker():
    store = store_for()
    registration = new_registration(WorkerOptions(using="default", queues=("default",)))
    store.register(registration)
    return store, registration.pk


@contextmanager
def before_statement(number, action):
    """Call ``action`` before the Nth statement; the yielded list is empty if there was none."""
    done = []
    left = itertools.count(1)

    def wrapper(execute, sql, params, many, context):
        if next(left) == number:
            done.append(sql)
            action()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield done


def start_over():
    for model in (QueuedEvent, EventLog, EventLane, EventWorker):
        model.objects.all().delete()


def interrupted_claim(older, number):
    """Claim one of two events of the key while an older event of the key appears."""
    for n in (2, 3):
        publish("step", n, key="k")
    (one, first), (other, second) = a_worker(), a_worker()
    with before_statement(number, older.appear) as reached:
        one.claim("default", limit=1, worker_id=first)
    if not reached:
        older.appear()
    older.finish()
    other.claim("default", limit=4, worker_id=second)
    holders = set(QueuedEvent.objects.exclude(claim_token=None).values_list("claim_token"))
    assert len(holders) == 1, f"{len(holders)} claims own the key if the event appears at {number}"
    for worker in (first, second):
        held = QueuedEvent.objects.filter(claimed_by=worker).values_list("pk", flat=True)
        one.recover_worker(worker, blamed=list(held), error=ERROR)
    return reached


@pytest.mark.parametrize("older", [SlowPublisher, DeadLetter])
def test_an_older_event_that_appears_during_a_claim_keeps_the_order_of_its_key(older):
    """F38: it appears before each statement of the claim in turn; then the owner is killed."""
    ran = []
    handler("step", name="h")(lambda event: ran.append(event.payload))
    for number in itertools.count(1):
        start_over()
        reached = interrupted_claim(older(), number)
        ran.clear()
        drain()
        assert ran == [1, 2, 3], f"if it appears before statement {number}"
        assert not QueuedEvent.objects.exists()
        assert not EventLane.objects.exists()
        if not reached:
            break
    assert number > 2, "the claim has more statements than that"


def test_an_event_committed_after_a_later_one_was_handled_is_handled():
    """F37: no query relies on ids greater than the last one."""
    ran = []
    handler("step", name="h")(lambda event: ran.append(event.payload))
    older = SlowPublisher()
    publish("step", 2, key="k")
    drain()
    assert ran == [2]
    older.appear()
    drain()
    assert ran == [2, 1]
