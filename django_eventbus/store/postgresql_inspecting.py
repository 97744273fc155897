"""Reads for checks of PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from django.db import transaction

from django_eventbus.store.inspecting import Inspecting

#: Seconds that a statement of a check waits for a lock. While a table is locked, about twenty
#: checks wait for this long, and the check that names the holder is one of the last.
LOCK_SECONDS = 0.25

LIMITS = """
SELECT set_config('statement_timeout', %s, true), set_config('lock_timeout', %s, true)
"""


class InspectingPostgreSQL(Inspecting):
    database_name: ClassVar[str] = "PostgreSQL"
    _privilege_errors: ClassVar[frozenset[Any]] = frozenset({"42501"})
    #: Error codes: statement timeout, lock timeout.
    _timeout_errors: ClassVar[frozenset[Any]] = frozenset({"57014", "55P03"})

    @contextmanager
    def examining(self, seconds: float) -> Iterator[None]:
        """Open a read-only transaction, or a read-only savepoint in a transaction of the caller.

        The rollback at the end restores the settings of a transaction of the caller.
        """
        with self.atomic():
            with self.connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION READ ONLY")
                cursor.execute(LIMITS, (f"{seconds * 1000:.0f}", f"{LOCK_SECONDS * 1000:.0f}"))
            yield
            transaction.set_rollback(True, using=self.using)
