"""Migration operations that install a trigger, so that every write to a table publishes an event.

Use ``BridgeTrigger`` on PostgreSQL, in place of ``bridge_model``, if rows are also written by bulk
operations, raw SQL, cascades of the database or other programs.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.db.models import Model

from django_eventbus.conf import settings
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.events import class_for
from django_eventbus.exceptions import BridgeError
from django_eventbus.integrations.model_events import PER_ROW, ModelEvents
from django_eventbus.store import RowTrigger, store_for


class BridgeTrigger(Operation):
    """Install the trigger of a model. To change it, run the operation again with all arguments.

    ``model_name`` is the name of a model of the migration's app. For a model of another app, put
    the label of that app before the name: ``"auth.User"`` or ``settings.AUTH_USER_MODEL``. The
    migration must then depend on a migration of that app in which the model has the ``fields``.
    The namespace of the events, and their queue if ``queue`` is not given, are the values that
    ``EVENTBUS`` has when the migration runs.
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
        """Do nothing: the trigger does not change the state of models."""

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
        return f"Create the event trigger of {self.model_name}"

    @property
    def migration_name_fragment(self) -> str:
        return f"bridge_{self._name_in_file}"

    @property
    def _name_in_file(self) -> str:
        return self.model_name.lower().replace(".", "_")

    def _run(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        state: ProjectState,
        *,
        install: bool,
    ) -> None:
        model = self._model(app_label, state)
        alias = schema_editor.connection.alias
        if self.allow_migrate_model(alias, model):
            for statement in store_for(alias).trigger_sql(self.trigger(model), install=install):
                schema_editor.execute(statement, params=None)

    def _model(self, app_label: str, state: ProjectState) -> type[Model]:
        """Return the model as it is at this point of the migrations."""
        label, _, name = self.model_name.rpartition(".")
        try:
            model = state.apps.get_model(label or app_label, name)
        except LookupError:
            raise BridgeError(self._what_is_missing(app_label, state)) from None
        if model._meta.swapped:
            raise BridgeError(
                f"{model._meta.label} is replaced by {model._meta.swapped}, so it has no table: "
                f"bridge {model._meta.swapped}"
            )
        if model._meta.proxy:
            concrete = model._meta.concrete_model
            raise BridgeError(
                f"{model._meta.label} is a proxy and has no table of its own: "
                f"bridge {concrete._meta.label}"
            )
        return model

    def _what_is_missing(self, app_label: str, state: ProjectState) -> str:
        label, _, name = self.model_name.rpartition(".")
        label = label or app_label
        known = [model.name for (app, _), model in state.models.items() if app == label]
        if known or label == app_label:
            hint = did_you_mean(name, known)
            return f"there is no model {label}.{name} at this point of the migrations{hint}"
        return (
            f"no model of the app {label!r} is known at this point of the migrations: add a "
            f"migration of {label!r} to the dependencies of the migration that bridges "
            f"{self.model_name}"
        )

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
    """Remove a trigger that an earlier migration installed.

    Pass the arguments with which the trigger was installed.
    """

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
        return f"Remove the event trigger of {self.model_name}"

    @property
    def migration_name_fragment(self) -> str:
        return f"unbridge_{self._name_in_file}"


def _columns(events: ModelEvents) -> dict[str, str]:
    columns = {}
    for name, field in events.fields.items():
        table = field.model._meta.db_table
        if table != events.model._meta.db_table:
            raise BridgeError(
                f"{events.label}.{name} is in the table {table!r}, which a trigger on "
                f"{events.model._meta.db_table!r} cannot read: remove it from fields"
            )
        columns[name] = str(field.column)
    return columns


def _version(type_name: str) -> int:
    cls = class_for(type_name)
    return cls.event_version if cls else 1
