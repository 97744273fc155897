"""Paging of lists with millions of rows: the numbers of counted rows and of pages are limited."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.http import HttpRequest
from django.utils.formats import number_format
from django.utils.functional import cached_property
from django.utils.translation import gettext as _

from django_eventbus.store import store_for

if TYPE_CHECKING:
    Base = Paginator[Any]
else:
    Base = Paginator

MOST_COUNTED = 10_000


def grouped(number: float) -> str:
    """Return a number with the thousands separators of the active language: ``1,000,000``."""
    return number_format(number, force_grouping=True)


class Grouped(int):
    """An int whose text has thousands separators. ngettext() can use it to choose a plural."""

    def __str__(self) -> str:
        return grouped(int(self))


class Capped(int):
    """A count that stops at ``MOST_COUNTED``. If there are more rows, its text is ``10,000+``."""

    def __new__(cls, found: int) -> Capped:
        capped = super().__new__(cls, min(found, MOST_COUNTED))
        capped.is_capped = found > MOST_COUNTED
        return capped

    is_capped: bool

    def __str__(self) -> str:
        number = grouped(int(self))
        return _("%(number)s+") % {"number": number} if self.is_capped else number


class CappedPaginator(Base):
    """A paginator that counts only up to a limit, which also limits the OFFSET of a page."""

    @cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        # The query keeps the order of the list, so that PostgreSQL uses an index. Without the
        # order, PostgreSQL may scan the table from its start and read many rows that do not match.
        return Capped(rows.values("pk")[: MOST_COUNTED + 1].count())


class IndexedChangeList(ChangeList):
    """A list that counts and fetches its rows by an index scan, whatever the planner estimates.

    A table that grew since the last ANALYZE looks small to the planner, which would then read and
    sort the whole table for a page of 50 rows.
    """

    @property
    def may_sort(self) -> bool:
        """Whether the database may sort the rows.

        It may sort the result of a search. Few rows match a search, and the index that finds them
        has another order than the list.
        """
        return bool(self.query)

    def get_results(self, request: HttpRequest) -> None:
        with store_for(self.queryset.db).reading_by_index(may_sort=self.may_sort):
            super().get_results(request)
            len(self.result_list)  # Fetches the rows inside this block, not in the template.
