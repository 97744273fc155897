"""Write the settlements of a batch on PostgreSQL: one statement for all rows of each kind."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django_eventbus.schema.payloads import encode
from django_eventbus.store import postgresql_sql as sql
from django_eventbus.store.settlements import (
    Ending,
    Finished,
    HandOff,
    Postponed,
    Progressed,
    WithDeliveries,
)
from django_eventbus.store.settling import Settling, require_all
from django_eventbus.store.waits import HeldBy, Wait


class SettlingEachRow(Settling):
    """Passes the values of each row as one JSON object, see ``postgresql_sql.WRITE``."""

    def _move_to_log(self, token: uuid.UUID, ids: Sequence[int], ending: Ending) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(
                sql.SETTLE,
                (
                    f"{{{','.join(map(str, ids))}}}",
                    token,
                    str(ending.status),
                    self._injected_now(),
                    ending.dead_handler,
                    ending.error_type,
                    ending.error_fingerprint,
                ),
            )
            require_all(cursor.rowcount, len(ids))

    def _write_deliveries(
        self, token: uuid.UUID, settlements: Sequence[Finished | Progressed]
    ) -> None:
        columns = {each.row_id: _columns(each) for each in settlements}
        self._update_each_row(sql.WRITE_DELIVERIES, token, columns)

    def _postpone(self, token: uuid.UUID, settlements: Sequence[Postponed]) -> None:
        columns = {}
        for each in settlements:
            columns[each.row_id] = {
                **_columns(each),
                **_waits(each.wait),
                **_hand_off(each.hand_off),
            }
        self._update_each_row(sql.POSTPONE, token, columns)

    def _update_each_row(
        self, statement: str, token: uuid.UUID, columns: dict[int, dict[str, Any]]
    ) -> None:
        params = {
            "token": token,
            "ids": list(columns),
            "written": encode(columns),
            "now": self._injected_now(),
        }
        with self.connection.cursor() as cursor:
            cursor.execute(statement, params)
            require_all(cursor.rowcount, len(columns))

    def _injected_now(self) -> datetime | None:
        return None if self.clock is None else self.clock()


def _columns(settlement: WithDeliveries) -> dict[str, Any]:
    columns = {"deliveries": settlement.deliveries, "errors": settlement.errors or None}
    return {name: value for name, value in columns.items() if value is not None}


def _waits(wait: Wait) -> dict[str, Any]:
    """Return the values of a wait for the statement POSTPONE.

    If the value of a column is missing, POSTPONE sets the column to NULL.
    """
    if isinstance(wait, HeldBy):
        return {"held_by": wait.flow_control_id}
    return {"wait": wait.seconds} if wait.seconds > 0 else {}


def _hand_off(hand_off: HandOff | None) -> dict[str, Any]:
    return {} if hand_off is None else {"handler": hand_off.handler, "token": str(hand_off.token)}
