"""F46: concurrent actions of operators on dead letters, and a killed bulk retry."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest
from django.db import connection

from django_eventbus import dead_letters, handler, publish_many, queued
from django_eventbus.models import EventLog, QueuedEvent
from tests.bus import drain
from tests.faults import halfway, invariants
from tests.workers import PATIENCE

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]

MANY = 1500


@pytest.fixture
def many_dead():
    @handler("x", name="h", retry={"max_retries": 0})
    def fail(event):
        raise ValueError("no")

    publish_many(("x", n) for n in range(MANY))
    drain()
    assert EventLog.objects.filter(status="FAILED").count() == MANY


def at_once(*actions):
    """Run the actions concurrently and return their results."""
    gate, results = threading.Barrier(len(actions)), [None] * len(actions)

    def run(index, action):
        gate.wait()
        try:
            results[index] = action()
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=each) for each in enumerate(actions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_concurrent_retries_revive_each_dead_letter_once(many_dead):
    revived = at_once(lambda: dead_letters.retry(type="x"), lambda: dead_letters.retry(type="x"))
    assert sum(revived) + dead_letters.retry(type="x") == MANY
    assert QueuedEvent.objects.count() == MANY
    invariants.check()


def test_each_dead_letter_is_either_retried_or_purged(many_dead):
    revived, purged = at_once(
        lambda: dead_letters.retry(type="x"), lambda: dead_letters.purge(type="x")
    )
    purged += dead_letters.purge(type="x")
    assert revived + purged == MANY
    assert QueuedEvent.objects.count() == revived
    assert not EventLog.objects.exists()


@pytest.mark.parametrize("keys", [0, 7])
def test_each_event_is_either_cancelled_or_handled(keys):
    seen = []
    handler("x", name="h")(lambda event: seen.append(event.payload))
    events = [("x", number) for number in range(MANY)]
    publish_many(events, key=lambda item: f"k{item[1] % keys}" if keys else None)
    ids = list(QueuedEvent.objects.order_by("-id").values_list("event_id", flat=True))
    pieces = [ids[start : start + 20] for start in range(0, MANY, 20)]
    cancelled, _ = at_once(lambda: sum(map(queued.cancel, pieces)), drain)
    drain()
    assert len(seen) == len(set(seen))
    assert cancelled + len(seen) == MANY
    assert EventLog.objects.filter(error_type="Cancelled").count() == cancelled
    assert not QueuedEvent.objects.exists()
    invariants.check()


def test_only_one_of_two_concurrent_edits_succeeds():
    handler("x", name="h", retry={"max_retries": 0})(lambda event: 1 / 0)
    publish_many([("x", 0)])
    drain()
    letter = EventLog.objects.get()
    edited = at_once(*(partial(dead_letters.edit, letter, payload) for payload in (1, 2, 3)))
    assert sum(edited) == 1
    event = QueuedEvent.objects.get()
    assert event.payload == edited.index(True) + 1
    assert [each["payload"] for each in event.edits] == [0]


@pytest.mark.processes
def test_a_killed_bulk_retry_can_be_repeated(many_dead):
    assert MANY > dead_letters.CHUNK
    command = subprocess.Popen(
        [sys.executable, "-m", "django", "dead_events", "retry", "--all"],
        env={
            **os.environ,
            **halfway.ENVIRONMENT,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _, complaints = command.communicate(timeout=PATIENCE)
    assert command.returncode == -signal.SIGKILL, complaints.decode()
    half = QueuedEvent.objects.count()
    assert 0 < half < MANY
    assert half + EventLog.objects.count() == MANY
    assert half + dead_letters.retry(type="x") == MANY
    invariants.check()
