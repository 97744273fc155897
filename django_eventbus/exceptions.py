"""What can go wrong, by name.

Every error the bus raises is an ``EventBusError``; ``Retry`` and ``Discard`` are what a handler
raises to steer its own delivery.
"""

from __future__ import annotations

from datetime import timedelta


class EventBusError(Exception):
    """Base of all errors of the bus. Do not raise it directly."""


class InvalidPayloadError(EventBusError, ValueError):
    """The payload, headers or another argument of an event cannot be stored as it is."""


class UnknownEventError(EventBusError):
    """An event class has no type name, or a stored payload does not fit its event class."""


class UnknownQueueError(EventBusError, ValueError):
    """The queue is not one of ``EVENTBUS["QUEUES"]``."""


class DuplicateEventError(EventBusError):
    """Two event classes claim the same type name, or an event that must be new is known."""


class DuplicateHandlerError(EventBusError):
    """Two handlers claim the same stored name."""


class InvalidScheduleError(EventBusError, ValueError):
    """A schedule that could not fire as it is written, or one that is not there."""


class MissingLibraryError(EventBusError):
    """A feature needs an optional library; the message says how to install it."""


class ForeignTransactionError(EventBusError):
    """The event would not be part of the transaction that is open around ``publish()``."""


class BridgeError(EventBusError):
    """A bridge could not make its event, so what it would have told of must not happen either."""


class BackpressureError(EventBusError):
    """A limit is reached, and its policy is to say so, or to wait no longer."""


class EventBusShutdownError(EventBusError):
    """The bus of this process has been shut down and takes no more events."""


class ClaimLostError(EventBusError):
    """The claim now belongs to somebody else, so nothing done under it may be committed."""


class WorkerEvictedError(EventBusError):
    """This worker was taken for dead and its registration is gone."""


class BrokenTransactionError(EventBusError):
    """A handler broke, ended or left open the transaction it ran in."""


class HandlerTimeout(KeyboardInterrupt):
    """A handler ran past its deadline.

    A BaseException, so that ``except Exception`` in a handler cannot swallow it; a
    KeyboardInterrupt, because that is what makes psycopg cancel the query it is waiting for and
    leave the connection usable.
    """


class Retry(Exception):
    """Raise in a handler to be called again, after ``delay`` seconds if given.

    Counts as a failed attempt. Without a delay the handler's retry policy decides.
    """

    def __init__(self, message: str = "", *, delay: float | timedelta | None = None) -> None:
        super().__init__(message or "the handler asked to be retried")
        self.delay = delay.total_seconds() if isinstance(delay, timedelta) else delay


class Discard(Exception):
    """Raise in a handler to give up at once: no retry, straight to the dead letters."""
