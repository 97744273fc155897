"""The measured handlers, discovered by the worker processes of a run."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any, TextIO

from benchmarks.models import Note
from django_eventbus import RetryPolicy, handler
from django_eventbus.delivery import grouped
from django_eventbus.executors import CeleryExecutor

#: Set for workers that commit after every event, to compare with group commit.
ALONE = "EVENTBUS_BENCH_ALONE"
#: The file in which ``stamp`` writes the times of its calls.
STAMPS = "EVENTBUS_BENCH_STAMPS"

if os.environ.get(ALONE):
    grouped.GROUP_SECONDS = -1.0  # A group is committed after its first event.


@handler("bench.noop")
def noop(event: Any) -> None:
    """Do nothing, so that only the time of the bus is measured."""


OFTEN = RetryPolicy(max_retries=1_000_000, base_delay=0.1, max_delay=0.1)


@handler("bench.fails", retry=OFTEN)
def fail(event: Any) -> None:
    raise RuntimeError("as always")


@handler("bench.dies", retry=RetryPolicy(max_retries=0))
def die(event: Any) -> None:
    raise RuntimeError("for good")


@handler("bench.insert")
def insert(event: Any) -> None:
    Note.objects.create(event_id=event.id)


@handler("bench.celery50", executor=CeleryExecutor(batch=50))
def insert_in_celery(event: Any) -> None:
    Note.objects.create(event_id=event.id)


@handler("bench.celery_wait", executor=CeleryExecutor(batch=50))
def wait_in_celery(event: Any) -> None:
    """Do what a call of another service does: wait."""
    time.sleep(0.02)
    Note.objects.create(event_id=event.id)


@handler("bench.celery1", executor=CeleryExecutor(batch=1))
def insert_in_celery_one_by_one(event: Any) -> None:
    Note.objects.create(event_id=event.id)


@handler("bench.stamp")
def stamp(event: Any) -> None:
    now = time.time()
    _stamps().write(f"{event.payload['n']} {now}\n")


@cache
def _stamps() -> TextIO:
    return open(os.environ[STAMPS], "a", buffering=1)
