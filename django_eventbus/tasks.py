"""The Celery tasks of the bus. Celery's ``autodiscover_tasks()`` imports this module."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from django_eventbus.executors import CeleryExecutor
from django_eventbus.integrations import celery_drain, celery_executor, messages
from django_eventbus.tracing import spans


@shared_task(name=celery_executor.DELIVER, ignore_result=True)  # type: ignore[untyped-decorator]
def deliver(*args: Any, **content: Any) -> None:
    """Deliver events that an event worker has handed off to Celery.

    The bus sends no ``args``. They are accepted here, so that a message with args is counted as any
    other malformed message.
    """
    content = {**content, "args": args} if args else content
    with spans.continued(celery_executor.headers_of_message()):
        messages.deliver(content, executor=CeleryExecutor.name)


@shared_task(name=celery_drain.DRAIN, ignore_result=True)  # type: ignore[untyped-decorator]
def drain(**options: Any) -> int:
    """Handle the events that are ready, for projects without ``run_event_worker``."""
    return celery_drain.drain(**options)
