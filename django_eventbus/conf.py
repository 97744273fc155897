"""All settings: type, default and meaning.

Settings are keys of one dict, ``EVENTBUS = {...}``. The dict is read when a setting is first used,
and read again after ``override_settings`` has changed it. Only this module and the system checks
read the dict; all other modules use ``settings``.
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
    """The default values. A key of ``EVENTBUS`` overrides the attribute with the same name."""

    #: Isolates projects that share a database: each project reads only events of its namespace.
    NAMESPACE: str = "default"
    #: The queue of events that are published without a queue.
    QUEUE: str = "default"
    #: All queues. Publishing to any other queue is an error. By default a worker serves all queues.
    QUEUES: Sequence[str] = ("default",)
    #: The aliases of the databases that contain the event tables. If the list is empty, Django's
    #: database router chooses the database.
    DATABASES: Sequence[str] = ()
    #: What publish() does if a transaction is open on a database that does not store the event:
    #: "warn", "error" or "allow".
    FOREIGN_TRANSACTION: str = "warn"
    #: The name of the publisher in each event. If empty, the host name and the process id are used.
    PRODUCER: str = ""
    #: The maximum number of events that a worker claims at once.
    BATCH_SIZE: int = 500
    #: Seconds between two polls of an idle queue.
    POLL_INTERVAL: float = 1.0
    #: Seconds without a heartbeat after which other workers take over a worker's events.
    ABANDON_AFTER: float = 60.0
    #: Seconds after which an event that was handed off to another executor is handed off again,
    #: unless the executor has claimed it.
    HANDOFF_DEADLINE: float = 60.0
    #: The approximate number of events of one handler that may wait for their executor at a time.
    HANDOFF_WINDOW: int = 1000
    #: Whether publish() sends a message to Celery after the commit, at most one per second and
    #: process, so that the Celery task ``django_eventbus.drain`` handles the events.
    CELERY_DRAIN: bool = False
    #: Seconds after which a running handler is interrupted, unless the handler has its own timeout.
    HANDLER_TIMEOUT: float = 30.0
    #: Keyword arguments of the default RetryPolicy.
    RETRY: Mapping[str, Any] = {}
    #: Keyword arguments of a CircuitBreaker for every handler. If this is None, a handler has a
    #: breaker only if the handler declares one.
    BREAKER: Mapping[str, Any] | None = None
    #: "handler": the writes of each handler are committed or rolled back separately. "event": the
    #: writes of all atomic handlers of an event are committed or rolled back together.
    ATOMIC: str = "handler"
    #: The policy for an event without a handler: "retry" retries it until it is a dead letter,
    #: "complete" ends it as completed. A dict maps types or patterns to policies; the policy of all
    #: other types is "retry".
    UNHANDLED: str | Mapping[str, str] = "retry"
    #: Keyword arguments of the RetryPolicy for events without a handler. The delays are long,
    #: because during a deployment an old worker may claim an event whose handler only new workers
    #: have.
    UNHANDLED_RETRY: Mapping[str, Any] = {
        "max_retries": 8,
        "base_delay": 5.0,
        "multiplier": 3.0,
        "max_delay": 3600.0,
    }
    #: What happens after an event with a key has become a dead letter: "skip" continues with the
    #: next event of the key, "block" stops all events of the key until an operator acts.
    DEAD_HEAD: str = "skip"
    #: Whether transactions that publish events with the same key wait for each other, so that these
    #: events are handled in commit order.
    STRICT_ORDER: bool = False
    #: How often a worker may die while it handles an event before the event is a dead letter.
    MAX_CRASHES: int = 3
    #: How often a claim of an event may end without a result before the event is a dead letter.
    #: Such a claim ends because its worker disappears, or because the event cannot be read or
    #: settled.
    MAX_INTERRUPTIONS: int = 5
    #: The maximum size of a payload as JSON. The same limit applies to headers.
    MAX_PAYLOAD_BYTES: int = 256 * 1024
    #: The maximum depth of nested lists and dicts in a payload.
    MAX_PAYLOAD_DEPTH: int = 64
    #: The maximum number of events that one transaction may publish.
    MAX_EVENTS_PER_TRANSACTION: int = 100_000
    #: The maximum size of one stored error with its traceback.
    MAX_ERROR_BYTES: int = 16 * 1024
    #: Dotted path of a function that takes the text of an error and returns the text to store.
    REDACT_ERRORS: str = ""
    #: The admin hides fields of payloads and headers whose names contain one of these words.
    REDACT_FIELDS: Sequence[str] = (
        "password",
        "passwd",
        "secret",
        "token",
        "api_key",
        "authorization",
        "cookie",
    )
    #: The maximum number of queued events per queue, key or type, and the policy for events beyond
    #: this number.
    LIMITS: Mapping[str, Mapping[str, Any]] = {}
    #: Seconds that publish() waits at a limit with overflow="block" before it raises an error.
    BLOCK_TIMEOUT: float = 10.0
    #: Seconds that running handlers may take to finish when a worker stops.
    SHUTDOWN_TIMEOUT: float = 30.0
    #: A worker process that uses more megabytes of memory than this is replaced after its batch.
    #: 0: no limit.
    MAX_MEMORY: int = 0
    #: Minutes for which the statistics of workers are kept.
    STATISTICS_MINUTES: int = 1440
    #: The bearer token with which Prometheus reads the metrics from the view of Django. If empty,
    #: only users with the permission to view the overview can read them.
    METRICS_TOKEN: str = ""
    #: How the span of a handler call refers to the span that published the event, if OpenTelemetry
    #: is installed: "link" starts a new trace with a link, "parent" continues the trace.
    TRACE_PARENT: str = "link"
    #: Whether LISTEN/NOTIFY wakes workers on PostgreSQL. Set it to False behind a connection pooler
    #: in transaction mode, where workers receive no notifications.
    NOTIFY: bool = True

    def __getattribute__(self, name: str) -> Any:
        if name in (_overrides if _overrides is not None else _read_overrides()):
            return _overrides[name]  # type: ignore[index]
        return object.__getattribute__(self, name)

    def producer(self) -> str:
        return self.PRODUCER or f"{_HOST}:{os.getpid()}"


def configured() -> Mapping[str, Any]:
    """Return the project's ``EVENTBUS`` dict without validation."""
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


def overridden() -> Mapping[str, Any]:
    """Return the settings that the project overrides."""
    return _overrides if _overrides is not None else _read_overrides()


def names() -> list[str]:
    return [name for name in vars(Settings) if name.isupper()]


_HOST = socket.gethostname()[:50]

settings = Settings()
