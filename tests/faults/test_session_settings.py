"""What a DBA or a project may set for every session: F08, F31, F32."""

import signal

import pytest

from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing import publish, publish_many
from tests.faults import invariants
from tests.faults.meetings import STUBBORN, publish_a_meeting, some_rows, what_they_met
from tests.shop.models import Effect

pytestmark = pytest.mark.long


def drained():
    return not QueuedEvent.objects.exists()


def statuses():
    return set(EventLog.objects.values_list("status", flat=True))


@pytest.mark.parametrize("kind", ["process.signal", "process.signal_outside"])
def test_a_worker_stopped_longer_than_its_session_may_idle(cluster, in_the_end, tmp_path, kind):
    """F08: the server ends its session, another takes over; awake again it settles nothing."""
    cluster.primary.configure(idle_in_transaction_session_timeout="500ms")
    files = {"started": str(tmp_path / "started"), "go_on": str(tmp_path / "go_on")}
    publish(kind, files)
    sleeper = cluster.start_worker()
    in_the_end((tmp_path / "started").exists)
    sleeper.signal_all(signal.SIGSTOP)
    (tmp_path / "go_on").touch()
    other = cluster.start_worker()
    in_the_end(drained)
    settled_by = EventLog.objects.get().claimed_by
    sleeper.signal_all(signal.SIGCONT)
    in_the_end(lambda: "is ended" in sleeper.log or sleeper.process.poll() is not None)
    for each in (sleeper, other):
        each.signal(signal.SIGTERM)
        each.wait()
    invariants.check()
    ended = EventLog.objects.get()
    assert (ended.status, ended.claimed_by, ended.crashes) == ("COMPLETED", settled_by, 1)
    # Outside of a transaction what the sleeper did before it was found out stays done.
    assert Effect.objects.count() == 1 or kind == "process.signal_outside"


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_handlers_that_get_into_each_others_way(cluster, in_the_end, isolation, tmp_path, figures):
    """F31: deadlocks and failed serializations are tried again until all is done once."""
    cluster.primary.configure(default_transaction_isolation=isolation, deadlock_timeout="20ms")
    rows = some_rows(2)
    publish_a_meeting(tmp_path, some_rows(2), apart=9)
    publish_many(("fault.update", rows if n % 2 else rows[::-1]) for n in range(60))
    publish_many((("fault.effect", n) for n in range(60)), key="k")
    publish_many(("fault.effect", n) for n in range(60))
    for _ in range(2):
        cluster.start_worker("--concurrency", "2", "--batch-size", "10", eventbus=STUBBORN)
    in_the_end(drained)
    invariants.check()
    invariants.check_order_of_effects()
    assert statuses() == {"COMPLETED"}
    assert Effect.objects.exclude(handler="row").count() == 191
    assert "deadlock detected" in what_they_met(tmp_path), "nothing was tried"
    unlucky = EventLog.objects.exclude(errors=None)
    figures(f"{unlucky.count()} of 62 events failed at least once")
    if isolation != "serializable":  # there the innocent are rolled back as well
        assert set(unlucky.values_list("type", flat=True)) <= {"fault.update", "fault.meet"}


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_handlers_that_change_the_same_row(cluster, in_the_end, isolation, tmp_path):
    """F31: who comes second has an old snapshot. It is tried again with a new one."""
    cluster.primary.configure(default_transaction_isolation=isolation)
    publish_a_meeting(tmp_path, some_rows(1))
    cluster.start_worker("--concurrency", "2", "--batch-size", "1", eventbus=STUBBORN)
    in_the_end(drained)
    invariants.check()
    assert "could not serialize" in what_they_met(tmp_path), "nothing was tried"
    assert statuses() == {"COMPLETED"}
    assert Effect.objects.exclude(handler="row").count() == 2


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_handler_that_spans_many_renewals_settles_the_first_time(cluster, in_the_end, isolation):
    """F31: a renewal never touches what a long transaction will settle."""
    cluster.primary.configure(default_transaction_isolation=isolation)
    publish("process.slow_effect", 3.0)
    cluster.start_worker(eventbus={"ABANDON_AFTER": 1.0})  # renewed every quarter of it
    in_the_end(drained)
    invariants.check()
    ended = EventLog.objects.get()
    assert (ended.status, ended.attempts, ended.errors) == ("COMPLETED", 1, None)
    assert Effect.objects.count() == 1


def test_a_role_with_short_timeouts(cluster, in_the_end):
    """F32: who needs longer fails alone, and says why; all others are done."""
    for setting in (
        "statement_timeout = '100ms'",
        "lock_timeout = '50ms'",
        "idle_in_transaction_session_timeout = '1s'",
    ):
        cluster.primary.sql(f"ALTER ROLE postgres IN DATABASE eventbus SET {setting}")
    producer = cluster.start_producer("--events", "300", "--keys", "5")
    slow = publish("process.slow_effect", 2.0)
    once = {"RETRY": {"max_retries": 0}}
    workers = [cluster.start_worker("--processes", "2", eventbus=once) for _ in range(2)]
    producer.wait()
    in_the_end(drained)
    invariants.check(cluster.journals)
    invariants.check_order_of_effects()
    dead = EventLog.objects.exclude(status="COMPLETED").get()
    assert dead.event_id == slow.event_id
    assert "idle-in-transaction timeout" in dead.errors[0]["message"]
    assert Effect.objects.count() == EventLog.objects.filter(status="COMPLETED").count() == 300
    assert [each.process.poll() for each in workers] == [None, None]
