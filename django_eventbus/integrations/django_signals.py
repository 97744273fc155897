"""From Django's signals to events: any signal, and the life of a model's rows.

A bridge publishes inside the transaction in which the signal is sent. What Django sends no signal
for (bulk writes, raw SQL), ``BridgedQuerySet`` or a trigger tells of; a system check says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from django.core.checks import CheckMessage, register
from django.core.checks import Warning as CheckWarning
from django.db.models import NOT_PROVIDED, Model
from django.db.models.signals import (
    class_prepared,
    m2m_changed,
    post_delete,
    post_save,
    pre_save,
)
from django.dispatch import Signal

from django_eventbus.events import check_name
from django_eventbus.exceptions import BridgeError
from django_eventbus.integrations.django_querysets import BridgedQuerySet
from django_eventbus.integrations.model_events import (
    PER_ROW,
    Key,
    ModelEvents,
    Values,
    all_told,
    publish_told,
    tell,
    tell_no_more,
)
from django_eventbus.store import store_for

__all__ = ["BridgedQuerySet", "ModelBridge", "SignalBridge", "bridge_model", "bridge_signal"]

#: They may come from a fixture, and then say ``raw``; in other signals the name is free.
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
    """Publish an event whenever the signal is sent (by ``sender``, if given).

    ``serialize`` gets what a receiver gets, as keyword arguments, and returns the payload, or
    None for no event. ``key`` may name values of the payload: ``"user:{user_id}"``. An error is
    raised as BridgeError to whoever sent the signal, and here if there is another bridge from the
    same signal and sender to this type.
    """
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
) -> ModelBridge:
    """Publish an event whenever a row of the model is created, updated or deleted.

    The payload has ``pk``, the values of ``fields`` and, of an update, in ``changed`` the old and
    new values of those that changed; if none did, there is no event. ``key`` may name them; by
    default the events of each row are handled in order. Call it in an ``AppConfig.ready()``.
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
    return ModelBridge(events)


class SignalBridge:
    """A signal that is connected to an event type, until ``disconnect()``.

    Built again, it replaces the one before: Django calls ``ready()`` again when a test changes
    INSTALLED_APPS.
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
            if bridge._takes_the_place_of(self):
                if not bridge._is_written_like(self):
                    raise BridgeError(f"{self} exists already, from the same signal and sender")
                bridge.disconnect()
        signal.connect(self._receive, sender=sender, weak=False, dispatch_uid=self._uid)
        _signal_bridges.add(self)

    def __str__(self) -> str:
        return f"the bridge to {self.event_type!r}"

    def disconnect(self) -> None:
        _signal_bridges.discard(self)
        self.signal.disconnect(sender=self.sender, dispatch_uid=self._uid)

    def _takes_the_place_of(self, other: SignalBridge) -> bool:
        return (
            self.signal is other.signal
            and self.sender is other.sender
            and self.event_type == other.event_type
        )

    def _is_written_like(self, other: SignalBridge) -> bool:
        """A function that ``ready()`` defines is another object each time, of the same code."""
        return (_code(self._serialize), self._key and self._key.template, self._queue) == (
            _code(other._serialize),
            other._key and other._key.template,
            other._queue,
        )

    def _receive(self, sender: Any, **kwargs: Any) -> None:
        if self.signal in WITH_FIXTURES and kwargs.get("raw"):
            return  # a fixture brings back what has happened before
        try:
            payload = self._serialize(sender=sender, **kwargs)
        except Exception as error:
            raise BridgeError(f"{self} could not serialize: {error!r}") from error
        if payload is not None:
            told = [(self.event_type, payload)]
            using = kwargs.get("using")
            publish_told(str(self), told, key=self._key, queue=self._queue, using=using)


#: Weak: what is connected lives in its signal, and whoever empties that is rid of it.
_signal_bridges: WeakSet[SignalBridge] = WeakSet()


def _code(function: Callable[..., Any]) -> Any:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__code__", function)


class ModelBridge:
    """A model whose rows are told of, until ``disconnect()`` or until it is built again."""

    def __init__(self, events: ModelEvents) -> None:
        self.events = events
        for bridge in _bridges.copy():
            if bridge.events.is_about_the_same_as(events):
                bridge.disconnect()
        tell(events)
        _bridges.append(self)
        class_prepared.connect(self._connect_subclass, weak=False)
        for model in _family(events.model):
            self._connect(model)

    def disconnect(self) -> None:
        tell_no_more(self.events)
        if self in _bridges:
            _bridges.remove(self)
        class_prepared.disconnect(self._connect_subclass)
        for model in _family(self.events.model):
            pre_save.disconnect(self._before_save, sender=model)
            post_save.disconnect(self._after_save, sender=model)
            post_delete.disconnect(self._after_delete, sender=model)

    def _connect_subclass(self, sender: type[Model], **kwargs: Any) -> None:
        if issubclass(sender, self.events.model):
            self._connect(sender)

    def _connect(self, model: type[Model]) -> None:
        """A child's rows are in our table too. Its deletion is told of as that of its parent."""
        if self.events.created or self.events.updated:
            pre_save.connect(self._before_save, sender=model, weak=False)
            post_save.connect(self._after_save, sender=model, weak=False)
        same_table = model._meta.concrete_model is self.events.model._meta.concrete_model
        if self.events.deleted and same_table:
            post_delete.connect(self._after_delete, sender=model, weak=False)

    def _before_save(
        self,
        sender: Any,
        instance: Model,
        raw: bool,
        using: str,
        update_fields: Collection[str] | None,
        **kwargs: Any,
    ) -> None:
        """The old values are read where they are true: an instance may be stale, deferred, or of
        a transaction that was rolled back. The row is locked, as the save is about to do."""
        before = None
        if not (raw or self._passes_by(update_fields) or self._needs_no_look(instance)):
            row = self.events.rows(using).filter(pk=instance.pk)
            locked = store_for(using).lock_of_an_update(row)
            before = next(iter(self.events.values_of(locked).values()), None)
        self._kept_with(instance).append(before)

    def _after_save(
        self,
        sender: Any,
        instance: Model,
        created: bool,
        raw: bool,
        using: str,
        update_fields: Collection[str] | None,
        **kwargs: Any,
    ) -> None:
        kept = self._kept_with(instance)
        before = kept.pop() if kept else None
        if raw or self._passes_by(update_fields):
            return
        after = self._values_after(instance, using, before or {}, update_fields)
        if before is None and created:
            self.events.publish(self.events.of_created(after), using)
        else:
            self.events.publish(self.events.of_updated(before or {}, after), using)

    def _after_delete(self, sender: Any, instance: Model, using: str, **kwargs: Any) -> None:
        self.events.publish(self.events.of_deleted(self.events.known_of(instance)), using)

    def _kept_with(self, instance: Model) -> list[Values | None]:
        """What the saves of an instance found; a receiver may save it again inside of a save."""
        kept: dict[int, Any] = instance.__dict__.setdefault("_eventbus_before", {})
        found: list[Values | None] = kept.setdefault(id(self), [])
        return found

    def _passes_by(self, update_fields: Collection[str] | None) -> bool:
        return update_fields is not None and not self.events.names_among(update_fields)

    def _needs_no_look(self, instance: Model) -> bool:
        if not instance._state.adding:
            return self.events.updated is None
        # Django inserts without looking where the key is missing or made by a default.
        pk = instance._meta.pk
        return instance.pk is None or pk.has_default() or pk.db_default is not NOT_PROVIDED

    def _values_after(
        self,
        instance: Model,
        using: str,
        before: Values,
        update_fields: Collection[str] | None,
    ) -> Values:
        written = self.events.names_among(update_fields)
        known = self.events.known_of(instance)
        if not known.keys() >= written:
            # What the database computed is known to it alone.
            return next(iter(self.events.read(using, [instance.pk]).values()))
        return before | {name: known[name] for name in ("pk", *written)}


_bridges: list[ModelBridge] = []


def _family(model: type[Model]) -> Iterator[type[Model]]:
    """The model, its proxies, and its children by multi-table inheritance."""
    yield model
    for each in model.__subclasses__():
        yield from _family(each)


@register("eventbus")
def check_bridges(**kwargs: Any) -> list[CheckMessage]:
    """Registered when the first bridge is built."""
    return [
        CheckWarning(
            f"{events.label} is bridged to events, but bulk_create(), update() and bulk_update() "
            f"of its manager {manager.name!r} send no signals: their rows have no events.",
            hint=f"Make it with BridgedQuerySet.as_manager(), or bridge {events.label} by a "
            "trigger; silence this if nothing writes that way.",
            obj=events.model,
            id="django_eventbus.W201",
        )
        for events in all_told()
        if events.created or events.updated
        for manager in events.model._meta.managers
        if not issubclass(manager._queryset_class, BridgedQuerySet)  # type: ignore[attr-defined]
    ]
