"""Real worker processes on the test database."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from django.db import Error, connection

from django_eventbus.models import EventWorker

PATIENCE = 60
#: For workers none of whom shall be taken for dead because the machine is busy.
PATIENT = {"ABANDON_AFTER": 600.0}
LONG_AGO = "2000-01-01T00:00:00Z"
#: Where it is no matter whether there is a supervisor: half as much to start.
IN_ONE_PROCESS = ("--processes", "0")
#: For tests of what the supervisor does about its children.
on_one_database = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="processes and signals are no matter of the database"
)


def eventually(condition, message="it never happened", *, patience=PATIENCE):
    """Wait for something that another process does; give up after a while."""
    give_up_at = time.monotonic() + patience
    while time.monotonic() < give_up_at:
        if found := condition():
            return found
        time.sleep(0.01)
    pytest.fail(message() if callable(message) else message)


def abandon():
    """Time passes: whoever is registered now has been silent for too long."""
    assert EventWorker.objects.update(expires_at=LONG_AGO)


class WorkerProcess:
    """``manage.py run_event_worker`` with options, as a person would start it."""

    def __init__(self, tmp_path, *options, eventbus=None, env=None):
        self.log_path = tmp_path / f"worker-{time.monotonic_ns()}.log"
        settings = {"ABANDON_AFTER": 2.0, "POLL_INTERVAL": 0.2, **(eventbus or {})}
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "django", "run_event_worker", *options],
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

    def wait_until_registered(self):
        """Its child stands in the table with a process id of its own."""
        return eventually(
            lambda: EventWorker.objects.exclude(pid=self.process.pid).first(), lambda: self.log
        )

    def signal(self, number):
        self.process.send_signal(number)

    def signal_all(self, number):
        """The supervisor and its children."""
        os.killpg(self.process.pid, number)

    def wait(self):
        return self.process.wait(timeout=PATIENCE)

    def end(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start_worker(transactional_db, tmp_path):
    """Start worker processes that are ended with the test."""
    started = []

    def start(*options, **kwargs):
        worker = WorkerProcess(tmp_path, *options, **kwargs)
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.end()
    if started:
        eventually(no_other_session, "sessions of killed workers went on")
    connection.close()


def no_other_session():
    """A server finishes what a killed process had asked for; not in the next test, please."""
    with suppress(Error), connection.cursor() as cursor:  # a server that is down has no sessions
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
                with suppress(Error):  # it ended by itself
                    cursor.execute("KILL %s", other)
            return not others
    return True
