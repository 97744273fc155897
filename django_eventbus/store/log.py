"""The log: how an event gets there, how a dead letter comes back, how both are forgotten."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from django.db.models import Case, DateTimeField, Model, QuerySet, TextField, Value, When
from django.db.models.expressions import Combinable

from django_eventbus.models import EventFields, EventLog, QueuedEvent, QueuedStatus
from django_eventbus.store.lanes import Lanes
from django_eventbus.store.rows import retried

MOVED_COLUMNS = tuple(field.attname for field in EventFields._meta.local_fields)


class Log(Lanes):
    """Moves between the two tables; a lane that a dead letter holds up hears of it."""

    def _copy(
        self, source: QuerySet[Any], target: type[Model], values: dict[str, Combinable]
    ) -> int:
        """INSERT … SELECT: the moved columns as they are, the others from expressions."""
        names = ["id", *(name for name in MOVED_COLUMNS if name not in values)]
        columns = [*names, *values]
        chosen = source.annotate(**{f"new_{name}": value for name, value in values.items()})
        query = chosen.values_list(*names, *(f"new_{name}" for name in values)).query
        select, params = query.get_compiler(self.using).as_sql()
        quote = self.connection.ops.quote_name
        into = ", ".join(map(quote, columns))
        with self.connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {quote(target._meta.db_table)} ({into}) {select}",
                params,
            )
            return int(cursor.rowcount)

    @retried
    def revive(
        self,
        ids: Collection[int],
        *,
        delay: float | None = None,
        every: float = 0.0,
        handler: str | None = None,
    ) -> int:
        """Move dead letters back into the queue as if new; handlers that were done stay done.

        The first is ready after ``delay``, each of the others ``every`` seconds after the one
        before. With a ``handler`` it is owed to that one alone: the others that died stay dead.
        """
        with self.atomic():
            dead = self.dead.filter(id__in=list(ids)).order_by("id")
            rows = list(self.locked(dead).values_list("id", "event_id", "deliveries"))
            if not rows:
                return 0
            ids = [row_id for row_id, *_ in rows]
            moved = self.dead.filter(id__in=ids)
            delays = [(delay or 0.0) + number * every for number in range(len(rows))]
            fresh: dict[str, Any] = {
                "attempts": Value(0),
                "crashes": Value(0),
                "claimed_by": Value(None, output_field=TextField()),
                "processing_started_at": Value(None, output_field=DateTimeField()),
                "status": Value(QueuedStatus.PENDING.value),
                "available_at": self._ready_after(ids, delays),
                "due_at": self._ready_after(ids, delays) if any(delays) else self.now,
            }
            if handler is None:
                self._keep_what_is_done({row_id: states for row_id, _, states in rows})
                fresh["errors"] = Value(None, output_field=TextField())
            else:
                self._forget_failures_of(handler, moved)
            revived = self._copy(moved, QueuedEvent, fresh)
            moved.delete()
            event_ids = (event_id for _, event_id, _ in rows)
            self.resume_lanes(dict(zip(event_ids, delays, strict=True)))
        return revived

    def _keep_what_is_done(self, deliveries: dict[int, Any]) -> None:
        partly = {row_id: done for row_id, states in deliveries.items() if (done := _done(states))}
        for row_id, done in partly.items():
            self.dead.filter(id=row_id).update(deliveries=done)
        others = [row_id for row_id in deliveries if row_id not in partly]
        self.dead.filter(id__in=others).update(deliveries=None)

    def _forget_failures_of(self, handler: str, letters: QuerySet[EventLog]) -> None:
        for letter in letters.only("deliveries", "errors"):
            kept = dict(letter.deliveries or {})
            if handler not in _done(kept):
                kept.pop(handler, None)
            errors = [each for each in letter.errors or [] if each["handler"] in kept]
            self.dead.filter(id=letter.pk).update(deliveries=kept or None, errors=errors or None)

    def _ready_after(self, ids: Sequence[int], delays: Sequence[float]) -> Any:
        if len(set(delays)) == 1:
            return self.after(delays[0]) if delays[0] else Value(None, output_field=DateTimeField())
        each = zip(ids, delays, strict=True)
        return Case(*(When(id=row_id, then=self.after(delay)) for row_id, delay in each))

    @retried
    def edit(self, row_id: int, payload: Any, *, by: str) -> bool:
        """Give a dead letter another payload and revive it; the one it had is kept beside it."""
        with self.atomic():
            letter = self.waiting_lock(self.dead.filter(id=row_id)).first()
            if letter is None:
                return False
            now = self.read_clock().isoformat()
            replaced = {"at": now, "by": by, "payload": letter.payload}
            edits = [*(letter.edits or []), replaced]
            self.dead.filter(id=row_id).update(payload=payload, edits=edits)
            return self.revive([row_id]) == 1

    @retried
    def purge(self, rows: QuerySet[EventLog], *, limit: int = 1000) -> int:
        """Delete up to ``limit`` rows of a query on the log, oldest first."""
        with self.atomic():
            found = self.locked(rows.order_by("finished_at")).values_list("id", "key", "event_id")
            gone = list(found[:limit])
            ids = [row_id for row_id, *_ in gone]
            deleted, _ = EventLog.objects.using(self.using).filter(id__in=ids).delete()
            self.unblock_lanes([event_id for _, key, event_id in gone if key is not None])
        return deleted


def _done(states: dict[str, Any] | None) -> dict[str, Any]:
    return {name: state for name, state in (states or {}).items() if state["state"] == "done"}
