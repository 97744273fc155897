"""A queryset whose bulk writes are told of: Django sends no signal for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from django.db import connections, models, transaction

from django_eventbus.exceptions import BridgeError
from django_eventbus.integrations.model_events import ModelEvents, Values, told_of
from django_eventbus.store import store_for

M = TypeVar("M", bound=models.Model)


class BridgedQuerySet(models.QuerySet[M]):
    """``bulk_create``, ``bulk_update`` and ``update`` publish the events of a bridged model.

    Each in one transaction with its events. ``update`` reads its rows before and after, so its
    cost grows with their number. A model's ``_base_manager`` writes without telling.
    """

    def bulk_create(self, objs: Iterable[M], *args: Any, **kwargs: Any) -> list[M]:
        self._for_write = True
        events = [each for each in told_of(self.model) if each.created]
        if not events:
            return super().bulk_create(objs, *args, **kwargs)
        if any(args[1:]) or kwargs.get("ignore_conflicts") or kwargs.get("update_conflicts"):
            raise BridgeError(
                f"bulk_create() with conflicts does not tell which rows of {self.model.__name__} "
                "it made: use _base_manager and publish what you know yourself"
            )
        with transaction.atomic(using=self.db, savepoint=False):
            created = super().bulk_create(objs, *args, **kwargs)
            for each in events:
                self._tell_of_created(each, created)
        return created

    bulk_create.alters_data = True  # type: ignore[attr-defined]

    def _tell_of_created(self, events: ModelEvents, created: list[M]) -> None:
        if any(instance.pk is None for instance in created):
            raise BridgeError(
                "this database does not tell the primary keys of rows made by bulk_create()"
            )
        made = [events.known_of(instance) for instance in created]
        if any(len(values) <= len(events.fields) for values in made):
            made = list(events.read(self.db, [values["pk"] for values in made]).values())
        events.publish([told for values in made for told in events.of_created(values)], self.db)

    def update(self, **kwargs: Any) -> int:
        """Also what ``bulk_update`` calls."""
        self._for_write = True
        events = [each for each in told_of(self.model) if each.updated and each.names_among(kwargs)]
        if not events or self.query.is_sliced or self.query.combinator:
            return super().update(**kwargs)  # which refuses the latter two
        with transaction.atomic(using=self.db, savepoint=False):
            before = [self._read_and_lock(each) for each in events]
            updated = super(BridgedQuerySet, self._only(before[0])).update(**kwargs)
            for each, old in zip(events, before, strict=True):
                new = each.read(self.db, old)
                pairs = [(old[pk], new[pk]) for pk in old if pk in new]
                each.publish([told for pair in pairs for told in each.of_updated(*pair)], self.db)
        return updated

    update.alters_data = True  # type: ignore[attr-defined]

    def _read_and_lock(self, events: ModelEvents) -> dict[Any, Values]:
        rows = events.rows(self.db).filter(pk__in=self.order_by().values("pk")).order_by("pk")
        return events.values_of(store_for(self.db).lock_of_an_update(rows))

    def _only(self, rows: dict[Any, Values]) -> BridgedQuerySet[M]:
        """Rows that came in between are not updated, as if it had been done a moment earlier.
        Where there are no row locks there is one writer, and that is us."""
        has_locks = connections[self.db].features.has_select_for_update
        return self.filter(pk__in=list(rows)) if has_locks else self
