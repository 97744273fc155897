"""Behind a pooler that gives each transaction another session (F30)."""

from contextlib import contextmanager

import pytest
from django.db import connection

from django_eventbus.models import EventLog
from django_eventbus.publishing.publisher import publish, publish_many
from tests.faults import invariants, journal
from tests.faults.proxy import through
from tests.faults.test_failpoints import drained
from tests.shop.models import Effect
from tests.workers import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]


@contextmanager
def idle_sessions(count):
    """Open extra sessions, so that a client can always get another session than its last one."""
    spare = [connection.copy() for _ in range(count)]
    for each in spare:
        each.connect()
    yield
    for each in spare:
        each.close()


@pytest.mark.parametrize("notify", [False, True])
def test_events_are_handled_behind_a_pooler(start_worker, pooler, tmp_path, notify):
    """LISTEN does not work behind a pooler, so workers poll although NOTIFY is on."""
    notes = journal.HandlerJournal(tmp_path / "handlers")
    env = pooler.environment | {journal.HANDLERS: str(notes.path)}
    options = {"NOTIFY": notify, "ABANDON_AFTER": 10.0}
    workers = [
        start_worker("--concurrency", "2", "--batch-size", "20", eventbus=options, env=env)
        for _ in range(2)
    ]
    with through(pooler), idle_sessions(3):
        publish_many(("fault.effect", n) for n in range(300))
        for n in range(30):
            publish("fault.effect", n, key=f"k{n % 4}")
            publish("process.parent", n)
        assert pooler.swaps > 60, "each of these transactions has another session"
        publish("fault.effect", 0, delay=1)
        publish_many(("fault.outside", n) for n in range(20))
    eventually(drained, lambda: workers[0].log)
    assert Effect.objects.count() == 300 + 30 + 90 + 1 + 20
    assert set(EventLog.objects.values_list("status", "crashes", "attempts")) == {
        ("COMPLETED", 0, 1)
    }
    invariants.check(handlers=notes)
