"""The events of a model's rows: types, payload and key.

Signals, querysets and triggers notice different writes, but publish the same events for a write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from string import Formatter
from typing import Any

from django.core.exceptions import FieldDoesNotExist
from django.db.models import Field, FileField, Model, QuerySet

from django_eventbus.conf import settings
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.exceptions import BridgeError, InvalidPayloadError
from django_eventbus.publishing.publisher import publish, publish_many
from django_eventbus.schema.names import check_name
from django_eventbus.schema.typed_payloads import as_json
from django_eventbus.store import default_alias

#: The values of a row, by the name of the field or "pk".
Values = dict[str, Any]
#: An event type and its payload.
Item = tuple[str, Values]

#: The default key: one key per row. All events of a row have the same key, so they are handled in
#: order.
PER_ROW = "<model>:{pk}"
CHANGED = "changed"
READ_CHUNK = 500


class Key:
    """A key with placeholders for values of the payload, such as ``order:{pk}``."""

    def __init__(self, template: str) -> None:
        check_name(template, "the key")
        self.template = template
        #: Pairs of a fixed text and the name of the value that follows the text. The name is None
        #: if no value follows.
        self.pieces: list[tuple[str, str | None]] = []
        for text, name, spec, conversion in Formatter().parse(template):
            if spec or conversion or name == "":
                raise BridgeError(
                    f"the key {template!r} has an invalid placeholder: write the name of a value "
                    "in braces, without format or conversion, such as 'order:{pk}'"
                )
            self.pieces.append((text, name))

    @property
    def names(self) -> set[str]:
        return {name for _, name in self.pieces if name is not None}

    def of(self, payload: Any) -> str:
        return "".join(text + self._text(payload, name) for text, name in self.pieces)

    def of_item(self, item: Any) -> str:
        return self.of(item[1])

    def _text(self, payload: Any, name: str | None) -> str:
        if name is None:
            return ""
        if not isinstance(payload, dict) or name not in payload:
            raise BridgeError(
                f"the key {self.template!r} needs the value {name!r}, which the payload lacks"
            )
        value = payload[name]
        return "" if value is None else str(value)


class ModelEvents:
    """The events of one model. The constructor raises BridgeError for invalid arguments."""

    def __init__(
        self,
        model: type[Model],
        *,
        created: str | None,
        updated: str | None,
        deleted: str | None,
        fields: Sequence[str],
        key: str | None,
        queue: str | None,
    ) -> None:
        self.model = model
        self.label = model._meta.label
        self.created, self.updated, self.deleted = created, updated, deleted
        self.queue = queue
        if model._meta.app_label == "django_eventbus":
            raise BridgeError(
                f"{self.label} is a model of django_eventbus: each event would publish another one"
            )
        if not self.types:
            raise BridgeError(
                f"{self.label} has no event type: pass created=, updated= or deleted="
            )
        for each in self.types:
            check_name(each, "the event type")
        if isinstance(fields, str):
            raise BridgeError(f"fields of {self.label} must be a list of names, not {fields!r}")
        self.fields: dict[str, Field[Any, Any]] = {name: self._field(name) for name in fields}
        if updated is not None and not self.fields:
            raise BridgeError(
                f"{updated!r} needs the fields of {self.label} that it watches: pass fields=[…]"
            )
        label = model._meta.label_lower
        self.key = None if key is None else Key(key.replace("<model>", label))
        self._check_key()

    @property
    def types(self) -> list[str]:
        return [each for each in (self.created, self.updated, self.deleted) if each is not None]

    def _field(self, name: str) -> Field[Any, Any]:
        try:
            field = self.model._meta.get_field(name)
        except FieldDoesNotExist:
            known = [each.name for each in self.model._meta.concrete_fields]
            raise BridgeError(
                f"{self.label} has no field {name!r}{did_you_mean(name, known)}"
            ) from None
        if not isinstance(field, Field) or not field.concrete or field.many_to_many:
            raise BridgeError(
                f"{self.label}.{name} is not a column: remove it from fields, "
                "or bridge the signal m2m_changed"
            )
        if name == CHANGED:
            raise BridgeError(
                f"{self.label}.{name} cannot be in fields: the payload uses the name {CHANGED!r} "
                "for the changed values"
            )
        return field

    def _check_key(self) -> None:
        for name in self.key.names if self.key else ():
            if name != "pk" and name not in self.fields:
                hint = did_you_mean(name, ["pk", *self.fields])
                raise BridgeError(
                    f"the key of {self.label} uses {name!r}, which is not in fields{hint}"
                )

    def is_about_the_same_as(self, other: ModelEvents) -> bool:
        return self.model is other.model and self.types == other.types

    def __str__(self) -> str:
        return f"the bridge from {self.label} to {', '.join(map(repr, self.types))}"

    def read(self, using: str, keys: Iterable[Any]) -> dict[Any, Values]:
        """Return the values of these rows in the database, by primary key."""
        wanted = list(keys)
        found: dict[Any, Values] = {}
        for start in range(0, len(wanted), READ_CHUNK):
            some = wanted[start : start + READ_CHUNK]
            found |= self.values_of(self.rows(using).filter(pk__in=some))
        return found

    def rows(self, using: str) -> QuerySet[Any]:
        """Return all rows. A manager of the model is not used, because a manager may hide rows."""
        return QuerySet(self.model, using=using)

    def values_of(self, rows: QuerySet[Any]) -> dict[Any, Values]:
        names = ["pk", *self.fields]
        columns = ["pk", *(field.attname for field in self.fields.values())]
        return {row[0]: dict(zip(names, row, strict=True)) for row in rows.values_list(*columns)}

    def known_of(self, instance: Model) -> Values:
        """Return the values that the instance has in memory.

        Deferred fields and values that the database computes are missing.
        """
        pk = self.model._meta.pk.to_python(instance.pk)
        found = {name: _value(field, instance) for name, field in self.fields.items()}
        known = {name: value for name, value in found.items() if value is not _UNKNOWN}
        return {"pk": pk, **known}

    def names_among(self, written: Collection[str] | None) -> set[str]:
        """Return the names in ``fields`` whose values may change if the ``written`` fields change.

        ``written=None`` means that all fields are written.
        """
        return {
            name
            for name, field in self.fields.items()
            if written is None or field.generated or {field.name, field.attname} & set(written)
        }

    def of_created(self, values: Values) -> list[Item]:
        return [] if self.created is None else [(self.created, _payload(values))]

    def of_updated(self, before: Values, after: Values) -> list[Item]:
        """Return a list with the event of an update; empty if no field changed.

        A field whose old value is unknown counts as changed.
        """
        changed = {
            name: _payload({"old": before[name]} if name in before else {})
            | _payload({"new": after[name]})
            for name in self.fields
            if name in after and not (name in before and before[name] == after[name])
        }
        if self.updated is None or not changed:
            return []
        return [(self.updated, {**_payload(after), CHANGED: changed})]

    def of_deleted(self, values: Values) -> list[Item]:
        return [] if self.deleted is None else [(self.deleted, _payload(values))]

    def publish(self, items: list[Item], using: str) -> None:
        publish_items(str(self), items, key=self.key, queue=self.queue, using=using)


def publish_items(
    bridge: str, items: list[Item], *, key: Key | None, queue: str | None, using: str | None
) -> None:
    """Publish events, in the database of the write if that database has the tables of the bus.

    Otherwise ``publish`` chooses the database. Raise BridgeError if an event cannot be published,
    so that no row is committed without its event.
    """
    options: dict[str, Any] = {"queue": queue, "using": _home(using)}
    try:
        if len(items) == 1:
            type_name, payload = items[0]
            publish(type_name, payload, key=key.of(payload) if key else None, **options)
        elif items:
            publish_many(items, key=key.of_item if key else None, **options)
    except (InvalidPayloadError, BridgeError) as error:
        raise BridgeError(f"{bridge} could not publish: {error}") from error


def _home(using: str | None) -> str | None:
    """Return the database of the write if it has the tables of the bus, else None.

    For None, ``publish`` chooses a database. If a transaction is open on another database,
    ``publish`` warns or raises an error, as set by FOREIGN_TRANSACTION.
    """
    return using if using in (settings.DATABASES or [default_alias()]) else None


_UNKNOWN = object()


def _value(field: Field[Any, Any], instance: Model) -> Any:
    """Return the value of a field in the form in which the database returns it."""
    value = instance.__dict__.get(field.attname, _UNKNOWN)
    if value is _UNKNOWN or field.generated or hasattr(value, "resolve_expression"):
        return _UNKNOWN
    return str(value) if isinstance(field, FileField) else field.to_python(value)


def _payload(values: Values) -> Values:
    return {name: as_json(value) for name, value in values.items()}


_bridged: list[ModelEvents] = []


def add_bridge(events: ModelEvents) -> None:
    """Register the events of a model.

    Raise BridgeError if another bridge of the model publishes one of the types.
    """
    for each in _bridged:
        if each.model is events.model and set(each.types) & set(events.types):
            raise BridgeError(f"{each} exists already: use another event type")
    _bridged.append(events)


def remove_bridge(events: ModelEvents) -> None:
    if events in _bridged:
        _bridged.remove(events)


def events_of(model: type[Model]) -> Iterable[ModelEvents]:
    """Return the bridged events of a model, of its proxied model and of its parents."""
    return [each for each in _bridged if issubclass(model, each.model)]
