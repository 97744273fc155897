"""The time from publishing an event to the first start of one of its handlers."""

from __future__ import annotations

from collections.abc import Sequence

from django_eventbus.outcomes.event_run import Outcome
from django_eventbus.outcomes.stored import states_of
from django_eventbus.registry import registry
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.schema.deliveries import HANDED_OFF


def first_start(event: ClaimedEvent, outcomes: Sequence[Outcome]) -> float | None:
    """Return the seconds from publishing, or from the due time if it is later, to the first start.

    Return None if a handler was started under an earlier claim, or if no handler was called.
    """
    if not (event.is_new or _was_only_handed_off(event)):
        return None
    first = outcomes[0]
    if first.error is not None and registry.get(first.handler) is None:
        return None  # The failure says that the handler is missing.
    started = first.ended - first.seconds
    return event.age(event.started_epoch + started - event.claim.answered_at)


def _was_only_handed_off(event: ClaimedEvent) -> bool:
    if event.crashes or event.interruptions or event.errors_json:
        return False
    return all(each["state"] == HANDED_OFF for each in states_of(event).values())
