"""The connection to Celery's broker. Each message is confirmed, and each call has a timeout."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from amqp.exceptions import MessageNacked
from celery import current_app
from celery.result import denied_join_result
from kombu.exceptions import OperationalError

from django_eventbus.errors import failures
from django_eventbus.exceptions import (
    BrokerUnavailableError,
    EventBusError,
    MessageRefusedError,
)
from django_eventbus.logs import about
from django_eventbus.tracing import spans

logger = logging.getLogger(__name__)

#: The timeout, in seconds, for a connection to the broker and for the confirmation of a message.
PATIENCE = 5.0
#: Seconds that a thread waits while another thread uses the connection. The time is longer than the
#: two attempts that the other thread may make.
TURN_PATIENCE = 15.0
#: The timeout, in seconds, of handlers that send tasks. It is longer than all waits of
#: ``Broker.send`` together. With a shorter timeout, an attempt would be charged whenever the broker
#: does not answer.
SEND_TIMEOUT = 40.0
FIRST_WAIT = 1.0
LONGEST_WAIT = 30.0
#: Seconds until the next attempt to send a task that an available broker has refused.
REFUSED_WAIT = 10.0

#: Make one attempt to connect. If it fails, the event waits in the database, not in this process.
CONNECT_ONCE = {"max_retries": 1, "interval_start": 0, "interval_step": 0}


class Broker:
    """The connection of this process to the broker. One thread at a time uses it.

    Celery's own pool is not used, because the project may have configured it without confirmations
    or timeouts. After a failed connection, no thread connects until a wait has passed. The wait
    doubles with each failure.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._producer: Any = None
        self._publish_options: dict[str, Any] = {}
        #: The id of the process that connected. A forked process must open its own connection.
        self._process = 0
        self._wait = FIRST_WAIT
        self._closed_until = 0.0

    def after_fork(self) -> None:
        """Replace the lock in a forked process: a thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def send(
        self,
        task_name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        task_id: str,
        options: Mapping[str, Any],
    ) -> None:
        """Send a task and wait for the broker's confirmation.

        Raises BrokerUnavailableError if the broker does not answer, or if it refuses the message.
        Raises EventBusError if the project has not loaded its Celery app.
        """
        _check_app()
        task = current_app.tasks.get(task_name)
        send = partial(current_app.send_task, task_name) if task is None else task.apply_async
        options = {**options, **_trace_headers(options)}
        send = partial(send, args=args, kwargs=kwargs, task_id=task_id, retry=False, **options)
        if task is not None and current_app.conf.task_always_eager:
            send()
            return
        if not self._lock.acquire(timeout=TURN_PATIENCE):
            raise BrokerUnavailableError(
                f"other threads used the connection to Celery's broker for {TURN_PATIENCE:g} s",
                retry_in=FIRST_WAIT,
            )
        try:
            self._send(send)
        finally:
            self._lock.release()

    def _send(self, send: Callable[..., Any]) -> None:
        self._raise_while_closed()
        is_new = self._connect()
        try:
            # Without denied_join_result(), Celery would subscribe to the result, which this process
            # never reads. If the result backend is down, subscribing fails after 20 seconds.
            with denied_join_result():
                send(producer=self._producer, **self._publish_options)
        except self._errors() as error:
            is_refused = self._is_refusal(error)
            self.close()
            if not is_new:
                # Try once more with a new connection: the broker may have closed the old connection
                # while it was idle. A new connection also declares a queue that was deleted.
                self._send(send)
            elif is_refused:
                raise self._refused(error) from error
            else:
                raise self._unavailable(error) from error
        except BaseException:
            # The handler's deadline may have interrupted the call after half of a frame, or before
            # the confirmation. On the same connection, the next message would follow the half
            # frame, or get the confirmation of this message. So the connection is closed.
            self.close()
            raise
        else:
            self._wait = FIRST_WAIT

    def _connect(self) -> bool:
        """Create a producer if this process has none. Return whether the producer is new.

        The producer opens its connection when it sends the first message.
        """
        if self._producer is not None and self._process == os.getpid():
            return False
        connection = current_app.connection_for_write(connect_timeout=PATIENCE)
        kind = connection.transport.driver_type
        connection.transport_options.update(CONNECT_ONCE, **_options_for(kind))
        # RabbitMQ confirms and drops a message that no queue takes. With mandatory=True, RabbitMQ
        # returns such a message, which raises an error here.
        self._publish_options = {"mandatory": True} if kind == "amqp" else {}
        self._producer = current_app.amqp.Producer(connection, auto_declare=False)
        self._process = os.getpid()
        return True

    def close(self) -> None:
        """Close the connection in any state. The next message opens a new connection."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.connection.collect(socket_timeout=1.0)

    def _errors(self) -> tuple[type[BaseException], ...]:
        connection = self._producer.connection
        listed = (*connection.connection_errors, *connection.channel_errors)
        # The Redis transport lists KeyError as a connection error. It is excluded, because Celery
        # also raises KeyError for a queue that is not declared.
        return (OperationalError, OSError, *(each for each in listed if each is not KeyError))

    def _is_refusal(self, error: BaseException) -> bool:
        """Return whether RabbitMQ refused this message, and would accept other messages."""
        connection = self._producer.connection
        if connection.transport.driver_type != "amqp" or not connection.connected:
            return False
        cause = error.__cause__ if isinstance(error, OperationalError) else error
        return isinstance(cause, (MessageNacked, *connection.channel_errors))

    def _refused(self, error: BaseException) -> MessageRefusedError:
        logger.warning(
            "Celery's broker refused a task, retrying in %.0f s: %s",
            REFUSED_WAIT,
            failures.in_a_line(error),
            extra=about(),
        )
        return MessageRefusedError("Celery's broker refused the task", retry_in=REFUSED_WAIT)

    def _raise_while_closed(self) -> None:
        remaining = self._closed_until - time.monotonic()
        if remaining > 0:
            raise BrokerUnavailableError("Celery's broker is unavailable", retry_in=remaining)

    def _unavailable(self, error: BaseException) -> BrokerUnavailableError:
        wait, self._wait = self._wait, min(self._wait * 2, LONGEST_WAIT)
        self._closed_until = time.monotonic() + wait
        logger.warning(
            "Celery's broker is unavailable, retrying in %.0f s: %s",
            wait,
            failures.in_a_line(error),
            extra=about(),
        )
        return BrokerUnavailableError("Celery's broker is unavailable", retry_in=wait)


def _trace_headers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option ``headers`` with the current trace, which Celery's tracing reads."""
    trace = spans.message_headers()
    return {"headers": {**trace, **(options.get("headers") or {})}} if trace else {}


def has_app() -> bool:
    """Return whether the project has loaded a Celery app. Otherwise Celery uses its fallback app.

    The fallback app would send every task to RabbitMQ on localhost.
    """
    app = current_app
    return app.main != "default" or app.set_as_current or bool(app.conf.broker_url)


def _check_app() -> None:
    """Raise EventBusError if Celery uses its fallback app."""
    if not has_app():
        raise EventBusError(
            "no Celery app is loaded in this process; import it in the __init__.py of the project"
        )


def _options_for(kind: str) -> dict[str, Any]:
    """Return options that prevent endless waits and the unnoticed loss of messages."""
    if kind == "amqp":
        # RabbitMQ confirms messages only if the client sets confirm_publish.
        return {"confirm_publish": True, "read_timeout": PATIENCE, "write_timeout": PATIENCE}
    if kind == "redis":
        return {"socket_timeout": PATIENCE, "socket_connect_timeout": PATIENCE}
    return {}


broker = Broker()
if hasattr(os, "register_at_fork"):  # Windows does not have this function.
    os.register_at_fork(after_in_child=broker.after_fork)
