"""The exceptions of the event bus.

Every error of the bus is an ``EventBusError``. Handlers raise ``Retry`` and ``Discard`` to control
their own delivery.
"""

from __future__ import annotations

from datetime import timedelta
from numbers import Real
from typing import Any


class EventBusError(Exception):
    """Base class of all errors of the event bus. Some errors are raised as this class itself."""


class InvalidPayloadError(EventBusError, ValueError):
    """The payload, headers or another argument of an event cannot be stored."""


class UnknownEventError(EventBusError):
    """A type has no event class, an event class has no type, or a payload does not fit a class."""


class UnknownQueueError(EventBusError, ValueError):
    """The queue is not one of ``EVENTBUS["QUEUES"]``."""


class DuplicateEventError(EventBusError):
    """Two event classes have one type name, or publish(on_duplicate="raise") found a duplicate."""


class DuplicateHandlerError(EventBusError):
    """Two handlers have the same name, or one handler is registered with two sets of types."""


class InvalidScheduleError(EventBusError, ValueError):
    """A schedule cannot fire, does not exist, or has the name of another schedule."""


class MissingLibraryError(EventBusError):
    """A feature needs an optional library; the message says how to install it."""


class UnsupportedDatabaseError(EventBusError):
    """The bus has no store for this kind of database."""


class ForeignTransactionError(EventBusError):
    """A transaction is open on another database, and its rollback would not remove the event."""


class BridgeError(EventBusError):
    """A bridge could not publish its event, so the bridged change must be rolled back."""


class BackpressureError(EventBusError):
    """An event was refused: a limit was reached, or the transaction has published too many events.

    A limit refuses events if its policy is "halt", or if its policy is "block" and the timeout has
    passed.
    """


class EventBusShutdownError(EventBusError):
    """Publishing is shut down in this process."""


class BrokerUnavailableError(EventBusError):
    """A message broker does not answer, or it refuses a message.

    The event waits ``retry_in`` seconds, and no attempt is counted.
    """

    def __init__(self, message: str, *, retry_in: float) -> None:
        super().__init__(message)
        self.retry_in = retry_in


class MessageRefusedError(BrokerUnavailableError):
    """A message broker refuses this message, and may accept others."""


class ClaimLostError(EventBusError):
    """The events are not claimed under this token any more, so the work must not be committed.

    Another worker has recovered or claimed the events, or they were settled before.
    """


class UnsettleableError(EventBusError):
    """The database refuses to store the result of an event."""


class UnreadableEventError(EventBusError):
    """A queued event has delivery state that this version of the code cannot read."""


class WorkerEvictedError(EventBusError):
    """The registration of this worker has expired; another worker may have deleted it."""


class BrokenTransactionError(EventBusError):
    """A handler broke or ended its transaction, or left another transaction open."""


class HandlerTimeout(KeyboardInterrupt):
    """A handler ran past its deadline.

    This class is a BaseException, so that ``except Exception`` in a handler does not catch it. It
    is a KeyboardInterrupt, because psycopg reacts to a KeyboardInterrupt by cancelling the running
    query, and keeps the connection usable.
    """


#: The longest delay in seconds: a hundred years.
LONGEST_DELAY = 100 * 365 * 24 * 3600.0


class Retry(Exception):
    """Raise this exception in a handler to retry the delivery, after ``delay`` seconds if given.

    The attempt counts as failed. If no delay is given, the handler's retry policy sets the delay.
    ``Retry(…)`` raises ValueError if the delay is negative, longer than a hundred years, or not a
    number or timedelta.
    """

    def __init__(self, message: str = "", *, delay: float | timedelta | None = None) -> None:
        super().__init__(message or "the handler asked to be retried")
        self.delay = None if delay is None else seconds_of(delay)


def seconds_of(delay: object) -> float:
    """Return the delay of a retry in seconds. Raises ValueError for an invalid delay."""
    number: Any = delay.total_seconds() if isinstance(delay, timedelta) else delay
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if not (is_number and 0 <= number <= LONGEST_DELAY):
        raise ValueError(
            f"Retry(delay=…) must be a timedelta or a number of seconds from 0 to "
            f"{LONGEST_DELAY:.0f}, not {_shown(delay)}."
        )
    return float(number)


def _shown(value: object) -> str:
    try:
        return repr(value)[:100]
    except Exception:  # repr() refuses an integer with thousands of digits.
        return f"this {type(value).__name__}"


class Discard(Exception):
    """Raise this exception in a handler to make the event a dead letter without a retry."""
