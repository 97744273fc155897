"""Lists of events: which columns they read, what can be searched, and which rows they mean."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.timesince import timesince
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_eventbus.admin.base import EventBusAdminMixin
from django_eventbus.admin.filters import ReadableRange
from django_eventbus.admin.story import status_in_words
from django_eventbus.failures import one_line
from django_eventbus.status import in_words
from django_eventbus.store import store_for


class EventChangeList(ChangeList):
    """A list that can say which rows it means."""

    def get_ordering_field(self, field_name: Any) -> Any:
        """Django offers only what is sortable, but takes any column's number from the address."""
        sortable = self.sortable_by or ()
        return super().get_ordering_field(field_name) if field_name in sortable else None

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        """Django takes a search that it cannot read for none."""
        rows = super().get_queryset(request, exclude_parameters)
        self.is_misread = bool(request.GET.get(SEARCH_VAR, "").strip()) and not self.query
        return rows.none() if self.is_misread else rows

    @property
    def complaints(self) -> list[str]:
        wrong = [getattr(spec, "complaint", "") for spec in self.filter_specs]
        if self.is_misread:
            wrong.append(_("The search cannot be read, so nothing is shown."))
        return [each for each in wrong if each]

    @property
    def filter_query(self) -> str:
        """The query string that chooses the same rows, on whatever page."""
        return self.get_query_string(remove=["p", "o", "all", "e"])

    @property
    def in_words(self) -> list[str]:
        """One line per condition that is in force; none means all there are."""
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
    """Reads no payload, sorts only by what an index has, and takes no filter but its own."""

    #: What the columns of the list need.
    list_columns: Sequence[str] = ()
    #: The column that ages.
    moment = "finished_at"
    choice_filters: Sequence[type[admin.SimpleListFilter]] = ()
    sortable_by: ClassVar[tuple[str, ...]] = ("age",)
    search_fields = ("event_id",)  # shows the box; what is searched is said below
    search_help_text = gettext_lazy("An event id, a key, or the beginning of a type")

    def get_range_filters(self) -> list[Any]:
        """For a theme that has range filters of its own to override."""
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
        try:
            return queryset.filter(event_id=uuid.UUID(term)), False
        except ValueError:
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
        return status_in_words(event.status)
