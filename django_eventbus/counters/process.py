"""The counters of this process for each database.

A web process has no thread that writes counts regularly. It writes them after a commit or a
request, at most every WRITE_EVERY seconds, and when it ends.
"""

from __future__ import annotations

import atexit
import logging
import os
from contextlib import suppress
from functools import cache
from typing import Any

from django.core.signals import request_finished
from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_eventbus.counters.counting import ProcessCounters
from django_eventbus.errors import failures
from django_eventbus.logs import about
from django_eventbus.models import PUBLISHING
from django_eventbus.registry import registry
from django_eventbus.store import Series, is_outage, store_for

logger = logging.getLogger(__name__)

#: The type of a counted event whose type this process does not know. Types may contain ids, so a
#: counter for each type could need any number of rows.
OTHER = "other"
#: Seconds until the next attempt after an error, for example because the database user of a web
#: process must not write the table.
RETRY_AFTER = 60.0


def counters_of_process(using: str) -> ProcessCounters:
    """Return the counters of this process for a database."""
    return _counters(os.getpid(), using, _database(using))


@cache
def _counters(process: int, using: str, database: str) -> ProcessCounters:
    # A forked process needs counters of its own: otherwise it would also write the counts of its
    # parent. The name of the database is part of the key, because a test runner changes it: counts
    # of tests must not be written to the database of the project.
    counters = ProcessCounters()
    _known.append((process, using, database, counters))
    return counters


_known: list[tuple[int, str, str, ProcessCounters]] = []


def _database(using: str) -> str:
    return str(connections[using].settings_dict["NAME"])


def count_publishing(using: str, queue: str, type_name: str, column: str, number: int = 1) -> None:
    """Count events that were published, dropped or coalesced (see ``column``)."""
    label = type_name if registry.knows_type(type_name) else OTHER
    series = Series(PUBLISHING, queue, event_type=label)
    counters_of_process(using).add(series, **{column: number})


def write_if_due(using: str) -> None:
    """Write the counts of this process if they are due and no transaction is open.

    Errors are logged and never raised, because the caller is a publisher.
    """
    counters = counters_of_process(using)
    if counters.is_due:
        _write(using, counters)


def _write(using: str, counters: ProcessCounters) -> None:
    connection = connections[using]
    try:
        # With autocommit off, the write would be part of a transaction of the project.
        if not connection.in_atomic_block and connection.get_autocommit():
            counters.write(store_for(using))
    except Exception as error:
        counters.postpone(RETRY_AFTER)
        logger.warning(
            "counters could not be written: %s", failures.in_a_line(error), extra=about()
        )
        _close_if_lost(connection, error)


def _close_if_lost(connection: BaseDatabaseWrapper, error: Exception) -> None:
    if is_outage(error) and connection.connection is not None and not connection.is_usable():
        with suppress(Error):
            connection.close()


def _counters_here() -> list[tuple[str, ProcessCounters]]:
    """Return the counters that this process counts in now, by database alias."""
    return [
        (using, counters)
        for process, using, database, counters in list(_known)
        if process == os.getpid() and database == _database(using)
    ]


def _after_request(**kwargs: Any) -> None:
    for using, counters in _counters_here():
        if counters.is_due:
            _write(using, counters)
            # Django has already closed the connections that a request leaves behind.
            connections[using].close_if_unusable_or_obsolete()


def write_at_exit() -> None:
    """Write the counts that are left when the process ends."""
    for using, counters in _counters_here():
        if counters.has_counts:
            _write(using, counters)


def connect() -> None:
    """Write counts after requests and at the end of the process."""
    request_finished.connect(_after_request, dispatch_uid="django_eventbus.counters")
    atexit.unregister(write_at_exit)
    atexit.register(write_at_exit)
