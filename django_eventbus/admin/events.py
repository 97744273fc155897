"""The lists of queued events and of the event log."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
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
from django_eventbus.admin.bulk import BulkAction, BulkMixin, BulkRun
from django_eventbus.admin.event_page import EventPageMixin
from django_eventbus.admin.filters import (
    HandedOffFilter,
    QueuedStatusFilter,
    QueueFilter,
    ReadableRange,
    ReplayFilter,
    StatusFilter,
    number_range,
    time_range,
)
from django_eventbus.admin.lists import EventChangeList, event_id_in
from django_eventbus.admin.paging import grouped
from django_eventbus.admin.replay_action import ReplayActionMixin, replay_events
from django_eventbus.admin.statuses import next_attempt
from django_eventbus.conf import settings
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.store import store_for

#: The largest number of events that a search of the log by type reads.
MOST_SEARCHED = 100_000


def _run_now(event_ids: Sequence[uuid.UUID], run: BulkRun) -> int:
    return queued.run_now(event_ids)


def _cancel(event_ids: Sequence[uuid.UUID], run: BulkRun) -> int:
    return queued.cancel(event_ids)


BULK_ACTIONS = (
    BulkAction(
        name="run",
        permission="retry",
        label=gettext_lazy("Run now"),
        label_all=gettext_lazy("Run all matching now"),
        question=ngettext_lazy("Run %(count)s event now?", "Run %(count)s events now?", "count"),
        result=ngettext_lazy(
            "Made %(count)s event ready to run", "Made %(count)s events ready to run", "count"
        ),
        skip_reason=gettext_lazy("already ready, being handled, or not the first of their key"),
        perform=_run_now,
    ),
    BulkAction(
        name="cancel",
        permission="purge",
        label=gettext_lazy("Cancel events"),
        label_all=gettext_lazy("Cancel all matching events"),
        question=ngettext_lazy("Cancel %(count)s event?", "Cancel %(count)s events?", "count"),
        result=ngettext_lazy("Cancelled %(count)s event", "Cancelled %(count)s events", "count"),
        skip_reason=gettext_lazy("being handled, or already ended"),
        warning=gettext_lazy("Cancelled events become dead letters, which can be retried."),
        perform=_cancel,
    ),
)


class QueuedEventAdminMixin(EventPageMixin, BulkMixin):
    bulk_actions = BULK_ACTIONS
    moment = "created_at"
    list_display = (
        "age",
        "shown_type",
        "shown_key",
        "shown_queue",
        "shown_status",
        "attempts",
        "next_attempt",
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
        "held_by",
        "handed_off_to",
    )
    ordering = ("-id",)
    sortable_by = ()
    choice_filters = (QueuedStatusFilter, QueueFilter, HandedOffFilter, ReplayFilter)

    def get_range_filters(self) -> list[Any]:
        return [
            ("created_at", time_range(gettext_lazy("time of publishing"))),
            ("attempts", number_range(gettext_lazy("attempts"))),
        ]

    @admin.display(description=gettext_lazy("next attempt"), empty_value="")
    def next_attempt(self, event: QueuedEvent) -> Any:
        return next_attempt(event)

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
            is_changed = queued.run_now([event.event_id]) == 1
            if is_changed:
                what, subject = _("made ready to run"), f"{event.type} {event.event_id}"
                audit.record(request, QueuedEvent, what, subject=subject, object_id=pk)
        if is_changed:
            self.message_user(request, _("Made the event ready to run."), messages.SUCCESS)
        else:
            text = _(
                "Event not changed: it is already ready, being handled, "
                "or not the first of its key."
            )
            self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(self.url_of("change", pk))


class LogChangeList(EventChangeList):
    """A list that searches by key with an index, and by type only among the newest events.

    The log has no index on the type, because every completed event would need an index entry, and
    events of a frequent type are found among the newest events. The list compares the search text
    with types only if no event has this text as its key. So the same search may find rows by key
    today and by type tomorrow; this is safe, because an action of the log stores the ids of the
    rows before its confirmation page is shown.
    """

    is_by_type = False
    is_cut = False

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        rows = super().get_queryset(request, exclude_parameters)
        if not self.query or event_id_in(self.query):
            return rows
        store, of_key = store_for(rows.db), rows.filter(key=self.query)
        with store.reading_by_index(may_sort=True):
            if of_key.exists():
                return of_key
        with store.reading_by_index():
            oldest = self._oldest_searched(request)
        self.is_by_type, self.is_cut = True, oldest is not None
        return rows.filter(finished_at__gte=oldest) if self.is_cut else rows

    @property
    def may_sort(self) -> bool:
        return super().may_sort and not self.is_by_type

    def _oldest_searched(self, request: HttpRequest) -> datetime | None:
        """Return the end time of the oldest event that a search by type reads.

        The search reads only events in the chosen range of time. None means that the search reads
        all events of that range.
        """
        ended = EventLog.objects.using(self.root_queryset.db)
        rows: QuerySet[Any] = ended.filter(namespace=settings.NAMESPACE)
        for spec in self.filter_specs:
            if isinstance(spec, ReadableRange) and spec.field_path == "finished_at":
                rows = spec.queryset(request, rows)
        ends = rows.order_by("-finished_at").values_list("finished_at", flat=True)
        return next(iter(ends[MOST_SEARCHED : MOST_SEARCHED + 1]), None)

    @property
    def notes(self) -> list[str]:
        if not self.is_cut:
            return []
        text = _(
            "No event has this key. Only the newest %(number)s events were searched by type. "
            "Choose a range of time to search older events."
        )
        return [text % {"number": grouped(MOST_SEARCHED)}]


class EventLogAdminMixin(EventPageMixin, ReplayActionMixin):
    actions = (replay_events,)
    change_list_template = "admin/django_eventbus/event_list.html"
    list_display = ("age", "shown_type", "shown_key", "shown_queue", "shown_status", "attempts")
    list_display_links = ("shown_type",)
    list_columns = ("event_id", "finished_at", "type", "key", "queue", "status", "attempts")
    ordering = ("-finished_at", "-id")
    choice_filters = (StatusFilter, QueueFilter)

    def get_range_filters(self) -> list[Any]:
        return [
            ("finished_at", time_range(gettext_lazy("end time"))),
            ("attempts", number_range(gettext_lazy("attempts"))),
        ]

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[EventChangeList]:
        return LogChangeList


@admin.register(QueuedEvent)
class QueuedEventAdmin(QueuedEventAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass


@admin.register(EventLog)
class EventLogAdmin(EventLogAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass
