"""Lists of events: columns, search, and a description of the active filter."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.timesince import timesince
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_eventbus.admin.base import EventBusAdminMixin
from django_eventbus.admin.filters import ReadableRange
from django_eventbus.admin.paging import IndexedChangeList
from django_eventbus.admin.statuses import status_of
from django_eventbus.errors.text import one_line
from django_eventbus.status import in_words
from django_eventbus.store import store_for


def event_id_in(term: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(term)
    except ValueError:
        return None


class EventChangeList(IndexedChangeList):
    """A list that describes its filter in words."""

    def get_ordering_field(self, field_name: Any) -> Any:
        """Ignore a column that is not sortable. Django accepts any column number from the URL."""
        sortable = self.sortable_by or ()
        return super().get_ordering_field(field_name) if field_name in sortable else None

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        """Return no rows for an invalid search text, where Django would return all rows."""
        rows = super().get_queryset(request, exclude_parameters)
        self.has_invalid_search = bool(request.GET.get(SEARCH_VAR, "").strip()) and not self.query
        return rows.none() if self.has_invalid_search else rows

    @property
    def complaints(self) -> list[str]:
        wrong = [getattr(spec, "complaint", "") for spec in self.filter_specs]
        if self.has_invalid_search:
            wrong.append(_("The search text contains invalid characters, so no rows are shown."))
        return [each for each in wrong if each]

    @property
    def notes(self) -> list[str]:
        """Texts about the shown rows, which the page displays above the list."""
        return []

    @property
    def filter_query(self) -> str:
        """The query string of the filter, without page and order."""
        return self.get_query_string(remove=["p", "o", "all", "e"])

    @property
    def in_words(self) -> list[str]:
        """One line per active condition; an empty list means all rows."""
        return list(self._conditions())

    def _conditions(self) -> Iterator[str]:
        if self.query:
            yield _("search: “%(text)s”") % {"text": one_line(self.query)}
        for spec in self.filter_specs:
            if isinstance(spec, ReadableRange):
                words = spec.in_words()
                if words:
                    yield words
            else:
                yield from self._chosen(spec)

    def _chosen(self, spec: Any) -> Iterator[str]:
        _all, *choices = spec.choices(self)
        for choice in choices:
            if choice.get("selected"):
                yield f"{spec.title}: {choice['display']}"


class EventListMixin(EventBusAdminMixin):
    """A list that reads no payloads, sorts only by an index, and accepts only its own filters."""

    #: The database columns that the list reads.
    list_columns: Sequence[str] = ()
    #: The column from which the age is computed.
    moment = "finished_at"
    choice_filters: Sequence[type[admin.SimpleListFilter]] = ()
    sortable_by: ClassVar[tuple[str, ...]] = ("age",)
    # Django shows the search box only if this is not empty. get_search_results() runs the search.
    search_fields = ("event_id",)
    search_help_text = gettext_lazy("Event id, key, or beginning of an event type")

    def get_range_filters(self) -> list[Any]:
        """Return the range filters. Override this method to use the range filters of a theme."""
        return []

    def get_list_filter(self, request: HttpRequest) -> list[Any]:
        return [*self.choice_filters, *self.get_range_filters()]

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[EventChangeList]:
        return EventChangeList

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).only(*self.list_columns)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        term = search_term.strip()
        if not term:
            return queryset, False
        if event_id := event_id_in(term):
            return queryset.filter(event_id=event_id), False
        of_type = store_for(queryset.db).starting_with("type", term)
        return queryset.filter(Q(key=term) | of_type), False

    @admin.display(description=gettext_lazy("age"), ordering="finished_at")
    def age(self, event: Any) -> str:
        moment: datetime = getattr(event, self.moment)
        seconds = (timezone.now() - moment).total_seconds()
        return format_html(
            '<time datetime="{}" title="{}">{}</time>',
            moment.isoformat(),
            timezone.localtime(moment).strftime("%Y-%m-%d %H:%M:%S %Z"),
            in_words(seconds) if seconds < 60 else timesince(moment, depth=1),
        )

    @admin.display(description=gettext_lazy("type"))
    def shown_type(self, event: Any) -> str:
        return one_line(event.type)

    @admin.display(description=gettext_lazy("key"), empty_value="")
    def shown_key(self, event: Any) -> str | None:
        return None if event.key is None else one_line(event.key)

    @admin.display(description=gettext_lazy("queue"))
    def shown_queue(self, event: Any) -> str:
        return one_line(event.queue)

    @admin.display(description=gettext_lazy("status"))
    def shown_status(self, event: Any) -> str:
        return status_of(event)
