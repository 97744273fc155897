"""The only code that locks or writes rows: one set of verbs, one class per kind of database."""

from __future__ import annotations

from django.db import connections, router

from django_eventbus.models import QueuedEvent
from django_eventbus.store.base import Store
from django_eventbus.store.mariadb import MariaDBStore
from django_eventbus.store.postgresql import PostgreSQLStore
from django_eventbus.store.rows import Clock, is_trouble
from django_eventbus.store.settlements import (
    Completed,
    Finished,
    NewEvent,
    Postponed,
    Progressed,
    Settlement,
)
from django_eventbus.store.sqlite import SQLiteStore

__all__ = [
    "Clock",
    "Completed",
    "Finished",
    "NewEvent",
    "Postponed",
    "Progressed",
    "Settlement",
    "Store",
    "default_alias",
    "is_trouble",
    "store_for",
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
