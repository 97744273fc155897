"""The log: move events into it, retry dead letters, delete old rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from django.db.models import Case, DateTimeField, F, Model, QuerySet, TextField, Value, When
from django.db.models.expressions import Combinable

from django_eventbus.models import EventFields, EventLog, QueuedEvent, QueuedStatus
from django_eventbus.store.history import LIFE_COLUMNS, carried_over, history_of, retry_of
from django_eventbus.store.lanes import Lanes
from django_eventbus.store.rows import retried

MOVED_COLUMNS = tuple(field.attname for field in EventFields._meta.local_fields)
LOG = EventLog._meta.db_table
_FIELDS = {field.name: field for field in EventLog._meta.concrete_fields}

_END_LIFE = f"UPDATE {LOG} SET deliveries = %s, errors = %s, history = %s WHERE id = %s"


class Log(Lanes):
    """Move rows between queue and log, and unblock lanes."""

    def _copy(
        self,
        source: QuerySet[Any],
        target: type[Model],
        values: dict[str, Combinable],
        *,
        keeps_id: bool = True,
    ) -> int:
        """Copy rows to another table with INSERT … SELECT; return how many.

        The columns in ``values`` are computed by its expressions. All other columns are copied. If
        ``keeps_id`` is false, the database assigns new row ids, in the order of the query.
        """
        names = [name for name in MOVED_COLUMNS if name not in values]
        if keeps_id:
            names.insert(0, "id")
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

    def page_of_dead(self, rows: QuerySet[Any], *, limit: int) -> list[tuple[int, datetime]]:
        """Return (id, finished_at) of the first dead letters, in the order of their index.

        In any other order, the query for each page would read all dead letters.
        """
        ordered = rows.order_by("namespace", "finished_at", "id")
        with self.reading_by_index():
            return list(ordered.values_list("id", "finished_at")[:limit])

    @retried
    def revive(
        self,
        ids: Collection[int],
        *,
        delay: float | None = None,
        every: float = 0.0,
        handler: str | None = None,
        by: str = "",
        edited: bool = False,
    ) -> int:
        """Move dead letters back into the queue with zero attempts; return how many.

        The first event is ready after ``delay`` seconds, and each next event ``every`` seconds
        after the previous event. Handlers that were done stay done. If ``handler`` is given, only
        this handler runs again. ``history`` keeps the earlier attempts and errors, the name of the
        operator (``by``), and whether the payload was changed (``edited``).
        """
        with self.atomic():
            dead = self.dead.filter(id__in=list(ids)).order_by("id")
            letters = list(self.locked(dead).only(*LIFE_COLUMNS))
            if not letters:
                return 0
            ids = [letter.pk for letter in letters]
            moved = self.dead.filter(id__in=ids)
            delays = [(delay or 0.0) + number * every for number in range(len(letters))]
            fresh: dict[str, Any] = {
                "attempts": Value(0),
                "crashes": Value(0),
                "interruptions": Value(0),
                "claimed_by": Value(None, output_field=TextField()),
                "processing_started_at": Value(None, output_field=DateTimeField()),
                "status": Value(QueuedStatus.PENDING.value),
                "available_at": self._ready_after(ids, delays),
                "due_at": self._ready_after(ids, delays) if any(delays) else self.now,
                "first_dead_at": _FIRST_DEAD_AT,
                "first_dead_of": F("error_fingerprint"),
            }
            self._end_lives(letters, retry_of(handler, by, edited, at=self.read_clock()))
            revived = self._copy(moved, QueuedEvent, fresh)
            moved.delete()
            event_ids = (letter.event_id for letter in letters)
            self.resume_lanes(dict(zip(event_ids, delays, strict=True)))
        return revived

    def _end_lives(self, letters: Sequence[EventLog], retry: dict[str, Any]) -> None:
        """Write the history of dead letters, and the deliveries and errors that a retry keeps.

        This method does not use the ORM, which is slow for the many thousands of dead letters that
        one retry may include.
        """
        rows = []
        for letter in letters:
            deliveries, errors = carried_over(letter, retry["retried_handler"])
            values = {
                "deliveries": deliveries or None,
                "errors": errors or None,
                "history": history_of(letter, errors, retry),
                "id": letter.pk,
            }
            rows.append([self._prepared_for_log(name, value) for name, value in values.items()])
        with self.connection.cursor() as cursor:
            cursor.executemany(_END_LIFE, rows)

    def _prepared_for_log(self, column: str, value: Any) -> Any:
        return _FIELDS[column].get_db_prep_save(value, self.connection)

    def _ready_after(self, ids: Sequence[int], delays: Sequence[float]) -> Any:
        if len(set(delays)) == 1:
            return self.after(delays[0]) if delays[0] else Value(None, output_field=DateTimeField())
        each = zip(ids, delays, strict=True)
        return Case(*(When(id=row_id, then=self.after(delay)) for row_id, delay in each))

    @retried
    def edit(self, row_id: int, payload: Any, *, by: str) -> bool:
        """Replace the payload of a dead letter and retry it; ``edits`` keeps the old payload."""
        with self.atomic():
            letter = self.waiting_lock(self.dead.filter(id=row_id)).first()
            if letter is None:
                return False
            now = self.read_clock().isoformat()
            replaced = {"at": now, "by": by, "payload": letter.payload}
            edits = [*(letter.edits or []), replaced]
            self.dead.filter(id=row_id).update(payload=payload, edits=edits)
            return self.revive([row_id], by=by, edited=True) == 1

    @retried
    def purge(self, rows: QuerySet[EventLog], *, limit: int = 1000) -> int:
        """Delete up to ``limit`` rows of a query on the log, oldest first; return how many."""
        with self.atomic():
            found = self.locked(rows.order_by("finished_at")).values_list("id", "key", "event_id")
            gone = list(found[:limit])
            ids = [row_id for row_id, *_ in gone]
            deleted, _ = EventLog.objects.using(self.using).filter(id__in=ids).delete()
            self.unblock_lanes([event_id for _, key, event_id in gone if key is not None])
        return deleted


#: The time at which the event first became a dead letter with its current error.
_FIRST_DEAD_AT = Case(
    When(first_dead_of=F("error_fingerprint"), then=F("first_dead_at")), default=F("finished_at")
)
