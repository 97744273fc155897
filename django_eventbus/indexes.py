"""Indexes and constraints that each database has in its own way.

Django leaves a conditional index out on MariaDB and MySQL, which would leave our claims without
any. A full index over the same (or named) columns serves the same queries there.
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
    """An index with a condition; ``full_fields`` names the columns where conditions are unknown."""

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
    """Unique among the rows where ``condition`` says that the last field is not NULL.

    Without partial indexes a plain constraint means the same, since NULLs are distinct.
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
        return []  # Django would warn of a missing condition; here nothing is lost without it


class StoredBytes(Func):
    """What a value takes. Cheap, since a constraint is asked at every claim: PostgreSQL tells the
    size of a value that is stored out of line without reading it."""

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
