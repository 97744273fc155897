"""Lists of millions of rows: counting stops early, and so does paging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.paginator import Paginator
from django.utils.formats import number_format
from django.utils.functional import cached_property
from django.utils.translation import gettext as _

if TYPE_CHECKING:
    Base = Paginator[Any]
else:
    Base = Paginator

MOST_COUNTED = 10_000


def grouped(number: float) -> str:
    """``1,000,000``, as the reader's language writes it."""
    return number_format(number, force_grouping=True)


class Grouped(int):
    """A number that texts show grouped, and still choose their plural by."""

    def __str__(self) -> str:
        return grouped(int(self))


class Capped(int):
    """A count that may have stopped early; then it says so wherever it is shown."""

    def __new__(cls, found: int) -> Capped:
        capped = super().__new__(cls, min(found, MOST_COUNTED))
        capped.is_capped = found > MOST_COUNTED
        return capped

    is_capped: bool

    def __str__(self) -> str:
        number = grouped(int(self))
        return _("%(number)s+") % {"number": number} if self.is_capped else number


class CappedPaginator(Base):
    """Counts one row more than it shows pages for, which also bounds the deepest OFFSET."""

    @cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        # In the order of the list: without one PostgreSQL may begin at the start of the table and
        # read all that comes before the rows that count.
        return Capped(rows.values("pk")[: MOST_COUNTED + 1].count())
