"""Replays by real worker processes and beside other transactions."""

import signal

import pytest
from django.db import connection, transaction

from django_eventbus import publish, replay
from django_eventbus.models import EventLog, ReplayState
from django_eventbus.store import Completed, store_for
from django_eventbus.testing import drain
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.log_rows import log_entry
from tests.shop.models import Effect
from tests.test_replay import handled, step_of
from tests.threads import while_another_transaction
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")
def test_an_event_that_is_committed_late_is_not_missed():
    """Its end was written before the replay began, and is committed while the replay waits."""
    replay.register()
    seen = handled()
    publish("order.placed", "late")
    store = store_for()
    registration = new_registration(WorkerOptions(using="default", queues=("default",)))
    store.register(registration)
    (event,) = store.claim("default", limit=1, worker_id=registration.pk)

    def settle():
        store_for().settle(event.claim.token, [Completed(event.row_id)])

    with while_another_transaction(settle) as commit:
        started = replay.start(type="order.*")
        for _ in range(2):
            take_step(started)
            assert replay.status(started).state == ReplayState.STARTING
        commit()
    take_step(started)
    assert replay.status(started).state == ReplayState.COPIED
    drain()
    assert [each.payload for each in seen] == ["late"]


def take_step(started):
    with transaction.atomic():
        replay.take_step(step_of(started))


def test_workers_that_are_killed_copy_and_handle_each_event_once(start_worker):
    """Kill all worker processes several times while they replay."""
    for number in range(600):
        log_entry(id=10**12 + number, type="process.effect", payload=number, key=f"k{number % 7}")
    handled("effect", "process.effect")  # The workers have another handler with this name.
    started = replay.start(type="process.effect", handler="effect", rate=200)
    for moment in (100, 300, 500):
        worker = start_worker("--processes", "2")
        eventually(lambda m=moment: Effect.objects.count() >= m, lambda w=worker: w.log)
        worker.signal_all(signal.SIGKILL)
        worker.wait()
    worker = start_worker("--processes", "2")
    eventually(lambda: replay.status(started).is_over, lambda: worker.log)
    notes = sorted(int(each) for each in Effect.objects.values_list("note", flat=True))
    assert notes == list(range(600))
    assert EventLog.objects.filter(replay_id=started.pk).count() == 600
    assert replay.status(started).dead == 0
