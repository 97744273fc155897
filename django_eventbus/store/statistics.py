"""Statistics per minute. Each row is written by only one worker."""

from __future__ import annotations

from collections.abc import Sequence

from django.db.models import QuerySet

from django_eventbus.conf import settings
from django_eventbus.models import MinuteStatistics
from django_eventbus.schema.histograms import COLUMNS
from django_eventbus.store.rows import Rows, retried

#: The columns with counts. The other columns identify the row.
COUNTED = (
    *("done", "retried", "dead", "discarded", "handed_off", "ignored_messages", "seconds"),
    *COLUMNS,
)
DELETE_CHUNK = 1000

_IDENTITY = ("namespace", "minute", "worker_id", "queue", "handler")


class Statistics(Rows):
    """Statistics per minute, written in their own transaction so that they delay no event."""

    @property
    def statistics(self) -> QuerySet[MinuteStatistics]:
        return MinuteStatistics.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    @retried
    def write_statistics(self, rows: Sequence[MinuteStatistics]) -> None:
        """Insert or replace rows in one statement.

        A row has the totals of its minute, not increments, so writing it a second time after a lost
        connection is harmless.
        """
        targeted = self.connection.features.supports_update_conflicts_with_target
        MinuteStatistics.objects.using(self.using).bulk_create(
            rows,
            update_conflicts=True,
            update_fields=COUNTED,
            unique_fields=_IDENTITY if targeted else None,
        )

    @retried
    def delete_old_statistics(self) -> int:
        """Delete a chunk of rows older than ``EVENTBUS["STATISTICS_MINUTES"]``; return how many."""
        old = self.statistics.filter(minute__lt=self.after(-60.0 * settings.STATISTICS_MINUTES))
        if not old.exists():
            return 0
        with self.atomic():
            oldest = self.locked(old.order_by("minute"))
            ids = list(oldest.values_list("pk", flat=True)[:DELETE_CHUNK])
            deleted, _ = self.statistics.filter(pk__in=ids).delete()
        return deleted
