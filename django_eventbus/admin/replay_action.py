"""The action "Replay…" of the event log and of the dead letters: confirm, and start a replay.

The confirmation page contains the selected rows in a signed form field, with the time at which the
page was shown. This time is the end of the replay's selection, so a confirmation that is sent twice
finds the replay that it has already started.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import ADDITION
from django.contrib.admin.sites import AdminSite
from django.core import signing
from django.core.exceptions import BadRequest, PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_eventbus import replay
from django_eventbus.admin import audit
from django_eventbus.admin.bulk import A_DAY
from django_eventbus.admin.lists import EventListMixin
from django_eventbus.admin.paging import Grouped, grouped
from django_eventbus.admin.related_events import replay_link, visible_rows
from django_eventbus.errors.text import one_line
from django_eventbus.exceptions import EventBusError
from django_eventbus.models import DeadEvent, EventLog, EventReplay
from django_eventbus.registry import registry
from django_eventbus.schema.names import MAX_NAME_LENGTH, OWN_TYPES
from django_eventbus.store import default_alias, store_for

SLOWEST, FASTEST = 0.01, 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """The selected rows and the time at which the confirmation page was first shown."""

    ids: list[int]
    asked_at: str
    #: The query string of the list, to return to the same list.
    query: str


class ReplayChoice:
    """The selected events that can be replayed, and the handlers that receive them again."""

    def __init__(self, types: dict[uuid.UUID, str], selected: int) -> None:
        self._receivers = {name: _receivers(name) for name in set(types.values())}
        self._types = {each: name for each, name in types.items() if self._receivers[name]}
        #: The number of selected events that cannot be replayed.
        self.left_out = selected - len(self._types)

    @property
    def count(self) -> int:
        return len(self._types)

    def events_for(self, handler: str) -> list[uuid.UUID]:
        """Return the ids of the events that a handler receives; "" means any handler.

        A copy of another event would have no handler, and would become a dead letter.
        """
        chosen = (
            event_id
            for event_id, name in self._types.items()
            if not handler or handler in self._receivers[name]
        )
        return sorted(chosen)

    @property
    def handlers(self) -> list[tuple[str, int]]:
        """The handlers by name, with the number of events that each of them receives."""
        counts = Counter(
            handler for name in self._types.values() for handler in self._receivers[name]
        )
        return sorted(counts.items())

    @property
    def refusing(self) -> list[str]:
        """The names of the handlers of these events that are declared with replay=False."""
        names = {
            each.name
            for name in set(self._types.values())
            for each in registry.handlers_for(name).all
            if not each.replay
        }
        return sorted(map(one_line, names))


def _receivers(type_name: str) -> frozenset[str]:
    if type_name.startswith(OWN_TYPES):
        return frozenset()
    return registry.handlers_for(type_name).for_replay(None).names


class ReplayForm(forms.Form):
    handler = forms.ChoiceField(
        label=gettext_lazy("Handler"),
        required=False,
        error_messages={
            "invalid_choice": gettext_lazy(
                "The handler %(value)s does not receive replays of these events. "
                "Choose another handler."
            )
        },
    )
    rate = forms.FloatField(
        label=gettext_lazy("Events per second"),
        required=False,
        min_value=SLOWEST,
        max_value=FASTEST,
        help_text=gettext_lazy("Leave it empty to replay as fast as the workers can."),
    )

    def __init__(self, choice: ReplayChoice, data: Any = None) -> None:
        super().__init__(data)
        handler: Any = self.fields["handler"]
        handler.choices = [("", _("All handlers")), *self._handlers(choice)]

    @staticmethod
    def _handlers(choice: ReplayChoice) -> Iterator[tuple[str, str]]:
        for name, count in choice.handlers:
            text = ngettext(
                "%(handler)s (%(count)s event)", "%(handler)s (%(count)s events)", count
            )
            yield name, text % {"handler": one_line(name), "count": Grouped(count)}


@admin.action(permissions=["replay"], description=gettext_lazy("Replay…"))
def replay_events(model_admin: Any, request: HttpRequest, rows: QuerySet[Any]) -> Any:
    """Show the confirmation page for the selected events."""
    with store_for(rows.db).reading_by_index(may_sort=True):
        ids = list(rows.values_list("pk", flat=True)[: replay.MOST_EVENT_IDS + 1])
    if len(ids) <= replay.MOST_EVENT_IDS:
        return model_admin.confirm_replay(request, ids)
    text = _(
        "This list can replay at most %(most)s events at once. To replay all events that match "
        "a filter, run manage.py replay_events."
    )
    most = grouped(replay.MOST_EVENT_IDS)
    model_admin.message_user(request, text % {"most": most}, messages.WARNING)
    return None


class ReplayActionMixin(EventListMixin):
    """A list of ended events with the action ``replay_events``."""

    def get_urls(self) -> list[Any]:
        return [self.route("replay/", self.replay_view, "replay"), *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        # Django would ignore the action, and only report that no action was selected.
        asked = request.POST.get("action") == replay_events.__name__
        if asked and not self.has_replay_permission(request):
            raise PermissionDenied
        return super().changelist_view(request, extra_context)

    def confirm_replay(self, request: HttpRequest, ids: list[int]) -> TemplateResponse:
        asked_at = store_for(default_alias()).read_clock().isoformat()
        asked = Confirmation(ids=ids, asked_at=asked_at, query=request.GET.urlencode())
        choice = self._choice(request, ids)
        return self._confirm_replay(request, asked, choice, ReplayForm(choice))

    def replay_view(self, request: HttpRequest) -> HttpResponse:
        """Start the replay of a confirmation."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        self.demand_view(request)
        if not self.has_replay_permission(request):
            raise PermissionDenied
        asked = self._signed_confirmation(request)
        choice = self._choice(request, asked.ids)
        form = ReplayForm(choice, request.POST)
        if choice.count and form.is_valid():
            try:
                self._start_and_report(request, asked, choice, form.cleaned_data)
            except EventBusError as error:
                form.add_error(None, one_line(str(error)))
            else:
                query = f"?{asked.query}" if asked.query else ""
                return HttpResponseRedirect(self.url_of("changelist") + query)
        return self._confirm_replay(request, asked, choice, form)

    def _choice(self, request: HttpRequest, ids: Sequence[int]) -> ReplayChoice:
        """Return the events of the selected rows that the user may view.

        A copy stands for its original event, because a replay never copies a copy.
        """
        rows = self.get_queryset(request).filter(pk__in=ids).order_by("pk")
        found = list(rows.values_list("event_id", "type", "replay_of"))
        types = {event_id: name for event_id, name, original in found if original is None}
        selected = {original or event_id for event_id, _name, original in found}
        if originals := selected - types.keys():
            types |= _types_of(originals, request, self.admin_site)
        return ReplayChoice(types, selected=len(selected))

    def _confirm_replay(
        self, request: HttpRequest, asked: Confirmation, choice: ReplayChoice, form: ReplayForm
    ) -> TemplateResponse:
        question = ngettext("Replay %(count)s event?", "Replay %(count)s events?", choice.count)
        query = f"?{asked.query}" if asked.query else ""
        return self.page(
            request,
            "replay",
            title=question % {"count": Grouped(choice.count)},
            choice=choice,
            form=form,
            token=signing.dumps(asdict(asked), salt=self._replay_salt(request), compress=True),
            form_url=self.url_of("replay"),
            back_url=self.url_of("changelist") + query,
        )

    def _signed_confirmation(self, request: HttpRequest) -> Confirmation:
        token, salt = request.POST.get("confirmation", ""), self._replay_salt(request)
        try:
            return Confirmation(**signing.loads(token, salt=salt, max_age=A_DAY))
        except signing.BadSignature:
            raise BadRequest("The confirmation is missing or has expired.") from None

    def _replay_salt(self, request: HttpRequest) -> str:
        """Return a salt per user, so that a confirmation is valid only for the user who got it."""
        return f"django_eventbus.replay.{self.opts.model_name}.{request.user.pk}"

    # -- the start

    def _start_and_report(
        self,
        request: HttpRequest,
        asked: Confirmation,
        choice: ReplayChoice,
        chosen: dict[str, Any],
    ) -> None:
        options = {
            "event_id": choice.events_for(chosen["handler"]),
            "handler": chosen["handler"] or None,
            "rate": chosen["rate"],
            "until": datetime.fromisoformat(asked.asked_at),
            "by": request.user.get_username(),
            "using": default_alias(),
        }
        store = store_for(default_alias())
        started, is_new = store.in_transaction(lambda: _start_once(request, options))
        link = replay_link(started.pk, request, self.admin_site)
        if is_new:
            text = ngettext(
                "Started the replay of %(count)s event.",
                "Started the replay of %(count)s events.",
                started.total,
            )
            text %= {"count": Grouped(started.total)}
            self.message_user(request, format_html("{} {}", text, link), messages.SUCCESS)
        else:
            text = _("This replay was already started.")
            self.message_user(request, format_html("{} {}", text, link), messages.WARNING)


def _start_once(request: HttpRequest, options: dict[str, Any]) -> tuple[EventReplay, bool]:
    """Start a replay, or return the replay that the same confirmation has already started.

    Raises EventBusError if none of the events is in the log any more. The lock on an event
    serializes two requests with the same confirmation.
    """
    store = store_for(options["using"])
    events = EventLog.objects.using(store.using).filter(event_id__in=options["event_id"])
    store.waiting_lock(events.order_by("pk")).values_list("pk", flat=True).first()
    same = store.replays.filter(until=options["until"], created_by=options["by"][:MAX_NAME_LENGTH])
    # A locking read also finds a replay that was committed after this transaction began.
    earlier = store.waiting_lock(same).first()
    if earlier is not None:
        return earlier, False
    if not replay.prepare(**options).total:
        raise EventBusError(_("The events have changed or were deleted. Select them again."))
    started = replay.start(**options)
    what = _("started; events: %(count)s; handler: %(handler)s") % {
        "count": started.total,
        "handler": started.handler or _("All handlers"),
    }
    subject = str(started)
    audit.record(request, EventReplay, what, subject=subject, object_id=started.pk, flag=ADDITION)
    return started, True


def _types_of(
    event_ids: set[uuid.UUID], request: HttpRequest, site: AdminSite
) -> dict[uuid.UUID, str]:
    """Return the types of the ended events with these ids that the user may view."""
    found: dict[uuid.UUID, str] = {}
    for model in (EventLog, DeadEvent):
        rows = visible_rows(model, request, site).filter(event_id__in=event_ids - found.keys())
        found |= dict(rows.order_by().values_list("event_id", "type"))
    return found
