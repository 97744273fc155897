"""The Celery project of the benchmark. EVENTBUS_BENCH_BROKER is the URL of its broker."""

from __future__ import annotations

import os

from celery import Celery

#: The URL of the broker, and the queue of one measurement.
BROKER = "EVENTBUS_BENCH_BROKER"
QUEUE = "EVENTBUS_BENCH_CELERY_QUEUE"

app = Celery("benchmarks", broker=os.environ.get(BROKER, "memory://"))
app.conf.task_default_queue = os.environ.get(QUEUE, "eventbus-benchmark")
app.conf.task_ignore_result = True
app.autodiscover_tasks()


@app.task(name="benchmarks.insert")  # type: ignore[untyped-decorator]
def insert(event_id: str) -> None:
    """Do the work of the measured handler, without the bus."""
    from benchmarks.models import Note

    Note.objects.create(event_id=event_id)
