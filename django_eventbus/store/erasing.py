"""Rewrite the content of events that no worker has claimed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from django.db.models import QuerySet

from django_eventbus.models import QueuedEvent, QueuedStatus
from django_eventbus.store.rows import Rows, retried


class Erasing(Rows):
    @retried
    def rewrite(
        self,
        rows: QuerySet[Any],
        ids: Collection[int],
        changes: Callable[[Any], dict[str, Any]],
    ) -> tuple[set[int], int]:
        """Update each row with the columns that ``changes(row)`` returns, in one transaction.

        Rows that are being processed or that another transaction has locked are skipped. Return
        the ids of the rows that were not skipped, and the number of changed rows.
        """
        if rows.model is QueuedEvent:
            rows = rows.filter(status=QueuedStatus.PENDING)
        changed = 0
        with self.atomic():
            free = list(self.locked(rows.filter(id__in=ids).order_by("id")))
            for row in free:
                if new := changes(row):
                    changed += rows.filter(id=row.pk).update(**new)
        return {row.pk for row in free}, changed
