"""Settle claimed events in the transaction of their handlers.

Every statement on these events has the claim token as a condition. If a statement changes too few
rows, ClaimLostError is raised and the caller rolls back. So a worker that lost its claim changes
nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import repeat
from typing import Any

from django.db import Error
from django.db.models import Case, F, Value, When

from django_eventbus.exceptions import ClaimLostError, UnsettleableError
from django_eventbus.models import EventLog, LogStatus, QueuedEvent
from django_eventbus.store.log import Log
from django_eventbus.store.rows import UNCLAIMED, is_outage
from django_eventbus.store.settlements import (
    Completed,
    Ending,
    Finished,
    HandOff,
    Postponed,
    Progressed,
    Settlement,
    WithDeliveries,
)
from django_eventbus.store.waits import HeldBy, Wait, holder_of, seconds_of

_FIELDS = {field.name: field for field in QueuedEvent._meta.local_fields}

_COMPLETED = Ending(LogStatus.COMPLETED)

_QUEUE = QueuedEvent._meta.db_table
_WRITE = f"UPDATE {_QUEUE} SET deliveries = %s, errors = %s"
_OURS = " WHERE id = %s AND claim_token = %s"
_WRITE_DELIVERIES = _WRITE + _OURS
# For an event in a lane, the wait is stored in the lane, when the worker releases the lane.
# A handed-off event gets a new claim token, with which the other executor claims it. The claim by
# this worker does not count as an attempt, so ``attempts`` is decremented.
_POSTPONE = f"""{_WRITE}, status = 'PENDING', claimed_by = NULL, processing_started_at = NULL,
    available_at = CASE WHEN lane_id IS NULL THEN %s END,
    held_by = CASE WHEN lane_id IS NULL THEN %s END,
    claim_token = %s, handed_off_to = %s, attempts = attempts - %s{_OURS}"""


class Settling(Log):
    """Write the settlements of a claim."""

    def settle(self, token: uuid.UUID, settlements: Iterable[Settlement]) -> None:
        """Write the results of claimed events.

        Raises ClaimLostError if the token is no longer valid, and UnsettleableError if the database
        rejects the values. After either error, the caller must roll back the transaction.
        """
        try:
            self._settle(token, settlements)
        except Error as error:
            if is_outage(error):
                raise
            raise UnsettleableError("the result of an event could not be written") from error

    def _settle(self, token: uuid.UUID, settlements: Iterable[Settlement]) -> None:
        completed: list[int] = []
        finished: list[Finished] = []
        postponed: list[Postponed] = []
        progressed: list[Progressed] = []
        held: dict[Wait, list[int]] = {}
        for each in settlements:
            if isinstance(each, Completed):
                completed.append(each.row_id)
            elif isinstance(each, Finished):
                finished.append(each)
            elif isinstance(each, Postponed):
                postponed.append(each)
            elif isinstance(each, Progressed):
                progressed.append(each)
            else:
                held.setdefault(each.wait, []).append(each.row_id)
        if completed:
            self._move_to_log(token, completed, _COMPLETED)
        if finished:
            self._finish(token, finished)
        if postponed:
            self._postpone(token, postponed)
        if progressed:
            self._write_deliveries(token, progressed)
        for wait, ids in held.items():
            self._hold(token, ids, wait)

    def _finish(self, token: uuid.UUID, finished: Sequence[Finished]) -> None:
        """Move events to the log; one statement moves all events with the same ending.

        When a dependency fails, many events have the same ending.
        """
        self._write_deliveries(token, finished)
        same: dict[Ending, list[int]] = {}
        for each in finished:
            if each.blocks_lane is not None:
                self.block_lane(each.blocks_lane, each.row_id)
            same.setdefault(each.ending, []).append(each.row_id)
        for ending, ids in same.items():
            self._move_to_log(token, ids, ending)

    def _write_deliveries(
        self, token: uuid.UUID, settlements: Sequence[Finished | Progressed]
    ) -> None:
        """Write deliveries and errors to the rows, which stay claimed."""
        self._update_each(_WRITE_DELIVERIES, token, settlements)

    def _postpone(self, token: uuid.UUID, settlements: Sequence[Postponed]) -> None:
        now = self.read_clock()
        waits = [
            (
                self._prepared("available_at", _ready_at(each.wait, now)),
                holder_of(each.wait),
                *self._prepared_hand_off(each.hand_off),
            )
            for each in settlements
        ]
        self._update_each(_POSTPONE, token, settlements, waits)

    def _update_each(
        self,
        statement: str,
        token: uuid.UUID,
        settlements: Sequence[WithDeliveries],
        others: Iterable[tuple[Any, ...]] = repeat(()),
    ) -> None:
        """Run the same statement for each settlement.

        This method does not use the ORM, which compiles the statement for each row. Compiling took
        longer than running the statement, and one outage can cause hundreds of failed events.
        """
        ours = self._prepared("claim_token", token)
        rows = [
            (
                self._prepared("deliveries", each.deliveries),
                self._prepared_errors(each.errors),
                *more,
                each.row_id,
                ours,
            )
            for each, more in zip(settlements, others, strict=False)
        ]
        with self.connection.cursor() as cursor:
            cursor.executemany(statement, rows)
            require_all(cursor.rowcount, len(rows))

    def _prepared_hand_off(self, hand_off: HandOff | None) -> tuple[Any, str | None, int]:
        """Return the token, the handler, and the number of attempts to subtract."""
        if hand_off is None:
            return None, None, 0
        return self._prepared("claim_token", hand_off.token), hand_off.handler, 1

    def _prepared_errors(self, errors: list[dict[str, Any]]) -> Any:
        return self._prepared("errors", errors or None)

    def _prepared(self, column: str, value: Any) -> Any:
        return _FIELDS[column].get_db_prep_save(value, self.connection)

    def _hold(self, token: uuid.UUID, ids: Sequence[int], wait: Wait) -> None:
        waits: dict[str, Any] = {}
        if isinstance(wait, HeldBy):
            waits["held_by"] = _unless_laned(Value(wait.flow_control_id))
        elif wait.seconds > 0:
            waits["available_at"] = _unless_laned(self.after(wait.seconds))
        held = self.queued.filter(id__in=ids, claim_token=token).update(
            **UNCLAIMED, attempts=F("attempts") - 1, **waits
        )
        require_all(held, len(ids))

    def _move_to_log(self, token: uuid.UUID, ids: Sequence[int], ending: Ending) -> None:
        self._copy_to_log(token, ids, ending)
        deleted, _ = self.queued.filter(id__in=ids, claim_token=token).delete()
        require_all(deleted, len(ids))

    def _copy_to_log(self, token: uuid.UUID, ids: Sequence[int], ending: Ending) -> None:
        mine = self.queued.filter(id__in=ids, claim_token=token)
        constants = {name: Value(value) for name, value in ending._asdict().items()}
        require_all(self._copy(mine, EventLog, {**constants, "finished_at": self.now}), len(ids))


def _unless_laned(value: Any) -> Case:
    return Case(When(lane_id__isnull=True, then=value), default=None)


def _ready_at(wait: Wait, now: datetime) -> datetime | None:
    """Return the time at which an event without a lane is ready; None if it is ready or held."""
    seconds = seconds_of(wait)
    return now + timedelta(seconds=seconds) if seconds and seconds > 0 else None


def require_all(count: int, expected: int) -> None:
    """Raise ClaimLostError if a statement has changed fewer rows than expected."""
    if count != expected:
        raise ClaimLostError(f"lost the claim on {expected - count} of {expected} events")
