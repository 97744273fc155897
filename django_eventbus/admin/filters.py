"""Filters that read no column to know their choices, and that can say in words what they chose.

A filter that cannot be understood shows nothing. To show everything instead, as the range filters
do of their own accord, would be the worst answer where an action may follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import MAXYEAR, MINYEAR, datetime
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.formats import localize
from django.utils.translation import gettext_lazy as _
from rangefilter.filters import DateTimeRangeFilter, NumericRangeFilter

from django_eventbus.conf import settings
from django_eventbus.failures import one_line
from django_eventbus.models import DEAD_STATUSES, LogStatus, QueuedStatus
from django_eventbus.registry import registry

if TYPE_CHECKING:
    Range = admin.FieldListFilter
else:
    Range = object


class ChoiceFilter(admin.SimpleListFilter):
    """A column by its exact value; one that is asked for is offered, known or not."""

    column: str

    def known(self) -> Sequence[tuple[str, Any]]:
        raise NotImplementedError

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, Any]]:
        known, asked = list(self.known()), self.value()
        if asked is not None and asked not in dict(known):
            known.append((asked, self.name_of(asked, model_admin.get_queryset(request))))
        return known

    def name_of(self, value: str, rows: QuerySet[Any]) -> str:
        """For a value that is not known; ``rows`` are those that this user may see."""
        return one_line(value)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        asked = self.value()
        if asked is None:
            return queryset
        # No text of a database has a NUL, and some refuse to look for one.
        return queryset.none() if "\0" in asked else queryset.filter(**{self.column: asked})


class StatusFilter(ChoiceFilter):
    title = _("status")
    parameter_name = column = "status"

    def known(self) -> Sequence[tuple[str, Any]]:
        return LogStatus.choices


class DeadStatusFilter(StatusFilter):
    def known(self) -> Sequence[tuple[str, Any]]:
        return [(status.value, status.label) for status in DEAD_STATUSES]


class QueuedStatusFilter(StatusFilter):
    def known(self) -> Sequence[tuple[str, Any]]:
        return QueuedStatus.choices


class QueueFilter(ChoiceFilter):
    title = _("queue")
    parameter_name = column = "queue"

    def known(self) -> Sequence[tuple[str, Any]]:
        return [(name, name) for name in settings.QUEUES]


class HandlerFilter(ChoiceFilter):
    title = _("handler")
    parameter_name, column = "handler", "dead_handler"

    def known(self) -> Sequence[tuple[str, Any]]:
        return [(each.name, each.name) for each in registry.all()]


class GroupFilter(ChoiceFilter):
    """Comes from the page of groups; nobody picks a fingerprint from a list."""

    title = _("error")
    parameter_name, column = "group", "error_fingerprint"

    def known(self) -> Sequence[tuple[str, Any]]:
        return []

    def name_of(self, value: str, rows: QuerySet[Any]) -> str:
        letters = rows.filter(error_fingerprint=value.replace("\0", ""))
        # In order, because of any one PostgreSQL takes the first that it meets in the whole table.
        latest = letters.order_by("-finished_at").values_list("error_type", "dead_handler")
        error, handler = latest.first() or (value, "")
        return one_line(
            _("%(error)s in %(handler)s") % {"error": error, "handler": handler}
            if handler
            else error
        )


class ReadableRange(Range):
    """What a range filter of django-admin-rangefilter lacks."""

    form: Any

    @property
    def complaint(self) -> str:
        """Why the range cannot be read."""
        if not self.form.is_bound or self.form.is_valid():
            return ""
        wrong = " ".join(str(error) for errors in self.form.errors.values() for error in errors)
        return _("The range of “%(title)s” cannot be read, so nothing is shown: %(wrong)s") % {
            "title": self.title,
            "wrong": wrong,
        }

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen: QuerySet[Any] = super().queryset(request, queryset)  # type: ignore[assignment]
        return queryset.none() if self.complaint else chosen

    def in_words(self) -> str:
        if not self.form.is_bound or not self.form.is_valid():
            return ""
        start, end = self.form.cleaned_data.values()
        bounds = {"title": self.title, "start": localize(start), "end": localize(end)}
        if start is not None and end is not None:
            return _("%(title)s: from %(start)s to %(end)s") % bounds
        if start is not None:
            return _("%(title)s: from %(start)s") % bounds
        return _("%(title)s: up to %(end)s") % bounds if end is not None else ""

    def _get_form_fields(self) -> Any:
        """Their inputs have no labels, only placeholders."""
        fields = super()._get_form_fields()  # type: ignore[misc]
        for field, name in zip(fields.values(), (_("from"), _("to")), strict=True):
            field.widget.attrs["aria-label"] = f"{self.title}: {name}"
        return fields


def time_range(title: Any) -> type[Any]:
    return type("TimeRange", (_TimeRange,), {"default_title": title, **_AS_BUILT})


def number_range(title: Any) -> type[Any]:
    return type("NumberRange", (_NumberRange,), {"default_title": title, **_AS_BUILT})


#: What its own builders set, which take no class of ours.
_AS_BUILT = {"__from_builder": True, "default_start": None, "default_end": None}


def _is_everywhere(moment: datetime) -> None:
    """In another time zone, such as the database's, the calendar ends earlier or begins later."""
    if moment.year in (MINYEAR, MAXYEAR):
        raise ValidationError(_("This date is out of range."))


class _TimeRange(ReadableRange, DateTimeRangeFilter):  # type: ignore[misc]
    def _get_form_fields(self) -> Any:
        fields = super()._get_form_fields()
        for field in fields.values():
            field.validators.append(_is_everywhere)
        return fields

    def _make_query_filter(self, request: HttpRequest, validated_data: Any) -> dict[str, Any]:
        """The last second is meant to its end."""
        bounds: dict[str, Any] = super()._make_query_filter(request, validated_data)
        return {
            name: moment.replace(microsecond=999_999) if name.endswith("__lte") else moment
            for name, moment in bounds.items()
        }


class _NumberRange(ReadableRange, NumericRangeFilter):  # type: ignore[misc]
    pass
