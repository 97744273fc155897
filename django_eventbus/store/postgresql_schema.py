"""The schema that the migrations create on PostgreSQL, and what a database lacks of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from django.db.models import CheckConstraint, Model, UniqueConstraint

from django_eventbus.models import EventLane, EventLog, EventWorker, FlowControl, QueuedEvent
from django_eventbus.store import postgresql_remedies as remedies
from django_eventbus.store.postgresql_facts import (
    Constraint,
    ExistingIndex,
    PostgreSQLFacts,
    models_of_the_bus,
)

_VACUUMED_BY_NUMBER_OF_ROWS = {
    "autovacuum_vacuum_scale_factor": "0.0",
    "autovacuum_vacuum_threshold": "10000",
    "autovacuum_vacuum_cost_delay": "0",
    "vacuum_truncate": "off",
}
#: The storage parameters of the tables. A test compares them with those of a migrated database.
STORAGE: Mapping[str, Mapping[str, str]] = {
    QueuedEvent._meta.db_table: {"fillfactor": "40", **_VACUUMED_BY_NUMBER_OF_ROWS},
    EventLane._meta.db_table: {"fillfactor": "50", **_VACUUMED_BY_NUMBER_OF_ROWS},
    EventWorker._meta.db_table: {"fillfactor": "50"},
    FlowControl._meta.db_table: {"fillfactor": "50"},
}
#: The indexes that the migration creates on PostgreSQL only: their columns and condition.
OWN_INDEXES = {
    "eventbus_log_dead_key": "(namespace, key) WHERE NOT status = 'COMPLETED' AND key IS NOT NULL",
    "eventbus_log_dead_type": "(namespace, type varchar_pattern_ops) "
    "WHERE NOT status = 'COMPLETED'",
}


class Missing(NamedTuple):
    """Something that the database lacks, and the statement or command that creates it."""

    table: str
    what: str
    statement: str


def differing_storage(table: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the storage parameters of the migration that the table does not have."""
    expected = STORAGE.get(table, {})
    return {
        name: value
        for name, value in expected.items()
        if _plain(options.get(name)) != _plain(value)
    }


def _plain(value: str | None) -> float | str | None:
    """Return a value that is equal for equal settings: 0 and 0.0, off and false."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return "off" if value in ("off", "false", "no", "f", "n") else "on"


def missing_in_schema(facts: PostgreSQLFacts) -> Iterator[Missing]:
    """Yield the tables, indexes and constraints of the models that do not exist.

    The migration names some of them. The others have a name by Django, which may change, so they
    are recognised by their columns.
    """
    connection = facts.store.connection
    editor = connection.SchemaEditorClass(connection, collect_sql=True)
    indexes, constraints = facts.indexes(), facts.constraints()
    tables = {each.name for each in facts.tables()}
    for model in models_of_the_bus():
        table = model._meta.db_table
        if table not in tables:
            yield Missing(table, "table", f"manage.py migrate {model._meta.app_label}")
            continue
        ours = [each for each in indexes if each.on_table == table]
        checked = [each for each in constraints if each.on_table == table]
        yield from _missing_named(
            model, editor, {each.name for each in ours} | {each.name for each in checked}
        )
        for field in model._meta.local_concrete_fields:
            yield from _missing_of_field(field, ours, checked)
    named = {each.name for each in indexes}
    table = EventLog._meta.db_table
    for name, definition in OWN_INDEXES.items():
        if name not in named and table in tables:
            statement = remedies.create_index(table, name, definition)
            yield Missing(table, f"index {name}", statement)


def _missing_named(model: type[Model], editor: Any, existing: set[str]) -> Iterator[Missing]:
    table = model._meta.db_table
    for index in model._meta.indexes:
        if index.name not in existing:
            created = index.create_sql(model, editor, concurrently=True)
            yield Missing(table, f"index {index.name}", f"{created};")
    for constraint in model._meta.constraints:
        if constraint.name not in existing and isinstance(
            constraint, CheckConstraint | UniqueConstraint
        ):
            created = constraint.create_sql(model, editor)
            yield Missing(table, f"constraint {constraint.name}", f"{created};")


def _missing_of_field(
    field: Any,
    indexes: Collection[ExistingIndex],
    constraints: Collection[Constraint],
) -> Iterator[Missing]:
    table, column = field.model._meta.db_table, str(field.column)
    whole = [each for each in indexes if each.columns == [column] and not each.is_partial]
    if field.unique and not any(each.is_unique for each in whole):
        what = "primary key" if field.primary_key else "unique constraint"
        yield Missing(table, f"{what} on {column}", remedies.add_unique(table, column, what))
    if field.db_index and not field.unique and not whole:
        yield Missing(table, f"index on {column}", remedies.create_index(table, "", f"({column})"))
    if field.remote_field and field.db_constraint:
        keys = [each for each in constraints if each.kind == "f" and each.columns == [column]]
        # The commit guard works only if the foreign key is checked at COMMIT.
        if not any(each.is_deferred for each in keys):
            target = field.target_field
            statement = remedies.add_foreign_key(
                table, column, target.model._meta.db_table, str(target.column)
            )
            yield Missing(table, f"deferred foreign key on {column}", statement)
