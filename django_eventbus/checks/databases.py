"""Check the settings of the databases that contain the event tables, without any query."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django.core.checks import CheckMessage, Error, register
from django.core.checks import Warning as CheckWarning
from django.db import connections, router

from django_eventbus.checks.messages import TAG, check_id, closed
from django_eventbus.checks.setting_rules import an_alias_list
from django_eventbus.conf import settings
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.exceptions import UnsupportedDatabaseError
from django_eventbus.models import QueuedEvent
from django_eventbus.store import default_alias, store_for

SQLITE_OPTIONS = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL;",
}
#: Seconds that Python's sqlite3 module waits for a lock by default.
SQLITE_DEFAULT_TIMEOUT = 5
#: The smallest timeout without a warning. In a measurement with several writers on a busy machine,
#: publish() waited up to 9 seconds for the write lock.
SQLITE_LEAST_TIMEOUT = 10


@register(TAG)
def check_databases(**kwargs: Any) -> list[CheckMessage]:
    if an_alias_list(settings.DATABASES) is not None:
        return []  # Check E104 reports the wrong setting.
    holders = list(settings.DATABASES)
    chosen = default_alias()
    if chosen not in (holders or connections):
        return [_misrouted(chosen, holders or list(connections))]
    return [message for alias in holders or [chosen] for message in _database_faults(alias)]


def _misrouted(chosen: str, holders: list[str]) -> CheckMessage:
    return Error(
        f"The database router sends events to {chosen!r}, which is not in EVENTBUS['DATABASES'].",
        hint=f"Add {chosen!r} to EVENTBUS['DATABASES'], or let db_for_write return another alias "
        f"for the app 'django_eventbus'{closed(did_you_mean(chosen, holders))}",
        id=check_id("E005"),
    )


def _database_faults(alias: str) -> Iterator[CheckMessage]:
    connection = connections[alias]
    try:
        store_for(alias)
    except UnsupportedDatabaseError as error:
        hint = "Put the bus into another database, with a router and EVENTBUS['DATABASES']."
        yield Error(str(error), hint=hint, id=check_id("E007"))
    if not connection.settings_dict["AUTOCOMMIT"]:
        yield Error(
            f"The database {alias!r} holds the event tables, but AUTOCOMMIT is off.",
            hint=f"Remove DATABASES[{alias!r}]['AUTOCOMMIT'], or use another database for events.",
            id=check_id("E004"),
        )
    # Only Django's backend for SQLite has this attribute.
    if hasattr(connection, "transaction_modes"):
        yield from _sqlite_faults(alias, connection.settings_dict["OPTIONS"])
    if connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS") and settings.NOTIFY is True:
        yield CheckWarning(
            f"The database {alias!r} holds the event tables and seems to be behind a pooler in "
            "transaction mode, where no worker receives NOTIFY.",
            hint="Set EVENTBUS['NOTIFY'] = False; workers then poll every POLL_INTERVAL seconds.",
            id=check_id("W005"),
        )
    if not router.allow_migrate_model(alias, QueuedEvent):
        yield CheckWarning(
            f"The database {alias!r} is in use for events, but the database router does not allow "
            "the migrations of the event tables there.",
            hint="Let the router's allow_migrate return True for the app 'django_eventbus' on "
            f"{alias!r}, or change EVENTBUS['DATABASES'].",
            id=check_id("W004"),
        )


def _sqlite_faults(alias: str, options: Mapping[str, Any]) -> Iterator[CheckMessage]:
    if str(options.get("transaction_mode")).upper() not in ("IMMEDIATE", "EXCLUSIVE"):
        yield CheckWarning(
            f"The SQLite database {alias!r} holds the event tables, but its transactions take the "
            "write lock only at their first write. SQLite may then fail at once instead of waiting "
            "for the lock: expect 'database is locked'.",
            hint=f"Add to DATABASES[{alias!r}]['OPTIONS']: {SQLITE_OPTIONS!r}",
            id=check_id("W001"),
        )
    elif options.get("timeout", SQLITE_DEFAULT_TIMEOUT) < SQLITE_LEAST_TIMEOUT:
        yield CheckWarning(
            f"The SQLite database {alias!r} holds the event tables, but a connection waits only "
            f"{options.get('timeout', SQLITE_DEFAULT_TIMEOUT)} seconds for the write lock: expect "
            "'database is locked' under load.",
            hint=f"Set DATABASES[{alias!r}]['OPTIONS']['timeout'] = {SQLITE_OPTIONS['timeout']}.",
            id=check_id("W007"),
        )
