"""Reads for checks of MariaDB and MySQL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from django.apps import apps

from django_eventbus.store.inspecting import LOCK_SECONDS, Inspecting

SESSION = """
SELECT @@tx_isolation AS isolation,
       @@sql_mode AS sql_mode,
       @@max_allowed_packet AS max_allowed_packet,
       @@innodb_flush_log_at_trx_commit AS flush_at_commit
"""
ENGINES = """
SELECT table_name AS name, engine AS engine
FROM information_schema.tables
WHERE table_schema = DATABASE() AND JSON_CONTAINS(%s, JSON_QUOTE(table_name))
"""


class InspectingMariaDB(Inspecting):
    database_name: ClassVar[str] = "MariaDB"
    #: Error codes: access denied to a database, a table, a column or an operation.
    _privilege_errors: ClassVar[frozenset[Any]] = frozenset({1044, 1142, 1143, 1227})
    #: Error codes: lock wait timeout; statement timeout of MariaDB, of MySQL.
    _timeout_errors: ClassVar[frozenset[Any]] = frozenset({1205, 1969, 3024})

    @contextmanager
    def examining(self, seconds: float) -> Iterator[None]:
        """Open a read-only transaction. Inside a transaction of the caller, only set timeouts.

        MariaDB cannot make a transaction read-only after it has begun.
        """
        is_ours = not self.connection.in_atomic_block
        with self._with_timeouts(seconds), self.atomic():
            if is_ours:
                with self.connection.cursor() as cursor:
                    cursor.execute("SET TRANSACTION READ ONLY")
            yield

    @contextmanager
    def _with_timeouts(self, seconds: float) -> Iterator[None]:
        """Set the timeouts of the session, and restore them at the end.

        ``lock_wait_timeout`` limits the wait for a schema change. Its default is one day.
        """
        longest: float = seconds
        statement = "SELECT @@max_statement_time AS longest, @@lock_wait_timeout AS locked"
        change = "SET SESSION max_statement_time = %s, lock_wait_timeout = %s"
        if not self.connection.mysql_is_mariadb:
            longest = round(seconds * 1000)
            statement = statement.replace("max_statement_time", "max_execution_time")
            change = change.replace("max_statement_time", "max_execution_time")
        (before,) = self.read_rows(statement)
        self._change(change, longest, int(LOCK_SECONDS))
        try:
            yield
        finally:
            self._change(change, before["longest"], before["locked"])

    def session_settings(self) -> dict[str, Any]:
        """Return the settings. Inside the examination, the level of the next transaction counts."""
        name = "tx_isolation" if self.connection.mysql_is_mariadb else "transaction_isolation"
        (found,) = self.read_rows(SESSION.replace("tx_isolation", name))
        return found

    def table_engines(self) -> dict[str, str]:
        models = apps.get_app_config("django_eventbus").get_models()
        tables = sorted({each._meta.db_table for each in models})
        rows = self.read_rows(ENGINES, [json.dumps(tables)])
        return {row["name"]: row["engine"] for row in rows}

    def _change(self, statement: str, *values: Any) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, values)
