"""Bridges that publish an event for any Django signal, or for each change of a model's rows.

A bridge publishes in the transaction in which the signal is sent. Django sends no signals for bulk
writes and raw SQL. For these writes, use ``BridgedQuerySet`` or a trigger. A system check warns
about managers whose bulk writes publish no events.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

from django.core.checks import CheckMessage, register
from django.core.checks import Warning as CheckWarning
from django.db import router
from django.db.models import NOT_PROVIDED, Model
from django.db.models.signals import (
    class_prepared,
    m2m_changed,
    post_delete,
    post_save,
    pre_save,
)
from django.dispatch import Signal

from django_eventbus.exceptions import BridgeError
from django_eventbus.integrations.django_querysets import BridgedQuerySet
from django_eventbus.integrations.model_events import (
    PER_ROW,
    Key,
    ModelEvents,
    Values,
    add_bridge,
    publish_items,
    remove_bridge,
)
from django_eventbus.internals.django import queryset_class_of
from django_eventbus.registry import TYPE_SOURCES
from django_eventbus.schema.names import check_name
from django_eventbus.store import store_for

__all__ = ["BridgedQuerySet", "ModelBridge", "SignalBridge", "bridge_model", "bridge_signal"]

#: Signals whose argument ``raw`` is true for fixtures. Other signals may use ``raw`` for another
#: purpose.
WITH_FIXTURES = (pre_save, post_save, m2m_changed)


def bridge_signal(
    signal: Signal,
    event_type: str,
    *,
    serialize: Callable[..., Any],
    sender: Any = None,
    key: str | None = None,
    queue: str | None = None,
) -> SignalBridge:
    """Publish an event whenever the signal is sent. If ``sender`` is given, ignore other senders.

    ``serialize`` gets the arguments of the signal as keyword arguments and returns the payload,
    or None for no event. It must accept ``**kwargs``, because senders may add arguments. ``key``
    may name values of the payload: ``"user:{user_id}"``. An error in ``serialize`` is raised as
    BridgeError in the code that sent the signal. Raises BridgeError if there is another bridge
    from the same signal and sender to this type.
    """
    if not _accepts_any_keyword(serialize):
        raise BridgeError(
            f"serialize of the bridge to {event_type!r} must accept **kwargs, "
            "because a sender of the signal may add arguments"
        )
    chosen = None if key is None else Key(key)
    return SignalBridge(signal, event_type, serialize, sender, chosen, queue)


def bridge_model(
    model: type[Model],
    *,
    created: str | None = None,
    updated: str | None = None,
    deleted: str | None = None,
    fields: Sequence[str],
    key: str | None = PER_ROW,
    queue: str | None = None,
    check_bulk_writes: bool = True,
) -> ModelBridge:
    """Publish an event whenever a row of the model is created, updated or deleted.

    The payload contains ``pk`` and the values of ``fields``. The payload of an update also contains
    ``changed``: the old and new values of the changed fields. An update that changes none of
    ``fields`` publishes no event. ``key`` may contain names of fields; by default the events of
    each row are handled in order. Bulk writes publish events only if the manager uses a
    ``BridgedQuerySet``. A system check reports other managers; ``check_bulk_writes=False`` turns
    the check off for this model. Call this function in an ``AppConfig.ready()``.
    """
    events = ModelEvents(
        model,
        created=created,
        updated=updated,
        deleted=deleted,
        fields=fields,
        key=key,
        queue=queue,
    )
    return ModelBridge(events, check_bulk_writes=check_bulk_writes)


class SignalBridge:
    """A signal that is connected to an event type, until ``disconnect()``.

    If the same bridge is created again, the new bridge replaces the old one. This happens when a
    test changes INSTALLED_APPS, because Django calls ``ready()`` again.
    """

    def __init__(
        self,
        signal: Signal,
        event_type: str,
        serialize: Callable[..., Any],
        sender: Any,
        key: Key | None,
        queue: str | None,
    ) -> None:
        check_name(event_type, "the event type")
        self.signal, self.event_type, self.sender = signal, event_type, sender
        self._serialize, self._key, self._queue = serialize, key, queue
        self._uid = f"django_eventbus:{event_type}"
        for bridge in list(_signal_bridges):
            if bridge._has_same_source(self):
                if not bridge._is_equivalent(self):
                    raise BridgeError(
                        f"{self} exists already, from the same signal and sender: "
                        "use another event type"
                    )
                bridge.disconnect()
        signal.connect(self._receive, sender=sender, weak=False, dispatch_uid=self._uid)
        _signal_bridges.add(self)

    def __str__(self) -> str:
        return f"the bridge to {self.event_type!r}"

    def disconnect(self) -> None:
        _signal_bridges.discard(self)
        self.signal.disconnect(sender=self.sender, dispatch_uid=self._uid)

    def _has_same_source(self, other: SignalBridge) -> bool:
        return (
            self.signal is other.signal
            and self.sender is other.sender
            and self.event_type == other.event_type
        )

    def _is_equivalent(self, other: SignalBridge) -> bool:
        """Return whether both bridges have the same code, key and queue.

        The code objects are compared, because ``ready()`` may create a new function each time.
        """
        return (_code(self._serialize), self._key and self._key.template, self._queue) == (
            _code(other._serialize),
            other._key and other._key.template,
            other._queue,
        )

    def _receive(self, **sent: Any) -> None:
        if self.signal in WITH_FIXTURES and sent.get("raw"):
            return  # A fixture restores rows whose events were published before.
        try:
            payload = self._serialize(**sent)
        except Exception as error:
            raise BridgeError(f"{self} could not serialize: {error!r}") from error
        if payload is not None:
            items = [(self.event_type, payload)]
            using = sent.get("using")
            publish_items(str(self), items, key=self._key, queue=self._queue, using=using)


#: All connected bridges. Weak references are enough, because the signal keeps a connected bridge
#: alive.
_signal_bridges: WeakSet[SignalBridge] = WeakSet()


def _code(function: Callable[..., Any]) -> Any:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__code__", function)


def _accepts_any_keyword(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True  # Some functions written in C have no signature.
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


class _Write(NamedTuple):
    """The arguments of a model's signal, with defaults for missing arguments.

    Django always sends all arguments. Some applications write with ``QuerySet.update()`` and send
    ``pre_save`` and ``post_save`` themselves, with fewer or other arguments.
    """

    instance: Model
    using: str
    raw: bool
    update_fields: Collection[str] | None
    created: bool | None

    @classmethod
    def of(cls, model: type[Model], sent: Mapping[str, Any]) -> _Write | None:
        """Return the write, or None if the signal is not about an instance of the model."""
        instance = sent.get("instance")
        if not isinstance(instance, model):
            return None
        using = sent.get("using") or router.db_for_write(type(instance), instance=instance)
        fields = sent.get("update_fields")
        return cls(
            instance=instance,
            using=using,
            raw=bool(sent.get("raw")),
            update_fields=[fields] if isinstance(fields, str) else fields,
            created=sent.get("created"),
        )


class _Before(NamedTuple):
    """The state of a row before a save."""

    values: Values | None
    is_new: bool


class ModelBridge:
    """A bridge of a model, until ``disconnect()`` or until the same bridge is created again."""

    def __init__(self, events: ModelEvents, *, check_bulk_writes: bool = True) -> None:
        self.events = events
        self.check_bulk_writes = check_bulk_writes
        for bridge in _bridges.copy():
            if bridge.events.is_about_the_same_as(events):
                bridge.disconnect()
        add_bridge(events)
        _bridges.append(self)
        class_prepared.connect(self._connect_subclass, weak=False)
        for model in _family(events.model):
            self._connect(model)

    def disconnect(self) -> None:
        remove_bridge(self.events)
        if self in _bridges:
            _bridges.remove(self)
        class_prepared.disconnect(self._connect_subclass)
        for model in _family(self.events.model):
            pre_save.disconnect(self._before_save, sender=model)
            post_save.disconnect(self._after_save, sender=model)
            post_delete.disconnect(self._after_delete, sender=model)

    def _connect_subclass(self, **sent: Any) -> None:
        sender = sent["sender"]
        if isinstance(sender, type) and issubclass(sender, self.events.model):
            self._connect(sender)

    def _connect(self, model: type[Model]) -> None:
        """Connect the signals of the bridged model or of one of its subclasses.

        The save signals of a subclass are connected, because its rows are also in the table of the
        parent. If a subclass has a table of its own, its ``post_delete`` is not connected, because
        Django also sends ``post_delete`` for the parent.
        """
        if self.events.created or self.events.updated:
            pre_save.connect(self._before_save, sender=model, weak=False)
            post_save.connect(self._after_save, sender=model, weak=False)
        same_table = model._meta.concrete_model is self.events.model._meta.concrete_model
        if self.events.deleted and same_table:
            post_delete.connect(self._after_delete, sender=model, weak=False)

    def _before_save(self, **sent: Any) -> None:
        """Lock the row and read its old values from the database.

        The values of the instance cannot be used: they may be stale, deferred, or changed in a
        transaction that was rolled back. The lock is harmless, because the save locks the row too.
        """
        write = _Write.of(self.events.model, sent)
        if write is None:
            return
        instance, values = write.instance, None
        if not (
            write.raw or self._is_unaffected(write.update_fields) or self._needs_no_read(instance)
        ):
            row = self.events.rows(write.using).filter(pk=instance.pk)
            locked = store_for(write.using).lock_of_an_update(row)
            values = next(iter(self.events.values_of(locked).values()), None)
        self._kept_with(instance).append(_Before(values, instance._state.adding))

    def _after_save(self, **sent: Any) -> None:
        write = _Write.of(self.events.model, sent)
        if write is None:
            return
        kept = self._kept_with(write.instance)
        before = kept.pop() if kept else _Before(None, is_new=False)
        if write.raw or write.instance.pk is None or self._is_unaffected(write.update_fields):
            return
        after = self._values_after(write, before.values or {})
        if after is None:
            return
        created = before.is_new if write.created is None else write.created
        if before.values is None and created:
            self.events.publish(self.events.of_created(after), write.using)
        else:
            self.events.publish(self.events.of_updated(before.values or {}, after), write.using)

    def _after_delete(self, **sent: Any) -> None:
        write = _Write.of(self.events.model, sent)
        if write is not None and write.instance.pk is not None:
            values = self.events.known_of(write.instance)
            self.events.publish(self.events.of_deleted(values), write.using)

    def _kept_with(self, instance: Model) -> list[_Before]:
        """Return a stack with the state of the row before each unfinished save of an instance.

        There may be several such saves, because a signal receiver may save the instance again.
        """
        kept: dict[int, Any] = instance.__dict__.setdefault("_eventbus_before", {})
        found: list[_Before] = kept.setdefault(id(self), [])
        return found

    def _is_unaffected(self, update_fields: Collection[str] | None) -> bool:
        return update_fields is not None and not self.events.names_among(update_fields)

    def _needs_no_read(self, instance: Model) -> bool:
        if not instance._state.adding:
            return self.events.updated is None
        # If the primary key is missing or has a default, Django does not try an UPDATE before the
        # INSERT, so the save cannot change an existing row.
        pk = instance._meta.pk
        return instance.pk is None or pk.has_default() or pk.db_default is not NOT_PROVIDED

    def _values_after(self, write: _Write, before: Values) -> Values | None:
        """Return the values of the row after a save, or None if the database has no such row."""
        written = self.events.names_among(write.update_fields)
        known = self.events.known_of(write.instance)
        if not known.keys() >= written:
            # The instance lacks values that the database computed, so read the row.
            return next(iter(self.events.read(write.using, [write.instance.pk]).values()), None)
        return before | {name: known[name] for name in ("pk", *written)}


_bridges: list[ModelBridge] = []


def _family(model: type[Model]) -> Iterator[type[Model]]:
    """Yield the model, its proxies, and its subclasses by multi-table inheritance."""
    yield model
    for each in model.__subclasses__():
        yield from _family(each)


def _bridged_types() -> Iterator[tuple[str, str]]:
    for bridge in _bridges:
        for type_name in bridge.events.types:
            yield type_name, f"the bridge from {bridge.events.label}"
    for each in _signal_bridges:
        yield each.event_type, f"the bridge from {_name_of(each.sender)}"


def _name_of(sender: Any) -> str:
    if sender is None:
        return "a signal"
    return f"a signal of {sender.__qualname__}" if isinstance(sender, type) else "a signal"


TYPE_SOURCES.append(_bridged_types)


@register("eventbus")
def check_bridges(**kwargs: Any) -> list[CheckMessage]:
    """Report managers of bridged models whose bulk writes publish no events.

    Importing this module registers the check, so only projects with bridges have it.
    """
    return [
        _unseen_writes(bridge.events, manager.name)
        for bridge in _bridges
        if bridge.check_bulk_writes and (bridge.events.created or bridge.events.updated)
        for manager in bridge.events.model._meta.managers
        if not issubclass(queryset_class_of(manager), BridgedQuerySet)
    ]


def _unseen_writes(events: ModelEvents, manager: str) -> CheckMessage:
    return CheckWarning(
        f"{events.label} is bridged to events, but bulk_create(), update() and bulk_update() "
        f"of its manager {manager!r} send no signals, so they publish no events.",
        hint="Create the manager with BridgedQuerySet.as_manager(), or bridge "
        f"{events.label} with a trigger. "
        "If no code uses these methods, pass check_bulk_writes=False to bridge_model().",
        obj=events.model,
        id="django_eventbus.W201",
    )
