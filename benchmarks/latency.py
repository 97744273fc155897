"""The time from a publisher's COMMIT to the first line of a handler in another process."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from django.core.management import call_command
from django.db import transaction

from benchmarks.figures import Figure, milliseconds
from benchmarks.handlers import STAMPS
from benchmarks.workers import running_worker
from django_eventbus import publish

RATE = 50
EVENTS = 500
WARM_UP = 50
PATIENCE = 30


def measure(options: argparse.Namespace) -> list[Figure]:
    call_command("flush", interactive=False, verbosity=0)
    with tempfile.TemporaryDirectory(prefix="eventbus-bench-") as directory:
        stamps = Path(directory) / "stamps"
        stamps.touch()
        with running_worker({STAMPS: str(stamps)}):
            committed = publish_steadily(stamps)
            handled = wait_for(stamps, len(committed))
    # Skip the first events: caches are cold, and the worker opens its connections.
    waits = [handled[n] - moment for n, moment in committed.items() if n >= WARM_UP]
    percentiles = statistics.quantiles(waits, n=100)
    return [
        milliseconds(f"commit to handler at {RATE}/s, p50", percentiles[49]),
        milliseconds(f"commit to handler at {RATE}/s, p99", percentiles[98]),
        milliseconds(f"commit to handler at {RATE}/s, longest", max(waits)),
    ]


def publish_steadily(stamps: Path) -> dict[int, float]:
    """Return the commit time of each event. Starts when the worker has handled the first."""
    committed: dict[int, float] = {}
    publish_one(0, committed)
    wait_for(stamps, 1)
    started = time.perf_counter()
    for n in range(1, WARM_UP + EVENTS):
        time.sleep(max(0.0, started + n / RATE - time.perf_counter()))
        publish_one(n, committed)
    return committed


def publish_one(n: int, committed: dict[int, float]) -> None:
    with transaction.atomic():
        # Registered before publish() registers the wake-up, so it runs first.
        transaction.on_commit(lambda: committed.__setitem__(n, time.time()))
        publish("bench.stamp", {"n": n})


def wait_for(stamps: Path, count: int) -> dict[int, float]:
    give_up_at = time.monotonic() + PATIENCE
    while True:
        lines = [line.split() for line in stamps.read_text().splitlines()]
        if len(lines) >= count:
            return {int(n): float(moment) for n, moment in lines}
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"{len(lines)} of {count} events were handled in {PATIENCE} s")
        time.sleep(0.05)
