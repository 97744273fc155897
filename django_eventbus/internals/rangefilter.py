"""Private methods of django-admin-rangefilter, behind public hooks.

This module imports ``django.contrib.admin``, so only the admin may import it.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from rangefilter.filters import DateTimeRangeFilter, NumericRangeFilter


class _Hooks:
    def adapt_fields(self, fields: list[Any]) -> None:
        """Change the form fields of the lower and the upper bound."""

    def adapt_bounds(self, bounds: dict[str, Any]) -> dict[str, Any]:
        """Return the conditions of the filter: lookups, such as ``created_at__gte``, and values.

        ``bounds`` contains the conditions that the library computed from the form.
        """
        return bounds

    def _get_form_fields(self) -> Any:
        fields = super()._get_form_fields()  # type: ignore[misc]
        self.adapt_fields(list(fields.values()))
        return fields

    def _make_query_filter(self, request: HttpRequest, validated_data: Any) -> dict[str, Any]:
        return self.adapt_bounds(
            super()._make_query_filter(request, validated_data)  # type: ignore[misc]
        )


class TimeRange(_Hooks, DateTimeRangeFilter):  # type: ignore[misc]
    """A filter for a range of times, with the hooks ``adapt_fields`` and ``adapt_bounds``."""


class NumberRange(_Hooks, NumericRangeFilter):  # type: ignore[misc]
    """A filter for a range of numbers, with the hooks ``adapt_fields`` and ``adapt_bounds``."""


def titled(filter_class: type[Any], title: Any) -> type[Any]:
    """Return a subclass with a title. The library's own builders accept only its classes."""
    built = {"__from_builder": True, "default_start": None, "default_end": None}
    return type(filter_class.__name__, (filter_class,), {"default_title": title, **built})
