"""The list of flow controls, and the form that pauses a queue, an event type or a handler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db import transaction
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_eventbus import breakers, pauses
from django_eventbus.admin import permissions
from django_eventbus.admin.audit import record
from django_eventbus.admin.filters import ChoiceFilter, StateFilter
from django_eventbus.admin.paging import IndexedChangeList, grouped
from django_eventbus.admin.row_actions import MOST_AT_ONCE, RowActionsMixin, read_at, time_between
from django_eventbus.admin.statuses import executor_of
from django_eventbus.conf import settings
from django_eventbus.exceptions import EventBusError
from django_eventbus.models import FlowControl, FlowControlKind
from django_eventbus.registry import registry
from django_eventbus.status import count_handed_off, count_held, in_words, shown_count
from django_eventbus.store import default_alias, store_for


class FlowControlStateFilter(StateFilter):
    def known(self) -> Sequence[tuple[str, Any]]:
        return [
            ("paused", gettext_lazy("paused")),
            ("open", gettext_lazy("circuit breaker open")),
            ("unavailable", gettext_lazy("broker unavailable")),
        ]

    def condition(self, state: str) -> Q:
        return {
            "paused": Q(paused_at__isnull=False),
            "open": Q(opened_at__isnull=False, kind=FlowControlKind.HANDLER),
            "unavailable": Q(opened_at__isnull=False, kind=FlowControlKind.EXECUTOR),
        }[state]


class KindFilter(ChoiceFilter):
    title = gettext_lazy("kind")
    parameter_name = column = "kind"

    def known(self) -> Sequence[tuple[str, Any]]:
        return FlowControlKind.choices


class FlowControlChangeList(IndexedChangeList):
    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        _count_waiting(list(self.result_list))


class FlowControlMixin(RowActionsMixin):
    list_display = ("name", "kind_label", "pause", "breaker", "running_deliveries", "hand_off")
    list_filter = (FlowControlStateFilter, KindFilter)
    ordering = ("kind", "name")
    actions = ("resume", "reset_breaker")
    fields = readonly_fields = list_display
    change_list_template = "admin/django_eventbus/flow_control_list.html"

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[FlowControlChangeList]:
        return FlowControlChangeList

    @admin.display(description=gettext_lazy("kind"))
    def kind_label(self, control: FlowControl) -> str:
        return str(FlowControlKind(control.kind).label)

    @admin.display(description=gettext_lazy("pause"), empty_value="")
    def pause(self, control: FlowControl) -> str:
        if control.paused_at is None:
            return _("not paused") if control.kind in pauses.KINDS else ""
        text = _("paused %(time)s ago by %(who)s")
        if control.reason:
            text = _("paused %(time)s ago by %(who)s: %(reason)s")
        since = time_between(control.paused_at, read_at(control))
        return text % {"time": since, "who": control.paused_by, "reason": control.reason}

    @admin.display(description=gettext_lazy("circuit breaker"))
    def breaker(self, control: FlowControl) -> str:
        now = read_at(control)
        if control.kind == FlowControlKind.EXECUTOR:
            return ""
        if control.opened_at is None:
            return _("closed") if control.calls else ""
        if control.probe_by:
            return _("half-open: one delivery is being tried")
        text = _("open for %(time)s, next try in %(wait)s")
        wait = time_between(now, control.probe_at) if control.probe_at else in_words(0)
        return text % {"time": time_between(control.opened_at, now), "wait": wait}

    @admin.display(description=gettext_lazy("running deliveries"))
    def running_deliveries(self, control: FlowControl) -> str:
        return str(sum(control.running.values())) if control.running else ""

    @admin.display(description=gettext_lazy("hand-off"))
    def hand_off(self, control: FlowControl) -> str:
        """Return the state of an executor, or the number of handed-off events of a handler."""
        if not hasattr(control, "waiting"):
            _count_waiting([control])
        count: str = shown_count(control.waiting)  # type: ignore[attr-defined]
        if control.kind == FlowControlKind.EXECUTOR:
            return _executor_state(control, count)
        executor = executor_of(control.name) if control.kind == FlowControlKind.HANDLER else ""
        if not executor:
            return ""
        text = _("%(executor)s: %(count)s of at most %(window)s events handed off")
        window = grouped(settings.HANDOFF_WINDOW)
        return text % {"executor": executor, "count": count, "window": window}

    @admin.action(description=gettext_lazy("Resume"), permissions=["pause"])
    def resume(self, request: HttpRequest, queryset: QuerySet[FlowControl]) -> None:
        def verb(control: FlowControl) -> bool:
            if control.kind not in pauses.KINDS:
                return False
            chosen: dict[str, Any] = {control.kind: control.name}
            return pauses.resume(**chosen, by=_user(request), using=default_alias())

        done = self.act(request, queryset[:MOST_AT_ONCE], verb, _("resumed"))
        text = ngettext("Ended %(count)s pause.", "Ended %(count)s pauses.", done)
        self.message_user(request, text % {"count": done})

    @admin.action(description=gettext_lazy("Reset circuit breakers"), permissions=["pause"])
    def reset_breaker(self, request: HttpRequest, queryset: QuerySet[FlowControl]) -> None:
        def verb(control: FlowControl) -> bool:
            is_handler = control.kind == FlowControlKind.HANDLER
            by, using = _user(request), default_alias()
            return is_handler and breakers.reset(control.name, by=by, using=using)

        done = self.act(request, queryset[:MOST_AT_ONCE], verb, _("reset the circuit breaker"))
        text = ngettext(
            "Reset %(count)s circuit breaker.", "Reset %(count)s circuit breakers.", done
        )
        self.message_user(request, text % {"count": done})

    def get_urls(self) -> list[URLPattern]:
        return [self.route("pause/", self.pause_view, "pause"), *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        pause_url = self.url_of("pause") if self.has_pause_permission(request) else ""
        context = {"pause_url": pause_url, **(extra_context or {})}
        return super().changelist_view(request, context)

    def pause_view(self, request: HttpRequest) -> HttpResponse:
        """Show and process the form that pauses a queue, an event type or a handler.

        This is a form and not an action of the list, because an action needs a row, and a queue,
        type or handler may not have a row yet.
        """
        self.demand_view(request)
        permissions.demand(request, permissions.PAUSE)
        form = PauseForm(request.POST if request.method == "POST" else None)
        if form.is_valid() and self._pause(request, form):
            return HttpResponseRedirect(self.url_of("changelist"))
        title = _("Pause a queue, an event type or a handler")
        return self.page(request, "pause", title=title, form=form)

    def _pause(self, request: HttpRequest, form: PauseForm) -> bool:
        """Pause the queue, type or handler of the form.

        If this fails, add the error to the form and return False.
        """
        kind, name = form.cleaned_data["chosen"]
        reason, using = form.cleaned_data["reason"], default_alias()
        chosen: dict[str, Any] = {kind: name}
        try:
            with transaction.atomic(using=using):
                done = pauses.pause(**chosen, reason=reason, by=_user(request), using=using)
                if done:
                    control = store_for(using).flow_controls.get(kind=kind, name=name)
                    what = _("paused: %(reason)s") if reason else _("paused")
                    what %= {"reason": reason}
                    record(request, FlowControl, what, subject=str(control), object_id=control.pk)
        except EventBusError as error:
            form.add_error(None, str(error))
            return False
        if done:
            self.message_user(request, _("Paused %(name)s.") % {"name": name})
        else:
            text = _("%(name)s was already paused; the first reason is kept.")
            self.message_user(request, text % {"name": name}, messages.WARNING)
        return True


@admin.register(FlowControl)
class FlowControlAdmin(FlowControlMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass


class PauseForm(forms.Form):
    """A form to choose a queue or a handler, or to enter a pattern of event types."""

    what = forms.ChoiceField(label=gettext_lazy("Queue or handler"), required=False)
    pattern = forms.CharField(
        label=gettext_lazy("Event type"),
        required=False,
        max_length=200,
        help_text=gettext_lazy(
            "A type or a pattern, for example order.placed or order.*. "
            "Leave it empty to pause a queue or a handler."
        ),
    )
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        required=False,
        max_length=pauses.MOST_LETTERS["reason"],
        help_text=gettext_lazy("Shown to other operators."),
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
                raise forms.ValidationError(
                    _("Choose exactly one: a queue, a handler or an event type.")
                )
            return cleaned
        kind, _colon, name = (what or f"type:{pattern}").partition(":")
        return {**cleaned, "chosen": (kind, name)}


def _count_waiting(controls: Sequence[FlowControl]) -> None:
    """Set ``waiting`` of each flow control to the number of events that wait because of it.

    For a handler, these are the events that wait for its executor; for an executor, the events that
    wait for its broker. All counts together need at most two queries.
    """
    store = store_for(default_alias())
    handlers = [each.name for each in controls if each.kind == FlowControlKind.HANDLER]
    handed_off = count_handed_off(store, [name for name in handlers if executor_of(name)])
    executors = [each for each in controls if each.kind == FlowControlKind.EXECUTOR]
    held = count_held(store, [each for each in executors if each.opened_at])
    for each in controls:
        is_executor = each.kind == FlowControlKind.EXECUTOR
        count = held.get(str(each.pk), 0) if is_executor else handed_off.get(each.name, 0)
        each.waiting = count  # type: ignore[attr-defined]


def _executor_state(control: FlowControl, held: str) -> str:
    if control.opened_at is None:
        return _("broker available")
    now = read_at(control)
    text = _(
        "broker unavailable for %(time)s, next attempt in %(wait)s; "
        "held events: %(count)s (all events of a key count as one)"
    )
    wait = time_between(now, control.probe_at) if control.probe_at else in_words(0)
    return text % {"time": time_between(control.opened_at, now), "wait": wait, "count": held}


def _user(request: HttpRequest) -> str:
    return request.user.get_username()
