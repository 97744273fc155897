"""Indexes and constraints that differ between databases.

MariaDB and MySQL have no partial indexes. On these databases Django would create no index, and
claims would read the whole table. The classes of this module create a full index there instead,
over the same columns or over ``full_fields``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.models import (
    BigIntegerField,
    CheckConstraint,
    F,
    Func,
    Index,
    Model,
    Q,
    UniqueConstraint,
)
from django.db.models.lookups import LessThanOrEqual


class PartialIndex(Index):
    """An index with a condition, or a full index if the database has no partial indexes."""

    def __init__(self, *, full_fields: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.full_fields = tuple(full_fields)

    def create_sql(
        self,
        model: type[Model],
        schema_editor: BaseDatabaseSchemaEditor,
        using: str = "",
        **kwargs: Any,
    ) -> Any:
        if schema_editor.connection.features.supports_partial_indexes:
            return super().create_sql(model, schema_editor, using, **kwargs)
        full = Index(fields=self.full_fields or self.fields, name=self.name)
        return full.create_sql(model, schema_editor, using, **kwargs)

    def deconstruct(self) -> Any:
        path, args, kwargs = super().deconstruct()
        if self.full_fields:
            kwargs["full_fields"] = self.full_fields
        return path, args, kwargs


class UniqueWhenSet(UniqueConstraint):
    """A unique constraint on the rows in which the last field is not NULL (the ``condition``).

    On a database without partial indexes, a constraint without the condition has the same effect,
    because two NULL values do not violate it.
    """

    def create_sql(
        self, model: type[Model] | None, schema_editor: BaseDatabaseSchemaEditor | None
    ) -> Any:
        return self._fitting(schema_editor).create_sql(model, schema_editor)

    def constraint_sql(
        self, model: type[Model] | None, schema_editor: BaseDatabaseSchemaEditor | None
    ) -> Any:
        return self._fitting(schema_editor).constraint_sql(model, schema_editor)

    def remove_sql(
        self, model: type[Model] | None, schema_editor: BaseDatabaseSchemaEditor | None
    ) -> Any:
        return self._fitting(schema_editor).remove_sql(model, schema_editor)

    def _fitting(self, schema_editor: Any) -> UniqueConstraint:
        if schema_editor.connection.features.supports_partial_indexes:
            return UniqueConstraint(fields=self.fields, name=self.name, condition=self.condition)
        return UniqueConstraint(fields=self.fields, name=self.name)

    def _check(self, model: Any, connection: Any) -> list[Any]:
        return []  # Suppress Django's warning that the condition is ignored.


class StoredBytes(Func):
    """The stored size of a value.

    The function must be cheap, because the constraint of ``no_larger_than`` is checked whenever a
    claim updates the row. For a value that is stored out of line (TOAST), PostgreSQL returns the
    size without reading the value.
    """

    output_field = BigIntegerField()

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, function="pg_column_size", **context)

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = "LENGTH(CAST(%(expressions)s AS BLOB))"
        return self.as_sql(compiler, connection, template=template, **context)

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, function="OCTET_LENGTH", **context)


def no_larger_than(size: int, *fields: str, name: str) -> CheckConstraint:
    within = (LessThanOrEqual(StoredBytes(F(field)), size) for field in fields)
    return CheckConstraint(condition=Q(*within), name=name)
