"""Filters that need no query for their choices, and that describe the active choice in words.

A list with an invalid filter shows no rows. Without the changes of this module, the range filters
of django-admin-rangefilter would ignore an invalid range and show all rows, and a bulk action could
process all rows by mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import MAXYEAR, MINYEAR, datetime
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.formats import localize
from django.utils.translation import gettext_lazy as _

from django_eventbus.conf import settings
from django_eventbus.errors.text import one_line
from django_eventbus.internals import rangefilter
from django_eventbus.models import DEAD_STATUSES, LogStatus, QueuedStatus
from django_eventbus.registry import registry

#: The number of digits that every 64-bit integer column can store.
MOST_DIGITS = 18

if TYPE_CHECKING:
    Range = admin.FieldListFilter
else:
    Range = object


class ChoiceFilter(admin.SimpleListFilter):
    """A filter by the exact value of a column. An unknown value in the URL becomes a choice."""

    column: str

    def known(self) -> Sequence[tuple[str, Any]]:
        raise NotImplementedError

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, Any]]:
        known, asked = list(self.known()), self.value()
        if asked is not None and asked not in dict(known):
            known.append((asked, self.name_of(asked, model_admin.get_queryset(request))))
        return known

    def name_of(self, value: str, rows: QuerySet[Any]) -> str:
        """Return the label of an unknown value; ``rows`` are the rows that the user may view."""
        return one_line(value)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        asked = self.value()
        if asked is None:
            return queryset
        # PostgreSQL refuses a parameter that contains NUL. No text column contains NUL, so no row
        # matches.
        return queryset.none() if "\0" in asked else queryset.filter(**{self.column: asked})


class StateFilter(ChoiceFilter):
    """A filter by a state that is not a column. An unknown state matches no rows."""

    title = _("state")
    parameter_name = "state"

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        asked = self.value()
        if asked is None:
            return queryset
        known = asked in dict(self.known())
        return queryset.filter(self.condition(asked)) if known else queryset.none()

    def condition(self, state: str) -> Q:
        raise NotImplementedError


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


class HandedOffFilter(ChoiceFilter):
    """A filter of queued events by handler. It is shown only if a handler has an executor."""

    title = _("handed off to")
    parameter_name = column = "handed_off_to"

    def known(self) -> Sequence[tuple[str, Any]]:
        return [(each.name, each.name) for each in registry.all() if each.executor]


class GroupFilter(ChoiceFilter):
    """A filter by error that offers no choices. Links on other admin pages set its value."""

    title = _("error")
    parameter_name, column = "group", "error_fingerprint"

    def known(self) -> Sequence[tuple[str, Any]]:
        return []

    def name_of(self, value: str, rows: QuerySet[Any]) -> str:
        letters = rows.filter(error_fingerprint=value.replace("\0", ""))
        # Without the order, PostgreSQL may scan the whole table for one row, and use no index.
        latest = letters.order_by("-finished_at").values_list("error_type", "dead_handler")
        error, handler = latest.first() or (value, "")
        return one_line(
            _("%(error)s in %(handler)s") % {"error": error, "handler": handler}
            if handler
            else error
        )


class ReplayFilter(ChoiceFilter):
    """A filter of the copies of a replay. The page of the replay sets its value."""

    title = _("replay")
    parameter_name, column = "replay", "replay_id"

    def known(self) -> Sequence[tuple[str, Any]]:
        return []

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        asked = self.value()
        if asked is None:
            return queryset
        # A text that is not an id, or an id that no column can store, matches no rows.
        is_id = asked.isascii() and asked.isdecimal() and len(asked) <= MOST_DIGITS
        return queryset.filter(replay_id=int(asked)) if is_id else queryset.none()


class ReadableRange(Range):
    """A range filter that rejects an invalid range, and describes a valid range in words."""

    form: Any

    @property
    def complaint(self) -> str:
        """The reason why the range is invalid; empty if it is valid."""
        if not self.form.is_bound or self.form.is_valid():
            return ""
        wrong = " ".join(str(error) for errors in self.form.errors.values() for error in errors)
        return _("The range of “%(title)s” is invalid, so no rows are shown: %(wrong)s") % {
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

    def adapt_fields(self, fields: list[Any]) -> None:
        """Label the two inputs for screen readers, because the form shows only placeholders."""
        for field, name in zip(fields, (_("from"), _("to")), strict=True):
            field.widget.attrs["aria-label"] = f"{self.title}: {name}"


def time_range(title: Any) -> type[Any]:
    return rangefilter.titled(_TimeRange, title)


def number_range(title: Any) -> type[Any]:
    return rangefilter.titled(_NumberRange, title)


def _check_year(moment: datetime) -> None:
    """Refuse the first and the last year of ``datetime``.

    A time in these years may overflow when it is converted to the database's time zone.
    """
    if moment.year in (MINYEAR, MAXYEAR):
        raise ValidationError(
            _("The year must be from %(first)s to %(last)s, not %(year)s.")
            % {"first": MINYEAR + 1, "last": MAXYEAR - 1, "year": moment.year}
        )


class _TimeRange(ReadableRange, rangefilter.TimeRange):
    def adapt_fields(self, fields: list[Any]) -> None:
        super().adapt_fields(fields)
        for field in fields:
            field.validators.append(_check_year)

    def adapt_bounds(self, bounds: dict[str, Any]) -> dict[str, Any]:
        """Move the upper bound to the end of its second, because the form has whole seconds."""
        return {
            name: moment.replace(microsecond=999_999) if name.endswith("__lte") else moment
            for name, moment in bounds.items()
        }


class _NumberRange(ReadableRange, rangefilter.NumberRange):
    pass
