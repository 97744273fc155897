"""Events that wait, and events that ended."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseNotAllowed,
    HttpResponseRedirect,
)
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_eventbus import queued
from django_eventbus.admin import audit
from django_eventbus.admin.bulk import Act, BulkMixin, Run
from django_eventbus.admin.filters import (
    QueuedStatusFilter,
    QueueFilter,
    StatusFilter,
    number_range,
    time_range,
)
from django_eventbus.admin.lists import EventListMixin
from django_eventbus.admin.story import StoryMixin
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.store import store_for
from django_eventbus.store.rows import PARKED


def _run_now(event_ids: Sequence[uuid.UUID], run: Run) -> int:
    return queued.run_now(event_ids)


def _cancel(event_ids: Sequence[uuid.UUID], run: Run) -> int:
    return queued.cancel(event_ids)


ACTS = (
    Act(
        name="run",
        permission="retry",
        label=gettext_lazy("Run now"),
        label_all=gettext_lazy("Run all now that match"),
        question=ngettext_lazy("Run %(count)s event now?", "Run %(count)s events now?", "count"),
        told=ngettext_lazy("%(count)s event made ready", "%(count)s events made ready", "count"),
        do=_run_now,
    ),
    Act(
        name="cancel",
        permission="purge",
        label=gettext_lazy("Cancel the events"),
        label_all=gettext_lazy("Cancel all events that match"),
        question=ngettext_lazy("Cancel %(count)s event?", "Cancel %(count)s events?", "count"),
        told=ngettext_lazy("%(count)s event cancelled", "%(count)s events cancelled", "count"),
        warning=gettext_lazy("They become dead letters, and can be retried from there."),
        do=_cancel,
    ),
)


class QueuedEventAdminMixin(StoryMixin, BulkMixin):
    acts = ACTS
    moment = "created_at"
    list_display = (
        "age",
        "shown_type",
        "shown_key",
        "shown_queue",
        "shown_status",
        "attempts",
        "due",
    )
    list_display_links = ("shown_type",)
    list_columns = (
        "event_id",
        "created_at",
        "type",
        "key",
        "queue",
        "status",
        "attempts",
        "available_at",
    )
    ordering = ("-id",)
    sortable_by = ()
    choice_filters = (QueuedStatusFilter, QueueFilter)

    def get_range_filters(self) -> list[Any]:
        return [
            ("created_at", time_range(gettext_lazy("time of publishing"))),
            ("attempts", number_range(gettext_lazy("attempts"))),
        ]

    @admin.display(description=gettext_lazy("waits until"), empty_value="")
    def due(self, event: QueuedEvent) -> Any:
        parked = event.available_at is not None and event.available_at >= PARKED
        return _("a gate opens") if parked else event.available_at

    def get_urls(self) -> list[Any]:
        return [self.route("<int:pk>/run/", self.run_view, "run"), *super().get_urls()]

    def run_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        self.demand_view(request)
        if not self.has_retry_permission(request):
            raise PermissionDenied
        event = self.get_queryset(request).filter(pk=pk).first()
        if event is None:
            raise Http404
        with transaction.atomic(using=store_for().using):
            hastened = queued.run_now([event.event_id]) == 1
            if hastened:
                subject = f"{event.type} {event.event_id}"
                audit.record(request, QueuedEvent, _("run now"), subject=subject, object_id=pk)
        if hastened:
            self.message_user(request, _("The event is ready to run."), messages.SUCCESS)
        else:
            no = _("Nothing was done: it is ready, being handled, or not the first of its key.")
            self.message_user(request, no, messages.WARNING)
        return HttpResponseRedirect(self.url_of("change", pk))


class EventLogAdminMixin(StoryMixin, EventListMixin):
    change_list_template = "admin/django_eventbus/event_list.html"
    list_display = ("age", "shown_type", "shown_key", "shown_queue", "shown_status", "attempts")
    list_display_links = ("shown_type",)
    list_columns = ("event_id", "finished_at", "type", "key", "queue", "status", "attempts")
    ordering = ("-finished_at", "-id")
    choice_filters = (StatusFilter, QueueFilter)

    def get_range_filters(self) -> list[Any]:
        return [
            ("finished_at", time_range(gettext_lazy("time of the end"))),
            ("attempts", number_range(gettext_lazy("attempts"))),
        ]


@admin.register(QueuedEvent)
class QueuedEventAdmin(QueuedEventAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass


@admin.register(EventLog)
class EventLogAdmin(EventLogAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass
