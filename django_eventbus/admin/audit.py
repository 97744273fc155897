"""Entries in the admin's history: the user, the action and the number of rows.

An entry is written while the transaction of the change that it describes is open. If the history
and the events are in one database, the entry and the change are committed together.
"""

from __future__ import annotations

from typing import cast

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.db.models import Model
from django.http import HttpRequest

from django_eventbus.errors.text import one_line

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
    """Record an action on one row; with ``object_id=None``, record an action on many rows."""
    LogEntry.objects.create(
        user_id=cast(int, request.user.pk),
        content_type_id=get_content_type_for_model(model).pk,
        object_id=None if object_id is None else str(object_id),
        object_repr=one_line(subject, LONGEST_NAME - 1),
        action_flag=flag,
        change_message=what,
    )


def type_of(model: type[Model]) -> int:
    """Return the content type id that history entries about this model have."""
    return int(get_content_type_for_model(model).pk)


def entries_of(object_id: object, *models: type[Model]) -> list[LogEntry]:
    """Return up to MOST_ENTRIES entries about the row that has this id in any of these models.

    These are the newest entries; the result is sorted by time, oldest first.
    """
    types = [type_of(model) for model in models]
    entries = LogEntry.objects.filter(content_type__in=types, object_id=str(object_id))
    return list(entries.select_related("user").order_by("-action_time")[:MOST_ENTRIES])[::-1]
