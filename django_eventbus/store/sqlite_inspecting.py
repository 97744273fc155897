"""Reads for checks of SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from django_eventbus.errors import introspection
from django_eventbus.store.inspecting import LOCK_SECONDS, Inspecting


class InspectingSQLite(Inspecting):
    database_name: ClassVar[str] = "SQLite"

    #: The busy timeout in milliseconds that the connection has outside of an examination.
    _busy_timeout: int | None = None

    @contextmanager
    def examining(self, seconds: float) -> Iterator[None]:
        """Refuse writes on this connection. SQLite has no timeout for a statement.

        There is no transaction, because BEGIN IMMEDIATE would wait for the write lock.
        """
        before = self._pragma("query_only"), self._pragma("busy_timeout")
        self._busy_timeout = before[1]
        self._set(True, round(LOCK_SECONDS * 1000))
        try:
            yield
        finally:
            self._set(*before)

    def refusal(self, error: BaseException) -> str | None:
        cause = error.__cause__
        if getattr(cause, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return f"timeout: {introspection.message(error)}"
        return None

    def session_settings(self) -> dict[str, Any]:
        timeout = self._busy_timeout
        return {
            "journal_mode": self._pragma("journal_mode"),
            "synchronous": self._pragma("synchronous"),
            "busy_timeout": self._pragma("busy_timeout") if timeout is None else timeout,
            "transaction_mode": self.connection.transaction_mode,
        }

    def _pragma(self, name: str) -> Any:
        with self.connection.cursor() as cursor:
            return cursor.execute(f"PRAGMA {name}").fetchone()[0]

    def _set(self, query_only: Any, busy_timeout: Any) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(f"PRAGMA query_only = {int(query_only)}")
            cursor.execute(f"PRAGMA busy_timeout = {int(busy_timeout)}")
