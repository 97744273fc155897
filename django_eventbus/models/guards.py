"""The commit guard of a group of events."""

from __future__ import annotations

from django.db import models


class GroupGuard(models.Model):
    """Private: a row that keeps an unsettled group transaction from being committed.

    A group inserts a row before its first savepoint and deletes the row after its settlement. The
    foreign key ``nowhere`` is invalid: it must match an ``anchor``, and every anchor is NULL.
    PostgreSQL and SQLite check the foreign key at COMMIT. So they refuse every COMMIT while the row
    exists, even a COMMIT that a handler sends as SQL. MariaDB and MySQL check foreign keys at once,
    so ``nowhere`` is NULL on these databases. On them, a row that exists after the transaction
    shows that the group was committed before its settlement.
    """

    id = models.BigIntegerField(primary_key=True)
    anchor = models.IntegerField(null=True, unique=True)
    nowhere = models.ForeignKey(
        "self", models.DO_NOTHING, to_field="anchor", null=True, db_index=False, related_name="+"
    )

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.pk)
