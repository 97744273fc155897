"""Hand events off to Django's Tasks framework.

The framework is part of Django since version 6.0. For Django 5.2, the package ``django-tasks``
provides it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from django.utils.module_loading import import_string

from django_eventbus.executors import Message, TaskExecutor
from django_eventbus.integrations import messages

task: Any = import_string("django.tasks.task" if find_spec("django.tasks") else "django_tasks.task")


@task()  # type: ignore[untyped-decorator]
def deliver(**content: Any) -> None:
    """Deliver events that an event worker has handed off to a task."""
    messages.deliver(content, executor=TaskExecutor.name)


def send(executor: TaskExecutor, message: Message, expires: float) -> None:
    """Enqueue a task that delivers the events of the message. Such a task does not expire."""
    task_of(executor).enqueue(**messages.content_of(message))


def task_of(executor: TaskExecutor) -> Any:
    """Return the task with the options of the executor. The backend may refuse the options."""
    return deliver.using(
        backend=executor.backend, queue_name=executor.queue_name, priority=executor.priority
    )
