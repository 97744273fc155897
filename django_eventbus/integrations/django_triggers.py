"""A bridge that no write gets past: a trigger of the database, installed by a migration.

On PostgreSQL, in place of ``bridge_model``, where rows are also written by bulk operations, by raw
SQL, by cascades of the database or by other programs.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.db.models import Model

from django_eventbus.conf import settings
from django_eventbus.events import class_for
from django_eventbus.exceptions import BridgeError
from django_eventbus.integrations.model_events import PER_ROW, ModelEvents
from django_eventbus.store import RowTrigger, store_for


class BridgeTrigger(Operation):
    """Install the trigger; run it again, with all it should be, to change it.

    Events go to the namespace and queue that ``EVENTBUS`` names when the migration runs.
    """

    reversible = True

    def __init__(
        self,
        model_name: str,
        *,
        created: str | None = None,
        updated: str | None = None,
        deleted: str | None = None,
        fields: Sequence[str],
        key: str | None = PER_ROW,
        queue: str | None = None,
    ) -> None:
        self.model_name = model_name
        self.created, self.updated, self.deleted = created, updated, deleted
        self.fields, self.key, self.queue = fields, key, queue

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """Models know nothing of it."""

    def database_forwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        self._run(app_label, schema_editor, to_state, install=True)

    def database_backwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        self._run(app_label, schema_editor, from_state, install=False)

    def describe(self) -> str:
        return f"Bridge {self.model_name} to events by a trigger"

    @property
    def migration_name_fragment(self) -> str:
        return f"bridge_{self.model_name.lower()}"

    def _run(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        state: ProjectState,
        *,
        install: bool,
    ) -> None:
        model = state.apps.get_model(app_label, self.model_name)
        alias = schema_editor.connection.alias
        if self.allow_migrate_model(alias, model):
            for statement in store_for(alias).trigger_sql(self.trigger(model), install=install):
                schema_editor.execute(statement, params=None)

    def trigger(self, model: type[Model]) -> RowTrigger:
        events = ModelEvents(
            model,
            created=self.created,
            updated=self.updated,
            deleted=self.deleted,
            fields=self.fields,
            key=self.key,
            queue=self.queue,
        )
        operations = {"INSERT": self.created, "UPDATE": self.updated, "DELETE": self.deleted}
        return RowTrigger(
            table=model._meta.db_table,
            columns={"pk": str(model._meta.pk.column), **_columns(events)},
            as_text=frozenset(
                name
                for name, field in events.fields.items()
                if field.get_internal_type() == "DecimalField"
            ),
            events=tuple(
                (operation, type_name, _version(type_name))
                for operation, type_name in operations.items()
                if type_name is not None
            ),
            key=None if events.key is None else tuple(events.key.pieces),
            namespace=settings.NAMESPACE,
            queue=self.queue or settings.QUEUE,
        )


class RemoveBridgeTrigger(BridgeTrigger):
    """Remove a trigger that an earlier migration installed; takes the same arguments."""

    def database_forwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        self._run(app_label, schema_editor, from_state, install=False)

    def database_backwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        self._run(app_label, schema_editor, to_state, install=True)

    def describe(self) -> str:
        return f"Bridge {self.model_name} to events no more"

    @property
    def migration_name_fragment(self) -> str:
        return f"unbridge_{self.model_name.lower()}"


def _columns(events: ModelEvents) -> dict[str, str]:
    columns = {}
    for name, field in events.fields.items():
        table = field.model._meta.db_table
        if table != events.model._meta.db_table:
            raise BridgeError(
                f"{events.label}.{name} is in the table {table!r}: a trigger sees only its own"
            )
        columns[name] = str(field.column)
    return columns


def _version(type_name: str) -> int:
    cls = class_for(type_name)
    return cls.event_version if cls else 1
