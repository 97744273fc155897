"""A settlement that is the victim of a deadlock: nobody's failure, so nobody is charged for it."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, connections, transaction

from django_eventbus import handler, publish
from django_eventbus.models import QueuedEvent
from tests.bus import drain, logged
from tests.shop.models import Effect
from tests.threads import somebody_waits_for_a_lock
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


def lock_the_event_and_write(holds):
    """Holds what the settlement will want, waits for what the handler has, and is never the victim:
    PostgreSQL chooses who looks first, InnoDB who has written least."""
    try:
        with transaction.atomic():
            if connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    cursor.execute("SET LOCAL deadlock_timeout = '10min'")
            Effect.objects.bulk_create(Effect(event_id=uuid.uuid4()) for _ in range(100))
            QueuedEvent.objects.select_for_update().get()
            holds.set()
            Effect.objects.filter(handler="contested").update(note="rival")
            transaction.set_rollback(True)
    finally:
        connections.close_all()


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
