"""Labels of the states of events on admin pages."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _

from django_eventbus.errors.text import one_line
from django_eventbus.models import LogStatus, QueuedEvent, QueuedStatus
from django_eventbus.registry import registry


def status_label(status: str) -> str:
    for choices in (QueuedStatus, LogStatus):
        if status in choices.values:
            return str(choices(status).label)
    return one_line(status)


def status_of(event: Any) -> str:
    """Return the label of the status of a queued or logged event."""
    return _("handed off") if is_handed_off(event) else status_label(event.status)


def is_handed_off(event: Any) -> bool:
    """Return whether the event waits for another executor, such as Celery."""
    return isinstance(event, QueuedEvent) and event.handed_off_to is not None


def handed_off_label(handler: str) -> str:
    """Return the label of an event or a lane that waits for the executor of a handler."""
    executor = executor_of(handler)
    if not executor:
        return _("handed off to %(handler)s") % {"handler": one_line(handler)}
    facts = {"handler": one_line(handler), "executor": executor}
    return _("handed off to %(handler)s (%(executor)s)") % facts


def executor_of(handler: str) -> str:
    """Return the name of a handler's executor.

    Return "" if the handler has no executor or is not registered in this process.
    """
    found = registry.get(handler)
    return found.executor.name if found and found.executor else ""


def next_attempt(event: QueuedEvent) -> Any:
    """Return the time of the next attempt, or a text if the event waits for something else."""
    if event.handed_off_to is not None:
        return handed_off_label(event.handed_off_to)
    return event.available_at if event.held_by is None else held_label()


def held_label() -> str:
    """Return the label of an event or a lane that a flow control holds."""
    return _("held by flow control")
