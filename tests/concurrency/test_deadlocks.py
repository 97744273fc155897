"""A settlement that is the victim of a deadlock: nobody's failure, so nobody is charged for it."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, connections, transaction

from django_eventbus import delivery, handler, publish
from django_eventbus.models import QueuedEvent
from tests.bus import drain, logged
from tests.shop.models import Effect
from tests.threads import somebody_waits_for_a_lock
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


def lock_the_event_and_write(holds):
    """Holds what the settlement will want, and waits for what the handler has."""
    try:
        with transaction.atomic():
            be_no_victim()
            QueuedEvent.objects.select_for_update().get()
            holds.set()
            Effect.objects.filter(handler="contested").update(note="rival")
            transaction.set_rollback(True)
    finally:
        connections.close_all()


def test_a_handler_is_not_charged_for_a_deadlock_by_the_locks_of_its_group(monkeypatch):
    """Alone, neither of the two handlers could get into one: each writes a single row."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has one lock")
    # One group, however slow the machine is.
    monkeypatch.setattr(delivery, "GROUP_SECONDS", float("inf"))
    for name in ("first", "second"):
        Effect.objects.create(event_id=uuid.uuid4(), handler=name)
    calls, errors = [], []
    with ThreadPoolExecutor(1) as pool:

        def write_both_the_other_way_round(holds):
            try:
                with transaction.atomic():
                    be_no_victim()
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
                eventually(somebody_waits_for_a_lock)
            Effect.objects.filter(handler=event.payload).update(note=event.payload)

        events = [publish("order.placed", name) for name in ("first", "second")]
        drain()
    assert errors == []
    assert calls == [("first", 1), ("second", 1)] * 2
    assert [logged(each).errors for each in events] == [None, None]


def be_no_victim():
    """PostgreSQL chooses who looks first, InnoDB who has written least."""
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
        def get_into_the_way_of_a_rival(event):
            calls.append(event.attempt)
            Effect.objects.filter(handler="contested").update(note="handler")
            if len(calls) < 3:
                holds = threading.Event()
                pool.submit(lock_the_event_and_write, holds)
                assert holds.wait(30)
                eventually(somebody_waits_for_a_lock)

        event = publish("order.placed", {}, key=key)
        drain()
    # In a group, alone, and alone again.
    assert calls == [1, 1, 1]
    assert logged(event).errors is None
    assert Effect.objects.get().note == "handler"
