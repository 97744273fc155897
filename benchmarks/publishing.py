"""The time that ``publish()`` takes."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from django.core.management import call_command
from django.db import transaction

from benchmarks.figures import Figure, per_second, ratio
from django_eventbus import publish, publish_many
from django_eventbus.conf import settings
from django_eventbus.models import QueuedEvent

PAYLOAD = {"order_id": 7, "customer": "ada@example.com", "total": "12.50", "items": [1, 2, 3]}
ROUNDS = 40
CALLS = 50


def measure(options: argparse.Namespace) -> list[Figure]:
    call_command("flush", interactive=False, verbosity=0)
    return [
        *in_open_transaction(),
        per_second("publish(), a transaction each", alone(min(options.events, 2000))),
        per_second("publish_many()", many(options.events)),
    ]


def in_open_transaction() -> list[Figure]:
    """Measure in turns, so that other load on the machine affects both."""
    publishes, creates = [], []
    with transaction.atomic():
        for _ in range(ROUNDS):
            publishes.append(seconds_for(lambda: publish("bench.noop", PAYLOAD)))
            creates.append(seconds_for(create))
        transaction.set_rollback(True)
    published, created = statistics.median(publishes), statistics.median(creates)
    return [
        per_second("publish() in an open transaction", CALLS / published),
        per_second("ORM create() of the same row", CALLS / created),
        ratio("publish() against create(), time", published / created),
    ]


def create() -> None:
    QueuedEvent.objects.create(
        namespace=settings.NAMESPACE,
        queue=settings.QUEUE,
        type="bench.noop",
        payload=PAYLOAD,
        producer=settings.producer(),
    )


def seconds_for(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return time.perf_counter() - started


def alone(count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        publish("bench.noop", PAYLOAD)
    return count / (time.perf_counter() - started)


def many(count: int) -> float:
    started = time.perf_counter()
    publish_many(("bench.noop", PAYLOAD) for _ in range(count))
    return count / (time.perf_counter() - started)
