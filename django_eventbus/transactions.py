"""One transaction around many handlers, a savepoint for each that touches the database.

Most handlers of a busy queue either touch nothing or one row. A transaction each would cost a
commit each, a savepoint each two round trips each; so the savepoint is taken when a handler first
asks for a cursor, and on databases with one writer so is the transaction itself.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from django.db import Error, connections
from django.db.transaction import Atomic

from django_eventbus.exceptions import BrokenTransactionError, EventBusError

Hook = Callable[[], Any]

#: Who waits for the one write lock asks for it now and then, at last ten times a second; a worker
#: that commits and begins again would be first every time. So it stays away for a share of the
#: time that it held the lock, and not for longer than anybody sleeps between two questions.
GIVE_WAY = 1 / 4
GIVE_WAY_AT_MOST = 0.1


class GroupLostError(EventBusError):
    """The whole transaction is gone; its events must be run again, one by one."""


class GroupTransaction:
    """``start`` before each handler, then ``keep`` or ``undo`` what it did; commits on exit."""

    def __init__(self, using: str, guard: Callable[[Hook], Hook]) -> None:
        self.connection: Any = connections[using]
        self.guard = guard
        self.savepoints = 0
        #: A handler changed how the transaction goes on, so nobody else should run in it.
        self.disturbed = False
        self._session_changed = False
        self._atomic = Atomic(using, savepoint=True, durable=False)
        self._begin_owed = False
        self._savepoint_owed = False
        self._touching = self._handler_runs = self._began = False
        #: Since when we are the one writer of a database that has one.
        self._locked_at: float | None = None
        self._sid = ""
        self._blocks = self._ids = 0

    def __enter__(self) -> Self:
        connection = self.connection
        begins_by_itself = not hasattr(connection, "_start_transaction_under_autocommit")
        if begins_by_itself or connection.in_atomic_block:
            self._atomic.__enter__()
        else:
            # SQLite would take the write lock here, and hold it while handlers sleep.
            connection._start_transaction_under_autocommit = _nothing
            try:
                self._atomic.__enter__()
            finally:
                del connection._start_transaction_under_autocommit
            self._begin_owed = True
        self._outermost = not connection.savepoint_ids
        self._own_blocks = len(connection.atomic_blocks)
        self._own_ids = len(connection.savepoint_ids)
        connection.execute_wrappers.append(self._on_execute)
        connection.cursor = self._on_cursor
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        connection = self.connection
        connection.execute_wrappers.remove(self._on_execute)
        del connection.cursor
        # A handler that broke everything may have left blocks of its own on top of ours.
        del connection.atomic_blocks[self._own_blocks :]
        del connection.savepoint_ids[self._own_ids :]
        if self._outermost and exc_type is None:
            # A callback that raises or hangs would keep those of other events from running.
            connection.run_on_commit = [
                (sids, self.guard(func), True) for sids, func, _ in connection.run_on_commit
            ]
        try:
            self._atomic.__exit__(exc_type, exc, traceback)
        finally:
            if self._session_changed and self._outermost:
                connection.close()
        if self._locked_at is not None:
            held = time.monotonic() - self._locked_at
            time.sleep(min(held * GIVE_WAY, GIVE_WAY_AT_MOST))

    def start(self) -> None:
        """From here until ``keep`` or ``undo``, a handler runs."""
        connection = self.connection
        self._blocks = len(connection.atomic_blocks)
        self._ids = len(connection.savepoint_ids)
        self._sid = f"eventbus_{next(_numbers)}"
        self._savepoint_owed = self._handler_runs = True
        # Issued or not, the id stands here: on_commit callbacks remember it, and are dropped
        # when the handler is undone.
        connection.savepoint_ids.append(self._sid)

    def keep(self) -> None:
        """Raises BrokenTransactionError (then ``undo``) if the handler left a mess."""
        self._handler_runs = False
        connection = self.connection
        if connection.closed_in_transaction or not connection.in_atomic_block:
            raise GroupLostError("a handler closed the connection or ended the transaction")
        if self._began and in_transaction(connection) is False:
            # Past Django, on the driver's own connection: no savepoint may be there to miss.
            raise GroupLostError("a handler ended the transaction")
        if connection.needs_rollback:
            raise BrokenTransactionError(
                "the handler left its transaction marked for rollback: it swallowed a database "
                "error inside atomic(), or called set_rollback(True)"
            )
        if len(connection.atomic_blocks) != self._blocks:
            raise BrokenTransactionError("the handler left an atomic() block open")
        if self._savepoint_owed:
            self._savepoint_owed = False
        else:
            if not self._outermost and connection.features.can_defer_constraint_checks:
                # In the transaction of a test, which never commits: a commit would refuse it.
                connection.check_constraints()
            try:
                connection.savepoint_commit(self._sid)
            except Error as error:
                if getattr(connection.connection, "closed", False):
                    # Timeouts of the server, say for a transaction that idles, are its reason.
                    raise GroupLostError("the session was ended under the handler") from error
                raise BrokenTransactionError(
                    "the handler swallowed a database error, which broke its transaction"
                ) from error
        connection.savepoint_ids.pop()

    def undo(self) -> None:
        """Take back all the handler did. Raises GroupLostError if that is not possible."""
        self._handler_runs = False
        connection = self.connection
        if connection.closed_in_transaction or not connection.in_atomic_block:
            raise GroupLostError("a handler closed the connection or ended the transaction")
        del connection.atomic_blocks[self._blocks :]
        del connection.savepoint_ids[self._ids :]
        connection.needs_rollback = False
        if self._savepoint_owed:
            self._savepoint_owed = False
            connection.run_on_commit = [
                hook for hook in connection.run_on_commit if self._sid not in hook[0]
            ]
            return
        try:
            connection.savepoint_rollback(self._sid)
            connection.savepoint_commit(self._sid)
        except Error as error:
            raise GroupLostError("the handler's savepoint is gone") from error

    def _on_cursor(self, *args: Any, **kwargs: Any) -> Any:
        # Asking for a cursor is enough: COPY and callproc never pass by the execute wrappers.
        self._touch()
        return type(self.connection).cursor(self.connection, *args, **kwargs)

    def _on_execute(self, execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
        self._touch()
        if self._handler_runs and not self._touching:
            text = str(sql)
            if self._would_end(text):
                raise BrokenTransactionError(
                    f"{sql} would end the worker's transaction, with the work of other events in "
                    "it; a handler that needs transactions of its own declares "
                    "@handler(..., atomic=False)"
                )
            self._session_changed |= changes_session(text)
            self.disturbed |= self._session_changed or _any_statement(_SETS, text)
        return execute(sql, params, many, context)

    def _would_end(self, sql: str) -> bool:
        if _ENDS.search(sql):
            return True
        return not self.connection.features.can_rollback_ddl and bool(_COMMITS_SILENTLY.match(sql))

    def _touch(self) -> None:
        self._began = True
        if self._touching or not (self._begin_owed or self._savepoint_owed):
            return
        self._touching = True
        try:
            if self._begin_owed:
                self.connection._start_transaction_under_autocommit()
                self._begin_owed = False
                self._locked_at = time.monotonic()
            if self._savepoint_owed and not self.connection.needs_rollback:
                self.connection._savepoint(self._sid)
                self._savepoint_owed = False
                self.savepoints += 1
        finally:
            self._touching = False


_NOISE = r"(?:\s|/\*.*?\*/|--[^\n]*\n)*"
_ENDS = re.compile(
    rf"\A{_NOISE}(?:COMMIT|ROLLBACK(?!\s+(?:WORK\s+)?TO\b)|END|ABORT|BEGIN|START\s+TRANSACTION"
    r"|PREPARE\s+TRANSACTION)\b"
    rf"|;{_NOISE}(?:COMMIT|ROLLBACK(?!\s+(?:WORK\s+)?TO\b))\b",
    re.IGNORECASE | re.DOTALL,
)
# Databases that cannot roll back a change of the schema commit everything before it.
_COMMITS_SILENTLY = re.compile(
    rf"\A{_NOISE}(?:CREATE(?!\s+TEMPORARY)|ALTER|DROP(?!\s+TEMPORARY)|TRUNCATE|RENAME|LOCK|UNLOCK"
    r"|GRANT|REVOKE)\b",
    re.IGNORECASE | re.DOTALL,
)
_SETS = re.compile(rf"{_NOISE}SET\b", re.IGNORECASE | re.DOTALL)
_CHANGES_SESSION = re.compile(
    rf"{_NOISE}(?:SET(?!\s+(?:LOCAL|CONSTRAINTS|TRANSACTION)\b)|RESET|DISCARD|LISTEN|UNLISTEN"
    r"|PREPARE|LOAD|CREATE\s+(?:LOCAL\s+|GLOBAL\s+)?TEMP(?:ORARY)?)\b",
    re.IGNORECASE | re.DOTALL,
)
_BY_FUNCTION = ("set_config", "pg_advisory_lock", "pg_try_advisory_lock")


def changes_session(sql: str) -> bool:
    """Whether it leaves behind what outlives a transaction: settings, locks, temporary tables."""
    return any(name in sql for name in _BY_FUNCTION) or _any_statement(_CHANGES_SESSION, sql)


def _any_statement(pattern: re.Pattern[str], sql: str) -> bool:
    # Every statement of every handler comes by here: a search would cost ten times as much.
    return any(map(pattern.match, sql.split(";")))


class SessionWatch:
    """An execute wrapper that notices when the session ought to end with the handler."""

    changed = False

    def __call__(self, execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
        self.changed |= changes_session(str(sql))
        return execute(sql, params, many, context)


def in_transaction(connection: Any) -> bool | None:
    """What the driver says; None if it cannot tell."""
    raw = connection.connection
    if hasattr(raw, "in_transaction"):
        return bool(raw.in_transaction)
    if hasattr(raw, "pgconn"):
        return bool(raw.pgconn.transaction_status)
    return None


_numbers = itertools.count(1)


def _nothing() -> None:
    """Stands in for BEGIN."""
