"""Dead letters by what killed them, without reading them all."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from django_eventbus.conf import settings
from django_eventbus.models import EventLog
from django_eventbus.store.rows import Rows

LOG = EventLog._meta.db_table

# The condition stands in every part although it follows from the others: by it a planner knows
# that the partial index has what is asked for.
DEAD = "namespace = %(namespace)s AND error_fingerprint > ''"

# One step of the index per group, where a GROUP BY would read an entry per dead letter.
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
    (SELECT MAX(finished_at) FROM {LOG} WHERE {DEAD} AND error_fingerprint = fingerprint),
    (SELECT id FROM {LOG} WHERE {DEAD} AND error_fingerprint = fingerprint
     ORDER BY finished_at DESC LIMIT 1)
FROM step WHERE fingerprint IS NOT NULL LIMIT %(at_most)s"""

# Asks for nothing that is not in the index.
_COUNT = f"""
SELECT %s, COUNT(*) FROM (
    SELECT 1 FROM {LOG}
    WHERE namespace = %s AND error_fingerprint > '' AND error_fingerprint = %s LIMIT %s
) AS capped"""


class GroupFound(NamedTuple):
    fingerprint: str
    first_at: datetime
    last_at: datetime
    #: The row of the one that died last.
    latest_id: int


class Groups(Rows):
    """What dead letters have in common is the fingerprint of their error."""

    def dead_groups(self, *, at_most: int) -> list[GroupFound]:
        params = {"namespace": settings.NAMESPACE, "at_most": at_most}
        with self.connection.cursor() as cursor:
            cursor.execute(_GROUPS, params)
            moment = self._to_datetime
            return [
                GroupFound(fingerprint, moment(first), moment(last), latest)
                for fingerprint, first, last, latest in cursor.fetchall()
            ]

    def count_dead(self, fingerprints: Sequence[str], *, at_most: int) -> dict[str, int]:
        """How many dead letters each has, in one statement; counting stops at ``at_most``."""
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
