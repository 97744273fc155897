"""The database's clock, in SQL."""

from __future__ import annotations

from typing import Any

from django.db.models.functions import Now


class DatabaseNow(Now):
    """The moment of a statement, in UTC as Django stores moments.

    Django's own ``Now()`` is the local time of the session on MariaDB and MySQL, wherever their
    server happens to stand.
    """

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)
