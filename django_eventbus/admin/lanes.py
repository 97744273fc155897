"""The list of lanes, with the actions "release" and "skip the first event"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib import admin
from django.db.models import OuterRef, Q, QuerySet, Subquery
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_eventbus import lanes
from django_eventbus.admin.filters import QueueFilter, StateFilter
from django_eventbus.admin.row_actions import MOST_AT_ONCE, RowActionsMixin, read_at, time_between
from django_eventbus.admin.statuses import handed_off_label, held_label
from django_eventbus.errors.text import one_line
from django_eventbus.lanes import LaneState
from django_eventbus.models import EventLane, QueuedEvent
from django_eventbus.status import shown_count
from django_eventbus.store import default_alias, store_for

SHOWN_ON_CONFIRMATION = 20
LONGEST_REASON = 500

LANE_STATES = {
    LaneState.BLOCKED: gettext_lazy("blocked by a dead letter"),
    LaneState.WAITING: gettext_lazy("waiting"),
    LaneState.RUNNING: gettext_lazy("running"),
    LaneState.READY: gettext_lazy("ready"),
}


class LaneStateFilter(StateFilter):
    def known(self) -> Sequence[tuple[str, Any]]:
        return [(state.value, label) for state, label in LANE_STATES.items()]

    def condition(self, state: str) -> Q:
        return lanes.in_state(LaneState(state), store_for(default_alias()).read_clock())


class LaneMixin(RowActionsMixin):
    list_display = ("key", "queue", "state", "wait")
    list_filter = (LaneStateFilter, QueueFilter)
    search_fields = ("key__exact",)
    search_help_text = gettext_lazy("Exact key")
    # An index has this order, so the database does not have to sort a million lanes.
    ordering = ("queue", "ready_at")
    actions = ("release", "skip_head")
    fields = readonly_fields = ("key", "queue", "state", "wait", "depth", "head", "blocked_by")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the lanes with the handler to which their first event is handed off, if any."""
        events = QueuedEvent.objects.filter(lane_id=OuterRef("pk")).order_by("id")
        first = Subquery(events.values("handed_off_to")[:1])
        rows: QuerySet[Any] = super().get_queryset(request).annotate(first_handed_off_to=first)
        return rows

    @admin.display(description=gettext_lazy("state"))
    def state(self, lane: EventLane) -> str:
        return str(LANE_STATES[lanes.state_of(lane, read_at(lane))])

    @admin.display(description=gettext_lazy("wait"))
    def wait(self, lane: EventLane) -> str:
        now = read_at(lane)
        state = lanes.state_of(lane, now)
        if lane.held_by is not None:
            return held_label()
        handler: str | None = lane.first_handed_off_to  # type: ignore[attr-defined]
        if state == LaneState.WAITING and handler is not None:
            return handed_off_label(handler)
        if state == LaneState.WAITING and lane.ready_at is not None:
            return _("retry in %(time)s") % {"time": time_between(now, lane.ready_at)}
        if state == LaneState.READY and lane.ready_at is not None:
            return _("ready for %(time)s") % {"time": time_between(lane.ready_at, now)}
        return ""

    @admin.display(description=gettext_lazy("events"))
    def depth(self, lane: EventLane) -> str:
        found = store_for(default_alias()).lane_depth(lane.pk, at_most=lanes.COUNTED + 1)
        return shown_count(found, up_to=lanes.COUNTED)

    @admin.display(description=gettext_lazy("first event"))
    def head(self, lane: EventLane) -> str:
        return str(store_for(default_alias()).lane_head(lane.pk) or "")

    @admin.action(description=gettext_lazy("Release lanes"), permissions=["pause"])
    def release(self, request: HttpRequest, queryset: QuerySet[EventLane]) -> None:
        def verb(lane: EventLane) -> bool:
            return lanes.release(lane.key, queue=lane.queue, using=default_alias())

        done = self.act(request, queryset[:MOST_AT_ONCE], verb, _("released the lane"))
        text = ngettext("Released %(count)s lane.", "Released %(count)s lanes.", done)
        self.message_user(request, text % {"count": done})

    @admin.action(
        description=gettext_lazy("Skip the first event of each key"), permissions=["purge"]
    )
    def skip_head(
        self, request: HttpRequest, queryset: QuerySet[EventLane]
    ) -> TemplateResponse | None:
        chosen = list(queryset[:MOST_AT_ONCE])
        if "confirmed" not in request.POST:
            return self._confirm_skip(request, chosen)
        why = one_line(request.POST.get("reason", ""), LONGEST_REASON)

        def verb(lane: EventLane) -> object:
            return lanes.skip(lane.key, queue=lane.queue, reason=why, using=default_alias())

        what = _("skipped the first event: %(why)s") if why else _("skipped the first event")
        done = self.act(request, chosen, verb, what % {"why": why})
        text = ngettext(
            "Skipped %(count)s event, which is now a dead letter.",
            "Skipped %(count)s events, which are now dead letters.",
            done,
        )
        self.message_user(request, text % {"count": done})
        return None

    def _confirm_skip(self, request: HttpRequest, chosen: list[EventLane]) -> TemplateResponse:
        return self.page(
            request,
            "skip_heads",
            title=_("Skip the first event of each key"),
            lanes=chosen[:SHOWN_ON_CONFIRMATION],
            more=max(0, len(chosen) - SHOWN_ON_CONFIRMATION),
            count=len(chosen),
            ids=[str(lane.pk) for lane in chosen],
        )


@admin.register(EventLane)
class LaneAdmin(LaneMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass
