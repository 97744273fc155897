"""Read the results of earlier attempts from an event's row: handler states and errors."""

from __future__ import annotations

import json
from typing import Any, cast

from django_eventbus.errors import failures
from django_eventbus.errors.text import one_line
from django_eventbus.exceptions import UnreadableEventError
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.schema.deliveries import State, is_state


def states_of(event: ClaimedEvent) -> dict[str, State]:
    """Return the state of each handler.

    Raises UnreadableEventError for a format that this version does not know, because a newer
    version may have written the row.
    """
    states = parsed(event.deliveries_json) or {}
    if states and not (isinstance(states, dict) and all(map(is_state, states.values()))):
        raise UnreadableEventError(
            f"the delivery state of event {event.event_id} cannot be read by this version of "
            f"django_eventbus: {one_line(str(event.deliveries_json))}"
        )
    return cast(dict[str, State], states)


def errors_of(event: ClaimedEvent) -> list[dict[str, Any]]:
    """Return the error records. Raises UnreadableEventError for an unknown format."""
    errors = parsed(event.errors_json) or []
    if not (isinstance(errors, list) and all(map(failures.is_record, errors))):
        raise UnreadableEventError(
            f"the error records of event {event.event_id} cannot be read by this version of "
            "django_eventbus"
        )
    return errors


def parsed(text: str | None) -> Any:
    return json.loads(text) if text else None


def identity_of(state: State | None) -> tuple[str, int] | None:
    """Return the part of a state that identifies an outcome.

    The due time is excluded, because it is computed again for each settlement.
    """
    return (state["state"], state["failures"]) if state else None
