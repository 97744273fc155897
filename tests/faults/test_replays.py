"""A replay out of a large log, by workers that are killed."""

import os
import signal
import time

import psutil
import pytest
from django.db import connection

from django_eventbus import replay
from django_eventbus.models import EventLog
from tests.shop.models import Effect
from tests.test_replay import handled
from tests.workers import eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="the rows are made by PostgreSQL"),
]

ROWS = int(os.environ.get("EVENTBUS_FAULT_ROWS", 100_000))
PATIENCE = 600

#: A tenth of the log has the type that is replayed.
FILL = """
INSERT INTO django_eventbus_eventlog (id, event_id, namespace, queue, type, version, payload,
    priority, producer, attempts, crashes, interruptions, created_at, status, finished_at,
    dead_handler, error_type, error_fingerprint)
SELECT 1000000000000 + n, gen_random_uuid(), 'default', 'default',
    CASE WHEN n %% 10 = 0 THEN 'fault.effect' ELSE 'other.type' END,
    1, to_jsonb(n), 0, 'past', 1, 0, 0, now() - interval '1 day', 'COMPLETED',
    now() - interval '1 day' + n * interval '1 millisecond', '', '', ''
FROM generate_series(1, %s) AS n"""


def test_each_event_of_a_large_log_is_replayed_once_by_killed_workers(start_worker, figures):
    """Workers are killed twice. Their memory does not grow with the number of events."""
    with connection.cursor() as cursor:
        cursor.execute(FILL, [ROWS])
        cursor.execute("ANALYZE django_eventbus_eventlog")
    expected = ROWS // 10
    handled("fault.effect", "fault.effect")  # The workers have another handler with this name.
    started, began = replay.start(type="fault.effect", handler="fault.effect"), time.monotonic()
    for part in (expected // 4, expected // 2):
        worker = start_worker("--processes", "2")
        await_effects(part, worker)
        worker.signal_all(signal.SIGKILL)
        worker.wait()
    worker = start_worker("--processes", "2")
    await_effects(expected * 6 // 10, worker)
    before, since = memory(worker), time.monotonic()
    handled_before = Effect.objects.count()
    eventually(lambda: replay.status(started).is_over, lambda: worker.log, patience=PATIENCE)
    seconds = time.monotonic() - since
    figures(
        f"{expected:,} of {ROWS:,} events replayed in {time.monotonic() - began:.0f} s with two "
        f"kills; without kills {(expected - handled_before) / seconds:,.0f}/s; memory "
        f"{before:.0f} to {memory(worker):.0f} MB"
    )
    copies = EventLog.objects.filter(replay_id=started.pk)
    assert copies.count() == copies.values("replay_of").distinct().count() == expected
    effects = Effect.objects.values_list("event_id", flat=True)
    assert sorted(effects) == sorted(copies.values_list("event_id", flat=True))
    assert replay.status(started).dead == 0


def await_effects(count, worker):
    eventually(lambda: Effect.objects.count() >= count, lambda: worker.log, patience=PATIENCE)


def memory(worker):
    processes = psutil.Process(worker.process.pid).children()
    return sum(each.memory_info().rss for each in processes) / 2**20
