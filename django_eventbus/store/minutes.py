"""Minutes: what each worker did, in rows that no other worker writes."""

from __future__ import annotations

from collections.abc import Sequence

from django.db.models import QuerySet

from django_eventbus.conf import settings
from django_eventbus.histograms import COLUMNS
from django_eventbus.models import EventMinute
from django_eventbus.store.rows import Rows, retried

#: What is counted in a minute; the rest of a row says of whom, when and what.
COUNTED = ("done", "retried", "dead", "discarded", "seconds", *COLUMNS)
FORGET_CHUNK = 1000

_WHICH = ("namespace", "minute", "worker_id", "queue", "handler")


class Minutes(Rows):
    """Never part of a settlement: figures are not worth an event's waiting for them."""

    @property
    def minutes(self) -> QuerySet[EventMinute]:
        return EventMinute.objects.using(self.using).filter(namespace=settings.NAMESPACE)

    @retried
    def write_minutes(self, rows: Sequence[EventMinute]) -> None:
        """In one statement. Rows tell the whole of their minute so far, not what was added: to
        write them again, because an answer was lost, does no harm."""
        targeted = self.connection.features.supports_update_conflicts_with_target
        EventMinute.objects.using(self.using).bulk_create(
            rows,
            update_conflicts=True,
            update_fields=COUNTED,
            unique_fields=_WHICH if targeted else None,
        )

    @retried
    def forget_minutes(self) -> int:
        """Delete some of those that are older than ``EVENTBUS["MINUTES_KEPT"]`` allows."""
        old = self.minutes.filter(minute__lt=self.after(-60.0 * settings.MINUTES_KEPT))
        if not old.exists():
            return 0
        with self.atomic():
            oldest = self.locked(old.order_by("minute"))
            ids = list(oldest.values_list("pk", flat=True)[:FORGET_CHUNK])
            deleted, _ = self.minutes.filter(pk__in=ids).delete()
        return deleted
