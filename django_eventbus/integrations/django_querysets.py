"""A queryset whose bulk writes publish events, because Django sends no signals for bulk writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from django.db import connections, models, transaction

from django_eventbus.exceptions import BridgeError
from django_eventbus.integrations.model_events import ModelEvents, Values, events_of
from django_eventbus.store import store_for

M = TypeVar("M", bound=models.Model)


class BridgedQuerySet(models.QuerySet[M]):
    """A queryset whose bulk methods publish the events of a bridged model.

    The methods are ``bulk_create``, ``bulk_update`` and ``update``. Rows and events are written in
    one transaction. ``update`` reads the rows before and after the write, so its cost grows with
    the number of rows. Writes through the model's ``_base_manager`` publish no events.
    """

    def bulk_create(self, objs: Iterable[M], *args: Any, **kwargs: Any) -> list[M]:
        self._for_write = True
        events = [each for each in events_of(self.model) if each.created]
        if not events:
            return super().bulk_create(objs, *args, **kwargs)
        if any(args[1:]) or kwargs.get("ignore_conflicts") or kwargs.get("update_conflicts"):
            raise BridgeError(
                "bulk_create() with ignore_conflicts or update_conflicts does not return which "
                f"rows of {self.model.__name__} it created: call it on _base_manager and publish "
                "the events yourself"
            )
        with transaction.atomic(using=self.db, savepoint=False):
            created = super().bulk_create(objs, *args, **kwargs)
            for each in events:
                self._publish_created(each, created)
        return created

    bulk_create.alters_data = True  # type: ignore[attr-defined]

    def _publish_created(self, events: ModelEvents, created: list[M]) -> None:
        if any(instance.pk is None for instance in created):
            raise BridgeError(
                f"this database does not return the primary keys of the rows of "
                f"{self.model.__name__} that bulk_create() inserted: save() them one by one"
            )
        rows = [events.known_of(instance) for instance in created]
        if any(len(values) <= len(events.fields) for values in rows):
            rows = list(events.read(self.db, [values["pk"] for values in rows]).values())
        events.publish([item for values in rows for item in events.of_created(values)], self.db)

    def update(self, **kwargs: Any) -> int:
        """Update the rows and publish their events. ``bulk_update`` calls this method too."""
        self._for_write = True
        events = [
            each for each in events_of(self.model) if each.updated and each.names_among(kwargs)
        ]
        if not events or self.query.is_sliced or self.query.combinator:
            return super().update(**kwargs)  # Django raises for a slice or a combination.
        with transaction.atomic(using=self.db, savepoint=False):
            before = [self._read_and_lock(each) for each in events]
            updated = super(BridgedQuerySet, self._only(before[0])).update(**kwargs)
            for each, old in zip(events, before, strict=True):
                new = each.read(self.db, old)
                pairs = [(old[pk], new[pk]) for pk in old if pk in new]
                each.publish([item for pair in pairs for item in each.of_updated(*pair)], self.db)
        return updated

    update.alters_data = True  # type: ignore[attr-defined]

    def _read_and_lock(self, events: ModelEvents) -> dict[Any, Values]:
        rows = events.rows(self.db).filter(pk__in=self.order_by().values("pk")).order_by("pk")
        return events.values_of(store_for(self.db).lock_of_an_update(rows))

    def _only(self, rows: dict[Any, Values]) -> BridgedQuerySet[M]:
        """Restrict the update to the rows that were read and locked.

        Without the restriction, the update could change a row that another transaction inserted
        after the read, and publish no event for it. A database without row locks has one writer at
        a time and needs no restriction.
        """
        has_locks = connections[self.db].features.has_select_for_update
        return self.filter(pk__in=list(rows)) if has_locks else self
