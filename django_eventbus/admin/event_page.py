"""The page of one event: facts, timeline, handlers, related events, payload, actions.

Queued events, logged events and dead letters have the same page. The URL of an event that has moved
to another table redirects to its current page.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.contrib.admin.sites import AdminSite
from django.contrib.admin.utils import unquote
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.functional import cached_property
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_eventbus.admin.base import EventBusAdminMixin
from django_eventbus.admin.payloads import Shown, shown
from django_eventbus.admin.permissions import EDIT, PURGE, REPLAY, RETRY, VIEW_PAYLOAD, may
from django_eventbus.admin.related_events import (
    MOST_RELATED,
    RelatedEvent,
    RelatedReplay,
    related_events,
    replay_link,
    replays_of,
)
from django_eventbus.admin.statuses import executor_of, is_handed_off, next_attempt, status_of
from django_eventbus.admin.timeline import Timeline, TimelineEntry, stored_time
from django_eventbus.errors.text import one_line
from django_eventbus.internals.django import redirect_for_missing_object
from django_eventbus.models import LogStatus, QueuedEvent, QueuedStatus
from django_eventbus.outcomes.endings import CRASHED
from django_eventbus.registry import HandlersOfType, registry
from django_eventbus.schema import deliveries
from django_eventbus.schema.names import OWN_TYPES
from django_eventbus.store import store_for

MOST_DIGITS = 19
SECRET = ("payload", "headers", "edits")


class EventPageMixin(EventBusAdminMixin):
    """The page of an event. It replaces Django's form to change a row."""

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        if request.method == "POST" or not self.has_view_permission(request):
            # Django's own view refuses a POST, and a user who may not view events.
            return super().change_view(request, object_id, form_url, extra_context)
        event = self.event_of(request, unquote(object_id))
        if event is None:
            return self._redirect_to_current_page(request, unquote(object_id))
        event_page = EventPage(event, request, self.admin_site)
        return self.page(
            request,
            "event_page",
            title=event_page.type,
            event_page=event_page,
            event=event,
            history_url=self.url_of("history", event.pk),
        )

    def event_of(self, request: HttpRequest, object_id: str) -> Any:
        """Return the event, or None if the table of this page does not contain it.

        Payload, headers and edits are not read if the user may not view payloads.
        """
        hidden = () if may(request, VIEW_PAYLOAD) else SECRET
        # The queryset defers most columns, because lists do not show them. ``defer(None)`` selects
        # all columns.
        rows = self.get_queryset(request).defer(None).defer(*hidden)
        return rows.filter(pk=int(object_id)).first() if _is_id(object_id) else None

    def _redirect_to_current_page(self, request: HttpRequest, object_id: str) -> HttpResponse:
        if _is_id(object_id):
            found = related_events(Q(pk=int(object_id)), request, self.admin_site)
            url = next((each.url for each in found if each.url), "")
            if url and url != request.path:
                return HttpResponseRedirect(url)
        return redirect_for_missing_object(self, request, object_id)


def _is_id(text: str) -> bool:
    """Return whether the text can be a row id.

    The length is limited, because ``int()`` raises an error for a text of thousands of digits.
    """
    return text.isdecimal() and len(text) <= MOST_DIGITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The state of one handler of the event."""

    handler: str
    state: str
    failures: int
    due: datetime | None = None
    bad: bool = False

    @property
    def name(self) -> str:
        return one_line(self.handler)


class EventPage:
    """The content of the page of one event, as the template reads it."""

    def __init__(self, event: Any, request: HttpRequest, site: AdminSite) -> None:
        self.event = event
        self.request = request
        self.site = site
        self.is_queued = isinstance(event, QueuedEvent)
        self.is_dead = not self.is_queued and event.status != LogStatus.COMPLETED
        self.is_copy = event.replay_of is not None
        self.type = one_line(event.type)

    # -- actions

    @property
    def may_retry(self) -> bool:
        return self.is_dead and may(self.request, RETRY)

    @property
    def may_edit(self) -> bool:
        return self.is_dead and may(self.request, EDIT, VIEW_PAYLOAD)

    @property
    def may_purge(self) -> bool:
        return self.is_dead and may(self.request, PURGE)

    @property
    def may_replay(self) -> bool:
        is_own = self.event.type.startswith(OWN_TYPES)
        return not self.is_queued and not is_own and may(self.request, REPLAY)

    @property
    def is_waiting(self) -> bool:
        return self.is_queued and self.event.status == QueuedStatus.PENDING

    @property
    def may_run(self) -> bool:
        return self.is_waiting and may(self.request, RETRY)

    @property
    def may_cancel(self) -> bool:
        return self.is_waiting and may(self.request, PURGE)

    # -- facts and timeline

    @property
    def status(self) -> str:
        return status_of(self.event)

    @property
    def facts(self) -> Iterator[tuple[str, Any]]:
        event = self.event
        yield _("Event id"), event.event_id
        yield _("Queue"), one_line(event.queue)
        yield _("Key"), one_line(event.key) if event.key is not None else _("none")
        yield _("Priority"), event.priority
        yield _("Version"), event.version
        if event.only_handler:
            yield _("Only for the handler"), one_line(event.only_handler)
        if event.history:
            yield _("Life"), event.life
        yield _("Attempts"), event.attempts
        if event.crashes:
            yield _("Worker crashes"), event.crashes
        if event.interruptions:
            yield _("Interruptions"), event.interruptions
        if is_handed_off(event):
            yield from self._hand_off()
        elif self.is_queued and next_attempt(event) is not None:
            yield _("Next attempt"), next_attempt(event)
        if self.is_queued and event.claimed_by is not None:
            yield _("Claimed by worker"), event.claimed_by

    def _hand_off(self) -> Iterator[tuple[str, Any]]:
        """Yield the facts about the executor for which the event waits."""
        handler = self.event.handed_off_to
        executor = executor_of(handler)
        yield _("Handed off to"), one_line(handler)
        state = deliveries.readable(self.event.deliveries).get(handler, {})
        since = stored_time(state.get("at"))
        if since is not None:
            waits = _("Waiting for %(executor)s since")
            yield waits % {"executor": executor or _("its executor")}, since
        if state.get("times", 1) != 1:
            yield _("Hand-offs"), state["times"]
        if again_at := self._handed_off_again_at():
            yield _("Handed off again at"), again_at

    def _handed_off_again_at(self) -> datetime | None:
        """Return when the event is handed off again; the lane of an event with a key stores it."""
        again_at: datetime | None = self.event.available_at
        if self.event.lane_id is not None:
            lanes = store_for(self.event._state.db).lanes.filter(pk=self.event.lane_id)
            again_at = lanes.values_list("ready_at", flat=True).first()
        return again_at

    @property
    def timeline(self) -> list[TimelineEntry]:
        return Timeline(self.event, with_payloads=self.may_see_payload).entries()

    # -- handlers

    @cached_property
    def deliveries(self) -> list[Delivery]:
        states = deliveries.readable(self.event.deliveries)
        known = [_delivery(name, state, self.event) for name, state in states.items()]
        if not self.is_queued:
            return known
        others = self._handlers().names - states.keys()
        return known + [
            Delivery(handler=name, state=_("not tried yet"), failures=0) for name in sorted(others)
        ]

    def _handlers(self) -> HandlersOfType:
        """Return the registered handlers that receive the event."""
        found = registry.handlers_for(self.event.type)
        return found.for_replay(self.event.only_handler) if self.is_copy else found

    @property
    def has_due(self) -> bool:
        return any(each.due for each in self.deliveries)

    @property
    def summary(self) -> str:
        """The result of an ended event whose ``deliveries`` column is empty."""
        if self.is_dead:
            return self._why_dead()
        if self.event.history:
            text = _("Every handler succeeded at the first attempt of life %(life)s.")
            return text % {"life": self.event.life}
        names = sorted(self._handlers().names)
        if not names:
            return _("Every handler succeeded at the first attempt.")
        text = _(
            "Every handler succeeded at the first attempt. "
            "The handlers registered now: %(handlers)s."
        )
        return text % {"handlers": one_line(", ".join(names))}

    def _why_dead(self) -> str:
        event = self.event
        if event.error_type == CRASHED:
            text = ngettext(
                "The event crashed its worker process %(count)s time; no handler completed.",
                "The event crashed its worker process %(count)s times; no handler completed.",
                event.crashes,
            )
            return text % {"count": event.crashes}
        error = {"error": one_line(event.error_type) or _("unknown")}
        if event.status == LogStatus.DISCARDED:
            return _("The event was discarded before any handler completed: %(error)s.") % error
        if event.status == LogStatus.COMPLETED_WITH_ERRORS:
            return _("The code that polled the event reported errors: %(error)s.") % error
        return _("No handler completed. Last error: %(error)s.") % error

    # -- payload

    @property
    def may_see_payload(self) -> bool:
        return may(self.request, VIEW_PAYLOAD)

    @property
    def payload(self) -> Shown:
        return shown(self.event.payload)

    @property
    def headers(self) -> Shown | None:
        return shown(self.event.headers) if self.event.headers else None

    # -- related events

    @cached_property
    def cause(self) -> RelatedEvent | None:
        if self.event.caused_by is None:
            return None
        return self._event_with(self.event.caused_by)

    @cached_property
    def original(self) -> RelatedEvent | None:
        """The event of which this event is a copy."""
        return self._event_with(self.event.replay_of) if self.is_copy else None

    @property
    def replay(self) -> str:
        """The link to the replay that made this copy."""
        return replay_link(self.event.replay_id, self.request, self.site)

    @cached_property
    def replays(self) -> list[RelatedReplay]:
        """The replays of an original event. The page shows the newest MOST_RELATED replays."""
        return [] if self.is_copy else replays_of(self.event, self.request, self.site)

    @property
    def replays_shown(self) -> list[RelatedReplay]:
        return self.replays[:MOST_RELATED]

    @property
    def has_more_replays(self) -> bool:
        return len(self.replays) > MOST_RELATED

    def _event_with(self, event_id: uuid.UUID) -> RelatedEvent:
        unknown = RelatedEvent(
            event_id=event_id,
            type=_("an event that was deleted or that you may not view"),
            status="",
            url="",
        )
        return next(iter(self._related(Q(event_id=event_id))), unknown)

    @cached_property
    def effects(self) -> list[RelatedEvent]:
        """The events that the handlers of this event published, at most MOST_FOUND per table.

        The page shows the first MOST_RELATED events.
        """
        return self._related(Q(caused_by=self.event.event_id))

    @property
    def effects_shown(self) -> list[RelatedEvent]:
        return self.effects[:MOST_RELATED]

    @property
    def has_more_effects(self) -> bool:
        return len(self.effects) > MOST_RELATED

    def _related(self, condition: Q) -> list[RelatedEvent]:
        return related_events(condition, self.request, self.site)


def _delivery(name: str, state: dict[str, Any], event: Any) -> Delivery:
    """Return the state of one handler.

    An event may end while a handler is in the state "retry" or "handed_off", for example because an
    operator cancels the event. The page then shows the handler as not completed.
    """
    is_queued = isinstance(event, QueuedEvent)
    labels = {
        "handed_off": _hand_off_label(name, event) if is_queued else _("not completed"),
        "done": _("done"),
        "retry": _("waiting for a retry") if is_queued else _("not completed"),
        "dead": _("dead"),
        "discarded": _("discarded"),
    }
    return Delivery(
        handler=name,
        state=labels.get(state["state"], one_line(state["state"])),
        failures=state["failures"],
        due=stored_time(state.get("due")) if is_queued else None,
        bad=state["state"] in ("dead", "discarded"),
    )


def _hand_off_label(name: str, event: QueuedEvent) -> str:
    """Return the state of a delivery that was handed off and has no outcome.

    If the event is pending and not handed off any more, the message could not be sent, or the
    process that picked the event up was interrupted. The event will be handed off again.
    """
    if event.status == QueuedStatus.PROCESSING or event.handed_off_to == name:
        return _("handed off")
    return _("waiting")
