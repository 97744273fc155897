"""Durable events for Django: publish in your transaction, handle exactly once in your database."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from django_eventbus.events import Envelope, Event
    from django_eventbus.exceptions import (
        BackpressureError,
        BridgeError,
        Discard,
        DuplicateEventError,
        DuplicateHandlerError,
        EventBusError,
        EventBusShutdownError,
        ForeignTransactionError,
        InvalidPayloadError,
        Retry,
        UnknownEventError,
        UnknownQueueError,
    )
    from django_eventbus.inbox import once_per
    from django_eventbus.integrations.django_signals import bridge_model, bridge_signal
    from django_eventbus.pacing import CircuitBreaker
    from django_eventbus.polling import finalize, poll
    from django_eventbus.publishing import apublish, publish, publish_many, shutdown
    from django_eventbus.registry import handler, subscribe, unsubscribe
    from django_eventbus.retries import RetryPolicy
    from django_eventbus.schedules import schedule

__version__ = "0.1.0"

_HOMES = {
    "Envelope": "events",
    "Event": "events",
    "BackpressureError": "exceptions",
    "BridgeError": "exceptions",
    "Discard": "exceptions",
    "DuplicateEventError": "exceptions",
    "DuplicateHandlerError": "exceptions",
    "EventBusError": "exceptions",
    "EventBusShutdownError": "exceptions",
    "ForeignTransactionError": "exceptions",
    "InvalidPayloadError": "exceptions",
    "Retry": "exceptions",
    "UnknownEventError": "exceptions",
    "UnknownQueueError": "exceptions",
    "once_per": "inbox",
    "bridge_model": "integrations.django_signals",
    "bridge_signal": "integrations.django_signals",
    "CircuitBreaker": "pacing",
    "finalize": "polling",
    "poll": "polling",
    "apublish": "publishing",
    "publish": "publishing",
    "publish_many": "publishing",
    "shutdown": "publishing",
    "handler": "registry",
    "subscribe": "registry",
    "unsubscribe": "registry",
    "RetryPolicy": "retries",
    "schedule": "schedules",
}

__all__ = [
    "BackpressureError",
    "BridgeError",
    "CircuitBreaker",
    "Discard",
    "DuplicateEventError",
    "DuplicateHandlerError",
    "Envelope",
    "Event",
    "EventBusError",
    "EventBusShutdownError",
    "ForeignTransactionError",
    "InvalidPayloadError",
    "Retry",
    "RetryPolicy",
    "UnknownEventError",
    "UnknownQueueError",
    "apublish",
    "bridge_model",
    "bridge_signal",
    "finalize",
    "handler",
    "once_per",
    "poll",
    "publish",
    "publish_many",
    "schedule",
    "shutdown",
    "subscribe",
    "unsubscribe",
]


def __getattr__(name: str) -> Any:
    """Names are fetched when first used: models cannot be imported before the apps are loaded."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
