"""The messages of hand-offs as JSON, and their delivery in a process of another executor.

A message contains the alias of the database, the queue, the handler, a token and row ids, but no
data of the events. If a message is lost, its events are handed off again after HANDOFF_DEADLINE. A
repeated message, or a message that arrives after its events were handed off again, is ignored,
because its token claims no event.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from django.db import connections, router
from django.db.models import BigIntegerField

from django_eventbus.errors.suggestions import check_queue
from django_eventbus.errors.text import one_line
from django_eventbus.exceptions import EventBusError
from django_eventbus.executors import LARGEST_BATCH, Message
from django_eventbus.integrations.green_threads import refuse_green_threads
from django_eventbus.logs import about
from django_eventbus.models import QueuedEvent
from django_eventbus.statistics.recorder import recorder_of_process
from django_eventbus.store import LOWEST_ID, store_for
from django_eventbus.worker.handed_off import deliver_message

logger = logging.getLogger(__name__)

LARGEST_ID = BigIntegerField.MAX_BIGINT


def content_of(message: Message) -> dict[str, Any]:
    """Return the message as a JSON object."""
    return {**message._asdict(), "token": str(message.token), "rows": list(message.rows)}


def deliver(content: dict[str, Any], *, executor: str) -> None:
    """Deliver the events of a message. A malformed message is logged, counted and ignored.

    Raises EventBusError in a process with green threads.
    """
    refuse_green_threads()
    try:
        message = _parsed(content)
    except EventBusError as error:
        logger.warning(
            "a message to the executor %s was ignored: %s",
            executor,
            one_line(str(error)),
            extra=about(),
        )
        # The message may name a wrong database, so it is counted in the database of new events.
        store = store_for()
        recorder_of_process(store.using).count_ignored(store)
        return
    deliver_message(message, executor=executor)


def _parsed(content: dict[str, Any]) -> Message:
    """Return the message. Raises EventBusError if the content cannot be a message of the bus.

    The text of the error contains untrusted content, which may be long.
    """
    if content.keys() != set(Message._fields):
        raise EventBusError(
            f"it has the fields {', '.join(sorted(content)) or 'none'} "
            f"instead of {', '.join(sorted(Message._fields))}"
        )
    using, queue, handler, token, rows = (content[name] for name in Message._fields)
    if not all(isinstance(each, str) for each in (using, queue, handler, token)):
        raise EventBusError("using, queue, handler and token must be strings")
    if not _are_rows(rows):
        raise EventBusError(f"rows must be a list of 1 to {LARGEST_BATCH} row ids")
    if using not in connections or not router.allow_migrate_model(using, QueuedEvent):
        raise EventBusError(f"the database {using!r} is not a database of the bus")
    store_for(using)  # Raises an error if the bus does not support the database.
    # The process would store the name in its registration, so an unknown queue is refused here.
    check_queue(queue)
    try:
        return Message(using, queue, handler, uuid.UUID(token), rows)
    except ValueError:
        raise EventBusError(f"the token {token!r} is not a UUID") from None


def _are_rows(rows: Any) -> bool:
    if not isinstance(rows, list) or not 0 < len(rows) <= LARGEST_BATCH:
        return False
    # bool is a subclass of int. A number outside of this range would cause a database error.
    return all(type(row) is int and LOWEST_ID <= row <= LARGEST_ID for row in rows)
