"""Real worker processes on the test database."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from django.db import Error, connection

from django_eventbus.models import EventWorker

PATIENCE = 60
#: A worker on a busy machine must not count as abandoned.
PATIENT = {"ABANDON_AFTER": 600.0}
LONG_AGO = "2000-01-01T00:00:00Z"
#: For tests that need no supervisor, because it starts twice as fast.
IN_ONE_PROCESS = ("--processes", "0")
#: For tests of processes, signals and terminals that do not depend on the rows.
on_one_database = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="the result does not depend on the database"
)


def eventually(condition, message="it never happened", *, patience=PATIENCE):
    """Wait until the condition is true; fail after a timeout."""
    give_up_at = time.monotonic() + patience
    while time.monotonic() < give_up_at:
        if found := condition():
            return found
        time.sleep(0.01)
    pytest.fail(message() if callable(message) else message)


def abandon():
    """Let all current registrations expire."""
    assert EventWorker.objects.update(expires_at=LONG_AGO)


def suspend(pid):
    """Suspend a process and wait until none of its threads runs.

    ``SIGSTOP`` alone is not enough: on a busy machine other threads go on until one of them has
    been scheduled and has handled the signal.
    """
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: set(thread_states(pid)) == {"T"}, "the process was not suspended")


def thread_states(pid):
    """Return the state of each thread: ``T`` is suspended, ``Z`` has ended."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # The thread may have ended.
            yield stat.read_text().rpartition(")")[2].split()[0]


class Process:
    """A process on the test database, with a log of its own."""

    #: The beginning of the name of its log.
    name: str

    def __init__(self, tmp_path, command, *, eventbus=None, env=None):
        self.log_path = tmp_path / f"{self.name}-{time.monotonic_ns()}.log"
        settings = {"ABANDON_AFTER": 2.0, "POLL_INTERVAL": 0.2, **(eventbus or {})}
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env={
                    **os.environ,
                    "DJANGO_SETTINGS_MODULE": "tests.settings",
                    "EVENTBUS_TEST_SETTINGS": json.dumps(settings),
                    "PYTHONUNBUFFERED": "1",
                    **(env or {}),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self):
        return self.log_path.read_text()

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self):
        return self.process.wait(timeout=PATIENCE)

    def end(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class WorkerProcess(Process):
    """A process of ``manage.py run_event_worker`` with options."""

    name = "worker"

    def __init__(self, tmp_path, *options, eventbus=None, env=None):
        command = ["django", "run_event_worker", *options]
        super().__init__(tmp_path, command, eventbus=eventbus, env=env)

    def wait_until_registered(self):
        """Wait until its worker process is registered."""
        return eventually(
            lambda: EventWorker.objects.exclude(pid=self.process.pid).first(), lambda: self.log
        )

    def signal_all(self, number):
        """Signal the supervisor and its worker processes."""
        os.killpg(self.process.pid, number)

    def suspend_all(self):
        """Suspend the supervisor and its worker processes; ``SIGCONT`` continues them."""
        supervisor = psutil.Process(self.process.pid)
        for process in (supervisor, *supervisor.children(recursive=True)):
            suspend(process.pid)


class Starter:
    """Starts processes of one kind, and kills all of them at the end of a test."""

    def __init__(self, kind, tmp_path):
        self.kind, self.tmp_path, self.started = kind, tmp_path, []

    def __call__(self, *options, **kwargs):
        self.started.append(self.kind(self.tmp_path, *options, **kwargs))
        return self.started[-1]

    def end(self):
        for process in self.started:
            process.end()


@pytest.fixture
def start_worker(transactional_db, tmp_path):
    """Start workers that are killed when the test ends."""
    start = Starter(WorkerProcess, tmp_path)
    yield start
    start.end()
    if start.started:
        eventually(no_other_session, "sessions of killed workers still exist")
    connection.close()


def no_other_session():
    """Terminate the sessions of killed processes, whose statements would affect the next test."""
    with suppress(Error), connection.cursor() as cursor:  # A stopped server has no sessions.
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND datname = current_database() "
                "AND backend_type = 'client backend'"
            )
            return not cursor.fetchall()
        if connection.vendor == "mysql":
            cursor.execute(
                "SELECT id FROM information_schema.processlist "
                "WHERE db = database() AND id <> connection_id()"
            )
            others = cursor.fetchall()
            for other in others:
                with suppress(Error):  # The session may have ended.
                    cursor.execute("KILL %s", other)
            return not others
    return True
