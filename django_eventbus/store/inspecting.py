"""Reads for checks: read-only, with timeouts for statements and locks, if the database has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from django_eventbus.store.rows import Rows, code_of

#: Seconds that a statement of a check waits for a lock. PostgreSQL has its own value.
LOCK_SECONDS = 1.0


class Inspecting(Rows):
    """The reads of checks. Each vendor overrides the methods that need its own statements."""

    #: The name of the database in texts for users.
    database_name: ClassVar[str]
    #: Codes of errors that mean a missing privilege.
    _privilege_errors: ClassVar[frozenset[Any]] = frozenset()
    #: Codes of errors that mean a statement timeout or a lock timeout.
    _timeout_errors: ClassVar[frozenset[Any]] = frozenset()

    @contextmanager
    def examining(self, seconds: float) -> Iterator[None]:
        """Refuse writes and limit the time of each statement in this block.

        Each vendor overrides this method, and does this as far as the database can.
        """
        yield

    def refusal(self, error: BaseException) -> str | None:
        """Return why the database refused the statement of a check.

        Return None for an error that is not a missing privilege and not a timeout.
        """
        code, text = code_of(error), str(error).splitlines()[:1]
        if code in self._privilege_errors:
            return f"missing privilege: {''.join(text)}"
        if code in self._timeout_errors:
            return f"timeout: {''.join(text)}"
        return None

    def session_settings(self) -> dict[str, Any]:
        """Return the settings of the server and of this session that the checks read.

        It is empty on PostgreSQL, whose checks use ``PostgreSQLFacts``.
        """
        return {}

    def table_engines(self) -> dict[str, str]:
        """Return the storage engine of each table of the bus; empty if there are no engines."""
        return {}

    def read_rows(
        self, statement: str, params: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[dict[str, Any]]:
        """Return the rows of a query as dicts, by the names of the columns."""
        with self.connection.cursor() as cursor:
            cursor.execute(statement, params)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
