"""Undocumented attributes of Django, each behind a function.

A connection is typed as Any here: django-stubs does not know most of these attributes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections
from django.utils import autoreload

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django.db.models import Manager, QuerySet
    from django.http import HttpRequest, HttpResponse

Hook = Callable[[], Any]


# -- BEGIN


def begins_explicitly(connection: Any) -> bool:
    """Return whether atomic() sends BEGIN itself, as on SQLite, where BEGIN may take a lock."""
    return hasattr(connection, "_start_transaction_under_autocommit")


@contextmanager
def begin_deferred(connection: Any) -> Iterator[None]:
    """Make atomic() send no BEGIN inside this block. After the block, ``begin`` sends the BEGIN."""
    connection._start_transaction_under_autocommit = lambda: None
    try:
        yield
    finally:
        del connection._start_transaction_under_autocommit


def begin(connection: Any) -> None:
    """Send the BEGIN that ``begin_deferred`` left out."""
    connection._start_transaction_under_autocommit()


# -- atomic() blocks and savepoints


class Depth(NamedTuple):
    """How many atomic() blocks and savepoints are open on a connection."""

    blocks: int
    savepoints: int


def depth(connection: Any) -> Depth:
    """Return how deeply atomic() blocks and savepoints are nested now."""
    return Depth(len(connection.atomic_blocks), len(connection.savepoint_ids))


def forget_deeper_than(connection: Any, kept: Depth) -> None:
    """Remove from Django's lists the blocks and savepoints opened since ``depth`` gave ``kept``.

    This sends no SQL.
    """
    del connection.atomic_blocks[kept.blocks :]
    del connection.savepoint_ids[kept.savepoints :]


def abandon_transaction(connection: Any) -> None:
    """Clear Django's lists of atomic() blocks and savepoints, before the caller calls close().

    While an atomic() block is open, Django does not open a new connection after close().
    """
    forget_deeper_than(connection, Depth(0, 0))
    connection.in_atomic_block = False


def transaction_is_lost(connection: Any) -> bool:
    """Return whether the connection was closed in a transaction, or no atomic() is open."""
    return bool(connection.closed_in_transaction or not connection.in_atomic_block)


def is_marked_for_rollback(connection: Any) -> bool:
    """Return whether the innermost atomic() block can only be rolled back."""
    return bool(connection.needs_rollback)


def unmark_for_rollback(connection: Any) -> None:
    """Allow statements in a block that is marked for rollback.

    The caller must undo the failed work itself, with a savepoint.
    """
    connection.needs_rollback = False


def push_savepoint_id(connection: Any, sid: str) -> None:
    """Add an id to the savepoint ids that Django stores with each later on_commit() callback."""
    connection.savepoint_ids.append(sid)


def pop_savepoint_id(connection: Any) -> None:
    """Undo the last ``push_savepoint_id``."""
    connection.savepoint_ids.pop()


def create_savepoint(connection: Any, sid: str) -> None:
    """Send SAVEPOINT with this name; ``connection.savepoint()`` would generate a name."""
    connection._savepoint(sid)


def is_in_test_case(connection: Any) -> bool:
    """Return whether a TestCase opened the transaction. Such a transaction is never committed."""
    return bool(connection.atomic_blocks[0]._from_testcase)


def has_only_test_case_blocks(connection: Any) -> bool:
    """Return whether no atomic() block is open except the blocks that a TestCase opened."""
    return all(block._from_testcase for block in connection.atomic_blocks)


# -- on_commit() callbacks


def commit_hooks(connection: Any) -> Any:
    """Return the list of on_commit() callbacks; each transaction has a list object of its own.

    The rollback of a savepoint also creates a new list.
    """
    return connection.run_on_commit


def last_commit_hook(connection: Any) -> Hook | None:
    """Return the on_commit() callback that was registered last, if any is pending."""
    return connection.run_on_commit[-1][1] if connection.run_on_commit else None


def last_commit_hook_is_of_same_savepoints(connection: Any) -> bool:
    """Return whether a rollback drops the last callback exactly if it drops a new callback."""
    hooks = connection.run_on_commit
    return bool(hooks) and hooks[-1][0] == set(connection.savepoint_ids)


def drop_commit_hooks(connection: Any, sid: str) -> None:
    """Drop the callbacks of a savepoint, as a rollback of the savepoint does."""
    connection.run_on_commit = [hook for hook in connection.run_on_commit if sid not in hook[0]]


def wrap_commit_hooks(connection: Any, wrap: Callable[[Hook], Hook]) -> None:
    """Wrap each pending callback and mark it as robust.

    After an error in a robust callback, Django runs the next callbacks.
    """
    connection.run_on_commit = [
        (sids, wrap(hook), True) for sids, hook, _is_robust in connection.run_on_commit
    ]


# -- cursors and statements


def watch_cursors(connection: Any, cursor: Callable[..., Any], on_execute: Any) -> None:
    """Make the connection open cursors with ``cursor`` and pass statements to ``on_execute``."""
    connection.cursor = cursor
    connection.execute_wrappers.append(on_execute)


def unwatch_cursors(connection: Any, on_execute: Any) -> None:
    """Undo ``watch_cursors``, and keep wrappers that other code has added meanwhile."""
    connection.execute_wrappers.remove(on_execute)
    del connection.cursor


def open_cursor(connection: Any, *args: Any, **kwargs: Any) -> Any:
    """Open a cursor with Django's own method, which ``watch_cursors`` has replaced."""
    return type(connection).cursor(connection, *args, **kwargs)


def driver_in_transaction(connection: Any) -> bool | None:
    """Return whether the driver sees an open transaction; None if the driver does not know."""
    raw = connection.connection
    if hasattr(raw, "in_transaction"):
        return bool(raw.in_transaction)
    if hasattr(raw, "pgconn"):
        return bool(raw.pgconn.transaction_status)
    if hasattr(raw, "get_autocommit") and raw.get_autocommit():
        # On MariaDB, Django begins a transaction by turning autocommit off. So while autocommit is
        # on, no transaction is open.
        return False
    return None


def driver_is_closed(connection: Any) -> bool:
    """Return whether the driver knows that its session has ended."""
    return bool(getattr(connection.connection, "closed", False))


def open_separate_session(connection: Any) -> Any:
    """Return a new driver connection to the same database. Django does not use the connection."""
    return connection.get_new_connection(connection.get_connection_params())


# -- options of connections that are opened later


def set_option_of_all_threads(alias: str, name: str, value: Any) -> None:
    """Set an option for the connections that any thread opens from now on."""
    connections.settings[alias]["OPTIONS"][name] = value


def set_option_of_this_thread(alias: str, name: str, value: Any) -> None:
    """Set an option for later connections of the current thread, but not of other threads."""
    connection = connections[alias]
    # The connections of all threads share one dict, so this connection gets a copy.
    shared: dict[str, Any] = connection.settings_dict
    connection.settings_dict = {**shared, "OPTIONS": {**shared["OPTIONS"], name: value}}


def turn_off_pool(alias: str) -> None:
    """Make the threads of this process open connections without Django's pool."""
    connections.settings[alias]["OPTIONS"].pop("pool", None)


# -- models and the admin


def queryset_class_of(manager: Manager[Any]) -> type[QuerySet[Any]]:
    """Return the class of the querysets that a manager returns."""
    found: type[QuerySet[Any]] = manager._queryset_class  # type: ignore[attr-defined]
    return found


def redirect_for_missing_object(
    page: ModelAdmin[Any], request: HttpRequest, object_id: str
) -> HttpResponse:
    """Return the admin's response for a missing object: a message and a redirect."""
    answer: HttpResponse = page._get_obj_does_not_exist_redirect(  # type: ignore[attr-defined]
        request, page.opts, object_id
    )
    return answer


# -- the reloader


def runs_under_reloader() -> bool:
    """Return whether Django's reloader has started this process to run the reloaded code."""
    return os.environ.get(autoreload.DJANGO_AUTORELOAD_ENV) == "true"
