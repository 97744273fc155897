"""Settlements of events that end without another handler call.

The claims of such an event ended without a result too often, the event cannot be read, or its
result cannot be written.
"""

from __future__ import annotations

from typing import Any

from django_eventbus.conf import settings
from django_eventbus.errors import failures
from django_eventbus.models import LogStatus
from django_eventbus.outcomes.stored import errors_of, parsed
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.schema.deliveries import DISCARDED, DONE
from django_eventbus.store import Finished

#: The error type of an event that crashed too many workers.
CRASHED = "crashed"
#: The types of error records that are written after the unexpected end of a worker.
LOSSES = ("WorkerLost", "WorkerCrashed")


def exhausted(event: ClaimedEvent) -> Finished | None:
    """Return the settlement of an event that has reached MAX_CRASHES or MAX_INTERRUPTIONS.

    Return None for any other event. If there is a settlement, the caller must not call a handler of
    the event: the call might kill another worker.
    """
    if event.crashes >= settings.MAX_CRASHES:
        return _ended_by_losses(event, CRASHED)
    if event.interruptions >= settings.MAX_INTERRUPTIONS:
        return _ended_by_losses(event, "interrupted")
    return None


def _ended_by_losses(event: ClaimedEvent, error_type: str) -> Finished:
    errors = errors_of(event)
    losses = [each for each in errors if each.get("type") in LOSSES] or failures.recorded(errors)
    return _failed(event, losses[-1] if losses else None, errors, error_type)


def unsettleable(event: ClaimedEvent, record: dict[str, Any]) -> Finished:
    """Return the settlement of an event that cannot be read, or whose result cannot be written."""
    errors = failures.with_record(parsed(event.errors_json), record)
    return _failed(event, record, errors, "unsettleable")


def _failed(
    event: ClaimedEvent,
    error: dict[str, Any] | None,
    errors: list[dict[str, Any]],
    error_type: str,
) -> Finished:
    deliveries = parsed(event.deliveries_json)
    return Finished(
        row_id=event.row_id,
        status=LogStatus.FAILED,
        deliveries=deliveries if isinstance(deliveries, dict) else None,
        errors=errors,
        dead_handler=error["handler"] if error else "",
        error_type=error_type,
        error_fingerprint=failures.fingerprint(error or {"handler": "", "type": error_type}),
        blocks_lane=blocked_lane(event),
    )


def blocked_lane(event: ClaimedEvent) -> int | None:
    """Return the lane that a dead event blocks, if DEAD_HEAD is "block".

    A discarded event does not block its lane, so it must not be passed to this function.
    """
    return event.lane_id if settings.DEAD_HEAD == "block" else None


def status_of(states: set[str]) -> str:
    """Return the status of an event whose handlers ended in these states."""
    if DONE in states:
        return LogStatus.COMPLETED_WITH_ERRORS
    return LogStatus.DISCARDED if states == {DISCARDED} else LogStatus.FAILED
