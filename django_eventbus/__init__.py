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
    from django_eventbus.executors import CeleryExecutor, TaskExecutor
    from django_eventbus.integrations.django_signals import bridge_model, bridge_signal
    from django_eventbus.policies import CircuitBreaker
    from django_eventbus.publishing.once import once_per
    from django_eventbus.publishing.publisher import apublish, publish, publish_many, shutdown
    from django_eventbus.registry import handler, subscribe, unsubscribe
    from django_eventbus.retries import RetryPolicy
    from django_eventbus.schedules import schedule
    from django_eventbus.worker.polling import finalize, poll

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
    "once_per": "publishing.once",
    "bridge_model": "integrations.django_signals",
    "bridge_signal": "integrations.django_signals",
    "CeleryExecutor": "executors",
    "TaskExecutor": "executors",
    "CircuitBreaker": "policies",
    "finalize": "worker.polling",
    "poll": "worker.polling",
    "apublish": "publishing.publisher",
    "publish": "publishing.publisher",
    "publish_many": "publishing.publisher",
    "shutdown": "publishing.publisher",
    "handler": "registry",
    "subscribe": "registry",
    "unsubscribe": "registry",
    "RetryPolicy": "retries",
    "schedule": "schedules",
}

__all__ = [
    "BackpressureError",
    "BridgeError",
    "CeleryExecutor",
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
    "TaskExecutor",
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


if not TYPE_CHECKING:
    # Type checkers must not see this function: they would accept any attribute of the package.

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used.

        An import at the top of the package would import models before Django has loaded the apps,
        which is an error.
        """
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
