"""The database's clock, in SQL."""

from __future__ import annotations

from typing import Any

from django.db.models.functions import Now


class DatabaseNow(Now):
    """The time of a statement, in UTC and in the format in which Django stores times.

    Django's own ``Now()`` differs on two databases: on MariaDB and MySQL it is the local time of
    the session, and on SQLite it has three decimals where stored times have six. SQLite compares
    times as text, so "…00.123" would be earlier than "…00.123000".
    """

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = "STRFTIME('%%%%Y-%%%%m-%%%%d %%%%H:%%%%M:%%%%f000', 'NOW')"
        return self.as_sql(compiler, connection, template=template, **context)

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)
