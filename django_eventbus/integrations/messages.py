"""The messages of hand-offs as JSON, and their delivery in a process of another executor.

A message has only row ids and a token. The database has the events, so a message that is lost,
late or repeated has no effect on them.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from django.utils.connection import ConnectionDoesNotExist

from django_eventbus.exceptions import EventBusError
from django_eventbus.executors import LARGEST_BATCH, Message
from django_eventbus.store import store_for
from django_eventbus.worker.handed_off import deliver_message

logger = logging.getLogger(__name__)


def content_of(message: Message) -> dict[str, Any]:
    """Return the message as a JSON object."""
    return {**message._asdict(), "token": str(message.token), "rows": list(message.rows)}


def deliver(content: dict[str, Any], *, executor: str) -> None:
    """Deliver the events of a message. A malformed message is logged and ignored."""
    try:
        message = _parsed(content)
    except EventBusError as error:
        logger.warning("a message to the executor %s was ignored: %s", executor, error)
        return
    deliver_message(message, executor=executor)


def _parsed(content: dict[str, Any]) -> Message:
    """Return the message. Raises EventBusError if the content cannot be a message of the bus."""
    if content.keys() != set(Message._fields):
        raise EventBusError(f"it has the fields {', '.join(sorted(content)) or 'none'}")
    using, queue, handler, token, rows = (content[name] for name in Message._fields)
    if not all(isinstance(each, str) for each in (using, queue, handler, token)):
        raise EventBusError("using, queue, handler and token must be texts")
    are_rows = isinstance(rows, list) and all(type(row) is int for row in rows)
    if not are_rows or len(rows) > LARGEST_BATCH:
        raise EventBusError(f"rows must be a list of at most {LARGEST_BATCH} row ids")
    try:
        store_for(using)
        return Message(using, queue, handler, uuid.UUID(token), rows)
    except (ValueError, ConnectionDoesNotExist) as error:
        raise EventBusError(str(error)) from None
