"""Hand events off to Celery. The module ``tasks`` has the task that delivers them."""

from __future__ import annotations

import uuid
from typing import Any

from celery import current_task

from django_eventbus.executors import CeleryExecutor, Message
from django_eventbus.integrations import celery_broker
from django_eventbus.integrations.messages import content_of

#: The name of the Celery task that delivers events.
DELIVER = "django_eventbus.deliver"


def send(executor: CeleryExecutor, message: Message, expires: float) -> None:
    """Send a message to Celery's broker.

    Raises BrokerUnavailableError if the broker does not answer or refuses the message.
    """
    celery_broker.broker.send(
        DELIVER,
        [],
        content_of(message),
        task_id=str(uuid.uuid4()),
        options={
            **executor.message_options,
            "expires": expires,
            "ignore_result": True,
            "serializer": "json",
        },
    )


def headers_of_message() -> dict[str, Any]:
    """Return the headers of the message that this process handles, or {}. They are not trusted."""
    headers = current_task.request.headers if current_task else None
    return headers if isinstance(headers, dict) else {}
