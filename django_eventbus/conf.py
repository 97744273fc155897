"""Every setting of the bus: its type, its default, its meaning.

All of them live in one dict, ``EVENTBUS = {...}``, which is looked up when first needed and again
when ``override_settings`` changes it. This is the only module that reads Django's settings.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.dispatch import receiver


class Settings:
    """The defaults are the class attributes; a key of ``EVENTBUS`` overrides its namesake."""

    #: Isolates projects that share a database: each sees only its own events.
    NAMESPACE: str = "default"
    #: The queue of events that name none.
    QUEUE: str = "default"
    #: All queues there are; publishing to any other is refused, a worker serves all of them.
    QUEUES: Sequence[str] = ("default",)
    #: Database aliases that hold the tables of the bus; empty means the router's choice.
    DATABASES: Sequence[str] = ()
    #: When the open transaction is on another database than the event's: warn, error or allow.
    FOREIGN_TRANSACTION: str = "warn"
    #: Who published; empty means host name and process id.
    PRODUCER: str = ""
    #: The most events one claim takes.
    BATCH_SIZE: int = 500
    #: Seconds between looks at an idle queue.
    POLL_INTERVAL: float = 1.0
    #: Seconds without a sign of life after which a worker's events are given to others.
    ABANDON_AFTER: float = 60.0
    #: Seconds a handler may take.
    HANDLER_TIMEOUT: float = 30.0
    #: Keyword arguments of the default RetryPolicy.
    RETRY: Mapping[str, Any] = {}
    #: Keyword arguments of a CircuitBreaker for every handler; None: only those that declare one.
    BREAKER: Mapping[str, Any] | None = None
    #: "handler": each handler's database work stands alone; "event": all of an event or none.
    ATOMIC: str = "handler"
    #: What becomes of an event nobody handles: "retry" until it is a dead letter, or "complete".
    UNHANDLED: str = "retry"
    #: Keyword arguments of the RetryPolicy for events without a handler; patient, for deploys.
    UNHANDLED_RETRY: Mapping[str, Any] = {
        "max_retries": 8,
        "base_delay": 5.0,
        "multiplier": 3.0,
        "max_delay": 3600.0,
    }
    #: What the death of an event does to later ones of its key: "skip" it, or "block" them.
    DEAD_HEAD: str = "skip"
    #: Publishers of one key wait for each other, so that its order is the order of their commits.
    STRICT_ORDER: bool = False
    #: How often an event may take its worker down before it is a dead letter.
    MAX_CRASHES: int = 3
    #: The largest payload (and the largest headers), as JSON.
    MAX_PAYLOAD_BYTES: int = 256 * 1024
    #: The deepest nesting of a payload.
    MAX_PAYLOAD_DEPTH: int = 64
    #: The most events that one transaction may publish.
    MAX_EVENTS_PER_TRANSACTION: int = 100_000
    #: The most bytes kept of one error and its traceback.
    MAX_ERROR_BYTES: int = 16 * 1024
    #: Dotted path of a function from text to text that every stored error goes through.
    REDACT_ERRORS: str = ""
    #: Fields of payloads and headers with such a word in their name are never shown in the admin.
    REDACT_FIELDS: Sequence[str] = (
        "password",
        "passwd",
        "secret",
        "token",
        "api_key",
        "authorization",
        "cookie",
    )
    #: The most events that may be queued, by queue, key or type, and what becomes of more.
    LIMITS: Mapping[str, Mapping[str, Any]] = {}
    #: Seconds that a publisher waits for room under a limit that blocks.
    BLOCK_TIMEOUT: float = 10.0
    #: Seconds that running handlers get to finish when a worker stops.
    SHUTDOWN_TIMEOUT: float = 30.0
    #: Megabytes of memory at which a worker process is replaced, between two batches; 0 is never.
    MAX_MEMORY: int = 0
    #: For how many minutes workers' figures (events, failures, times) are kept.
    MINUTES_KEPT: int = 1440
    #: Wake workers by LISTEN/NOTIFY where the database has it; turn off behind a pooler.
    NOTIFY: bool = True

    def __getattribute__(self, name: str) -> Any:
        if name in (_overrides if _overrides is not None else _read_overrides()):
            return _overrides[name]  # type: ignore[index]
        return object.__getattribute__(self, name)

    def producer(self) -> str:
        return self.PRODUCER or f"{_HOST}:{os.getpid()}"


def configured() -> Mapping[str, Any]:
    """The project's ``EVENTBUS`` dict as it stands, unchecked."""
    found = getattr(django_settings, "EVENTBUS", {})
    return found if isinstance(found, Mapping) else {}


_overrides: Mapping[str, Any] | None = None


def _read_overrides() -> Mapping[str, Any]:
    global _overrides
    _overrides = {name: value for name, value in configured().items() if str(name).isupper()}
    return _overrides


@receiver(setting_changed)
def _forget_overrides(*, setting: str, **kwargs: Any) -> None:
    global _overrides
    if setting == "EVENTBUS":
        _overrides = None


def names() -> list[str]:
    return [name for name in vars(Settings) if name.isupper()]


_HOST = socket.gethostname()[:50]

settings = Settings()
