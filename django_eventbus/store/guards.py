"""The commit guard: a row that prevents the commit of a group before the group is settled."""

from __future__ import annotations

import logging
import random
from typing import NamedTuple

from django.db import Error

from django_eventbus.internals.django import create_savepoint
from django_eventbus.logs import about
from django_eventbus.models import GroupGuard
from django_eventbus.store.rows import Rows

logger = logging.getLogger(__name__)

GUARD = GroupGuard._meta.db_table
#: A foreign key with this value refers to no row, so it always violates its constraint.
NOWHERE = 0
#: The savepoint of a group on databases that check foreign keys immediately. If the
#: savepoint no longer exists, a handler has ended the transaction.
SAVEPOINT = "eventbus_group"

_RAISE = f"INSERT INTO {GUARD} (id, nowhere_id) VALUES (%s, %s)"
_LOWER = f"DELETE FROM {GUARD} WHERE id = %s"


class Guard(NamedTuple):
    """An inserted guard: the id of its row and, on PostgreSQL, the ctid of the row."""

    row_id: int
    place: str | None = None


class Guards(Rows):
    """Insert the guard before the first savepoint of a group; delete it after the settlement."""

    @property
    def refuses_commit(self) -> bool:
        """Return whether this database refuses a COMMIT while the row of a guard exists."""
        return bool(self.connection.features.can_defer_constraint_checks)

    def raise_guard(self) -> Guard:
        guard = Guard(random.getrandbits(62))
        nowhere = NOWHERE if self.refuses_commit else None
        with self.connection.cursor() as cursor:
            cursor.execute(_RAISE, (guard.row_id, nowhere))
        if not self.refuses_commit:
            create_savepoint(self.connection, SAVEPOINT)
        return guard

    def lower_guard(self, guard: Guard) -> bool:
        """Delete the guard's row; return False if the row is missing because of a rollback.

        After this call no guard exists, so the next statement must be COMMIT or ROLLBACK.
        """
        intact = self.refuses_commit or self._savepoint_exists()
        lowered = self.delete_guard(guard)
        if lowered and not intact:
            logger.error(
                "a handler committed the transaction of its group by a statement that was not "
                "recognised; the remaining work of the group is committed separately",
                extra=about(),
            )
        return lowered

    def _savepoint_exists(self) -> bool:
        try:
            self.connection.savepoint_commit(SAVEPOINT)
        except Error:
            return False
        return True

    def delete_guard(self, guard: Guard) -> bool:
        """Delete the row of a guard; return whether the row existed.

        After the transaction of a group was lost, an existing row means that the group was
        committed before it was settled.
        """
        with self.connection.cursor() as cursor:
            cursor.execute(_LOWER, (guard.row_id,))
            return bool(cursor.rowcount)

    def is_refused_commit(self, error: BaseException) -> bool:
        """Return whether a handler got this error because the guard refused its COMMIT."""
        return False
