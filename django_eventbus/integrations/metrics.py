"""The metrics of the bus, and their values in the database.

This module needs no library. ``integrations.prometheus`` exports the values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from django_eventbus import breakers
from django_eventbus.conf import settings
from django_eventbus.counters.process import OTHER
from django_eventbus.models import EVENTS, PUBLISHING, RUNS, STARTS, FlowControl, FlowControlKind
from django_eventbus.registry import registry
from django_eventbus.schema.histograms import COLUMNS
from django_eventbus.status import LAGGING, events_by_state, executors_of_handlers, waited
from django_eventbus.store import COUNTED, NOTHING, Series, Store

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

#: The largest exact number of events of a queue in one state, and of dead letters.
COUNTED_UP_TO = 100_000

QUEUED_STATES = ("pending", "running", "handed_off", "retrying", "scheduled", "held")
BREAKER_STATES = ("closed", "open", "half-open")


class Metric(NamedTuple):
    """A metric as a monitoring system sees it. The name of a counter has no ``_total``."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


class Durations(NamedTuple):
    """The value of a histogram: the number of durations in each column, and their sum."""

    counts: tuple[int, ...]
    seconds: float


METRICS = (
    Metric("eventbus_up", GAUGE, (), "1 if the database answered this scrape, otherwise 0."),
    Metric(
        "eventbus_events_published",
        COUNTER,
        ("queue", "type"),
        "Events whose publishing transaction was committed.",
    ),
    Metric(
        "eventbus_events_dropped",
        COUNTER,
        ("queue", "type"),
        'Events that a limit with overflow="drop" dropped.',
    ),
    Metric(
        "eventbus_events_coalesced",
        COUNTER,
        ("queue", "type"),
        'Events that replaced a waiting event at a limit with overflow="coalesce".',
    ),
    Metric("eventbus_events_completed", COUNTER, ("queue",), "Events that completed."),
    Metric("eventbus_events_dead", COUNTER, ("queue",), "Events that became dead letters."),
    Metric("eventbus_events_discarded", COUNTER, ("queue",), "Events that handlers discarded."),
    Metric(
        "eventbus_events_retried",
        COUNTER,
        ("queue",),
        "Events that returned to the queue because a handler failed.",
    ),
    Metric(
        "eventbus_claims_lost",
        COUNTER,
        ("queue",),
        "Events whose claim was lost to another worker while a handler ran.",
    ),
    Metric(
        "eventbus_messages_ignored",
        COUNTER,
        ("queue",),
        "Messages to an executor that were malformed, late, repeated or forged.",
    ),
    Metric(
        "eventbus_handler_failures",
        COUNTER,
        ("queue", "handler"),
        "Runs of a handler that failed, whether or not the handler is retried.",
    ),
    Metric(
        "eventbus_handler_hand_offs",
        COUNTER,
        ("queue", "handler"),
        "Events that were handed off to the executor of the handler.",
    ),
    Metric(
        "eventbus_event_start_delay_seconds",
        HISTOGRAM,
        ("queue",),
        "Time from publishing an event, or from its due time, to the first start of a handler.",
    ),
    Metric(
        "eventbus_event_duration_seconds",
        HISTOGRAM,
        ("queue",),
        "Time from publishing an event, or from its due time, to its end, with all retries.",
    ),
    Metric(
        "eventbus_handler_duration_seconds",
        HISTOGRAM,
        ("queue", "handler"),
        "Duration of the runs of a handler, failed runs included.",
    ),
    Metric("eventbus_queue_events", GAUGE, ("queue", "state"), "Queued events by state."),
    Metric(
        "eventbus_queue_oldest_pending_age_seconds",
        GAUGE,
        ("queue",),
        "Time that the oldest due event without an attempt has waited.",
    ),
    Metric("eventbus_queue_paused", GAUGE, ("queue",), "1 if the queue is paused, otherwise 0."),
    Metric("eventbus_queue_workers", GAUGE, ("queue",), "Live worker processes of the queue."),
    Metric("eventbus_dead_letters", GAUGE, ("queue",), "Dead letters in the log."),
    Metric("eventbus_lanes_blocked", GAUGE, ("queue",), "Keys that a dead letter blocks."),
    Metric("eventbus_lanes_held", GAUGE, ("queue",), "Keys that flow control holds."),
    Metric("eventbus_workers", GAUGE, (), "Live worker processes."),
    Metric(
        "eventbus_worker_slots",
        GAUGE,
        ("state",),
        "Handlers that all workers can run at the same time, busy or idle at the last heartbeat.",
    ),
    Metric(
        "eventbus_breaker_state",
        GAUGE,
        ("handler", "state"),
        "1 for the current state of the circuit breaker of the handler, otherwise 0.",
    ),
    Metric(
        "eventbus_handler_paused", GAUGE, ("handler",), "1 if the handler is paused, otherwise 0."
    ),
    Metric("eventbus_type_paused", GAUGE, ("type",), "Pauses of the event type or pattern."),
    Metric(
        "eventbus_handler_handed_off_events",
        GAUGE,
        ("handler",),
        "Events that wait for the executor of the handler.",
    ),
)

#: The columns of a counter, by its measure. Their numbers are summed.
_COLUMNS = {
    "eventbus_events_published": (PUBLISHING, ("published",)),
    "eventbus_events_dropped": (PUBLISHING, ("dropped",)),
    "eventbus_events_coalesced": (PUBLISHING, ("coalesced",)),
    "eventbus_events_completed": (EVENTS, ("done",)),
    "eventbus_events_dead": (EVENTS, ("dead",)),
    "eventbus_events_discarded": (EVENTS, ("discarded",)),
    "eventbus_events_retried": (EVENTS, ("retried",)),
    "eventbus_claims_lost": (EVENTS, ("lost",)),
    "eventbus_messages_ignored": (EVENTS, ("ignored_messages",)),
    "eventbus_handler_failures": (RUNS, ("retried", "dead")),
    "eventbus_handler_hand_offs": (RUNS, ("handed_off",)),
}
_DURATIONS = {
    "eventbus_event_start_delay_seconds": STARTS,
    "eventbus_event_duration_seconds": EVENTS,
    "eventbus_handler_duration_seconds": RUNS,
}

#: The values of a metric by the values of its labels.
Values = dict[tuple[str, ...], float | Durations]


def read(store: Store) -> dict[str, Values]:
    """Return the values of all metrics.

    This runs five queries, and on PostgreSQL also statements that change settings of the planner.
    If handlers have an executor, it runs one more query.
    """
    values: dict[str, Values] = defaultdict(dict)
    values["eventbus_up"][()] = 1
    _read_counters(values, store)
    _read_queues(values, store)
    _read_workers(values, store)
    _read_flow_controls(values, store)
    _read_hand_offs(values, store)
    return values


def _read_counters(values: dict[str, Values], store: Store) -> None:
    counters = store.read_counters()
    for queue in settings.QUEUES:
        # The counters begin with 0, because Prometheus cannot compute an increase from a missing
        # series to its first value.
        counters.setdefault(Series(EVENTS, queue), [0] * len(COUNTED))
        counters.setdefault(Series(STARTS, queue), [0] * len(COUNTED))
    labels = {each.name: each.labels for each in METRICS}
    for series, numbers in sorted(counters.items()):
        found = dict(zip(COUNTED, numbers, strict=True))
        label_of = {"queue": series.queue, "handler": series.handler, "type": series.event_type}
        for name, (measure, columns) in _COLUMNS.items():
            if measure == series.measure:
                key = tuple(label_of[label] for label in labels[name])
                values[name][key] = sum(int(found[column]) for column in columns)
        for name, measure in _DURATIONS.items():
            if measure == series.measure:
                key = tuple(label_of[label] for label in labels[name])
                counts = tuple(int(found[column]) for column in COLUMNS)
                values[name][key] = Durations(counts, float(found["seconds"]))


def _read_queues(values: dict[str, Values], store: Store) -> None:
    now = store.read_clock()
    with store.reading_by_index(may_sort=True):
        depths = store.depths_by_queue(at_most=COUNTED_UP_TO)
    for queue in sorted({*settings.QUEUES, *depths}):
        of_queue = defaultdict(lambda: NOTHING, depths.get(queue, {}))
        for state, count in events_by_state(of_queue).items():
            values["eventbus_queue_events"][queue, state] = count
        age = max(waited(of_queue[kind], now) for kind in LAGGING)
        values["eventbus_queue_oldest_pending_age_seconds"][queue,] = age
        values["eventbus_dead_letters"][queue,] = of_queue["dead"].total
        values["eventbus_lanes_blocked"][queue,] = of_queue["blocked_lanes"].total
        values["eventbus_lanes_held"][queue,] = of_queue["held_lanes"].total


def _read_workers(values: dict[str, Values], store: Store) -> None:
    alive = store.workers.filter(expires_at__gt=store.now, slots__gt=0)
    workers = list(alive.values_list("queues", "slots", "busy"))
    busy = sum(min(slots, running) for _, slots, running in workers)
    values["eventbus_workers"][()] = len(workers)
    values["eventbus_worker_slots"]["busy",] = busy
    values["eventbus_worker_slots"]["idle",] = sum(slots for _, slots, _ in workers) - busy
    for queue in settings.QUEUES:
        serving = sum(queue in queues for queues, _, _ in workers)
        values["eventbus_queue_workers"][queue,] = serving


def _read_flow_controls(values: dict[str, Values], store: Store) -> None:
    controls = list(store.flow_controls)
    _set_pauses(values["eventbus_queue_paused"], settings.QUEUES, controls, FlowControlKind.QUEUE)
    handlers = [each.name for each in registry.all()]
    _set_pauses(values["eventbus_handler_paused"], handlers, controls, FlowControlKind.HANDLER)
    _set_pauses(values["eventbus_type_paused"], (), controls, FlowControlKind.TYPE)
    rows = {each.name: each for each in controls if each.kind == FlowControlKind.HANDLER}
    for handler in breakers.names():
        now = breakers.state_of(rows.get(handler))
        for state in BREAKER_STATES:
            values["eventbus_breaker_state"][handler, state] = float(state == now)


def _set_pauses(
    values: Values, known: Sequence[str], controls: Iterable[FlowControl], kind: str
) -> None:
    for name in known:
        values[name,] = 0.0
    for each in controls:
        if each.kind != kind or each.paused_at is None:
            continue
        if kind != FlowControlKind.TYPE:
            values[each.name,] = 1.0
            continue
        label = each.name if registry.knows_type(each.name) else OTHER
        before = values.get((label,), 0.0)
        assert isinstance(before, float)
        values[label,] = before + 1.0


def _read_hand_offs(values: dict[str, Values], store: Store) -> None:
    handlers = sorted(executors_of_handlers())
    if not handlers:
        return
    with store.reading_by_index():
        counts = store.handed_off_by_handler(handlers, at_most=COUNTED_UP_TO)
    for handler in handlers:
        values["eventbus_handler_handed_off_events"][handler,] = counts.get(handler, 0)
