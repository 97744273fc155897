"""The invariants that hold after any fault, checked from journals and tables only.

I1 no loss; I2 one end per event; I3 order and no overlap per key; I4 one effect for each success
and none for the rest; I5 every attempt that failed left its error; I9 nothing from a rollback.
"""

from collections import Counter
from itertools import pairwise

from django_eventbus.models import EventLog, LogStatus, QueuedEvent
from tests.faults.journal import FAIL, OK
from tests.shop.models import Effect


def check(producers=(), handlers=None):
    """Raise AssertionError with every broken invariant."""
    broken = [*ends(), *effects(), *errors()]
    for journal in producers:
        broken += published(journal)
    if handlers is not None:
        broken += order(handlers)
    assert not broken, "\n".join(broken[:20])


def check_order_of_effects():
    """I3 from the tables only: the effects of each key are in the order of its events."""
    rows = dict(EventLog.objects.exclude(key=None).values_list("event_id", "id"))
    keys = dict(EventLog.objects.exclude(key=None).values_list("event_id", "key"))
    last = {}
    for event in Effect.objects.order_by("id").values_list("event_id", flat=True):
        if (key := keys.get(event)) is not None:
            assert last.get(key, 0) < rows[event], f"I3: {event} of key {key} was overtaken"
            last[key] = rows[event]


def published(journal):
    queued = set(map(str, QueuedEvent.objects.values_list("event_id", flat=True)))
    ended = set(map(str, EventLog.objects.values_list("event_id", flat=True)))
    for event in sorted(journal.with_outcome(OK) - queued - ended):
        yield f"I1: {event} was committed and is lost"
    for event in sorted(journal.with_outcome(FAIL) & (queued | ended)):
        yield f"I9: {event} was rolled back and is there"


def ends():
    queued = set(QueuedEvent.objects.values_list("event_id", flat=True))
    ended = Counter(EventLog.objects.values_list("event_id", flat=True))
    for event in queued & ended.keys():
        yield f"I2: {event} is queued and has ended"
    for event, count in ended.items():
        if count > 1:
            yield f"I2: {event} ended {count} times"


def effects():
    """Check atomic handlers only, because plain handlers may be repeated."""
    seen = Counter(
        Effect.objects.exclude(handler__endswith="outside").values_list("event_id", "handler")
    )
    done = set(
        EventLog.objects.filter(type="fault.effect", status=LogStatus.COMPLETED).values_list(
            "event_id", flat=True
        )
    )
    for (event, handler), count in seen.items():
        if count > 1:
            yield f"I4: {handler} had {count} effects for {event}"
        if handler == "fault.effect" and event not in done:
            yield f"I4: {event} has an effect and did not succeed"
    for event in done - {event for event, _ in seen}:
        yield f"I4: {event} succeeded without an effect"


def errors():
    for model in (QueuedEvent, EventLog):
        for event, crashes, records in model.objects.filter(crashes__gt=0).values_list(
            "event_id", "crashes", "errors"
        ):
            if len(records or ()) < crashes:
                yield f"I5: {event} crashed {crashes} times and tells of {len(records or ())}"


def order(journal):
    """Check that runs of one key do not overlap, and that first runs are in the order of ids.

    A run whose process died has no end; its repetition may start at any time after it. A worker
    that was suspended beyond its lease may run its handler concurrently when it wakes. It commits
    nothing, so this run is ignored.
    """
    settled_by = {
        str(event): str(worker)
        for event, worker in EventLog.objects.values_list("event_id", "claimed_by")
    }
    for key, runs in journal.runs_by_key().items():
        if key is None:
            continue
        counting = [run for run in runs if settled_by.get(run[0], run[4]) == run[4]]
        for (event, _, _, end, _), (later, _, start, _, _) in pairwise(counting):
            if end is not None and start < end:
                yield f"I3: {later} of key {key} started while {event} ran"
        firsts = list(dict.fromkeys(run[1] for run in runs))
        if firsts != sorted(firsts):
            yield f"I3: key {key} was handled in the order {firsts}"
