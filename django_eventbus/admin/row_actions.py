"""The lists of lanes, workers, flow controls and schedules, and the actions on their rows.

An action changes each row in its own transaction, together with the entry in the admin's history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext as _

from django_eventbus.admin.audit import record
from django_eventbus.admin.base import EventBusAdminMixin
from django_eventbus.exceptions import EventBusError
from django_eventbus.schema.clock import DatabaseNow
from django_eventbus.status import in_words
from django_eventbus.store import default_alias

#: The maximum number of rows that one request changes. Django refuses a form with more than 1,000
#: fields, and a confirmation form has a field per row.
MOST_AT_ONCE = 500


class RowActionsMixin(EventBusAdminMixin):
    """A list whose actions run row by row.

    Each row has ``read_at``, the database time of the query.
    """

    sortable_by = ()

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset(request).annotate(read_at=DatabaseNow())
        return rows

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        """Raise PermissionDenied for an action that is not offered to the user.

        Django itself would ignore the action and show the list.
        """
        asked = request.POST.get("action")
        if asked and asked not in self.get_actions(request):
            raise PermissionDenied
        return super().changelist_view(request, extra_context)

    def act(
        self,
        request: HttpRequest,
        rows: Iterable[Any],
        verb: Callable[[Any], object],
        what: str,
    ) -> int:
        """Call ``verb`` for each row, and return the number of changed rows.

        A row for which ``verb`` returns a false value is counted as skipped.
        """
        done = skipped = 0
        for row in rows:
            try:
                with transaction.atomic(using=default_alias()):
                    if verb(row):
                        done += 1
                        record(request, type(row), what, subject=str(row), object_id=row.pk)
                    else:
                        skipped += 1
            except EventBusError as error:
                self.message_user(request, str(error), messages.ERROR)
        if skipped:
            text = _("%(count)s skipped: deleted, locked by a worker, or unchanged.")
            self.message_user(request, text % {"count": skipped}, messages.WARNING)
        return done


def read_at(row: Model) -> datetime:
    """Return the time of the database at which the row was read."""
    moment: datetime = row.read_at  # type: ignore[attr-defined]
    return moment


def time_between(since: datetime, until: datetime) -> str:
    return in_words((until - since).total_seconds())
