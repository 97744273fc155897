"""MariaDB and MySQL: the portable store at READ COMMITTED, which Django sets by default."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar

from django_eventbus.store.base import Store


class MariaDBStore(Store):
    #: JSON_VALID, which guards the columns, gives up at 32.
    deepest_json: ClassVar[int] = 31
    #: Deadlock, lock wait timeout, record changed under a snapshot.
    conflicts: ClassVar[frozenset[Any]] = frozenset({1213, 1205, 1020})
    _clock_sql: ClassVar[str] = "SELECT UTC_TIMESTAMP(6)"

    def _to_datetime(self, value: Any) -> datetime:
        assert isinstance(value, datetime)
        return value.replace(tzinfo=UTC)
