"""Worker processes that stop, are suspended, or are killed."""

import json
import os
import re
import signal

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from django_eventbus import dead_letters
from django_eventbus.models import EventLog, EventWorker, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from tests import databases
from tests.faults import failpoints
from tests.shop.models import Effect
from tests.workers import (
    IN_ONE_PROCESS,
    PATIENT,
    abandon,
    eventually,
    on_one_database,
    suspend,
    thread_states,
)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def files(tmp_path):
    return {"started": str(tmp_path / "started"), "go_on": str(tmp_path / "go_on")}


def has_started(files):
    return lambda: os.path.exists(files["started"])


def touch(path):
    with open(path, "w"):
        pass


def test_an_idle_worker_stops_on_a_signal(start_worker):
    """F03."""
    worker = start_worker(eventbus=PATIENT)
    worker.wait_until_registered()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.log
    assert not EventWorker.objects.exists()


def test_the_first_signal_lets_a_handler_finish_and_releases_the_rest(start_worker, files):
    """M27, F03: in-flight events finish, unstarted ones return uncharged."""
    publish("process.signal", files)
    publish_many(("process.effect", n) for n in range(5))
    worker = start_worker(eventbus=PATIENT)
    eventually(has_started(files), lambda: worker.log)
    worker.signal(signal.SIGTERM)
    eventually(lambda: "Stopping" in worker.log)
    touch(files["go_on"])
    assert worker.wait() == 0, worker.log
    assert list(Effect.objects.values_list("note", flat=True)) == ["started"]
    assert EventLog.objects.count() == 1
    assert set(QueuedEvent.objects.values_list("status", "attempts", "errors")) == {
        ("PENDING", 0, None)
    }


@on_one_database
def test_the_second_signal_stops_the_worker_immediately(start_worker, files):
    """F05."""
    publish("process.signal", files)
    publish_many(("process.effect", n) for n in range(5))
    worker = start_worker(eventbus=PATIENT)
    eventually(has_started(files), lambda: worker.log)
    worker.signal(signal.SIGTERM)
    worker.signal(signal.SIGTERM)
    eventually(lambda: (worker.process.poll() is not None) or worker.signal(signal.SIGTERM))
    assert worker.wait() != 0, worker.log
    assert not Effect.objects.exists()
    interrupted = QueuedEvent.objects.get(type="process.signal")
    assert (interrupted.status, interrupted.attempts) == ("PENDING", 1)
    assert "forced shutdown" in interrupted.errors[0]["message"]
    assert QueuedEvent.objects.filter(attempts=0, status="PENDING").count() == 5


def test_a_handler_that_exceeds_the_grace_period_is_killed(start_worker, files):
    """F05."""
    publish("process.signal", files)
    worker = start_worker(eventbus={**PATIENT, "SHUTDOWN_TIMEOUT": 0.5})
    eventually(has_started(files), lambda: worker.log)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 1, worker.log
    assert QueuedEvent.objects.get().status == "PENDING"


def test_a_killed_worker_process_is_replaced_and_only_its_running_event_is_charged(
    start_worker, files
):
    """M6, M29: nothing lost, no effect twice, neighbours uncharged."""
    publish("process.signal", files)
    publish_many(("process.effect", n) for n in range(5))
    worker = start_worker(eventbus=PATIENT)
    eventually(has_started(files), lambda: worker.log)
    child = worker.wait_until_registered()
    os.remove(files["started"])
    os.kill(child.pid, signal.SIGKILL)
    eventually(lambda: Effect.objects.count() == 5, lambda: worker.log)
    eventually(has_started(files), lambda: worker.log)
    touch(files["go_on"])
    eventually(lambda: EventLog.objects.count() == 6, lambda: worker.log)
    assert Effect.objects.count() == 6
    blamed = EventLog.objects.get(type="process.signal")
    assert (blamed.attempts, blamed.crashes) == (2, 1)
    assert "SIGKILL" in blamed.errors[0]["message"]
    assert blamed.errors[0]["handler"] == "signal"
    assert set(
        EventLog.objects.filter(type="process.effect").values_list("attempts", "crashes")
    ) == {(1, 0)}


def test_a_poison_event_ends_as_crashed_and_the_others_are_handled(start_worker):
    """M6: this includes events that kill their process."""
    publish_many(("process.effect", n) for n in range(10))
    poison = publish("process.exit", {})
    publish_many(("process.effect", n) for n in range(10))
    worker = start_worker(eventbus=PATIENT)
    eventually(lambda: EventLog.objects.count() == 21, lambda: worker.log)
    (dead,) = dead_letters.list()
    assert dead.event_id == poison.event_id
    assert (dead.status, dead.error_type, dead.crashes) == ("FAILED", "crashed", 3)
    assert dead.dead_handler == "exit"
    assert ["exit code 7" in error["message"] for error in dead.errors] == [True] * 3
    assert Effect.objects.count() == 20
    assert set(EventLog.objects.filter(type="process.effect").values_list("crashes")) == {(0,)}


def test_a_poison_event_that_kills_the_supervisor_too_is_identified(start_worker):
    """No process can report the running event, so suspects run alone until one crashes."""
    publish_many(("process.effect", n) for n in range(3))
    poison = publish("process.kill_group", {})
    publish_many(("process.effect", n) for n in range(3))

    def one_more_worker_until_done():
        worker = start_worker("--drain", eventbus=PATIENT)
        if worker.wait() != 0:
            abandon()
        return EventLog.objects.count() == 7

    eventually(one_more_worker_until_done)
    (dead,) = dead_letters.list()
    assert (dead.event_id, dead.error_type) == (poison.event_id, "crashed")
    assert Effect.objects.count() == 6


@on_one_database
def test_a_handler_that_holds_the_gil_past_its_deadline_is_killed(start_worker):
    """M17, F09: a handler cannot block the worker."""
    publish("process.hold_the_gil", {})
    publish_many(("process.effect", n) for n in range(3))
    worker = start_worker(eventbus=PATIENT)
    eventually(lambda: EventLog.objects.count() == 4, lambda: worker.log)
    (dead,) = dead_letters.list()
    assert "could not be interrupted; its process was killed" in dead.errors[0]["message"]
    assert dead.dead_handler == "hold_the_gil"
    assert Effect.objects.count() == 3


def test_worker_processes_do_not_outlive_their_supervisor(start_worker):
    worker = start_worker()
    registration = worker.wait_until_registered()
    worker.signal(signal.SIGKILL)
    worker.wait()
    eventually(lambda: not alive(registration.pid), lambda: worker.log)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not set(thread_states(pid)) <= {"Z"}


others_can_write = pytest.mark.skipif(
    "connection.vendor == 'sqlite'",
    reason="a stale worker's open transaction holds the only write lock",
)


@others_can_write
@pytest.mark.parametrize(
    ("threads", "atomic"), [(1, "handler"), (1, "event"), (4, "handler"), (4, "event")]
)
def test_the_late_commit_of_a_stale_worker_is_refused(
    start_worker, files, tmp_path, threads, atomic
):
    """F06. Only the worker process is suspended and its supervisor does not kill it, so only the
    claim token prevents its settlement."""
    for number in range(threads):
        publish("process.signal", {**files, "started": f"{files['started']}{number}"})
    settings = {**PATIENT, "ATOMIC": atomic, "HANDLER_TIMEOUT": 600.0}
    passed = {"do": "wait", "until": files["go_on"]}
    places = {
        "handler__after": {**passed, "seen": str(tmp_path / "finished")},
        "settle__before_commit": {**passed, "seen": str(tmp_path / "settled")},
    }
    stale = start_worker(
        *("--concurrency", str(threads), "--batch-size", "1"),
        eventbus=settings,
        env=failpoints.environment(**places),
    )
    for number in range(threads):
        eventually(lambda n=number: os.path.exists(f"{files['started']}{n}"), lambda: stale.log)
    child = stale.wait_until_registered()
    suspend(child.pid)
    abandon()
    touch(files["go_on"])
    other = start_worker(*IN_ONE_PROCESS, eventbus=settings)
    eventually(lambda: EventLog.objects.count() == threads, lambda: other.log)
    assert not (tmp_path / "finished").exists()
    os.kill(child.pid, signal.SIGCONT)
    eventually((tmp_path / "finished").exists, lambda: stale.log)
    stale.signal(signal.SIGTERM)
    stale.wait()
    assert "killing worker process" not in stale.log
    assert not (tmp_path / "settled").exists()
    assert Effect.objects.count() == EventLog.objects.count() == threads
    assert child.pk not in set(EventLog.objects.values_list("claimed_by", flat=True))


@others_can_write
def test_a_worker_that_was_suspended_for_too_long_commits_nothing(start_worker, files):
    """F06: the whole worker is suspended; the claim token or the supervisor stops it."""
    publish("process.signal", files)
    stale = start_worker(eventbus={"ABANDON_AFTER": 1.0})
    eventually(has_started(files), lambda: stale.log)
    stale.suspend_all()
    touch(files["go_on"])
    other = start_worker(*IN_ONE_PROCESS, eventbus={"ABANDON_AFTER": 1.0})
    eventually(lambda: EventLog.objects.count() == 1, lambda: other.log)
    stale.signal_all(signal.SIGCONT)
    stale.signal(signal.SIGTERM)
    stale.wait()
    assert Effect.objects.count() == 1
    assert EventLog.objects.count() == 1


def test_a_stale_worker_without_a_transaction_settles_nothing(start_worker, files):
    """F06."""
    publish("process.signal_outside", files)
    stale = start_worker(eventbus={"ABANDON_AFTER": 1.0})
    eventually(has_started(files), lambda: stale.log)
    stale.suspend_all()
    touch(files["go_on"])
    other = start_worker(*IN_ONE_PROCESS, eventbus={"ABANDON_AFTER": 1.0})
    eventually(lambda: EventLog.objects.count() == 1, lambda: other.log)
    settled_by = EventLog.objects.get().claimed_by
    stale.signal_all(signal.SIGCONT)
    # At-least-once: the stale worker's handler may finish its work but cannot settle the event.
    eventually(
        lambda: Effect.objects.count() == 2 or "killing worker process" in stale.log,
        lambda: stale.log,
    )
    stale.signal(signal.SIGTERM)
    stale.wait()
    assert EventLog.objects.get().claimed_by == settled_by


def test_a_worker_survives_the_loss_of_its_connections(start_worker):
    if connection.vendor != "postgresql":
        pytest.skip("connections are cut by pg_terminate_backend")
    worker = start_worker(eventbus=PATIENT)
    worker.wait_until_registered()
    publish("process.effect", "before")
    eventually(Effect.objects.exists, lambda: worker.log)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        assert cursor.fetchone()[0] > 0
    publish("process.effect", "after")
    eventually(lambda: Effect.objects.count() == 2, lambda: worker.log)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.log


def test_a_worker_whose_registration_was_deleted_starts_again(start_worker, files):
    publish("process.signal", files)
    worker = start_worker(eventbus={"ABANDON_AFTER": 1.0})
    eventually(has_started(files), lambda: worker.log)
    os.remove(files["started"])
    if connection.vendor == "sqlite":
        pytest.skip("the handler's open transaction holds the only write lock")
    EventWorker.objects.all().delete()
    eventually(has_started(files), lambda: worker.log)
    touch(files["go_on"])
    eventually(lambda: EventLog.objects.count() == 1, lambda: worker.log)
    assert Effect.objects.count() == 1


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="only psycopg has pools")
def test_a_worker_does_not_use_the_connection_pool_of_the_project(start_worker):
    """Threads, listener and heartbeat need more connections than the pool has, and a session that
    a handler has changed must not be reused."""
    one = {"pool": {"min_size": 1, "max_size": 1, "timeout": 1}}
    publish_many(("process.effect", n) for n in range(20))
    options = {databases.OPTIONS: json.dumps(one)}
    worker = start_worker("--concurrency", "4", "--drain", eventbus=PATIENT, env=options)
    assert worker.wait() == 0, worker.log
    assert Effect.objects.count() == 20
    assert "PoolTimeout" not in worker.log


def test_a_worker_stops_after_the_given_number_of_events(start_worker):
    publish_many(("process.effect", n) for n in range(100))
    worker = start_worker("--max-events", "10", "--batch-size", "5", eventbus=PATIENT)
    assert worker.wait() == 0, worker.log
    assert 10 <= EventLog.objects.count() <= 20
    assert QueuedEvent.objects.filter(status="PENDING", attempts=0).exists()


def test_a_worker_in_one_process_drains_the_queue(start_worker):
    publish_many(("process.effect", n) for n in range(10))
    worker = start_worker("--processes", "0", "--drain", eventbus=PATIENT)
    assert worker.wait() == 0, worker.log
    assert Effect.objects.count() == 10
    assert not EventWorker.objects.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--queues", "defualt"], "did you mean 'default'?"),
        (["--database", "defualt"], "did you mean 'default'?"),
        (["--concurrency", "0"], "--concurrency must be greater than 0, not 0"),
        (["--processes", "-1"], "--processes must be 0 or more, not -1"),
    ],
)
def test_invalid_options_are_refused_with_the_valid_choices(options, message):
    with pytest.raises(CommandError, match=re.escape(message)):
        call_command("run_event_worker", *options)


def test_a_handler_that_exits_with_status_0_is_a_crash(start_worker):
    poison = publish("process.exit_as_if_done", {})
    publish_many(("process.effect", n) for n in range(3))
    worker = start_worker(eventbus={**PATIENT, "MAX_CRASHES": 1})
    eventually(lambda: EventLog.objects.count() == 4, lambda: worker.log)
    (dead,) = dead_letters.list()
    assert (dead.event_id, dead.error_type) == (poison.event_id, "crashed")
    assert Effect.objects.count() == 3


def test_an_event_running_next_to_a_killed_handler_is_not_charged(start_worker, files):
    """F09: one of two threads ignores its deadline; killing the process interrupts the other."""
    guilty = publish("process.ignore_deadline", {})
    publish("process.signal_outside", files)
    options = ("--concurrency", "2", "--batch-size", "1")
    worker = start_worker(*options, eventbus=PATIENT)
    eventually(lambda: EventLog.objects.exists(), lambda: worker.log)
    touch(files["go_on"])
    eventually(lambda: EventLog.objects.count() == 2, lambda: worker.log)
    (dead,) = dead_letters.list()
    assert dead.event_id == guilty.event_id
    innocent = EventLog.objects.get(type="process.signal_outside")
    assert (innocent.status, innocent.crashes, innocent.interruptions) == ("COMPLETED", 0, 0)
    assert innocent.attempts == 1


@pytest.mark.parametrize(
    ("event_type", "attempts"), [("ignore_deadline", [1]), ("ignore_deadline_twice", [1, 2])]
)
def test_a_kill_at_the_deadline_is_a_failed_attempt_under_the_handlers_policy(
    start_worker, tmp_path, event_type, attempts
):
    runs = tmp_path / "runs"
    published = publish(f"process.{event_type}", str(runs))
    worker = start_worker(eventbus=PATIENT)
    eventually(lambda: EventLog.objects.exists(), lambda: worker.log)
    assert [int(line) for line in runs.read_text().split()] == attempts
    (dead,) = dead_letters.list()
    assert (dead.event_id, dead.dead_handler) == (published.event_id, event_type)
    assert (dead.error_type, dead.crashes, dead.interruptions) == ("TimeoutError", 0, 0)
    assert dead.attempts == len(attempts)
    assert [error["attempt"] for error in dead.errors] == attempts
    # The supervisor logs after its commit.
    eventually(lambda: "is a dead letter" in worker.log, lambda: worker.log)


def test_a_query_past_its_deadline_is_cancelled_in_a_thread(start_worker):
    if connection.vendor != "postgresql":
        pytest.skip("pg_sleep")
    publish("process.pg_sleep", {})
    worker = start_worker("--concurrency", "2", eventbus=PATIENT)
    eventually(lambda: EventLog.objects.count() == 1, lambda: worker.log)
    (dead,) = dead_letters.list()
    assert (dead.error_type, dead.crashes) == ("TimeoutError", 0)
