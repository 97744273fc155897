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
                cursor.execute("PRAGMA busy_timeout = 0")  # A locked database raises at once.
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


def test_a_handler_without_queries_does_not_take_the_write_lock():
    """M31: the transaction starts when a handler first uses the database."""
    failures = []

    @handler("x", name="h")
    def wait(event):
        failures.extend(in_another_thread(lambda: publish("y", {})))

    publish("x", {})
    drain(max_events=1)
    assert failures == []
    assert EventLog.objects.filter(type="x").count() == 1


def test_a_handler_that_writes_holds_the_write_lock():
    """Slow handlers should therefore use atomic=False."""
    failures = []

    @handler("x", name="h")
    def write(event):
        Effect.objects.create(event_id=event.id, handler="h")
        failures.extend(in_another_thread(lambda: publish("y", {})))

    publish("x", {})
    drain(max_events=1)
    assert "locked" in str(failures[0])


def test_a_busy_worker_lets_others_write():
    """SQLite has no queue of waiting writers: a worker without pauses would starve the others."""

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


def test_a_listener_resumes_after_an_error(capture):
    """Otherwise its worker would wait for every poll interval."""
    wake_ups, stopped = queue.SimpleQueue(), threading.Event()

    def listen():
        errors = iter([OperationalError("disk I/O error")])

        def fail_once(execute, *args):
            for error in errors:
                raise error
            return execute(*args)

        with connection.execute_wrapper(fail_once):
            store_for().listen(lambda: wake_ups.put(None), stopped)

    with in_thread(listen):
        try:
            wake_ups.get(timeout=60)  # After the restart it looks once.
            eventually(lambda: publish("x", {}) and not wake_ups.empty())
        finally:
            stopped.set()
    assert "listening for wake-ups failed, the worker continues to poll" in capture.text
