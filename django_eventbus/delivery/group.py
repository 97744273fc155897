"""One transaction for many handlers, with a savepoint for each handler that uses the database.

Most handlers of a busy queue use no row or one row. A transaction per handler would cost one commit
per handler, so many handlers share a transaction. A savepoint costs two round trips, so it is
created only when a handler first opens a cursor. On databases with one writer (SQLite), the
transaction also begins only when a handler first opens a cursor.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from django.db import Error
from django.db.transaction import atomic

from django_eventbus.delivery.statements import Effects, effects_of, text_of
from django_eventbus.errors.text import one_line
from django_eventbus.exceptions import BrokenTransactionError, EventBusError
from django_eventbus.internals import django as internals
from django_eventbus.logs import about
from django_eventbus.store import Guard, Store

logger = logging.getLogger(__name__)

Hook = Callable[[], Any]

#: SQLite has one write lock and no queue for it: a waiting writer polls, at least ten times a
#: second. A worker that begins a transaction directly after a commit would take the lock before any
#: waiting writer. So the worker sleeps after each transaction that took the lock. It sleeps for
#: GIVE_WAY times the duration of the lock, but at most for the longest polling interval.
GIVE_WAY = 1 / 4
GIVE_WAY_AT_MOST = 0.1

#: The number of characters of a refused statement that the error message shows.
LONGEST_SHOWN = 200

_ADVICE = "Declare a handler that needs its own transactions with @handler(..., atomic=False)."
_WOULD_END = (
    "{sql} would end the worker's transaction, which also holds the work of other events. "
    + _ADVICE
)
_REFUSED = (
    "The database refused the COMMIT that the handler sent (or the check of deferred constraints "
    "that a function of the database made): the worker's transaction is not settled yet. " + _ADVICE
)
_ENDED = (
    "The worker's transaction ended while the handler ran: the handler closed the connection, "
    "sent COMMIT or ROLLBACK, or caught and ignored a database error that rolled back the whole "
    "transaction. " + _ADVICE
)


class GroupLostError(EventBusError):
    """The whole transaction is lost; its events must be run again, one by one.

    If the event ran alone, the guilty handler is charged with ``__cause__``, or with this error if
    there is no cause.
    """


class GroupTransaction:
    """The transaction of a group. For each handler, call ``start``, then ``keep`` or ``undo``.

    ``__exit__`` commits the transaction. A commit guard (see ``GroupGuard``) is inserted before the
    first savepoint, and ``__exit__`` deletes it. While the guard exists, PostgreSQL and SQLite
    refuse to commit the handlers' work.
    """

    def __init__(self, store: Store, guard: Callable[[Hook], Hook]) -> None:
        self.store = store
        self.connection: Any = store.connection
        self.guard = guard
        self.savepoints = 0
        #: Whether a handler changed the state of the session or of the transaction. If so, no other
        #: handler may run in this transaction.
        self.disturbed = False
        self._session_changed = False
        self._atomic = atomic(store.using)
        self._begin_pending = False
        self._savepoint_pending = False
        self._preparing = self._handler_runs = self._began = False
        self._guard: Guard | None = None
        self._guard_lifted = False
        #: The monotonic time at which this connection took the write lock of SQLite.
        self._locked_at: float | None = None
        self._sid = ""
        self._depth_before = internals.Depth(0, 0)

    def __enter__(self) -> Self:
        connection = self.connection
        if connection.in_atomic_block or not internals.begins_explicitly(connection):
            self._atomic.__enter__()
        else:
            # Do not send BEGIN IMMEDIATE yet: it would take SQLite's write lock, even if no handler
            # uses the database.
            with internals.begin_deferred(connection):
                self._atomic.__enter__()
            self._begin_pending = True
        self._own_depth = internals.depth(connection)
        self._outermost = not self._own_depth.savepoints
        internals.watch_cursors(connection, self._on_cursor, self._on_execute)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if exc_type is None:
                self._lower_guard()
        except BaseException as error:
            self._exit(type(error), error, error.__traceback__)
            raise
        self._exit(exc_type, exc, traceback)

    def _exit(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        connection = self.connection
        internals.unwatch_cursors(connection, self._on_execute)
        # Remove Django's entries for atomic() blocks that a handler left open when it broke the
        # transaction.
        internals.forget_deeper_than(connection, self._own_depth)
        if self._outermost and exc_type is None:
            # The callbacks of other events must run even if one callback raises or hangs.
            internals.wrap_commit_hooks(
                connection, lambda hook: in_own_session(connection, hook, self.guard)
            )
        try:
            self._atomic.__exit__(exc_type, exc, traceback)
        finally:
            if self._session_changed and self._outermost:
                connection.close()
        if self._locked_at is not None:
            held = time.monotonic() - self._locked_at
            time.sleep(min(held * GIVE_WAY, GIVE_WAY_AT_MOST))

    def _lower_guard(self) -> None:
        if self._guard is None:
            return
        # Delete the guard even if _lift_guard() deleted it before: the rollback of a savepoint may
        # have restored it.
        if not (self.store.lower_guard(self._guard) or self._guard_lifted):
            raise _ended()

    def was_committed(self) -> bool:
        """Return whether this lost transaction was committed without its settlement.

        This is possible only on databases where the guard does not prevent a commit (MariaDB and
        MySQL). Call this method in a new session, and only once, because it deletes the guard.
        """
        if self._guard is None or self.store.refuses_commit:
            return False
        return self.store.delete_guard(self._guard)

    def start(self) -> None:
        """Prepare for a handler, which runs until ``keep`` or ``undo``."""
        self._depth_before = internals.depth(self.connection)
        self._sid = f"eventbus_{next(_numbers)}"
        self._savepoint_pending = self._handler_runs = True
        # Django stores the ids of the open savepoints with each on_commit callback, and drops the
        # callback when one of these savepoints is rolled back. So Django must know the id of this
        # savepoint before the savepoint is created.
        internals.push_savepoint_id(self.connection, self._sid)

    def keep(self) -> None:
        """Keep the work of the handler.

        Raises BrokenTransactionError if the work of the handler must be rolled back with ``undo``,
        and GroupLostError if the handler ended the whole transaction.
        """
        self._handler_runs = False
        connection = self.connection
        if internals.transaction_is_lost(connection):
            raise _ended("a handler closed the connection or ended the transaction")
        if self._began and internals.driver_in_transaction(connection) is False:
            # The handler ended the transaction through the driver. If the handler's savepoint was
            # created, the release of the savepoint would fail. If it was not created yet, no
            # statement would fail, so this check is needed.
            raise _ended()
        if internals.is_marked_for_rollback(connection):
            raise BrokenTransactionError(
                "the handler left its transaction marked for rollback: it caught and ignored a "
                "database error inside atomic(), or called set_rollback(True)"
            )
        if internals.depth(connection).blocks != self._depth_before.blocks:
            raise BrokenTransactionError("the handler left an atomic() block open")
        if self._savepoint_pending:
            self._savepoint_pending = False
        else:
            self._release_savepoint()
        internals.pop_savepoint_id(connection)

    def _release_savepoint(self) -> None:
        connection = self.connection
        if not self._outermost and connection.features.can_defer_constraint_checks:
            # The outer transaction of a test case never commits, so the database would never check
            # deferred constraints.
            connection.check_constraints()
        try:
            connection.savepoint_commit(self._sid)
        except Error as error:
            if internals.driver_is_closed(connection):
                # Keep the server's error as the cause: it may name an idle timeout, for example.
                raise GroupLostError("the session ended while the handler ran") from error
            raise BrokenTransactionError(
                "the handler caught and ignored a database error, which broke its transaction"
            ) from error

    def undo(self, error: BaseException) -> BaseException:
        """Roll back the work of the handler, and return the error to charge to it.

        Raises GroupLostError if only the whole transaction can be rolled back.
        """
        self._handler_runs = False
        connection = self.connection
        if internals.transaction_is_lost(connection):
            raise GroupLostError("a handler closed the connection") from error
        internals.forget_deeper_than(connection, self._depth_before)
        internals.unmark_for_rollback(connection)
        if self._savepoint_pending:
            self._savepoint_pending = False
            internals.drop_commit_hooks(connection, self._sid)
            return error
        noticed_by_keep = issubclass(type(error), BrokenTransactionError)
        if self._guard is not None and self.store.is_refused_commit(error):
            error = _broken(_REFUSED, error)
        try:
            connection.savepoint_rollback(self._sid)
            connection.savepoint_commit(self._sid)
        except Error:
            if noticed_by_keep:
                error = _broken(_ENDED, error)
            raise GroupLostError("the handler's savepoint no longer exists") from error
        self._guard_lifted = False
        return error

    def _on_cursor(self, *args: Any, **kwargs: Any) -> Any:
        # COPY and callproc bypass the execute wrappers, so opening a cursor counts as using the
        # database.
        self._prepare()
        return internals.open_cursor(self.connection, *args, **kwargs)

    def _on_execute(self, execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
        self._prepare()
        if self._handler_runs and not self._preparing:
            effects = effects_of(sql, self.connection)
            if effects.ends_transaction:
                text = text_of(sql, self.connection)[:LONGEST_SHOWN]
                raise BrokenTransactionError(_WOULD_END.format(sql=text))
            if effects != _HARMLESS:
                self._note_effects(effects)
        return execute(sql, params, many, context)

    def _note_effects(self, effects: Effects) -> None:
        self._session_changed |= effects.changes_session
        self.disturbed |= self._session_changed or effects.sets or effects.checks_constraints
        if effects.checks_constraints and self._guard is not None:
            self._lift_guard(self._guard)

    def _lift_guard(self, guard: Guard) -> None:
        """Delete the guard for a handler that checks all deferred constraints.

        The guard violates a deferred constraint, so it would make that check fail. No other handler
        runs in this group afterwards.
        """
        if self.store.refuses_commit:
            self._preparing = self._guard_lifted = True
            try:
                self.store.delete_guard(guard)
            finally:
                self._preparing = False

    def _prepare(self) -> None:
        self._began = True
        if self._preparing or not (self._begin_pending or self._savepoint_pending):
            return
        self._preparing = True
        try:
            if self._begin_pending:
                internals.begin(self.connection)
                self._begin_pending = False
                self._locked_at = time.monotonic()
            if self._savepoint_pending and not internals.is_marked_for_rollback(self.connection):
                self._take_savepoint()
        finally:
            self._preparing = False

    def _take_savepoint(self) -> None:
        """Insert the commit guard if it does not exist, and create the handler's savepoint."""
        if self._outermost and self._guard is None:
            self._guard = self.store.raise_guard()
        internals.create_savepoint(self.connection, self._sid)
        self._savepoint_pending = False
        self.savepoints += 1


_HARMLESS = Effects()


def _ended(message: str = "a handler ended the transaction") -> GroupLostError:
    lost = GroupLostError(message)
    lost.__cause__ = BrokenTransactionError(_ENDED)
    return lost


def _broken(message: str, cause: BaseException) -> BrokenTransactionError:
    broken = BrokenTransactionError(message)
    broken.__cause__ = cause
    return broken


class SessionWatch:
    """An execute wrapper that notices statements after which the session must be replaced."""

    changed = False

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def __call__(self, execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
        self.changed |= effects_of(sql, self.connection).changes_session
        return execute(sql, params, many, context)


def in_own_session(connection: Any, hook: Hook, guard: Callable[[Hook], Hook]) -> Hook:
    """Wrap an on_commit callback so that no later code uses a session that the callback changed."""
    guarded = guard(hook)

    def run() -> None:
        watch = SessionWatch(connection)
        with connection.execute_wrapper(watch):
            guarded()
        if close_if_left_open(connection):
            logger.error(
                "the on_commit callback %s left autocommit off or a transaction open: that "
                "transaction was rolled back, and the connection was closed",
                one_line(repr(hook)),
                extra=about(),
            )
        elif watch.changed:
            connection.close()

    return run


def close_if_left_open(connection: Any) -> bool:
    """Close a connection that has an open transaction; return whether it was closed.

    If it stayed open, later settlements would become part of that transaction.
    """
    if connection.in_atomic_block:
        if internals.is_in_test_case(connection):
            return False
        internals.abandon_transaction(connection)
    elif connection.connection is None or (
        connection.get_autocommit() and not internals.driver_in_transaction(connection)
    ):
        return False
    connection.close()
    return True


_numbers = itertools.count(1)
