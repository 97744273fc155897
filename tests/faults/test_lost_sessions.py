"""The server terminates the sessions of a worker (F17): it recovers, and no event runs twice."""

import pytest
from django.db import connection, transaction

from django_eventbus.models import EventLog, EventWorker, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from tests.faults import failpoints, invariants
from tests.faults.test_failpoints import drained
from tests.shop.models import Effect
from tests.threads import in_thread
from tests.workers import eventually

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("on_postgresql"),
]

OTHERS = "datname = current_database() AND pid <> pg_backend_pid()"
#: A busy loop would log hundreds of lines for each lost session.
FEW = 20
#: Long enough that no worker on a busy machine counts as abandoned, and short enough that a claim
#: in doubt is searched again before a test times out.
STEADY = {"ABANDON_AFTER": 20.0}


def sessions(condition="true"):
    with connection.cursor() as cursor:
        # Otherwise a transaction sees its first snapshot of the statistics again.
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(f"SELECT pid FROM pg_stat_activity WHERE {OTHERS} AND {condition}")
        return cursor.fetchall()


def terminate(condition="true"):
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            f"WHERE {OTHERS} AND {condition}"
        )
        return cursor.fetchone()[0]


def check_that_it_recovered(worker, child, events, losses=1):
    assert worker.process.poll() is None, worker.log
    assert EventWorker.objects.get().pid == child.pid, worker.log
    assert worker.log.count("database error, retrying") < FEW * losses, worker.log
    assert Effect.objects.count() == EventLog.objects.filter(status="COMPLETED").count() == events
    invariants.check()


@pytest.mark.parametrize(
    "place",
    ["claim.committed", "handler.after", "settle.before_commit", "renew.sent"],
)
def test_a_worker_recovers_when_its_sessions_are_terminated_at(start_worker, tmp_path, place):
    publish_many(("fault.effect", n) for n in range(20))
    for n in range(10):
        publish("fault.effect", {}, key=f"k{n % 3}")
    seen, go_on = tmp_path / "seen", tmp_path / "go_on"
    plan = {place.replace(".", "__"): {"do": "wait", "seen": str(seen), "until": str(go_on)}}
    worker = start_worker(eventbus=STEADY, env=failpoints.environment(**plan))
    child = worker.wait_until_registered()
    eventually(seen.exists, lambda: worker.log)
    assert terminate() > 0
    go_on.touch()
    eventually(drained, lambda: worker.log)
    check_that_it_recovered(worker, child, 30)


def test_an_idle_worker_recovers_from_terminated_sessions(start_worker):
    worker = start_worker(eventbus=STEADY)
    child = worker.wait_until_registered()
    for n in range(3):
        publish("fault.effect", n)
        eventually(drained, lambda: worker.log)
        eventually(lambda: terminate() > 0, lambda: worker.log)
    publish("fault.effect", "after all")
    eventually(drained, lambda: worker.log)
    check_that_it_recovered(worker, child, 4, losses=3)


def test_a_worker_recovers_from_sessions_terminated_during_a_claim_and_a_renewal(start_worker):
    """Both need the row of the registration, which the test keeps locked."""
    worker = start_worker(eventbus={**STEADY, "POLL_INTERVAL": 0.1})
    child = worker.wait_until_registered()
    publish("fault.effect", "the worker has started")
    eventually(drained, lambda: worker.log)
    waiting = "wait_event_type = 'Lock' AND query LIKE '%{}%'"
    claim, renewal = waiting.format("enable_seqscan"), waiting.format("renewed_at")
    with transaction.atomic():
        EventWorker.objects.select_for_update().get()
        with in_thread(publish_many, [("fault.effect", n) for n in range(5)]):
            pass
        eventually(lambda: sessions(claim) and sessions(renewal), lambda: worker.log)
        assert terminate(f"({claim} OR {renewal})") >= 2
    eventually(drained, lambda: worker.log)
    check_that_it_recovered(worker, child, 6)


def test_workers_recover_from_repeatedly_terminated_sessions_under_load(start_worker):
    worker = start_worker("--concurrency", "2", "--batch-size", "20", eventbus=STEADY)
    child = worker.wait_until_registered()
    published = 0

    def terminate_once_more():
        nonlocal published
        publish_many(("fault.effect", published + n) for n in range(50))
        published += 50
        terminate()
        return published == 500

    eventually(terminate_once_more)
    eventually(drained, lambda: worker.log)
    check_that_it_recovered(worker, child, published, losses=10)
    assert not QueuedEvent.objects.exists()
