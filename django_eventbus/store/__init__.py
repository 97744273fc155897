"""The store: the only package that locks or writes rows. Each database vendor has a class."""

from __future__ import annotations

from django.db import connections, router

from django_eventbus.exceptions import UnsupportedDatabaseError
from django_eventbus.models import QueuedEvent
from django_eventbus.store import postgresql_remedies as remedies
from django_eventbus.store.attention import Attention, AttentionQuery
from django_eventbus.store.base import Store
from django_eventbus.store.counters import COUNTED, FOLD_AFTER, Series
from django_eventbus.store.depths import NOTHING, Depth
from django_eventbus.store.guards import Guard
from django_eventbus.store.handing_off import HandedOffClaim
from django_eventbus.store.inserting import INSERT_CHUNK
from django_eventbus.store.mariadb import MariaDBStore
from django_eventbus.store.outages import through_outage
from django_eventbus.store.postgresql import PostgreSQLStore
from django_eventbus.store.postgresql_facts import PostgreSQLFacts, Snapshot, Table
from django_eventbus.store.postgresql_schema import differing_storage, missing_in_schema
from django_eventbus.store.quarantine import SetAside, set_aside
from django_eventbus.store.recovery import Charge
from django_eventbus.store.rows import (
    CONFLICT_RETRIES,
    LOWEST_ID,
    Clock,
    is_outage,
    is_shortage,
)
from django_eventbus.store.schedules import DEFINITION
from django_eventbus.store.sessions import name_own_sessions, name_sessions
from django_eventbus.store.settlements import (
    UNCOUNTED,
    Completed,
    Finished,
    HandOff,
    Held,
    NewEvent,
    Postponed,
    Progressed,
    Settlement,
)
from django_eventbus.store.sqlite import SQLiteStore
from django_eventbus.store.triggers import RowTrigger
from django_eventbus.store.waits import AT_ONCE, SEVERAL, After, HeldBy, Wait, soonest

__all__ = [
    "AT_ONCE",
    "CONFLICT_RETRIES",
    "COUNTED",
    "DEFINITION",
    "FOLD_AFTER",
    "INSERT_CHUNK",
    "LOWEST_ID",
    "NOTHING",
    "SEVERAL",
    "UNCOUNTED",
    "After",
    "Attention",
    "AttentionQuery",
    "Charge",
    "Clock",
    "Completed",
    "Depth",
    "Finished",
    "Guard",
    "HandOff",
    "HandedOffClaim",
    "Held",
    "HeldBy",
    "NewEvent",
    "PostgreSQLFacts",
    "Postponed",
    "Progressed",
    "RowTrigger",
    "Series",
    "SetAside",
    "Settlement",
    "Snapshot",
    "Store",
    "Table",
    "Wait",
    "default_alias",
    "differing_storage",
    "is_outage",
    "is_shortage",
    "missing_in_schema",
    "name_own_sessions",
    "name_sessions",
    "remedies",
    "set_aside",
    "soonest",
    "store_for",
    "through_outage",
]

_STORES: dict[str, type[Store]] = {
    "postgresql": PostgreSQLStore,
    "sqlite": SQLiteStore,
    "mysql": MariaDBStore,
}


def store_for(using: str | None = None, *, clock: Clock | None = None) -> Store:
    """Return the store of a database alias. The call is cheap, so callers need not keep the store.

    Raises UnsupportedDatabaseError if there is no store class for the vendor of the database.
    """
    alias = using or default_alias()
    vendor = connections[alias].vendor
    try:
        store = _STORES[vendor]
    except KeyError:
        raise UnsupportedDatabaseError(
            f"The database {alias!r} is of the vendor {vendor!r}, which is not supported. "
            f"Supported vendors: {', '.join(sorted(_STORES))}."
        ) from None
    return store(alias, clock=clock)


def default_alias() -> str:
    """Return the alias of the database that events are written to by default."""
    return router.db_for_write(QueuedEvent)
