"""Record the failed attempt of a handler whose process was killed at its deadline.

The killed process cannot record the attempt, so the supervisor does. The attempt counts as a
failure under the handler's retry policy. It does not count as a crash.
"""

from __future__ import annotations

import uuid

from django_eventbus.conf import settings
from django_eventbus.delivery.batch import Batch
from django_eventbus.delivery.settling import Settler
from django_eventbus.outcomes.event_run import EventRun
from django_eventbus.registry import registry
from django_eventbus.retries import RetryPolicy
from django_eventbus.statistics.recorder import StatisticsRecorder
from django_eventbus.store import Store


def record_kill(
    store: Store, statistics: StatisticsRecorder, *, worker_id: uuid.UUID, row_id: int, handler: str
) -> bool:
    """Settle the event of a killed handler. Return False if the claim on the event was lost."""
    event = store.find_claimed(worker_id, row_id)
    if event is None:
        return False
    settler, batch = Settler(store, statistics=statistics), Batch.of([event])
    with settler.guarded(batch, event):
        run = EventRun(event)
        _charge(run, handler)
        settler.settle(batch, run, run.settlement(claim_ends=True))
    if batch.tally.lost:
        return False
    if batch.lanes:
        store.release_lanes(batch.token, batch.lane_waits())
    return True


def _charge(run: EventRun, handler: str) -> None:
    known = {each.name: each for each in registry.all()}.get(handler)
    policy = known.retry_policy if known else RetryPolicy.default()
    seconds = known.deadline if known else settings.HANDLER_TIMEOUT
    error = TimeoutError(
        f"{handler} ran longer than {seconds:g} s and could not be interrupted; "
        "its process was killed"
    )
    run.halted = settings.ATOMIC == "event"
    run.fail(handler, error, policy, seconds)
