"""SQLite in WAL mode, with no other infrastructure (M31)."""

import queue
import threading
import time

import pytest
from django.db import OperationalError, connection, connections

from django_eventbus import handler, publish, publish_many
from django_eventbus.models import EventLog
from django_eventbus.store import store_for
from tests.bus import drain
from tests.shop.models import Effect
from tests.threads import in_thread
from tests.workers import eventually

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif("connection.vendor != 'sqlite'", reason="SQLite's one writer"),
]


def in_another_thread(action):
    failures = []

    def run():
        try:
            with connection.cursor() as cursor:
                cursor.execute("PRAGMA busy_timeout = 0")  # a lock is an error at once
            action()
        except Exception as error:
            failures.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return failures


def test_the_bus_works_in_wal_mode():
    """M31: readers and the one writer do not wait for each other."""
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        assert cursor.fetchone() == ("wal",)
    handler("x", name="h")(lambda event: Effect.objects.create(event_id=event.id, handler="h"))
    publish_many(("x", n) for n in range(100))
    drain()
    assert EventLog.objects.count() == Effect.objects.count() == 100


def test_a_handler_that_touches_nothing_keeps_nobody_from_writing():
    """M31: the transaction begins when a handler first asks for the database."""
    failures = []

    @handler("x", name="h")
    def wait(event):
        failures.extend(in_another_thread(lambda: publish("y", {})))

    publish("x", {})
    drain(max_events=1)
    assert failures == []
    assert EventLog.objects.filter(type="x").count() == 1


def test_a_handler_that_writes_holds_the_one_write_lock():
    """The other side of it: this is what atomic=False is for."""
    failures = []

    @handler("x", name="h")
    def write(event):
        Effect.objects.create(event_id=event.id, handler="h")
        failures.extend(in_another_thread(lambda: publish("y", {})))

    publish("x", {})
    drain(max_events=1)
    assert "locked" in str(failures[0])


def test_a_busy_worker_lets_others_write():
    """SQLite keeps no line of those who wait: who takes the lock again at once has it for ever."""

    @handler("x", name="h")
    def write_and_work(event):
        Effect.objects.create(event_id=event.id, handler="h")
        time.sleep(0.01)

    publish_many(("x", n) for n in range(300))
    with in_thread(drain, max_events=300):
        eventually(Effect.objects.exists)
        for n in range(20):
            publish("y", n)
        assert Effect.objects.count() < 250
    assert Effect.objects.count() == 300


def test_a_listener_that_meets_an_error_listens_again(capture):
    """Else its worker would be deaf, and wait out every poll interval."""
    told, stopped = queue.SimpleQueue(), threading.Event()

    def listen():
        errors = iter([OperationalError("disk I/O error")])

        def fail_once(execute, *args):
            for error in errors:
                raise error
            return execute(*args)

        with connection.execute_wrapper(fail_once):
            store_for().listen(lambda: told.put(None), stopped)

    with in_thread(listen):
        try:
            told.get(timeout=60)  # it begins again with a look
            eventually(lambda: publish("x", {}) and not told.empty())
        finally:
            stopped.set()
    assert "listening for events failed, polling goes on" in capture.text
