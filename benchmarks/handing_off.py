"""The speed of handlers that run in Celery, beside plain Celery tasks that do the same work.

The time is measured from the first to the last inserted row, so the start of the processes does
not count.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from django.db import connection

from benchmarks import celery_app
from benchmarks.figures import Figure, count, per_second, ratio
from benchmarks.models import Note
from benchmarks.workers import running_worker
from django_eventbus import publish_many
from django_eventbus.models import EventLog

BROKERS = {
    "Redis": "redis://127.0.0.1:6379/5",
    "RabbitMQ": "amqp://guest:guest@127.0.0.1:5672//",
}
PATIENCE = 600
PROCESSES = 2


def measure(options: argparse.Namespace) -> list[Figure]:
    figures = []
    for name, url in BROKERS.items():
        if answers(url):
            figures += measure_on(name, url, options)
        else:
            print(f"skipped: no {name} answers at {urlsplit(url).hostname}", file=sys.stderr)
    return figures


def measure_on(name: str, url: str, options: argparse.Namespace) -> list[Figure]:
    events = options.events // 4
    ways: dict[str, Callable[[], float]] = {
        "batch=50": lambda: handled(url, "bench.celery50", events),
        "batch=1": lambda: handled(url, "bench.celery1", events // 4),
        "task.delay()": lambda: called(url, events // 4),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    sessions: list[float] = []
    for _ in range(options.repeat):
        for way, run in ways.items():
            before = sessions_so_far()
            rates[way].append(run())
            if way == "batch=50":
                sessions.append((sessions_so_far() - before) * 1000 / events)
    median = {way: statistics.median(each) for way, each in rates.items()}
    figures = [per_second(f"{name}, {way}", rate) for way, rate in median.items()]
    figures.append(ratio(f"{name}, batch=50 to batch=1", median["batch=50"] / median["batch=1"]))
    figures.append(
        ratio(f"{name}, batch=50 to task.delay()", median["batch=50"] / median["task.delay()"])
    )
    if connection.vendor == "postgresql":
        label = f"{name}, connections per 1,000 events, batch=50"
        figures.append(count(label, statistics.median(sessions)))
    return figures + measure_machines(name, url, events // 4)


def measure_machines(name: str, url: str, events: int) -> list[Figure]:
    """Measure a handler that waits for 20 ms, in one and in three Celery workers.

    All of them run on this machine, so only a handler that waits shows whether they share the work.
    """
    one, three = (handled(url, "bench.celery_wait", events, workers=each) for each in (1, 3))
    return [
        per_second(f"{name}, 20 ms per call, one Celery worker", one),
        per_second(f"{name}, 20 ms per call, three Celery workers", three),
        ratio(f"{name}, three Celery workers to one", three / one),
    ]


def answers(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=1).close()
    except OSError:
        return False
    return True


def handled(url: str, type_name: str, events: int, *, workers: int = 1) -> float:
    """Return the events per second that a worker and Celery handle together."""
    empty()
    environment = surroundings(url)
    publish_many((type_name, {"n": n}) for n in range(events))
    with running_celery(environment, workers=workers), running_worker(environment):
        rate = rate_of_inserts(events)
        wait_for(lambda: EventLog.objects.count() == events)
    return rate


def called(url: str, events: int) -> float:
    """Return the plain tasks per second that Celery runs."""
    empty()
    environment = surroundings(url)
    sender = (
        "from benchmarks.celery_app import insert; import uuid\n"
        f"for n in range({events}): insert.delay(str(uuid.uuid4()))"
    )
    subprocess.run([sys.executable, "-c", sender], env=environment, check=True)
    with running_celery(environment):
        return rate_of_inserts(events)


def rate_of_inserts(events: int) -> float:
    wait_for(Note.objects.exists)
    began, seen = time.monotonic(), Note.objects.count()
    wait_for(lambda: Note.objects.count() == events)
    return (events - seen) / (time.monotonic() - began)


def empty() -> None:
    with connection.cursor() as cursor:
        for model in (Note, EventLog):
            cursor.execute(f"DELETE FROM {model._meta.db_table}")


def wait_for(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError("Celery does not handle the events")
        time.sleep(0.02)


def sessions_so_far() -> int:
    """Return the number of sessions that PostgreSQL has counted for the database."""
    if connection.vendor != "postgresql":
        return 0
    time.sleep(1)  # PostgreSQL reports its counts with a delay.
    with connection.cursor() as cursor:
        cursor.execute("SELECT sessions FROM pg_stat_database WHERE datname = current_database()")
        return int(cursor.fetchone()[0])


def surroundings(url: str) -> dict[str, str]:
    return {
        **os.environ,
        celery_app.BROKER: url,
        celery_app.QUEUE: f"eventbus-benchmark-{uuid.uuid4().hex}",
    }


@contextmanager
def running_celery(environment: Mapping[str, str], *, workers: int = 1) -> Iterator[None]:
    """Run Celery workers until the end of the block."""
    celery = [sys.executable, "-m", "celery", "-A", "benchmarks.celery_app"]
    options = ["--concurrency", str(PROCESSES), "--without-gossip", "--without-mingle"]
    started = [
        subprocess.Popen(
            [*celery, "worker", *options, "--hostname", f"{number}@%h"],
            env={**environment, "C_FORCE_ROOT": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in range(workers)
    ]
    try:
        yield
    finally:
        for worker in started:
            worker.terminate()
        for worker in started:
            worker.wait()
        queue = environment[celery_app.QUEUE]
        with celery_app.app.connection_for_write(url=environment[celery_app.BROKER]) as broker:
            broker.default_channel.queue_delete(queue)
