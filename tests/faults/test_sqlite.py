"""SQLite: several processes use one file, in both journal modes (F48)."""

import sqlite3
import threading
from contextlib import closing

import pytest
from django.db import OperationalError, connection, connections

from django_eventbus import publish, publish_many
from django_eventbus.models import EventLog, QueuedEvent
from tests.databases import JOURNAL
from tests.faults import failpoints, invariants
from tests.shop.models import Effect
from tests.workers import eventually

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif("connection.vendor != 'sqlite'", reason="SQLite's one writer"),
]


@pytest.fixture(params=["WAL", "DELETE"])
def journal(request, monkeypatch):
    """Set the journal mode of the database, for this process and the processes it starts."""
    monkeypatch.setenv(JOURNAL, request.param)
    options = connection.settings_dict["OPTIONS"]
    command = options["init_command"]
    monkeypatch.setitem(options, "init_command", command.replace("WAL", request.param))
    eventually(reopened)
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        assert cursor.fetchone() == (request.param.lower(),)
    yield request.param
    monkeypatch.undo()
    eventually(reopened)


def reopened():
    """Reopen the connection, which sets the journal mode. SQLite needs exclusive access for that,
    and does not wait for a killed process that still exists."""
    connection.close()
    try:
        connection.ensure_connection()
    except OperationalError:
        return False
    return True


class Reader:
    """Keeps a read transaction on the queue open in another thread."""

    def __enter__(self):
        self._reads, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._reads.wait(30)
        return self

    def _read(self):
        try:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN DEFERRED")
                cursor.execute("SELECT count(*) FROM django_eventbus_queuedevent")
                cursor.fetchone()
                self._reads.set()
                self._stop.wait(30)
                cursor.execute("ROLLBACK")
        finally:
            connections.close_all()

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join()


def published():
    publish_many(("fault.effect", n) for n in range(40))
    for n in range(20):
        publish("fault.effect", n, key=f"k{n % 3}")
    return 60


def drained():
    return not QueuedEvent.objects.exists()


def check_that_all_are_handled(count, workers):
    eventually(drained, lambda: "\n".join(worker.log for worker in workers))
    invariants.check()
    invariants.check_order_of_effects()
    assert Effect.objects.count() == EventLog.objects.filter(status="COMPLETED").count() == count
    assert not [worker.log for worker in workers if "locked" in worker.log]


def test_a_process_killed_during_a_write_does_not_stop_the_others(journal, start_worker, tmp_path):
    """The next process that opens the file rolls back the journal."""
    count = published()
    plan = {"settle__before_commit": {"do": "kill", "once": str(tmp_path / "killed")}}
    env = failpoints.environment(**plan)
    workers = [start_worker("--processes", "2", env=env) for _ in range(2)]
    check_that_all_are_handled(count, workers)
    assert (tmp_path / "killed").exists()


def a_writer_waits():
    """Whether a writer waits for readers to leave; meanwhile no new reader is admitted."""
    with closing(sqlite3.connect(connection.settings_dict["NAME"], timeout=0)) as newcomer:
        try:
            newcomer.execute("SELECT count(*) FROM django_eventbus_queuedevent").fetchone()
        except sqlite3.OperationalError as error:
            return "locked" in str(error)
    return False


def test_workers_wait_for_a_long_reader_without_errors(journal, start_worker):
    """Without a write-ahead log, writers wait for a reader for a limited time."""
    count = published()
    with Reader():
        workers = [start_worker("--processes", "2") for _ in range(2)]
        if journal == "WAL":
            check_that_all_are_handled(count, workers)
        else:
            eventually(a_writer_waits, lambda: workers[0].log)
    check_that_all_are_handled(count, workers)
