"""An event's page: what happened to it, in the order in which it happened.

The same for queued events, logged ones and dead letters; an event that has moved from one to the
other since the page was asked for is shown where it is.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib.admin.sites import AdminSite
from django.contrib.admin.utils import unquote
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_eventbus.admin import audit
from django_eventbus.admin.base import EventBusAdminMixin
from django_eventbus.admin.payloads import Shown, printable, shown
from django_eventbus.admin.permissions import EDIT, PURGE, RETRY, VIEW_PAYLOAD, may
from django_eventbus.failures import one_line
from django_eventbus.models import DeadEvent, EventLog, LogStatus, QueuedEvent, QueuedStatus
from django_eventbus.registry import registry
from django_eventbus.status import in_words
from django_eventbus.store.rows import NEVER, PARKED

MOST_DIGITS = 19
MOST_RELATED = 20
#: One more tells that there are more.
MOST_FOUND = MOST_RELATED + 1
MOST_ATTEMPTS = 100
#: An edit and its entry in the history are written by two clocks.
SAME_MOMENT = timedelta(seconds=10)
SECRET = ("payload", "headers", "edits")


class StoryMixin(EventBusAdminMixin):
    """Shows the story of an event in the place of a form."""

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        if request.method == "POST" or not self.has_view_permission(request):
            return super().change_view(request, object_id, form_url, extra_context)  # refuses
        event = self.event_of(request, unquote(object_id))
        if event is None:
            return self._where_it_went(request, unquote(object_id))
        story = Story(event, request, self.admin_site)
        history_url = self.url_of("history", event.pk)
        return self.page(
            request, "story", title=story.type, story=story, event=event, history_url=history_url
        )

    def event_of(self, request: HttpRequest, object_id: str) -> Any:
        """With its payload only for those who may see it; None if it is not here (any more)."""
        hidden = () if may(request, VIEW_PAYLOAD) else SECRET
        # Lists do without most columns: defer(None) takes that back.
        rows = self.get_queryset(request).defer(None).defer(*hidden)
        return rows.filter(pk=int(object_id)).first() if _is_id(object_id) else None

    def _where_it_went(self, request: HttpRequest, object_id: str) -> HttpResponse:
        if _is_id(object_id):
            found = related_events(Q(pk=int(object_id)), request, self.admin_site)
            url = next((each.url for each in found if each.url), "")
            if url and url != request.path:
                return HttpResponseRedirect(url)
        missing: HttpResponse = self._get_obj_does_not_exist_redirect(  # type: ignore[attr-defined]
            request, self.opts, object_id
        )
        return missing


def _is_id(text: str) -> bool:
    """Python refuses to read numbers of thousands of digits."""
    return text.isdecimal() and len(text) <= MOST_DIGITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened. ``waited`` and ``took`` are words."""

    at: datetime | None
    what: str
    message: str = ""
    traceback: str = ""
    waited: str = ""
    took: str = ""
    bad: bool = False
    payload: Shown | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How far a handler has come with the event."""

    handler: str
    state: str
    failures: int
    due: datetime | None = None
    bad: bool = False

    @property
    def name(self) -> str:
        return one_line(self.handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Related:
    """Another event, and the way to its page; there is none to one that is gone."""

    event_id: uuid.UUID
    type: str
    status: str
    url: str


class Story:
    """What the page tells, in the order of the page."""

    def __init__(self, event: Any, request: HttpRequest, site: AdminSite) -> None:
        self.event = event
        self.request = request
        self.site = site
        self.is_queued = isinstance(event, QueuedEvent)
        self.is_dead = not self.is_queued and event.status != LogStatus.COMPLETED
        self.type = one_line(event.type)

    # -- what can be done

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
    def is_waiting(self) -> bool:
        return self.is_queued and self.event.status == QueuedStatus.PENDING

    @property
    def may_run(self) -> bool:
        return self.is_waiting and may(self.request, RETRY)

    @property
    def may_cancel(self) -> bool:
        return self.is_waiting and may(self.request, PURGE)

    # -- what is known

    @property
    def status(self) -> str:
        return status_in_words(self.event.status)

    @property
    def facts(self) -> Iterator[tuple[str, Any]]:
        event = self.event
        yield _("Event id"), event.event_id
        yield _("Queue"), one_line(event.queue)
        yield _("Key"), one_line(event.key) if event.key is not None else _("none")
        yield _("Priority"), event.priority
        yield _("Version"), event.version
        yield _("Times taken from the queue"), event.attempts
        if event.crashes:
            yield _("Workers it took down"), event.crashes
        if self.is_queued and event.available_at is not None:
            yield _("Waits"), self._until(event.available_at)
        if self.is_queued and event.claimed_by is not None:
            yield _("Being handled by worker"), event.claimed_by

    @staticmethod
    def _until(moment: datetime) -> Any:
        return _("for a gate to open") if moment >= PARKED else moment

    @cached_property
    def deliveries(self) -> list[Delivery]:
        states = self.event.deliveries or {}
        told = [_delivery(name, state) for name, state in states.items()]
        if not self.is_queued:
            return told
        others = registry.handlers_for(self.event.type).names - states.keys()
        return told + [
            Delivery(handler=name, state=_("not tried yet"), failures=0) for name in sorted(others)
        ]

    @property
    def has_due(self) -> bool:
        return any(each.due for each in self.deliveries)

    @property
    def smoothly(self) -> str:
        """How an event ended of which nothing was written down."""
        names = sorted(registry.handlers_for(self.event.type).names)
        if not names:
            return _("Every handler did it at the first attempt.")
        today = {"handlers": one_line(", ".join(names))}
        text = _("Every handler did it at the first attempt. Today these are: %(handlers)s.")
        return text % today

    @property
    def moments(self) -> list[Moment]:
        told = [
            *self._left_out(),
            *self._due(),
            *self._deeds(),
            *self._edits(),
            *self._attempts(),
            *self._successes(),
        ]
        told.sort(key=lambda each: each.at or self.event.created_at)
        return [self._published(), *told, *self._end()]

    def _published(self) -> Moment:
        by = {"producer": one_line(self.event.producer)}
        return Moment(at=self.event.created_at, what=_("Published by %(producer)s") % by)

    @property
    def _due_at(self) -> datetime:
        published: datetime = self.event.created_at
        return max(published, self.event.due_at or published)

    def _due(self) -> Iterator[Moment]:
        """Not of one that was cancelled before."""
        end = None if self.is_queued else self.event.finished_at
        if self._due_at > self.event.created_at and (end is None or self._due_at <= end):
            yield Moment(at=self._due_at, what=_("Due"))

    def _deeds(self) -> Iterator[Moment]:
        """What operators did to this very event: a retry forgets the errors before it."""
        for entry in audit.entries_of(self.event.pk, DeadEvent, QueuedEvent, EventLog):
            name = entry.user.get_username()
            if not self._is_told_as_edit(name, entry.action_time):
                done = {"what": capfirst(one_line(entry.change_message)), "name": one_line(name)}
                yield Moment(at=entry.action_time, what=_("%(what)s by %(name)s") % done)

    def _is_told_as_edit(self, name: str, moment: datetime) -> bool:
        return any(
            edit["by"] == name and abs((_moment(edit["at"]) or NEVER) - moment) < SAME_MOMENT
            for edit in self._seen_edits
        )

    @property
    def _seen_edits(self) -> list[dict[str, Any]]:
        return (self.event.edits or []) if self.may_see_payload else []

    def _edits(self) -> Iterator[Moment]:
        for edit in self._seen_edits:
            by = {"name": one_line(edit["by"] or _("somebody"))}
            what = _("Retried by %(name)s with another payload. Before, it was:") % by
            yield Moment(at=_moment(edit["at"]), what=what, payload=shown(edit["payload"]))

    def _left_out(self) -> Iterator[Moment]:
        count = len(self.event.errors or []) - MOST_ATTEMPTS
        if count > 0:
            text = ngettext(
                "%(count)s earlier attempt is not shown.",
                "%(count)s earlier attempts are not shown.",
                count,
            )
            yield Moment(at=None, what=text % {"count": count})

    def _attempts(self) -> Iterator[Moment]:
        before: dict[str, datetime] = {}
        for error in (self.event.errors or [])[-MOST_ATTEMPTS:]:
            at, seconds = _moment(error["at"]), error.get("seconds")
            since = before.get(error["handler"], self._due_at)
            if at is not None and at < since:  # of a life before this one
                since = self.event.created_at
            if at is not None:
                before[error["handler"]] = at
            yield Moment(
                at=at,
                what=self._attempt_in_words(error),
                message=printable(error["message"]),
                traceback=printable(error["traceback"]),
                waited=in_words((at - since).total_seconds() - (seconds or 0)) if at else "",
                took=in_words(seconds) if seconds is not None else "",
                bad=True,
            )

    @staticmethod
    def _attempt_in_words(error: dict[str, Any]) -> str:
        facts = {
            "handler": one_line(error["handler"]),
            "attempt": error["attempt"],
            "error": one_line(error["type"]),
        }
        if not error["handler"]:
            return str(facts["error"])
        return _("%(handler)s failed at attempt %(attempt)s: %(error)s") % facts

    def _successes(self) -> Iterator[Moment]:
        for name, state in (self.event.deliveries or {}).items():
            if state["state"] == "done" and "at" in state:
                done = {"handler": one_line(name), "attempt": state["failures"] + 1}
                yield Moment(
                    at=_moment(state["at"]),
                    what=_("%(handler)s done at attempt %(attempt)s") % done,
                    took=in_words(state["seconds"]),
                )

    def _end(self) -> Iterator[Moment]:
        event = self.event
        if not self.is_queued:
            took = ""
            if event.processing_started_at is not None:
                took = in_words((event.finished_at - event.processing_started_at).total_seconds())
            what = _("Ended: %(status)s") % {"status": self.status}
            yield Moment(at=event.finished_at, what=what, took=took, bad=self.is_dead)
        elif event.processing_started_at is not None:
            yield Moment(at=event.processing_started_at, what=_("Taken by a worker"))

    # -- what it carried

    @property
    def may_see_payload(self) -> bool:
        return may(self.request, VIEW_PAYLOAD)

    @property
    def payload(self) -> Shown:
        return shown(self.event.payload)

    @property
    def headers(self) -> Shown | None:
        return shown(self.event.headers) if self.event.headers else None

    # -- what came before and after

    @cached_property
    def cause(self) -> Related | None:
        if self.event.caused_by is None:
            return None
        causes = self._related(Q(event_id=self.event.caused_by))
        unknown = Related(
            event_id=self.event.caused_by,
            type=_("an event that is gone, or not for you to see"),
            status="",
            url="",
        )
        return causes[0] if causes else unknown

    @cached_property
    def effects(self) -> list[Related]:
        """What its handlers published; one more than are shown, if there are more."""
        return self._related(Q(caused_by=self.event.event_id))

    @property
    def effects_shown(self) -> list[Related]:
        return self.effects[:MOST_RELATED]

    @property
    def has_more_effects(self) -> bool:
        return len(self.effects) > MOST_RELATED

    def _related(self, condition: Q) -> list[Related]:
        return related_events(condition, self.request, self.site)


def related_events(condition: Q, request: HttpRequest, site: AdminSite) -> list[Related]:
    """Events that the user can find in one of the lists; each as its best page knows it."""
    found: dict[uuid.UUID, Related] = {}
    for model in (QueuedEvent, DeadEvent, EventLog):
        for event in _seen(model, request, site).filter(condition).order_by("id")[:MOST_FOUND]:
            found.setdefault(event.event_id, _related(event, site))
    return list(found.values())


def _seen(model: type[Any], request: HttpRequest, site: AdminSite) -> QuerySet[Any]:
    page = site._registry.get(model)
    rows: QuerySet[Any] = model._default_manager.none()
    if page is not None and page.has_view_permission(request):
        rows = page.get_queryset(request).only("event_id", "type", "status")
    return rows


def _related(event: Any, site: AdminSite) -> Related:
    name = f"admin:{event._meta.app_label}_{event._meta.model_name}_change"
    return Related(
        event_id=event.event_id,
        type=one_line(event.type),
        status=status_in_words(event.status),
        url=reverse(name, args=[event.pk], current_app=site.name),
    )


def status_in_words(status: str) -> str:
    for choices in (QueuedStatus, LogStatus):
        if status in choices.values:
            return str(choices(status).label)
    return one_line(status)


def _delivery(name: str, state: dict[str, Any]) -> Delivery:
    words = {
        "done": _("done"),
        "retry": _("to be retried"),
        "dead": _("dead"),
        "discarded": _("discarded"),
    }
    return Delivery(
        handler=name,
        state=words.get(state["state"], one_line(state["state"])),
        failures=state["failures"],
        due=_moment(state.get("due")),
        bad=state["state"] in ("dead", "discarded"),
    )


def _moment(text: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
