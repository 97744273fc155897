"""Signals at the worst moment: asked to stop in a commit, stopped and woken too late."""

import signal

import pytest
from django.db import connection

from django_eventbus import dead_letters
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing import publish, publish_many
from django_eventbus.store import store_for
from tests.faults import failpoints, invariants
from tests.faults.journal import HANDLERS, HandlerJournal
from tests.shop.models import Effect
from tests.workers import IN_ONE_PROCESS, PATIENT, abandon, eventually, on_one_database

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def pause(tmp_path):
    """A failpoint that says that it was reached and waits; and how to go on."""

    class Pause:
        seen, until = tmp_path / "seen", tmp_path / "until"
        fault = {
            "do": "wait",
            "seen": str(seen),
            "until": str(until),
            "once": str(tmp_path / "once"),
        }

        def go_on(self):
            self.until.touch()

    return Pause()


@pytest.mark.parametrize("place", ["settle.before_commit", "settle.committed"])
def test_a_worker_asked_to_stop_while_it_settles_finishes_its_commit(start_worker, pause, place):
    """F04: a signal only sets a flag."""
    publish_many(("fault.effect", n) for n in range(3))
    plan = {place.replace(".", "__"): pause.fault}
    worker = start_worker(env=failpoints.environment(**plan), eventbus=PATIENT)
    eventually(pause.seen.exists, lambda: worker.log)
    worker.signal(signal.SIGTERM)
    eventually(lambda: "Stopping" in worker.log)
    pause.go_on()
    assert worker.wait() == 0, worker.log
    invariants.check()
    assert EventLog.objects.count() == Effect.objects.count() == 3
    assert set(EventLog.objects.values_list("attempts", "crashes")) == {(1, 0)}


def test_a_worker_that_dies_while_it_gives_back_has_lost_nothing(start_worker, tmp_path, pause):
    """F01 at the last place: the rest of a batch is about to return."""
    publish_many(("fault.effect", n) for n in range(10))
    fault = {"do": "kill", "once": str(tmp_path / "killed")}
    plan = {"handler__after": pause.fault, "release__before": fault}
    worker = start_worker(env=failpoints.environment(**plan), eventbus=PATIENT)
    eventually(pause.seen.exists, lambda: worker.log)
    worker.signal(signal.SIGTERM)
    eventually(lambda: "Stopping" in worker.log)
    pause.go_on()
    worker.wait()
    assert (tmp_path / "killed").exists(), worker.log
    assert set(QueuedEvent.objects.values_list("status", "attempts")) == {("PENDING", 0)}
    other = start_worker(*IN_ONE_PROCESS, "--drain", eventbus=PATIENT)
    assert other.wait() == 0, other.log
    invariants.check()
    assert Effect.objects.count() == EventLog.objects.count() == 10


@pytest.mark.parametrize(
    "place", ["claim.committed", "handler.after", "settle.before_commit", "settle.committed"]
)
def test_a_whole_worker_that_dies_at(start_worker, tmp_path, pause, place):
    """F01 without a supervisor that could tell: all it held is suspect, and clears itself."""
    publish_many(("fault.effect", n) for n in range(20))
    plan = {place.replace(".", "__"): pause.fault}
    dying = start_worker(env=failpoints.environment(**plan), eventbus=PATIENT)
    eventually(pause.seen.exists, lambda: dying.log)
    dying.signal_all(signal.SIGKILL)
    dying.wait()
    abandon()
    other = start_worker(*IN_ONE_PROCESS, eventbus=PATIENT)
    eventually(lambda: not QueuedEvent.objects.exists(), lambda: other.log)
    invariants.check()
    assert EventLog.objects.filter(status="COMPLETED").count() == Effect.objects.count() == 20
    assert not EventLog.objects.filter(crashes__gt=1).exists()


def zombies_first_run(start_worker, tmp_path, pause, lease=PATIENT):
    """A worker stopped in its handler's end, for longer than others wait for it.

    Its own supervisor has no reason to end it: what it does when it wakes is up to the fence.
    """
    if connection.vendor == "sqlite":
        pytest.skip("a zombie's open transaction holds the only write lock: nobody takes over")
    journal = HandlerJournal(tmp_path / "handlers")
    zombie = start_worker(
        env={**failpoints.environment(handler__after=pause.fault), HANDLERS: str(journal.path)},
        eventbus=lease,
    )
    eventually(pause.seen.exists, lambda: zombie.log)
    zombie.signal_all(signal.SIGSTOP)
    abandon()
    return zombie, journal


def test_a_zombie_that_takes_its_own_event_again_settles_it_once(start_worker, tmp_path, pause):
    """F07: no other worker is there; the late attempt must not settle the new one's claim."""
    publish("fault.effect", {})
    # When its registration is due, in a quarter of the time, it gets to know that it has none.
    lease = {"ABANDON_AFTER": 20.0}
    zombie, journal = zombies_first_run(start_worker, tmp_path, pause, lease)
    assert store_for().recover() == 1
    zombie.signal_all(signal.SIGCONT)
    pause.go_on()
    eventually(lambda: not QueuedEvent.objects.exists(), lambda: zombie.log)
    invariants.check(handlers=journal)
    assert Effect.objects.count() == EventLog.objects.count() == 1
    assert len({fact["token"] for fact in journal.read()}) == 2


def test_a_zombie_that_wakes_while_the_new_attempt_runs_cannot_touch_it(
    start_worker, tmp_path, pause
):
    """F07: both are at work on the same event at once; the new token alone counts."""
    event = publish("fault.effect", {})
    zombie, _ = zombies_first_run(start_worker, tmp_path, pause)
    second = {**pause.fault, "once": str(tmp_path / "twice"), "seen": str(tmp_path / "running")}
    second["until"] = str(tmp_path / "finish")
    other = start_worker(
        *IN_ONE_PROCESS, env=failpoints.environment(handler__after=second), eventbus=PATIENT
    )
    eventually((tmp_path / "running").exists, lambda: other.log)
    claim = QueuedEvent.objects.get().claim_token
    zombie.signal_all(signal.SIGCONT)
    pause.go_on()
    zombie.signal(signal.SIGTERM)
    zombie.wait()
    held = QueuedEvent.objects.get()
    assert (held.claim_token, held.status) == (claim, "PROCESSING")
    assert not Effect.objects.exists()
    (tmp_path / "finish").touch()
    eventually(lambda: not QueuedEvent.objects.exists(), lambda: other.log)
    invariants.check()
    assert EventLog.objects.get().event_id == event.event_id
    assert Effect.objects.count() == 1


@on_one_database
@pytest.mark.parametrize("death", ["abort", "segfault", "out_of_memory"])
def test_a_handler_that_kills_its_process_is_the_only_one_charged(start_worker, death):
    """F11: whatever it dies of, it ends as crashed, and its neighbours are handled."""
    publish_many(("fault.effect", n) for n in range(5))
    poison = publish("fault.death", death)
    publish_many(("fault.effect", n) for n in range(5))
    worker = start_worker(eventbus={**PATIENT, "RETRY": {"max_retries": 0}})
    eventually(lambda: EventLog.objects.count() == 11, lambda: worker.log)
    invariants.check()
    (dead,) = dead_letters.list()
    assert dead.event_id == poison.event_id
    if death != "out_of_memory":  # Python may have got a MemoryError out of it
        assert (dead.error_type, dead.crashes) == ("crashed", 3)
    assert set(EventLog.objects.filter(type="fault.effect").values_list("crashes")) == {(0,)}
    assert Effect.objects.count() == 10
