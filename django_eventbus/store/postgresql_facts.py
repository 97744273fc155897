"""Facts about a PostgreSQL server and the tables of the bus, for the checks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from typing import Any, NamedTuple

from django.apps import apps
from django.db.models import Model

from django_eventbus.internals.django import open_separate_session
from django_eventbus.models import QueuedEvent
from django_eventbus.store import postgresql_facts_sql as sql
from django_eventbus.store.base import Store
from django_eventbus.store.postgresql_notify import cut_off_after

#: Seconds after which a session of the pooler test is cut off: a pooler whose sessions are all in
#: use would let it wait.
POOLER_ANSWER = 3.0
#: How often each of the two sessions of the pooler test reads the process id of its server.
POOLER_ROUNDS = 3


class Server(NamedTuple):
    version_number: int
    version: str
    is_standby: bool
    #: The isolation level of a transaction of this project.
    isolation: str
    #: The part of the NOTIFY queue that is in use, from 0 to 1.
    notify_usage: float
    #: The quoted name of the role of the session.
    role: str
    #: The quoted name of the database of the session.
    database: str


class Session(NamedTuple):
    """A session of the server. A state or time that this role may not see is None."""

    pid: int
    role: str | None
    application: str | None
    state: str | None
    #: Seconds since the transaction of the session began; None if there is no transaction.
    seconds: float | None


class Snapshot(NamedTuple):
    """A session whose snapshot or transaction id keeps old row versions."""

    pid: int
    role: str | None
    application: str | None
    state: str | None
    seconds: float | None
    #: Seconds since ``state`` last changed.
    in_state: float | None
    #: The age of the snapshot or transaction id, in transactions.
    transactions: int


class Prepared(NamedTuple):
    gid: str
    role: str
    seconds: float
    transactions: int


class HeldByReplication(NamedTuple):
    """A replication slot or a standby that keeps old row versions."""

    kind: str
    name: str
    is_active: bool
    transactions: int


class Table(NamedTuple):
    """A table of the bus. The numbers of rows are estimates of the statistics."""

    name: str
    #: Whether the rows survive a crash: the table is not UNLOGGED.
    is_logged: bool
    rows_at_analyze: float
    options: Mapping[str, str]
    toast_options: Mapping[str, str]
    age: int
    multixact_age: int
    live: int
    dead: int
    #: Rows that were inserted, updated or deleted since the last ANALYZE.
    changed: int
    #: Seconds since the last ANALYZE; None if there was none.
    analyzed_before: float | None
    #: Seconds since the last VACUUM; None if there was none.
    vacuumed_before: float | None


class Size(NamedTuple):
    """Bytes of a table. ``width`` is the average width of its rows, None if unknown."""

    name: str
    heap: int
    indexes: int
    index_count: int
    width: float | None


class ExistingIndex(NamedTuple):
    on_table: str
    name: str
    is_valid: bool
    is_unique: bool
    is_partial: bool
    #: None for an index on expressions only.
    columns: list[str] | None
    is_being_built: bool


class Constraint(NamedTuple):
    on_table: str
    name: str
    #: ``pg_constraint.contype``: for example, ``f`` is a foreign key.
    kind: str
    is_deferred: bool
    columns: list[str]


class LockWait(NamedTuple):
    """A session that waits for a lock on a table of the bus."""

    pid: int
    role: str | None
    application: str | None
    mode: str
    relation: str
    #: The process ids of the sessions that it waits for; 0 is a prepared transaction.
    blockers: list[int]
    seconds: float | None


class StrongLock(NamedTuple):
    """A lock that blocks publishers or workers. ``pid`` is None for a prepared transaction."""

    pid: int | None
    role: str | None
    application: str | None
    state: str | None
    seconds: float | None
    relation: str
    mode: str


class SilentTrigger(NamedTuple):
    """A disabled trigger; the names are quoted."""

    on_table: str
    name: str
    is_internal: bool


class Limit(NamedTuple):
    """A limit on connections: ``max_connections``, ``database`` or ``role``."""

    name: str
    used: int
    allowed: int


class PostgreSQLFacts:
    """Reads of a PostgreSQL database that change nothing and read no row of an event."""

    def __init__(self, store: Store) -> None:
        self.store = store
        quote = store.connection.ops.quote_name
        self._tables = {"tables": [quote(model._meta.db_table) for model in models_of_the_bus()]}

    def server(self) -> Server:
        (row,) = self._read(sql.SERVER)
        return Server(**row)

    def settings(self, *names: str) -> dict[str, str]:
        """Return settings of the server as pg_settings shows them, in their base units.

        A setting that this version does not have is missing.
        """
        rows = self._read(sql.SETTINGS, names=list(names))
        return {row["name"]: row["value"] for row in rows}

    # -- sessions

    def snapshots(self) -> list[Snapshot]:
        return [Snapshot(**row) for row in self._read(sql.SNAPSHOTS)]

    def sessions(self, pids: Collection[int]) -> list[Session]:
        return [Session(**row) for row in self._read(sql.SESSIONS, pids=list(pids))]

    def prepared_transactions(self) -> list[Prepared]:
        return [Prepared(**row) for row in self._read(sql.PREPARED)]

    def held_by_replication(self) -> list[HeldByReplication]:
        return [HeldByReplication(**row) for row in self._read(sql.HELD_BY_REPLICATION)]

    def lock_waits(self) -> list[LockWait]:
        return [LockWait(**row) for row in self._read(sql.LOCK_WAITS)]

    def strong_locks(self) -> list[StrongLock]:
        return [StrongLock(**row) for row in self._read(sql.STRONG_LOCKS)]

    def connection_limits(self) -> list[Limit]:
        return [Limit(**row) for row in self._read(sql.CONNECTIONS)]

    def sessions_are_shared(self) -> bool:
        """Return whether a pooler gives each transaction another session.

        Two connections that are open at the same time have two server processes, which never
        change. Behind a pooler in transaction mode they use the same process in turn, or the
        process of a connection changes. Raises OperationalError if a connection gets no answer.
        """
        with (
            closing(self._separate_session()) as first,
            closing(self._separate_session()) as second,
        ):
            seen = [
                [self._process_id(raw) for raw in (first, second)] for _ in range(POOLER_ROUNDS)
            ]
        of_first, of_second = ({*pids} for pids in zip(*seen, strict=True))
        return len(of_first) > 1 or len(of_second) > 1 or not of_first.isdisjoint(of_second)

    def _separate_session(self) -> Any:
        raw = open_separate_session(self.store.connection)
        raw.autocommit = True
        return raw

    def _process_id(self, raw: Any) -> int:
        with cut_off_after(POOLER_ANSWER, raw):
            pid: int = raw.execute("SELECT pg_backend_pid()").fetchone()[0]
        return pid

    # -- tables

    def tables(self) -> list[Table]:
        return [
            Table(
                **{
                    **row,
                    "options": _parsed(row["options"]),
                    "toast_options": _parsed(row["toast_options"]),
                }
            )
            for row in self._read(sql.TABLES)
        ]

    def sizes(self) -> list[Size]:
        return [Size(**row) for row in self._read(sql.SIZES)]

    def indexes(self) -> list[ExistingIndex]:
        return [ExistingIndex(**row) for row in self._read(sql.INDEXES)]

    def constraints(self) -> list[Constraint]:
        return [Constraint(**row) for row in self._read(sql.CONSTRAINTS)]

    def silent_triggers(self) -> list[SilentTrigger]:
        """Return the disabled triggers of bridges and of the tables of the bus."""
        return [SilentTrigger(**row) for row in self._read(sql.SILENT_TRIGGERS)]

    def number_of_bridge_triggers(self) -> int:
        (row,) = self._read(sql.BRIDGE_TRIGGERS)
        return int(row["number"])

    def _read(self, statement: str, **params: Any) -> list[dict[str, Any]]:
        return self.store.read_rows(statement, {**self._tables, **params})


def models_of_the_bus() -> list[type[Model]]:
    """Return the models that have a table."""
    config = apps.get_app_config(QueuedEvent._meta.app_label)
    return [model for model in config.get_models() if not model._meta.proxy]


def _parsed(options: list[str] | None) -> dict[str, str]:
    """Parse storage parameters: ``fillfactor=40``."""
    return dict(option.split("=", 1) for option in options or ())
