"""Links to other events: the cause of an event, and the events that its handlers published."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from django.contrib.admin.sites import AdminSite
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse

from django_eventbus.admin.permissions import page_for
from django_eventbus.admin.statuses import status_of
from django_eventbus.errors.text import one_line
from django_eventbus.models import DeadEvent, EventLog, QueuedEvent

MOST_RELATED = 20
#: One event more than the page shows, to find out whether there are more events.
MOST_FOUND = MOST_RELATED + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RelatedEvent:
    """Another event and the URL of its page; the URL is empty if the user cannot open it."""

    event_id: uuid.UUID
    type: str
    status: str
    url: str


def related_events(condition: Q, request: HttpRequest, site: AdminSite) -> list[RelatedEvent]:
    """Return the matching events that the user can see in one of the lists.

    A dead letter is also in the log. It gets the URL of its page as a dead letter, which has more
    actions.
    """
    found: dict[uuid.UUID, RelatedEvent] = {}
    for model in (QueuedEvent, DeadEvent, EventLog):
        rows = _visible_rows(model, request, site).filter(condition)
        for event in rows.order_by("id")[:MOST_FOUND]:
            found.setdefault(event.event_id, _related(event, site))
    return list(found.values())


def _visible_rows(model: type[Any], request: HttpRequest, site: AdminSite) -> QuerySet[Any]:
    rows: QuerySet[Any] = model._default_manager.none()
    if page := page_for(request, site, model):
        more = ("handed_off_to",) if model is QueuedEvent else ()
        rows = page.get_queryset(request).only("event_id", "type", "status", *more)
    return rows


def _related(event: Any, site: AdminSite) -> RelatedEvent:
    name = f"admin:{event._meta.app_label}_{event._meta.model_name}_change"
    return RelatedEvent(
        event_id=event.event_id,
        type=one_line(event.type),
        status=status_of(event),
        url=reverse(name, args=[event.pk], current_app=site.name),
    )
