"""The time to recover the events of a dead worker."""

from __future__ import annotations

import argparse
import statistics
import time
from datetime import UTC, datetime

from django.core.management import call_command

from benchmarks.figures import Figure, milliseconds
from django_eventbus import publish_many
from django_eventbus.models import EventWorker
from django_eventbus.store import store_for
from django_eventbus.worker.registration import WorkerOptions, new_registration

STUCK = 100
LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


def measure(options: argparse.Namespace) -> list[Figure]:
    took = [recovered() for _ in range(options.repeat)]
    return [milliseconds(f"recovery of {STUCK} stuck events", statistics.median(took))]


def recovered() -> float:
    call_command("flush", interactive=False, verbosity=0)
    store = store_for()
    publish_many(("bench.noop", {"n": n}) for n in range(STUCK))
    dead = new_registration(WorkerOptions(using=store.using, queues=("default",)))
    store.register(dead)
    claimed = store.claim("default", limit=STUCK, worker_id=dead.pk)
    EventWorker.objects.update(expires_at=LONG_AGO)
    began = time.perf_counter()
    found = store.recover()
    took = time.perf_counter() - began
    assert len(claimed) == found == STUCK
    return took
