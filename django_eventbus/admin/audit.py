"""Who did what to how many: Django's own history of the admin.

An entry is written in the transaction of the change it tells of, where both are in one database:
a change without its entry, or an entry without its change, cannot be found.
"""

from __future__ import annotations

from typing import cast

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.db.models import Model
from django.http import HttpRequest

from django_eventbus.failures import one_line

LONGEST_NAME = 200
MOST_ENTRIES = 100


def record(
    request: HttpRequest,
    model: type[Model],
    what: str,
    *,
    subject: str,
    object_id: object = None,
    flag: int = CHANGE,
) -> None:
    """``what`` was done to ``subject``: one row, with its ``object_id``, or many in words."""
    LogEntry.objects.create(
        user_id=cast(int, request.user.pk),
        content_type_id=get_content_type_for_model(model).pk,
        object_id=None if object_id is None else str(object_id),
        object_repr=one_line(subject, LONGEST_NAME - 1),
        action_flag=flag,
        change_message=what,
    )


def entries_of(object_id: object, *models: type[Model]) -> list[LogEntry]:
    """What was done to one row, whichever of the models it was then: the latest, oldest first."""
    types = [get_content_type_for_model(model).pk for model in models]
    entries = LogEntry.objects.filter(content_type__in=types, object_id=str(object_id))
    return list(entries.select_related("user").order_by("-action_time")[:MOST_ENTRIES])[::-1]
