"""SQLite: several processes at one file, in both kinds of journal (F48)."""

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
    """The mode of the database's file, for this process and those it starts."""
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
    """With its mode set: for that SQLite wants the file for itself, and does not wait for a process
    that has been killed and is still being cleared away."""
    connection.close()
    try:
        connection.ensure_connection()
    except OperationalError:
        return False
    return True


class Reader:
    """Reads the queue in a transaction of its own, and stays in it until told."""

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


def all_is_well(count, workers):
    eventually(drained, lambda: "\n".join(worker.log for worker in workers))
    invariants.check()
    invariants.check_order_of_effects()
    assert Effect.objects.count() == EventLog.objects.filter(status="COMPLETED").count() == count
    assert not [worker.log for worker in workers if "locked" in worker.log]


def test_four_processes_and_one_that_is_killed_in_the_middle_of_a_write(
    journal, start_worker, tmp_path
):
    """The journal is rolled back by whoever opens the file next."""
    count = published()
    plan = {"settle__before_commit": {"do": "kill", "once": str(tmp_path / "killed")}}
    env = failpoints.environment(**plan)
    workers = [start_worker("--processes", "2", env=env) for _ in range(2)]
    all_is_well(count, workers)
    assert (tmp_path / "killed").exists()


def a_writer_waits():
    """For readers to leave, before it may write to the file: until then no new one is let in."""
    with closing(sqlite3.connect(connection.settings_dict["NAME"], timeout=0)) as newcomer:
        try:
            newcomer.execute("SELECT count(*) FROM django_eventbus_queuedevent").fetchone()
        except sqlite3.OperationalError as error:
            return "locked" in str(error)
    return False


def test_a_long_reader_is_waited_for_and_nothing_fails(journal, start_worker):
    """With a write-ahead log nobody waits for it; without, writers do, and not for ever."""
    count = published()
    with Reader():
        workers = [start_worker("--processes", "2") for _ in range(2)]
        if journal == "WAL":
            all_is_well(count, workers)
        else:
            eventually(a_writer_waits, lambda: workers[0].log)
    all_is_well(count, workers)
