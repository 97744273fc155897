"""Links of the page of an event: its cause, the events that its handlers published, its replays."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from django.contrib.admin.sites import AdminSite
from django.db.models import Q, QuerySet, TextField
from django.db.models.functions import Cast
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from django_eventbus.admin.permissions import page_for
from django_eventbus.admin.statuses import status_of
from django_eventbus.errors.text import one_line
from django_eventbus.models import (
    ACTIVE_STATES,
    DeadEvent,
    EventLog,
    EventReplay,
    LogStatus,
    QueuedEvent,
)

MOST_RELATED = 20
#: One event more than the page shows, to find out whether there are more events.
MOST_FOUND = MOST_RELATED + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RelatedReplay:
    """A replay that copied an event."""

    link: SafeString
    row: EventReplay

    @property
    def handler(self) -> str:
        return one_line(self.row.handler)


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
        rows = visible_rows(model, request, site).filter(condition)
        for event in rows.order_by("id")[:MOST_FOUND]:
            found.setdefault(event.event_id, _related(event, site))
    return list(found.values())


def visible_rows(model: type[Any], request: HttpRequest, site: AdminSite) -> QuerySet[Any]:
    """Return the events of a table that the user can see in its list."""
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


def replay_link(replay_id: int, request: HttpRequest, site: AdminSite) -> SafeString:
    """Return the name of a replay, as a link if the replay exists and the user may view it."""
    page = page_for(request, site, EventReplay)
    exists = page is not None and page.get_queryset(request).filter(pk=replay_id).exists()
    return _replay_name(replay_id, site) if exists else format_html("{}", _name(replay_id))


def _replay_name(replay_id: int, site: AdminSite) -> SafeString:
    name = "admin:django_eventbus_eventreplay_change"
    url = reverse(name, args=[replay_id], current_app=site.name)
    return format_html('<a href="{}">{}</a>', url, _name(replay_id))


def _name(replay_id: int) -> str:
    return _("Replay %(id)s") % {"id": replay_id}


def replays_of(event: Any, request: HttpRequest, site: AdminSite) -> list[RelatedReplay]:
    """Return up to MOST_FOUND replays that copied this event or will copy it, newest first.

    The log has no index by which the copies of an event could be found. There are few replays, so
    their filters are compared with the event.
    """
    page = page_for(request, site, EventReplay)
    if page is None:
        return []
    rows = page.get_queryset(request).annotate(ids_as_text=Cast("event_ids", TextField()))
    # The operator selected the event itself. The time of its end may have changed by a retry.
    selected = Q(ids_as_text__contains=str(event.event_id)) & (
        Q(state__in=ACTIVE_STATES) | Q(copied__gt=0)
    )
    if isinstance(event, EventLog):
        selected |= Q(event_ids__isnull=True) & _selects(event) & _has_reached(event)
    found = rows.filter(selected).order_by("-id")[:MOST_FOUND]
    return [RelatedReplay(link=_replay_name(each.pk, site), row=each) for each in found]


def _selects(event: EventLog) -> Q:
    """Return the condition of the replays whose filters match the event."""
    patterns = [f"{event.type[:length]}*" for length in range(len(event.type) + 1)]
    is_dead = event.status != LogStatus.COMPLETED
    return (
        Q(type__in=["", event.type, *patterns])
        & Q(key__in=["", event.key or ""])
        & Q(status__in=["", event.status.lower(), *(["dead"] if is_dead else [])])
        & (Q(since__isnull=True) | Q(since__lte=event.finished_at))
        & Q(until__gt=event.finished_at)
    )


def _has_reached(event: EventLog) -> Q:
    """Return the condition of the replays whose position is behind the event, or will be."""
    at, row_id = event.finished_at, event.pk
    passed = Q(position_at__gt=at) | Q(position_at=at, position_id__gte=row_id)
    return Q(state__in=ACTIVE_STATES) | passed
