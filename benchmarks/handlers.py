"""The handlers that are measured, as the worker processes of a run find them."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any, TextIO

from benchmarks.models import Note
from django_eventbus import RetryPolicy, delivery, handler

#: Set for workers that shall commit after every event, to compare with group commit.
ALONE = "EVENTBUS_BENCH_ALONE"
#: Names the file in which ``stamp`` notes when it was called.
STAMPS = "EVENTBUS_BENCH_STAMPS"

if os.environ.get(ALONE):
    delivery.GROUP_SECONDS = -1.0  # every group is overdue after its first event


@handler("bench.noop")
def noop(event: Any) -> None:
    """Costs nothing: what is left is the bus."""


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


@handler("bench.stamp")
def stamp(event: Any) -> None:
    now = time.time()
    _stamps().write(f"{event.payload['n']} {now}\n")


@cache
def _stamps() -> TextIO:
    return open(os.environ[STAMPS], "a", buffering=1)
