"""The number of connections of a worker process, counted on the server."""

import os
import signal

import pytest
from django.db import connection

from django_eventbus.models import EventLog
from django_eventbus.publishing.publisher import publish
from tests.workers import PATIENT, eventually

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="only PostgreSQL has names"),
]

CONCURRENCY = 10


def roles_of(pid):
    """The roles of the sessions of a worker process, read from the session names."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT substring(application_name from '[a-z]+$') FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE %s",
            [f"eventbus worker %:{pid} %"],
        )
        return sorted(role for (role,) in cursor.fetchall())


def test_each_busy_thread_has_a_connection_and_idle_threads_have_none(start_worker, tmp_path):
    go_on = tmp_path / "go_on"
    started = [tmp_path / f"started{n}" for n in range(CONCURRENCY)]
    worker = start_worker("--concurrency", str(CONCURRENCY), eventbus=PATIENT)
    child = worker.wait_until_registered()
    eventually(lambda: roles_of(child.pid) == ["dispatcher", "listener"], lambda: worker.log)
    for path in started:
        publish("process.signal", {"started": str(path), "go_on": str(go_on)})
    eventually(lambda: all(map(os.path.exists, started)), lambda: worker.log)
    assert roles_of(child.pid) == [*["deliver"] * CONCURRENCY, "dispatcher", "listener"]
    go_on.touch()
    eventually(lambda: EventLog.objects.count() == CONCURRENCY, lambda: worker.log)
    eventually(lambda: roles_of(child.pid) == ["dispatcher", "listener"], lambda: worker.log)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.log


def test_a_worker_with_one_thread_closes_the_connection_that_claimed_ahead(start_worker):
    worker = start_worker(eventbus=PATIENT)
    child = worker.wait_until_registered()
    for n in range(300):
        publish("process.effect", n)
    eventually(lambda: EventLog.objects.count() == 300, lambda: worker.log)
    eventually(lambda: roles_of(child.pid) == ["deliver", "listener"], lambda: worker.log)
