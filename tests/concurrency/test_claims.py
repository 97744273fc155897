"""Concurrent claims in real threads and real processes."""

import threading
from collections import Counter

import pytest
from django.db import OperationalError, connection, connections

from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing.publisher import publish_many
from django_eventbus.store import AT_ONCE, Completed, store_for
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.shop.models import Effect
from tests.workers import PATIENT, eventually

pytestmark = pytest.mark.django_db(transaction=True)

CLAIMERS = 20


def claim_everything(claimed, failures, barrier):
    try:
        store = store_for()
        registration = new_registration(WorkerOptions(using="default", queues=("default",)))
        store.register(registration)
        barrier.wait()
        while events := store.claim("default", limit=7, worker_id=registration.pk):
            assert len(events) <= 7  # F27
            claimed.extend(event.row_id for event in events)
    except BaseException as error:
        failures.append(error)
        raise
    finally:
        connections.close_all()


def test_twenty_claimers_never_share_an_event():
    """M2, M9: two workers never claim the same event."""
    publish_many(("x", n) for n in range(1000))
    claimed, failures, barrier = [], [], threading.Barrier(CLAIMERS)
    threads = [
        threading.Thread(target=claim_everything, args=(claimed, failures, barrier))
        for _ in range(CLAIMERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert Counter(claimed).most_common(1)[0][1] == 1
    assert len(claimed) == 1000
    assert set(QueuedEvent.objects.values_list("attempts", flat=True)) == {1}


def settle(store, token, events):
    """Settle like a worker: retry if the database chose this transaction as the deadlock victim."""
    try:
        with store.atomic():
            store.settle(token, [Completed(event.row_id) for event in events])
    except OperationalError as error:
        if not store.is_conflict(error):
            raise
        settle(store, token, events)


def test_two_claimers_never_share_a_key():
    """M15: the owner of a lane owns its key."""
    for key in range(10):
        publish_many((("x", n) for n in range(10)), key=f"k{key}")
    running, overlaps, order, failures = set(), [], {}, []
    lock = threading.Lock()

    def work():
        try:
            store = store_for()
            registration = new_registration(WorkerOptions(using="default", queues=("default",)))
            store.register(registration)
            while QueuedEvent.objects.exists() and not failures:
                events = store.claim("default", limit=8, worker_id=registration.pk)
                if not events:
                    continue
                keys = {event.key for event in events}
                with lock:
                    overlaps.extend(keys & running)
                    running.update(keys)
                    for event in events:
                        order.setdefault(event.key, []).append(int(event.payload_json))
                token = events[0].claim.token
                settle(store, token, events)
                with lock:
                    running.difference_update(keys)
                store.release_lanes(token, {event.lane_id: AT_ONCE for event in events})
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            connections.close_all()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert overlaps == []
    assert order == {f"k{key}": list(range(10)) for key in range(10)}


def meet(tmp_path):
    """Publish two events whose handlers wait for each other, so they only finish in parallel."""
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    publish_many(
        [
            ("process.signal_outside", {"started": one, "go_on": other}),
            ("process.signal_outside", {"started": other, "go_on": one}),
        ]
    )


def test_several_processes_share_the_load(start_worker, tmp_path):
    """M9."""
    meet(tmp_path)
    worker = start_worker("--processes", "2", "--batch-size", "1", eventbus=PATIENT)
    eventually(lambda: EventLog.objects.count() == 2, lambda: worker.log)
    assert EventLog.objects.values("claimed_by").distinct().count() == 2


def test_threads_of_one_process_work_in_parallel(start_worker, tmp_path):
    meet(tmp_path)
    worker = start_worker("--concurrency", "2", "--batch-size", "1", eventbus=PATIENT)
    eventually(lambda: EventLog.objects.count() == 2, lambda: worker.log)
    assert EventLog.objects.values("claimed_by").distinct().count() == 1


def test_a_sleeping_worker_is_woken_by_a_commit(start_worker):
    """The poll interval is ten minutes, so only a wake-up can deliver the event in time."""
    if connection.vendor == "mysql":
        pytest.skip("MariaDB has no notifications: workers poll")
    worker = start_worker("--poll-interval", "600", eventbus=PATIENT)
    worker.wait_until_registered()
    publish_many([("process.effect", 0)])
    eventually(Effect.objects.exists, lambda: worker.log)
    publish_many([("process.effect", 1)])
    eventually(lambda: Effect.objects.count() == 2, lambda: worker.log)


def test_a_delayed_event_runs_when_it_is_due_without_a_wake_up(start_worker):
    worker = start_worker("--poll-interval", "600", eventbus=PATIENT)
    worker.wait_until_registered()
    publish_many([("process.effect", 0)], delay=0.5)
    eventually(Effect.objects.exists, lambda: worker.log)
