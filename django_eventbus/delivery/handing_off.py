"""Send the messages of events that were handed off to another executor.

The messages are sent at the end of a batch, when the settlements are committed and the lanes of
the batch are released, so that the executor can claim the events. If the process dies before it
sends them, the events are handed off again after HANDOFF_DEADLINE.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from django.utils.module_loading import import_string

from django_eventbus.delivery.batch import Batch
from django_eventbus.delivery.settling import Settler
from django_eventbus.errors import failures
from django_eventbus.errors.failpoints import reached
from django_eventbus.exceptions import BrokerUnavailableError, MessageRefusedError
from django_eventbus.executors import Executor, Message, Send
from django_eventbus.flow.controls import FlowControls
from django_eventbus.flow.decisions import (
    executor_failed,
    executor_works,
    message_failed,
    message_sent,
)
from django_eventbus.logs import about
from django_eventbus.registry import registry
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.store import After, HandOff, HeldBy, Wait
from django_eventbus.tracing import spans

logger = logging.getLogger(__name__)

#: Seconds until events are handed off again after an error that is not an outage of the broker.
RETRY_AFTER = 10.0


class HandOffSender:
    """Sends the messages for one thread. If the broker is unavailable, the events are held."""

    def __init__(
        self, settler: Settler, controls: FlowControls, report: Callable[[], None]
    ) -> None:
        """Initialize. ``report`` informs the supervisor that the thread is not stuck."""
        self.settler = settler
        self.store = settler.store
        self.controls = controls
        self.report = report

    def send_all(self, batch: Batch) -> None:
        for hand_off, events in batch.handed_off.items():
            handler = registry.get(hand_off.handler)
            if handler is not None and handler.executor is not None:
                self._send(batch.queue, handler.executor, hand_off, events)

    def _send(
        self, queue: str, executor: Executor, hand_off: HandOff, events: list[ClaimedEvent]
    ) -> None:
        rows = [each.row_id for each in events]
        for start in range(0, len(rows), executor.batch):
            stop = start + executor.batch
            some = rows[start:stop]
            message = Message(self.store.using, queue, hand_off.handler, hand_off.token, some)
            reached("hand_off.before_send")
            self.report()
            try:
                with spans.sending(executor.name, hand_off.handler, events[start:stop]):
                    _sender(executor.sender)(executor, message, hand_off.seconds)
            except Exception as error:
                wait = self._wait_after(executor, message, error)
                self._take_back(hand_off, rows[start:], wait)
                return
        self._record_success(executor, hand_off.handler)

    def _wait_after(self, executor: Executor, message: Message, error: Exception) -> Wait:
        """Record the error; return the wait of the events whose message could not be sent.

        If the broker is unavailable, the flow control of the executor holds all events for this
        executor. After any other error, only the unsent events wait: the broker may accept other
        messages.
        """
        known, is_refused = self.controls.snapshot, isinstance(error, MessageRefusedError)
        if isinstance(error, BrokerUnavailableError) and not is_refused:
            control_id = self._decide(known.executor_ids.get(executor.name), executor_failed)
            return After(error.retry_in) if control_id is None else HeldBy(control_id)
        reason = failures.in_a_line(error.__cause__ if is_refused and error.__cause__ else error)
        self._decide(known.handler_ids.get(message.handler), partial(message_failed, reason))
        if isinstance(error, MessageRefusedError):
            return After(error.retry_in)
        logger.error(
            "events of the handler %s could not be handed off to %s, trying again in %.0f s: %s",
            message.handler,
            executor.name,
            RETRY_AFTER,
            reason,
            extra=about(handler=message.handler, queue=message.queue),
        )
        return After(RETRY_AFTER)

    def _record_success(self, executor: Executor, handler: str) -> None:
        known = self.controls.snapshot
        if executor.name in known.failed_executors:
            logger.info("the broker of %s is available again", executor.name, extra=about())
            self._decide(known.executor_ids.get(executor.name), executor_works)
        if handler in known.unsent_handlers:
            self._decide(known.handler_ids.get(handler), message_sent)

    def _take_back(self, hand_off: HandOff, rows: list[int], wait: Wait) -> None:
        """Return events to the queue. No attempt is counted."""
        self.settler.through_outage(
            lambda: self.store.take_back_handed_off(rows, token=hand_off.token, wait=wait)
        )

    def _decide(self, control_id: int | None, decision: Callable[..., Any]) -> int | None:
        if control_id is not None:
            self.settler.through_outage(lambda: self.store.decide(control_id, decision))
            self.controls.read_again()
        return control_id


@cache
def _sender(path: str) -> Send:
    sender: Send = import_string(path)
    return sender
