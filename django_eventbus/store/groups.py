"""Groups of dead letters that have the same error. No query reads all dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from django_eventbus.conf import settings
from django_eventbus.models import EventLog
from django_eventbus.store.rows import Rows

LOG = EventLog._meta.db_table

# Every subquery repeats this condition, although its other conditions imply it. The planner uses a
# partial index only if the query contains the condition of the index.
DEAD = "namespace = %(namespace)s AND error_fingerprint > ''"

# This query needs a few index lookups per group. A GROUP BY would read one index entry per dead
# letter.
_GROUPS = f"""
WITH RECURSIVE step (fingerprint) AS (
    SELECT MIN(error_fingerprint) FROM {LOG} WHERE {DEAD}
    UNION ALL
    SELECT (SELECT MIN(error_fingerprint) FROM {LOG}
            WHERE {DEAD} AND error_fingerprint > step.fingerprint)
    FROM step WHERE step.fingerprint IS NOT NULL
)
SELECT fingerprint,
    (SELECT MIN(finished_at) FROM {LOG} WHERE {DEAD} AND error_fingerprint = fingerprint),
    (SELECT MIN(first_dead_at) FROM {LOG} WHERE {DEAD} AND error_fingerprint = fingerprint
     AND first_dead_at IS NOT NULL AND first_dead_of = fingerprint),
    (SELECT MAX(finished_at) FROM {LOG} WHERE {DEAD} AND error_fingerprint = fingerprint),
    (SELECT id FROM {LOG} WHERE {DEAD} AND error_fingerprint = fingerprint
     ORDER BY finished_at DESC LIMIT 1)
FROM step WHERE fingerprint IS NOT NULL LIMIT %(at_most)s"""

# This query reads only the index, not the table.
_COUNT = f"""
SELECT %s, COUNT(*) FROM (
    SELECT 1 FROM {LOG}
    WHERE namespace = %s AND error_fingerprint > '' AND error_fingerprint = %s LIMIT %s
) AS capped"""


class GroupFound(NamedTuple):
    fingerprint: str
    first_at: datetime
    last_at: datetime
    #: The row id of the latest dead letter of the group.
    latest_id: int


class Groups(Rows):
    """Groups of dead letters that have the same error fingerprint."""

    def dead_groups(self, *, at_most: int) -> list[GroupFound]:
        params = {"namespace": settings.NAMESPACE, "at_most": at_most}
        with self.connection.cursor() as cursor:
            cursor.execute(_GROUPS, params)
            moment = self._to_datetime
            return [
                GroupFound(
                    fingerprint, min(moment(first), moment(earlier or first)), moment(last), latest
                )
                for fingerprint, first, earlier, last, latest in cursor.fetchall()
            ]

    def count_dead(self, fingerprints: Sequence[str], *, at_most: int) -> dict[str, int]:
        """Return the number of dead letters per fingerprint; counting stops at ``at_most``."""
        if not fingerprints:
            return {}
        params = [
            value
            for fingerprint in fingerprints
            for value in (fingerprint, settings.NAMESPACE, fingerprint, at_most)
        ]
        with self.connection.cursor() as cursor:
            cursor.execute(" UNION ALL ".join([_COUNT] * len(fingerprints)), params)
            return dict(cursor.fetchall())
