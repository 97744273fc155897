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


class Capped(int):
    """A count that may have stopped early; then it says so wherever it is shown."""

    def __new__(cls, found: int) -> Capped:
        capped = super().__new__(cls, min(found, MOST_COUNTED))
        capped.is_capped = found > MOST_COUNTED
        return capped

    is_capped: bool

    def __str__(self) -> str:
        number = number_format(int(self), force_grouping=True)
        return _("%(number)s+") % {"number": number} if self.is_capped else number


class CappedPaginator(Base):
    """Counts one row more than it shows pages for, which also bounds the deepest OFFSET."""

    @cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        return Capped(rows.order_by().values("pk")[: MOST_COUNTED + 1].count())
