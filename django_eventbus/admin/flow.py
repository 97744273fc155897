"""What flows and what is held up: lanes, workers, pauses and circuit breakers.

The verbs are those of ``lanes``, ``gates`` and ``breakers``. Each row that is acted on has a
transaction of its own, with its entry in the history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_eventbus import breakers, gates, lanes
from django_eventbus.admin import permissions
from django_eventbus.admin.audit import record
from django_eventbus.admin.base import EventBusAdminMixin
from django_eventbus.admin.filters import ChoiceFilter, QueueFilter
from django_eventbus.clock import DatabaseNow
from django_eventbus.conf import settings
from django_eventbus.exceptions import EventBusError
from django_eventbus.failures import one_line
from django_eventbus.lanes import LaneState
from django_eventbus.models import EventGate, EventLane, EventWorker, GateKind
from django_eventbus.registry import registry
from django_eventbus.status import in_words, shown_count
from django_eventbus.store import default_alias, store_for
from django_eventbus.store.rows import PARKED

#: Rows that one request acts on; more of them take another. (Forms may have 1,000 fields.)
MOST_AT_ONCE = 500
SHOWN_ON_CONFIRMATION = 20


class StateFilter(ChoiceFilter):
    """States that are no column; one that is not known is nobody's."""

    title = gettext_lazy("state")
    parameter_name = "state"

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        asked = self.value()
        if asked is None:
            return queryset
        known = asked in dict(self.known())
        return queryset.filter(self.condition(asked)) if known else queryset.none()

    def condition(self, state: str) -> Q:
        raise NotImplementedError


class FlowMixin(EventBusAdminMixin):
    """Rows are told about as they are at the database's time, which each of them brings along."""

    sortable_by = ()

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset(request).annotate(looked_at=DatabaseNow())
        return rows

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        """An action that is not offered is refused by Django without a word: say it."""
        asked = request.POST.get("action")
        if asked and asked not in self.get_actions(request):
            raise PermissionDenied
        return super().changelist_view(request, extra_context)

    def has_pause_permission(self, request: HttpRequest) -> bool:
        return permissions.may(request, permissions.PAUSE)

    def has_purge_permission(self, request: HttpRequest) -> bool:
        return permissions.may(request, permissions.PURGE)

    def act(
        self,
        request: HttpRequest,
        rows: Iterable[Any],
        verb: Callable[[Any], object],
        what: str,
    ) -> int:
        """Do it to each row that still lets it be done; how many that were."""
        done = passed = 0
        for row in rows:
            try:
                with transaction.atomic(using=default_alias()):
                    if verb(row):
                        done += 1
                        record(request, type(row), what, subject=str(row), object_id=row.pk)
                    else:
                        passed += 1
            except EventBusError as error:
                self.message_user(request, str(error), messages.ERROR)
        if passed:
            text = ngettext(
                "%(count)s was passed over: it is gone, busy, or not in need of it.",
                "%(count)s were passed over: they are gone, busy, or not in need of it.",
                passed,
            )
            self.message_user(request, text % {"count": passed}, messages.WARNING)
        return done


# -- lanes


class LaneStateFilter(StateFilter):
    def known(self) -> Sequence[tuple[str, Any]]:
        return [(state.value, label) for state, label in LANE_STATES.items()]

    def condition(self, state: str) -> Q:
        return lanes.in_state(LaneState(state), store_for(default_alias()).read_clock())


LANE_STATES = {
    LaneState.BLOCKED: gettext_lazy("blocked by a dead letter"),
    LaneState.WAITING: gettext_lazy("waiting"),
    LaneState.RUNNING: gettext_lazy("running"),
    LaneState.READY: gettext_lazy("ready"),
}


class LaneMixin(FlowMixin):
    """Keys with events waiting: who waits, for what, and the hand to help them on."""

    list_display = ("key", "queue", "state", "wait")
    list_filter = (LaneStateFilter, QueueFilter)
    search_fields = ("key__exact",)
    search_help_text = gettext_lazy("A key, exactly as it was published")
    # That of an index: a million keys are not to be sorted.
    ordering = ("queue", "ready_at")
    actions = ("release", "skip_head")
    fields = readonly_fields = ("key", "queue", "state", "wait", "depth", "head", "blocked_by")

    @admin.display(description=gettext_lazy("state"))
    def state(self, lane: EventLane) -> str:
        return str(LANE_STATES[lanes.state_of(lane, looked_at(lane))])

    @admin.display(description=gettext_lazy("wait"))
    def wait(self, lane: EventLane) -> str:
        now = looked_at(lane)
        state = lanes.state_of(lane, now)
        if state == LaneState.WAITING and lane.ready_at >= PARKED:
            return _("until a pause or a circuit breaker ends")
        if state == LaneState.WAITING:
            return _("retried in %(time)s") % {"time": time_between(now, lane.ready_at)}
        if state == LaneState.READY:
            return _("ready for %(time)s") % {"time": time_between(lane.ready_at, now)}
        return ""

    @admin.display(description=gettext_lazy("events"))
    def depth(self, lane: EventLane) -> str:
        found = store_for(default_alias()).lane_depth(lane.pk, at_most=lanes.COUNTED + 1)
        return shown_count(found, up_to=lanes.COUNTED)

    @admin.display(description=gettext_lazy("first event"))
    def head(self, lane: EventLane) -> str:
        return str(store_for(default_alias()).lane_head(lane.pk) or "")

    @admin.action(
        description=gettext_lazy("Release: let the keys go on now"), permissions=["pause"]
    )
    def release(self, request: HttpRequest, queryset: QuerySet[EventLane]) -> None:
        def verb(lane: EventLane) -> bool:
            return lanes.release(lane.key, queue=lane.queue, using=default_alias())

        done = self.act(request, queryset[:MOST_AT_ONCE], verb, _("released the lane"))
        text = ngettext("%(count)s lane was released.", "%(count)s lanes were released.", done)
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
        why = one_line(request.POST.get("reason", ""), 500)

        def verb(lane: EventLane) -> object:
            return lanes.skip(lane.key, queue=lane.queue, reason=why, using=default_alias())

        what = _("skipped the first event: %(why)s") if why else _("skipped the first event")
        done = self.act(request, chosen, verb, what % {"why": why})
        text = ngettext(
            "%(count)s event was skipped: it is a dead letter now.",
            "%(count)s events were skipped: they are dead letters now.",
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


# -- workers


class WorkerMixin(FlowMixin):
    """Worker processes, and when they were last heard of. There is nothing to do to them here."""

    list_display = ("process", "serves", "running_for", "last_sign", "state")
    ordering = ("started_at", "id")
    fields = readonly_fields = (
        "process",
        "serves",
        "started_at",
        "renewed_at",
        "expires_at",
        "last_sign",
        "state",
    )

    @admin.display(description=gettext_lazy("worker"))
    def process(self, worker: EventWorker) -> str:
        return str(worker)

    @admin.display(description=gettext_lazy("queues"))
    def serves(self, worker: EventWorker) -> str:
        return ", ".join(map(str, worker.queues))

    @admin.display(description=gettext_lazy("running for"))
    def running_for(self, worker: EventWorker) -> str:
        return time_between(worker.started_at, looked_at(worker))

    @admin.display(description=gettext_lazy("last sign of life"))
    def last_sign(self, worker: EventWorker) -> str:
        return _("%(time)s ago") % {"time": time_between(worker.renewed_at, looked_at(worker))}

    @admin.display(description=gettext_lazy("state"))
    def state(self, worker: EventWorker) -> str:
        if worker.expires_at > looked_at(worker):
            return _("alive")
        return _("silent: its events are given to other workers")


@admin.register(EventWorker)
class WorkerAdmin(WorkerMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass


# -- pauses and breakers


class GateStateFilter(StateFilter):
    def known(self) -> Sequence[tuple[str, Any]]:
        return [("paused", gettext_lazy("paused")), ("open", gettext_lazy("circuit breaker open"))]

    def condition(self, state: str) -> Q:
        return Q(paused_at__isnull=False) if state == "paused" else Q(opened_at__isnull=False)


class KindFilter(ChoiceFilter):
    title = gettext_lazy("kind")
    parameter_name = column = "kind"

    def known(self) -> Sequence[tuple[str, Any]]:
        return GateKind.choices


class GateMixin(FlowMixin):
    """What is paused, by whom and why, and the circuit breakers of handlers."""

    list_display = ("name", "kind_in_words", "pause", "breaker", "running_now")
    list_filter = (GateStateFilter, KindFilter)
    ordering = ("kind", "name")
    actions = ("resume", "reset_breaker")
    fields = readonly_fields = ("name", "kind_in_words", "pause", "breaker", "running_now")
    change_list_template = "admin/django_eventbus/gates.html"

    @admin.display(description=gettext_lazy("kind"))
    def kind_in_words(self, gate: EventGate) -> str:
        return str(GateKind(gate.kind).label)

    @admin.display(description=gettext_lazy("pause"), empty_value="")
    def pause(self, gate: EventGate) -> str:
        if gate.paused_at is None:
            return _("not paused")
        text = _("paused for %(time)s by %(who)s")
        if gate.reason:
            text = _("paused for %(time)s by %(who)s: %(reason)s")
        since = time_between(gate.paused_at, looked_at(gate))
        return text % {"time": since, "who": gate.paused_by, "reason": gate.reason}

    @admin.display(description=gettext_lazy("circuit breaker"))
    def breaker(self, gate: EventGate) -> str:
        now = looked_at(gate)
        if gate.opened_at is None:
            return _("closed") if gate.calls else ""
        if gate.probe_by:
            return _("half-open: one delivery is tried")
        text = _("open for %(time)s, next try in %(wait)s")
        wait = time_between(now, gate.probe_at) if gate.probe_at else in_words(0)
        return text % {"time": time_between(gate.opened_at, now), "wait": wait}

    @admin.display(description=gettext_lazy("running now"))
    def running_now(self, gate: EventGate) -> str:
        return str(sum(gate.running.values())) if gate.running else ""

    @admin.action(description=gettext_lazy("Resume"), permissions=["pause"])
    def resume(self, request: HttpRequest, queryset: QuerySet[EventGate]) -> None:
        def verb(gate: EventGate) -> bool:
            chosen: dict[str, Any] = {gate.kind: gate.name}
            return gates.resume(**chosen, by=_who(request), using=default_alias())

        done = self.act(request, queryset[:MOST_AT_ONCE], verb, _("resumed"))
        text = ngettext("%(count)s pause was ended.", "%(count)s pauses were ended.", done)
        self.message_user(request, text % {"count": done})

    @admin.action(description=gettext_lazy("Reset the circuit breaker"), permissions=["pause"])
    def reset_breaker(self, request: HttpRequest, queryset: QuerySet[EventGate]) -> None:
        def verb(gate: EventGate) -> bool:
            is_handler = gate.kind == GateKind.HANDLER
            return is_handler and breakers.reset(gate.name, by=_who(request), using=default_alias())

        done = self.act(request, queryset[:MOST_AT_ONCE], verb, _("reset the circuit breaker"))
        text = ngettext(
            "%(count)s circuit breaker was closed.", "%(count)s circuit breakers were closed.", done
        )
        self.message_user(request, text % {"count": done})

    def get_urls(self) -> list[URLPattern]:
        return [self.route("pause/", self.pause_view, "pause"), *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        pause_url = self.url_of("pause") if self.has_pause_permission(request) else ""
        offered = {"pause_url": pause_url, **(extra_context or {})}
        return super().changelist_view(request, offered)

    def pause_view(self, request: HttpRequest) -> HttpResponse:
        """What has never been paused has no row to be acted on, so it has a form."""
        self.demand_view(request)
        permissions.demand(request, permissions.PAUSE)
        form = PauseForm(request.POST if request.method == "POST" else None)
        if form.is_valid() and self._paused(request, form):
            return HttpResponseRedirect(self.url_of("changelist"))
        title = _("Pause a queue, an event type or a handler")
        return self.page(request, "pause", title=title, form=form)

    def _paused(self, request: HttpRequest, form: PauseForm) -> bool:
        kind, name = form.cleaned_data["chosen"]
        reason, using = form.cleaned_data["reason"], default_alias()
        chosen: dict[str, Any] = {kind: name}
        try:
            with transaction.atomic(using=using):
                done = gates.pause(**chosen, reason=reason, by=_who(request), using=using)
                if done:
                    gate = store_for(using).gates.get(kind=kind, name=name)
                    what = _("paused: %(reason)s") if reason else _("paused")
                    what %= {"reason": reason}
                    record(request, EventGate, what, subject=str(gate), object_id=gate.pk)
        except EventBusError as error:
            form.add_error(None, str(error))
            return False
        said = {"name": name}
        if done:
            self.message_user(request, _("%(name)s is paused now.") % said)
        else:
            text = _("%(name)s was paused before; its first reason stands.")
            self.message_user(request, text % said, messages.WARNING)
        return True


@admin.register(EventGate)
class GateAdmin(GateMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass


class PauseForm(forms.Form):
    """One thing: a queue or a handler from the list, or a pattern of event types."""

    what = forms.ChoiceField(label=gettext_lazy("Queue or handler"), required=False)
    pattern = forms.CharField(
        label=gettext_lazy("or event type"),
        required=False,
        max_length=200,
        help_text=gettext_lazy("Such as order.placed or order.*"),
    )
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        required=False,
        max_length=gates.MOST_LETTERS["reason"],
        help_text=gettext_lazy("For those who find it paused"),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = sorted(each.name for each in registry.all())
        what: Any = self.fields["what"]
        what.choices = [
            ("", "---------"),
            (_("Queues"), [(f"queue:{name}", name) for name in settings.QUEUES]),
            (_("Handlers"), [(f"handler:{name}", name) for name in names]),
        ]

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or {}
        what, pattern = cleaned.get("what"), cleaned.get("pattern")
        if bool(what) == bool(pattern):
            if not self.errors:
                raise forms.ValidationError(_("Choose one: a queue, a handler or an event type."))
            return cleaned
        kind, _colon, name = (what or f"type:{pattern}").partition(":")
        return {**cleaned, "chosen": (kind, name)}


def _who(request: HttpRequest) -> str:
    return request.user.get_username()


def looked_at(row: Model) -> datetime:
    moment: datetime = row.looked_at  # type: ignore[attr-defined]
    return moment


def time_between(since: datetime, until: datetime) -> str:
    return in_words((until - since).total_seconds())
