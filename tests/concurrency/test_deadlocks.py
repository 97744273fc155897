"""A settlement that is the victim of a deadlock is no failure, so no handler is charged."""

import importlib
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import OperationalError, connection, connections, transaction

from django_eventbus import handler, publish
from django_eventbus.delivery import grouped
from django_eventbus.errors import failpoints
from django_eventbus.models import QueuedEvent
from django_eventbus.store import CONFLICT_RETRIES
from tests.bus import drain, logged
from tests.shop.models import Effect
from tests.threads import a_session_waits_for_a_lock
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


def lock_the_event_and_write(holds):
    """Lock the row that the settlement needs, and wait for the row that the handler wrote."""
    try:
        with transaction.atomic():
            win_the_deadlock()
            QueuedEvent.objects.select_for_update().get()
            holds.set()
            Effect.objects.filter(handler="contested").update(note="rival")
            transaction.set_rollback(True)
    finally:
        connections.close_all()


def test_a_handler_is_not_charged_for_a_deadlock_caused_by_its_group(monkeypatch):
    """Neither handler could deadlock alone, because each writes a single row."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has one lock")
    # A slow machine must not split the group.
    monkeypatch.setattr(grouped, "GROUP_SECONDS", float("inf"))
    for name in ("first", "second"):
        Effect.objects.create(event_id=uuid.uuid4(), handler=name)
    calls, errors = [], []
    with ThreadPoolExecutor(1) as pool:

        def write_both_the_other_way_round(holds):
            try:
                with transaction.atomic():
                    win_the_deadlock()
                    Effect.objects.filter(handler="second").update(note="rival")
                    holds.set()
                    Effect.objects.filter(handler="first").update(note="rival")
            except Exception as error:
                errors.append(error)
            finally:
                connections.close_all()

        @handler("order.placed", name="effect")
        def write(event):
            calls.append((event.payload, event.attempt))
            if event.payload == "second" and len(calls) == 2:
                holds = threading.Event()
                pool.submit(write_both_the_other_way_round, holds)
                assert holds.wait(30)
                eventually(a_session_waits_for_a_lock)
            Effect.objects.filter(handler=event.payload).update(note=event.payload)

        events = [publish("order.placed", name) for name in ("first", "second")]
        drain()
    assert errors == []
    assert calls == [("first", 1), ("second", 1)] * 2
    assert [logged(each).errors for each in events] == [None, None]


def win_the_deadlock():
    """PostgreSQL rolls back the transaction that detects the deadlock, InnoDB the smallest one."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL deadlock_timeout = '10min'")
    Effect.objects.bulk_create(Effect(event_id=uuid.uuid4()) for _ in range(100))


@pytest.mark.parametrize("key", [None, "k"])
def test_a_handler_is_not_charged_for_a_deadlock_of_its_settlement(key):
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has one lock")
    Effect.objects.create(event_id=uuid.uuid4(), handler="contested")
    calls = []
    with ThreadPoolExecutor(1) as pool:

        @handler("order.placed", name="effect")
        def deadlock_with_a_rival(event):
            calls.append(event.attempt)
            Effect.objects.filter(handler="contested").update(note="handler")
            if len(calls) < 3:
                holds = threading.Event()
                pool.submit(lock_the_event_and_write, holds)
                assert holds.wait(30)
                eventually(a_session_waits_for_a_lock)

        event = publish("order.placed", {}, key=key)
        drain()
    # The handler runs in a group, then twice alone.
    assert calls == [1, 1, 1]
    assert logged(event).errors is None
    assert Effect.objects.get().note == "handler"


def deadlock():
    """The error that the driver raises for the victim of a deadlock."""
    if connection.vendor == "mysql":
        return OperationalError(1213, "Deadlock found")
    error = OperationalError("deadlock detected")
    error.__cause__ = importlib.import_module("psycopg").errors.DeadlockDetected()
    return error


def test_a_settlement_that_always_deadlocks_becomes_a_failure(monkeypatch):
    """A settlement is repeated after a deadlock, up to a limit."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has one lock")
    runs_in_a_group_and_alone = 2 + CONFLICT_RETRIES
    deadlocks = [deadlock() for _ in range(runs_in_a_group_and_alone)]

    def lose(place):
        if place == "settle.before_commit" and deadlocks:
            raise deadlocks.pop()

    monkeypatch.setattr(failpoints, "on_reaching", lose)
    calls = []
    retry = {"max_retries": 0}
    handler("order.placed", name="h", retry=retry)(lambda event: calls.append(event.attempt))
    event = publish("order.placed", {})
    drain()
    assert calls == [1] * runs_in_a_group_and_alone
    assert logged(event).status == "FAILED"
    assert "eadlock" in logged(event).errors[0]["message"]
