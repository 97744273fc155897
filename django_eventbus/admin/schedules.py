"""Schedules: add, change, delete, enable, disable and run.

A schedule that is declared in code can be enabled, disabled and run, but not changed or deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_eventbus import schedules
from django_eventbus.admin import permissions
from django_eventbus.admin.base import EventBusAdminMixin
from django_eventbus.admin.filters import ChoiceFilter
from django_eventbus.admin.payloads import shown
from django_eventbus.admin.row_actions import MOST_AT_ONCE, RowActionsMixin, read_at, time_between
from django_eventbus.exceptions import EventBusError
from django_eventbus.models import EventSchedule, ScheduleOrigin
from django_eventbus.store import DEFINITION, default_alias

SHOWN_RUNS = 3
#: Fields that may be sensitive, and the methods that show them redacted on a read-only page.
READ_AS: dict[Any, str] = {"payload": "shown_payload", "headers": "shown_headers"}


class OriginFilter(ChoiceFilter):
    title = gettext_lazy("origin")
    parameter_name = column = "origin"

    def known(self) -> Sequence[tuple[str, Any]]:
        return ScheduleOrigin.choices


class ScheduleMixin(RowActionsMixin):
    """The pages of schedules, with Django's permissions to add, change and delete."""

    list_display = ("name", "type", "enabled", "rhythm", "next_run", "last_at", "origin")
    list_filter = (OriginFilter,)
    search_fields = ("name__exact", "type__exact")
    search_help_text = gettext_lazy("Exact name or event type")
    ordering = ("name",)
    actions = ("enable", "disable", "run_now")
    readonly_fields = ("plan_in_words", "next_run", "last_at", "origin")
    fieldsets = (
        (None, {"fields": ("name", "enabled", "origin")}),
        (
            gettext_lazy("Timing"),
            {"fields": ("cron", "tz", "misfire", "plan_in_words", "next_run", "last_at")},
        ),
        (
            gettext_lazy("Event"),
            {"fields": ("type", "payload", "key", "queue", "priority", "headers")},
        ),
    )

    # EventBusAdminMixin denies these three permissions to all users, so these methods call Django's
    # implementation.

    def has_add_permission(self, request: HttpRequest) -> bool:
        return super(EventBusAdminMixin, self).has_add_permission(request)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super(EventBusAdminMixin, self).has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allow the deletion of single schedules whose origin is not CODE.

        The bulk deletion is denied, because Django writes the history of a bulk deletion in another
        transaction. A schedule with the origin CODE cannot be deleted here: a worker whose code
        declares it would add it again, and a worker that starts deletes it when its tick is a week
        late.
        """
        deletable = obj is not None and obj.origin != ScheduleOrigin.CODE
        return deletable and super(EventBusAdminMixin, self).has_delete_permission(request, obj)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        if obj is None or obj.origin != ScheduleOrigin.CODE:
            return self.readonly_fields
        return (*self.readonly_fields, "name", *DEFINITION, *READ_AS.values())

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Hide payload and headers of an existing schedule if the user may not view payloads."""
        hidden = {"plan_in_words", "next_run", "last_at", "origin"} if obj is None else set()
        if obj is not None and not permissions.may(request, permissions.VIEW_PAYLOAD):
            hidden = {"payload", "headers"}
        # A form saves the values that it shows, so it must show sensitive values unchanged. A
        # read-only page redacts sensitive values.
        is_read = obj is not None and not self._is_changed_here(request, obj)
        instead: dict[Any, str] = READ_AS if is_read else {}
        return [
            (title, {"fields": [instead.get(name, name) for name in names]})
            for title, names in self._parts(hidden)
        ]

    def _parts(self, hidden: set[str]) -> Iterator[tuple[Any, list[Any]]]:
        for title, part in self.fieldsets:
            yield title, [name for name in part["fields"] if name not in hidden]

    def _is_changed_here(self, request: HttpRequest, schedule: EventSchedule) -> bool:
        in_code = schedule.origin == ScheduleOrigin.CODE
        return not in_code and self.has_change_permission(request, schedule)

    @admin.display(description=gettext_lazy("payload"))
    def shown_payload(self, schedule: EventSchedule) -> str:
        return _as_json(schedule.payload)

    @admin.display(description=gettext_lazy("headers"))
    def shown_headers(self, schedule: EventSchedule) -> str:
        return _as_json(schedule.headers)

    @admin.display(description=gettext_lazy("plan"))
    def rhythm(self, schedule: EventSchedule) -> str:
        return self._or_error(lambda: schedules.explain(schedule, 0, after=read_at(schedule)))

    @admin.display(description=gettext_lazy("plan"))
    def plan_in_words(self, schedule: EventSchedule) -> str:
        return self._or_error(
            lambda: schedules.explain(schedule, SHOWN_RUNS, after=read_at(schedule))
        )

    @admin.display(description=gettext_lazy("next run"))
    def next_run(self, schedule: EventSchedule) -> str:
        now = read_at(schedule)
        if not schedule.enabled:
            return _("disabled")
        if schedule.next_at is not None and schedule.next_at < now - schedules.MISSED_AFTER:
            return _("overdue for %(time)s") % {"time": time_between(schedule.next_at, now)}

        def coming() -> str:
            first = schedules.coming_runs(schedule, 1, now=now)
            return _("in %(time)s") % {"time": time_between(now, first[0])} if first else _("never")

        return self._or_error(coming)

    @staticmethod
    def _or_error(words: Callable[[], str]) -> str:
        """Return the text, or the error: a row that was written with SQL may be invalid."""
        try:
            return words()
        except EventBusError as error:
            return str(error)

    @admin.action(description=gettext_lazy("Enable"), permissions=["change"])
    def enable(self, request: HttpRequest, queryset: QuerySet[EventSchedule]) -> None:
        def verb(schedule: EventSchedule) -> bool:
            schedules.enable(schedule.name, using=default_alias())
            return True

        off = queryset.filter(enabled=False)[:MOST_AT_ONCE]
        done = self.act(request, off, verb, _("enabled"))
        text = ngettext("Enabled %(count)s schedule.", "Enabled %(count)s schedules.", done)
        self.message_user(request, text % {"count": done})

    @admin.action(description=gettext_lazy("Disable"), permissions=["change"])
    def disable(self, request: HttpRequest, queryset: QuerySet[EventSchedule]) -> None:
        def verb(schedule: EventSchedule) -> bool:
            schedules.disable(schedule.name, using=default_alias())
            return True

        on = queryset.filter(enabled=True)[:MOST_AT_ONCE]
        done = self.act(request, on, verb, _("disabled"))
        text = ngettext("Disabled %(count)s schedule.", "Disabled %(count)s schedules.", done)
        self.message_user(request, text % {"count": done})

    @admin.action(description=gettext_lazy("Run now"), permissions=["change"])
    def run_now(self, request: HttpRequest, queryset: QuerySet[EventSchedule]) -> None:
        def verb(schedule: EventSchedule) -> object:
            return schedules.run(schedule.name, using=default_alias())

        done = self.act(request, queryset[:MOST_AT_ONCE], verb, _("run manually"))
        text = ngettext("Published %(count)s event.", "Published %(count)s events.", done)
        self.message_user(request, text % {"count": done})


def _as_json(value: Any) -> str:
    return render_to_string("admin/django_eventbus/json.html", {"shown": shown(value)})


@admin.register(EventSchedule)
class ScheduleAdmin(ScheduleMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass
