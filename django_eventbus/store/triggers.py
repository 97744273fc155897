"""PostgreSQL triggers that insert an event into the queue for each write to a table.

A trigger runs in the transaction of the writer. It sends no NOTIFY, which would hold an
instance-wide lock until the commit is on disk; workers find its events with the next poll.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from django.db.backends.utils import truncate_name

from django_eventbus.models import QueuedEvent, QueuedStatus
from django_eventbus.schema.names import MAX_NAME_LENGTH

MAX_IDENTIFIER = 63
MAX_PRODUCER = 64

#: A UUID of version 7, as events.uuid7 makes it: random, with the time in the first 48 bits.
_UUID7 = """encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
        PLACING substring(int8send((date_part('epoch', clock_timestamp()) * 1000)::bigint) FROM 3)
        FROM 1 FOR 6), 52, 1), 53, 1), 'hex')::uuid"""

# The function sets search_path and time zone, because the session of the writer may have other
# values than the session of the migration.
_FUNCTION = """CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql
SET search_path FROM CURRENT SET timezone = 'UTC' SET intervalstyle = 'iso_8601' AS {body}"""

# `written` is OLD in a DELETE, in which NEW is not assigned, and NEW in all other operations.
_BODY = """
DECLARE
    written record;
    payload jsonb;
    changed jsonb = '{{}}';
BEGIN
    IF TG_OP = 'DELETE' THEN written = OLD; ELSE written = NEW; END IF;
    payload = {payload};
    IF TG_OP = 'UPDATE' THEN{changes}
        payload = payload || jsonb_build_object('changed', changed);
    END IF;
    INSERT INTO {queue} ({columns})
    VALUES ({values});
    RETURN NULL;
END"""

_CHANGE = """
        IF OLD.{column} IS DISTINCT FROM NEW.{column} THEN
            changed = changed || jsonb_build_object({name}, jsonb_build_object(
                'old', OLD.{column}{cast}, 'new', NEW.{column}{cast}));
        END IF;"""

_TRIGGER = """CREATE TRIGGER {trigger} AFTER {operation} ON {table}
FOR EACH ROW {condition}EXECUTE FUNCTION {function}({type}, {version})"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTrigger:
    """The triggers of a table. ``columns`` maps each name in the payload to its column."""

    table: str
    columns: Mapping[str, str]
    #: Names in the payload whose values are stored as text, because JSON numbers would lose digits.
    as_text: frozenset[str]
    #: For each operation (INSERT, UPDATE or DELETE): the operation, the event type, its version.
    events: tuple[tuple[str, str, int], ...]
    #: The pieces of the key. A piece is a constant text and the name of the payload value that
    #: follows the text (None if no value follows). Without a key, the whole field is None.
    key: tuple[tuple[str, str | None], ...] | None
    namespace: str
    queue: str

    def install(self) -> list[str]:
        return [*self.remove(), self._function_sql(), *map(self._trigger_sql, self.events)]

    def remove(self) -> list[str]:
        drops = [
            f"DROP TRIGGER IF EXISTS {_trigger_name(operation)} ON {_name(self.table)}"
            for operation in ("INSERT", "UPDATE", "DELETE")
        ]
        return [*drops, f"DROP FUNCTION IF EXISTS {self._function}()"]

    @property
    def _function(self) -> str:
        plain = self.table.replace('"', "").replace(".", "_")
        return _name(truncate_name(f"eventbus_{plain}", MAX_IDENTIFIER))

    def _function_sql(self) -> str:
        body = _BODY.format(
            payload=" || ".join(
                f"jsonb_build_object({_text(name)}, written.{_name(column)}{self._cast(name)})"
                for name, column in self.columns.items()
            ),
            changes="".join(
                _CHANGE.format(name=_text(name), column=_name(column), cast=self._cast(name))
                for name, column in self.columns.items()
                if name != "pk"
            ),
            queue=_name(QueuedEvent._meta.db_table),
            columns=", ".join(self._row()),
            values=", ".join(self._row().values()),
        )
        return _FUNCTION.format(function=self._function, body=_text(body))

    def _row(self) -> dict[str, str]:
        """Return the columns that the trigger inserts, each with the SQL of its value."""
        return {
            "event_id": _UUID7,
            "namespace": _text(self.namespace),
            "queue": _text(self.queue),
            "type": "TG_ARGV[0]",
            "version": "TG_ARGV[1]::int",
            "payload": "payload",
            "key": self._key_sql(),
            "priority": "0",
            "producer": _text(f"trigger:{self.table}"[:MAX_PRODUCER]),
            "attempts": "0",
            "crashes": "0",
            "interruptions": "0",
            "status": _text(QueuedStatus.PENDING.value),
        }

    def _key_sql(self) -> str:
        if self.key is None:
            return "NULL"
        pieces = []
        for text, name in self.key:
            pieces.append(_text(text))
            if name is not None:
                pieces.append(f"written.{_name(self.columns[name])}")
        return f"NULLIF(left(concat({', '.join(pieces)}), {MAX_NAME_LENGTH}), '')"

    def _trigger_sql(self, event: tuple[str, str, int]) -> str:
        operation, type_name, version = event
        differs = " OR ".join(
            f"OLD.{_name(column)} IS DISTINCT FROM NEW.{_name(column)}"
            for name, column in self.columns.items()
            if name != "pk"
        )
        return _TRIGGER.format(
            trigger=_trigger_name(operation),
            operation=operation,
            table=_name(self.table),
            condition=f"WHEN ({differs}) " if operation == "UPDATE" else "",
            function=self._function,
            type=_text(type_name),
            version=_text(str(version)),
        )

    def _cast(self, name: str) -> str:
        return "::text" if name in self.as_text else ""


def _trigger_name(operation: str) -> str:
    return f"eventbus_{operation.lower()}"


def _name(identifier: str) -> str:
    """Quote an identifier unless it is quoted already, as Django does."""
    return identifier if identifier.startswith('"') else f'"{identifier}"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
