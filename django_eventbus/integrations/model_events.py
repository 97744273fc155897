"""What is told of a model's rows: which events, of which fields, under which key.

Signals, querysets and triggers each see other writes; what they tell of one is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from string import Formatter
from typing import Any

from django.core.exceptions import FieldDoesNotExist
from django.db.models import Field, FileField, Model, QuerySet

from django_eventbus.conf import settings
from django_eventbus.events import check_name, plain
from django_eventbus.exceptions import BridgeError, InvalidPayloadError
from django_eventbus.publishing import publish, publish_many
from django_eventbus.registry import did_you_mean
from django_eventbus.store import default_alias

#: A row's values by the names they were asked for, and "pk".
Values = dict[str, Any]
#: A type and its payload.
Told = tuple[str, Values]

#: The key of events that have to be handled in order for each row.
PER_ROW = "<model>:{pk}"
CHANGED = "changed"
READ_CHUNK = 500


class Key:
    """A key with names of payload values in it, such as ``order:{pk}``."""

    def __init__(self, template: str) -> None:
        check_name(template, "the key")
        self.template = template
        #: (text, name of the value after it, if any)
        self.pieces: list[tuple[str, str | None]] = []
        for text, name, spec, conversion in Formatter().parse(template):
            if spec or conversion or name == "":
                raise BridgeError(f"the key {template!r} may only have {{names}} in braces")
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
            raise BridgeError(f"the key {self.template!r} needs {name!r}, which is not known")
        value = payload[name]
        return "" if value is None else str(value)


class ModelEvents:
    """The events of one model, checked when they are declared."""

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
            raise BridgeError(f"an event about {self.label} would be one itself, and so on")
        if not self.types:
            raise BridgeError(f"say what the events of {self.label} are called: created=…")
        for each in self.types:
            check_name(each, "the event type")
        if isinstance(fields, str):
            raise BridgeError(f"fields of {self.label} must be a list of names, not {fields!r}")
        self.fields: dict[str, Field[Any, Any]] = {name: self._field(name) for name in fields}
        if updated is not None and not self.fields:
            raise BridgeError(f"say which fields of {self.label} make it {updated!r}: fields=…")
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
            raise BridgeError(f"{self.label}.{name} is no column: bridge m2m_changed instead")
        if name == CHANGED:
            raise BridgeError(f"{CHANGED!r} is where the payload says what changed in a row")
        return field

    def _check_key(self) -> None:
        for name in self.key.names if self.key else ():
            if name != "pk" and name not in self.fields:
                hint = did_you_mean(name, ["pk", *self.fields])
                raise BridgeError(f"the key of {self.label} needs {name!r} among fields{hint}")

    def is_about_the_same_as(self, other: ModelEvents) -> bool:
        return self.model is other.model and self.types == other.types

    def __str__(self) -> str:
        return f"the bridge from {self.label} to {', '.join(map(repr, self.types))}"

    def read(self, using: str, keys: Iterable[Any]) -> dict[Any, Values]:
        """The values of these rows as they are in the database, by primary key."""
        wanted = list(keys)
        found: dict[Any, Values] = {}
        for start in range(0, len(wanted), READ_CHUNK):
            some = wanted[start : start + READ_CHUNK]
            found |= self.values_of(self.rows(using).filter(pk__in=some))
        return found

    def rows(self, using: str) -> QuerySet[Any]:
        """Past all managers, which may hide some."""
        return QuerySet(self.model, using=using)

    def values_of(self, rows: QuerySet[Any]) -> dict[Any, Values]:
        names = ["pk", *self.fields]
        columns = ["pk", *(field.attname for field in self.fields.values())]
        return {row[0]: dict(zip(names, row, strict=True)) for row in rows.values_list(*columns)}

    def known_of(self, instance: Model) -> Values:
        """The values that an instance has, asking nobody: neither deferred fields nor those that
        the database was told to compute are among them."""
        pk = self.model._meta.pk.to_python(instance.pk)
        found = {name: _value(field, instance) for name, field in self.fields.items()}
        known = {name: value for name, value in found.items() if value is not _UNKNOWN}
        return {"pk": pk, **known}

    def names_among(self, written: Collection[str] | None) -> set[str]:
        """Of our fields, those that a write of these fields (None: of all) may change."""
        return {
            name
            for name, field in self.fields.items()
            if written is None or field.generated or {field.name, field.attname} & set(written)
        }

    def of_created(self, values: Values) -> list[Told]:
        return [] if self.created is None else [(self.created, _payload(values))]

    def of_updated(self, before: Values, after: Values) -> list[Told]:
        """Nothing if nothing changed. What is not known of before may have changed."""
        changed = {
            name: _payload({"old": before[name]} if name in before else {})
            | _payload({"new": after[name]})
            for name in self.fields
            if name in after and not (name in before and before[name] == after[name])
        }
        if self.updated is None or not changed:
            return []
        return [(self.updated, {**_payload(after), CHANGED: changed})]

    def of_deleted(self, values: Values) -> list[Told]:
        return [] if self.deleted is None else [(self.deleted, _payload(values))]

    def publish(self, told: list[Told], using: str) -> None:
        publish_told(str(self), told, key=self.key, queue=self.queue, using=using)


def publish_told(
    bridge: str, told: list[Told], *, key: Key | None, queue: str | None, using: str | None
) -> None:
    """Publish where the write happened, if the bus is there, or not at all: errors are raised,
    because what is committed without its event would be lost."""
    options: dict[str, Any] = {"queue": queue, "using": _home(using)}
    try:
        if len(told) == 1:
            type_name, payload = told[0]
            publish(type_name, payload, key=key.of(payload) if key else None, **options)
        elif told:
            publish_many(told, key=key.of_item if key else None, **options)
    except (InvalidPayloadError, BridgeError) as error:
        raise BridgeError(f"{bridge} could not publish: {error}") from error


def _home(using: str | None) -> str | None:
    """None lets ``publish`` choose, and say so if another database's transaction is open."""
    return using if using in (settings.DATABASES or [default_alias()]) else None


_UNKNOWN = object()


def _value(field: Field[Any, Any], instance: Model) -> Any:
    """As it will come back from the database."""
    value = instance.__dict__.get(field.attname, _UNKNOWN)
    if value is _UNKNOWN or field.generated or hasattr(value, "resolve_expression"):
        return _UNKNOWN
    return str(value) if isinstance(field, FileField) else field.to_python(value)


def _payload(values: Values) -> Values:
    return {name: plain(value) for name, value in values.items()}


_told: list[ModelEvents] = []


def tell(events: ModelEvents) -> None:
    """From now on: ``told_of`` knows them."""
    for each in _told:
        if each.model is events.model and set(each.types) & set(events.types):
            raise BridgeError(f"{each} exists already")
    _told.append(events)


def tell_no_more(events: ModelEvents) -> None:
    if events in _told:
        _told.remove(events)


def told_of(model: type[Model]) -> Iterable[ModelEvents]:
    """The events of a model, and of those it inherits its table or part of its rows from."""
    return [each for each in _told if issubclass(model, each.model)]


def all_told() -> list[ModelEvents]:
    return list(_told)
