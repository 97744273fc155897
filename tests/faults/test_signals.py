"""Signals at critical moments: SIGTERM during a commit, and workers suspended for too long."""

import signal

import pytest
from django.db import connection

from django_eventbus import dead_letters
from django_eventbus.models import EventLog, EventWorker, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from django_eventbus.store import store_for
from tests.faults import failpoints, invariants
from tests.faults.journal import HANDLERS, HandlerJournal
from tests.shop.models import Effect
from tests.workers import IN_ONE_PROCESS, PATIENT, abandon, eventually, on_one_database

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def pause(tmp_path):
    """A failpoint that reports that it was reached and waits for ``go_on()``."""

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


def test_a_worker_that_dies_during_a_release_loses_nothing(start_worker, tmp_path, pause):
    """F01 at the last failpoint: the rest of a batch is about to be released."""
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
def test_no_event_is_lost_when_a_supervisor_dies_with_its_processes_at(
    start_worker, tmp_path, pause, place
):
    """F01: no supervisor reports the running events, so all claimed events are suspects."""
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


def first_run_of_a_stale_worker(start_worker, tmp_path, pause, lease=PATIENT):
    """Suspend a worker at the end of its handler, for longer than ABANDON_AFTER.

    Its supervisor does not kill it, so only the claim token prevents its settlement.
    """
    if connection.vendor == "sqlite":
        pytest.skip("a stale worker's open transaction holds the only write lock")
    journal = HandlerJournal(tmp_path / "handlers")
    stale = start_worker(
        env={**failpoints.environment(handler__after=pause.fault), HANDLERS: str(journal.path)},
        eventbus=lease,
    )
    eventually(pause.seen.exists, lambda: stale.log)
    stale.suspend_all()
    abandon()
    return stale, journal


def test_a_stale_worker_that_claims_its_event_again_settles_it_once(start_worker, tmp_path, pause):
    """F07: there is no other worker; the late attempt must not settle the claim of the new one."""
    publish("fault.effect", {})
    # The worker learns at its next renewal, after a quarter of this, that it has no registration.
    lease = {"ABANDON_AFTER": 20.0}
    stale, journal = first_run_of_a_stale_worker(start_worker, tmp_path, pause, lease)
    assert store_for().recover() == 1
    stale.signal_all(signal.SIGCONT)
    pause.go_on()
    eventually(lambda: not QueuedEvent.objects.exists(), lambda: stale.log)
    invariants.check(handlers=journal)
    assert Effect.objects.count() == EventLog.objects.count() == 1
    assert len({fact["token"] for fact in journal.read()}) == 2


def test_a_stale_worker_that_wakes_during_the_new_attempt_cannot_settle_it(
    start_worker, tmp_path, pause
):
    """F07: both attempts run at the same time, and only the new claim token is valid."""
    event = publish("fault.effect", {})
    stale, _ = first_run_of_a_stale_worker(start_worker, tmp_path, pause)
    second = {**pause.fault, "once": str(tmp_path / "twice"), "seen": str(tmp_path / "running")}
    second["until"] = str(tmp_path / "finish")
    other = start_worker(
        *IN_ONE_PROCESS, env=failpoints.environment(handler__after=second), eventbus=PATIENT
    )
    eventually((tmp_path / "running").exists, lambda: other.log)
    claim = QueuedEvent.objects.get().claim_token
    stale.signal_all(signal.SIGCONT)
    pause.go_on()
    stale.signal(signal.SIGTERM)
    stale.wait()
    held = QueuedEvent.objects.get()
    assert (held.claim_token, held.status) == (claim, "PROCESSING")
    assert not Effect.objects.exists()
    (tmp_path / "finish").touch()
    eventually(lambda: not QueuedEvent.objects.exists(), lambda: other.log)
    invariants.check()
    assert EventLog.objects.get().event_id == event.event_id
    assert Effect.objects.count() == 1


@pytest.mark.parametrize(
    "death", ["abort", "segfault", pytest.param("out_of_memory", marks=on_one_database)]
)
def test_only_the_event_whose_handler_kills_its_process_is_charged(start_worker, death):
    """F11: the event ends as crashed for any cause of death, and the other events are handled."""
    publish_many(("fault.effect", n) for n in range(5))
    poison = publish("fault.death", death)
    publish_many(("fault.effect", n) for n in range(5))
    worker = start_worker(eventbus={**PATIENT, "RETRY": {"max_retries": 0}})
    eventually(lambda: EventLog.objects.count() == 11, lambda: worker.log)
    invariants.check()
    (dead,) = dead_letters.list()
    assert dead.event_id == poison.event_id
    if death != "out_of_memory":  # Python may have raised a MemoryError instead of dying.
        assert (dead.error_type, dead.crashes) == ("crashed", 3)
    assert set(EventLog.objects.filter(type="fault.effect").values_list("crashes")) == {(0,)}
    assert Effect.objects.count() == 10


BOTH_SIGNALS = pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name
)


def assert_stopped(worker):
    assert worker.wait() == 0, worker.log
    assert not EventWorker.objects.exists(), "a registration was left behind"
    assert "Traceback" not in worker.log
    assert "ended with" not in worker.log


@BOTH_SIGNALS
@pytest.mark.parametrize("options", [(), IN_ONE_PROCESS], ids=["supervisor", "one process"])
def test_a_command_that_is_asked_to_stop_while_it_starts_exits_with_0(
    start_worker, pause, options, number
):
    plan = failpoints.environment(start__command=pause.fault)
    worker = start_worker(*options, env=plan, eventbus=PATIENT)
    eventually(pause.seen.exists, lambda: worker.log)
    worker.signal(number)
    assert_stopped(worker)


@BOTH_SIGNALS
def test_a_worker_process_that_is_asked_to_stop_while_it_starts_exits_with_0(
    start_worker, pause, number
):
    """The signal reaches the whole process group, as Ctrl-C and many service managers send it."""
    plan = failpoints.environment(start__child=pause.fault)
    worker = start_worker(env=plan, eventbus=PATIENT)
    eventually(pause.seen.exists, lambda: worker.log)
    worker.signal_all(number)
    assert_stopped(worker)


@BOTH_SIGNALS
def test_a_supervisor_that_is_asked_to_stop_while_it_starts_processes_stops_them_all(
    start_worker, pause, number
):
    plan = failpoints.environment(start__registered={**pause.fault, "nth": 2})
    worker = start_worker("--processes", "3", env=plan, eventbus=PATIENT)
    eventually(pause.seen.exists, lambda: worker.log)
    worker.signal(number)
    eventually(lambda: "Stopping" in worker.log)
    pause.go_on()
    assert_stopped(worker)


@BOTH_SIGNALS
def test_a_worker_in_one_process_that_is_asked_to_stop_while_it_registers_exits_with_0(
    start_worker, pause, number
):
    plan = failpoints.environment(start__registered=pause.fault)
    worker = start_worker(*IN_ONE_PROCESS, env=plan, eventbus=PATIENT)
    eventually(pause.seen.exists, lambda: worker.log)
    worker.signal(number)
    pause.go_on()
    assert_stopped(worker)
