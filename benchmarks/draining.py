"""The speed at which one worker process empties a queue.

The duration is read from the log: from the first claim to the last settlement, by the database's
clock. So the start of Python and Django does not count, but the writes to the log do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

from django.core.management import call_command
from django.db.models import Max, Min

from benchmarks.figures import Figure, per_second, ratio
from benchmarks.handlers import ALONE
from benchmarks.workers import drain, running_worker
from django_eventbus import publish_many
from django_eventbus.conf import settings
from django_eventbus.models import EventLog, QueuedEvent

KEYS = 1000
MANY_PENDING = 1_000_000
FEW_PENDING = 10_000
BLOCKED = 100_000
PATIENCE = 300


def measure(options: argparse.Namespace) -> list[Figure]:
    return [
        *compare("no-op handler", "bench.noop", options.events, options.repeat),
        *compare("handler with one INSERT", "bench.insert", options.events // 4, options.repeat),
        per_second("drain, every event fails and dies", rate_of_failures(options)),
    ]


def rate_of_failures(options: argparse.Namespace) -> float:
    count = options.events // 10
    rates = [drained(lambda: fill(count, "bench.dies")) for _ in range(options.repeat)]
    return statistics.median(rates)


def compare(what: str, type_name: str, count: int, repeat: int) -> list[Figure]:
    """Measure group commit and a transaction per event in turns, so that they can be compared."""
    fewer = max(count // 10, 500)  # One transaction per event would take too long for all events.
    together, alone = [], []
    for _ in range(repeat):
        together.append(drained(lambda: fill(count, type_name)))
        alone.append(drained(lambda: fill(fewer, type_name), alone=True))
    rate, rate_alone = statistics.median(together), statistics.median(alone)
    return [
        per_second(f"drain, {what}", rate),
        per_second(f"drain, {what}, a transaction per event", rate_alone),
        ratio(f"group commit, {what}", rate / rate_alone),
    ]


def measure_keys(options: argparse.Namespace) -> list[Figure]:
    count = options.events // 4
    many = [drained(lambda: fill_keys(count, KEYS)) for _ in range(options.repeat)]
    one = [drained(lambda: fill_keys(count, 1)) for _ in range(options.repeat)]
    return [
        per_second(f"drain, {KEYS:,} keys", statistics.median(many)),
        per_second("drain, one hot key", statistics.median(one)),
    ]


def measure_failing_head(options: argparse.Namespace) -> list[Figure]:
    """Measure other events while one key has many events that wait behind a failing event."""
    count = options.events
    fills: dict[str, Callable[[], None]] = {
        "without keys": lambda: fill(count, "bench.noop"),
        f"with {KEYS:,} keys": lambda: fill_keys(count, KEYS),
    }
    figures = []
    for what, fill_others in fills.items():
        undisturbed, beside = [], []
        for _ in range(options.repeat):
            undisturbed.append(handled(count, fill_others))
            beside.append(handled(count, both(fill_blocked, fill_others)))
        rate, rate_beside = statistics.median(undisturbed), statistics.median(beside)
        figures += [
            per_second(f"events {what}", rate),
            per_second(f"events {what}, {BLOCKED:,} behind a failing head", rate_beside),
            ratio(f"events {what}, rate with a failing head", rate_beside / rate),
        ]
    return figures


def measure_pending(options: argparse.Namespace) -> list[Figure]:
    """Drain the same number of events from a short and from a very long queue."""
    limit = ("--max-events", str(FEW_PENDING))
    few, many = [], []
    for _ in range(options.repeat):
        few.append(drained(lambda: fill(FEW_PENDING, "bench.noop"), more=limit))
        many.append(drained(lambda: fill(MANY_PENDING, "bench.noop"), more=limit))
    rate_of_few, rate_of_many = statistics.median(few), statistics.median(many)
    return [
        per_second(f"drain, {FEW_PENDING:,} pending", rate_of_few),
        per_second(f"drain, {MANY_PENDING:,} pending", rate_of_many),
        ratio("time with many pending events", rate_of_few / rate_of_many),
    ]


def drained(
    fill_queue: Callable[[], None], *, alone: bool = False, more: tuple[str, ...] = ()
) -> float:
    """Events per second of ``run_event_worker --drain`` on a freshly filled queue."""
    call_command("flush", interactive=False, verbosity=0)
    fill_queue()
    drain(*more, environment={ALONE: "1" if alone else ""})
    return rate_in_log()


def handled(count: int, fill_queue: Callable[[], None]) -> float:
    """Measure ``count`` events that succeed, while other events keep failing."""
    call_command("flush", interactive=False, verbosity=0)
    fill_queue()
    with running_worker():
        wait_until(lambda: EventLog.objects.count() >= count)
    return rate_in_log()


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"the worker did not handle the events within {PATIENCE} s")
        time.sleep(0.2)


def rate_in_log() -> float:
    log = EventLog.objects.aggregate(start=Min("processing_started_at"), end=Max("finished_at"))
    return EventLog.objects.count() / (log["end"] - log["start"]).total_seconds()


def fill(count: int, type_name: str) -> None:
    publish_many((type_name, {"n": n}) for n in range(count))


def both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def fill_both() -> None:
        first()
        second()

    return fill_both


def fill_blocked() -> None:
    """Publish events of one key and wait until they are in their lane.

    Routing happens once per event, so the measurement must not include it.
    """
    publish_many((("bench.fails", {"n": n}) for n in range(BLOCKED)), key="blocked")
    with running_worker():
        wait_until(lambda: not QueuedEvent.objects.filter(lane_id=None).exists())


def fill_keys(count: int, keys: int) -> None:
    """Interleave the rows, as if many publishers had published at once."""
    QueuedEvent.objects.bulk_create(keyed_rows(count, keys), batch_size=1000)


def keyed_rows(count: int, keys: int) -> Iterator[QueuedEvent]:
    for n in range(count):
        yield QueuedEvent(
            namespace=settings.NAMESPACE,
            queue=settings.QUEUE,
            type="bench.noop",
            payload={"n": n},
            key=f"key:{n % keys}",
            producer=settings.producer(),
        )
