"""The only code that locks or writes rows: one set of verbs, one class per kind of database."""

from __future__ import annotations

from django.db import connections, router

from django_eventbus.models import QueuedEvent
from django_eventbus.store.base import Store
from django_eventbus.store.figures import Sample
from django_eventbus.store.gates import Entry, Report
from django_eventbus.store.mariadb import MariaDBStore
from django_eventbus.store.postgresql import PostgreSQLStore
from django_eventbus.store.rows import (
    CONFLICT_RETRIES,
    Clock,
    is_shortage,
    is_trouble,
    until_opened,
)
from django_eventbus.store.settlements import (
    Completed,
    Finished,
    Held,
    NewEvent,
    Postponed,
    Progressed,
    Settlement,
)
from django_eventbus.store.sqlite import SQLiteStore
from django_eventbus.store.triggers import RowTrigger

__all__ = [
    "CONFLICT_RETRIES",
    "Clock",
    "Completed",
    "Entry",
    "Finished",
    "Held",
    "NewEvent",
    "Postponed",
    "Progressed",
    "Report",
    "RowTrigger",
    "Sample",
    "Settlement",
    "Store",
    "default_alias",
    "is_shortage",
    "is_trouble",
    "store_for",
    "until_opened",
]

_STORES: dict[str, type[Store]] = {
    "postgresql": PostgreSQLStore,
    "sqlite": SQLiteStore,
    "mysql": MariaDBStore,
}


def store_for(using: str | None = None, *, clock: Clock | None = None) -> Store:
    """The store that fits the database behind the alias. Cheap; has no state worth keeping."""
    alias = using or default_alias()
    return _STORES.get(connections[alias].vendor, Store)(alias, clock=clock)


def default_alias() -> str:
    """Where events go when nothing says otherwise."""
    return router.db_for_write(QueuedEvent)
