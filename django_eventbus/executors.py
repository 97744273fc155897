"""Executors: the processes that run a handler.

The event workers run a handler that has no executor. A handler with ``executor="celery"`` runs in
Celery workers: an event worker hands each event off, by a message with the row id of the event.
``executor="task"`` does the same with a task of Django's Tasks framework.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

from django_eventbus.errors.suggestions import closest
from django_eventbus.exceptions import EventBusError

#: The name of the default executor.
WORKER = "worker"
LARGEST_BATCH = 1000


class Message(NamedTuple):
    """The content of a message to an executor: events to claim, and the handler to call."""

    using: str
    queue: str
    handler: str
    token: uuid.UUID
    rows: Sequence[int]


#: Sends a message. The broker may drop the message after the given number of seconds.
Send = Callable[["Executor", Message, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CeleryExecutor:
    """Run a handler in Celery workers::

        @handler("order.placed", executor=CeleryExecutor(queue="mail", batch=20))
        def send_receipt(event): ...

    ``queue``, ``routing_key`` and ``priority`` are options of Celery's ``apply_async``. ``batch``
    is the largest number of events in one message. ``executor="celery"`` means
    ``CeleryExecutor()``.
    """

    queue: str | None = None
    routing_key: str | None = None
    priority: int | None = None
    batch: int = 50

    name: ClassVar[str] = "celery"
    #: The function that sends a message. It is loaded when it is first needed, because Celery may
    #: not be installed.
    sender: ClassVar[str] = "django_eventbus.integrations.celery_executor.send"

    def __post_init__(self) -> None:
        _check_names(self, "queue", "routing_key")
        if self.priority is not None:
            _check_whole_number(self, "priority", least=0, most=255)
        _check_whole_number(self, "batch", least=1, most=LARGEST_BATCH)

    @property
    def message_options(self) -> dict[str, str | int]:
        """The options of Celery's ``apply_async`` that are set."""
        names = (each.name for each in fields(self) if each.name != "batch")
        options = {name: getattr(self, name) for name in names}
        return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExecutor:
    """Run a handler in a task of Django's Tasks framework::

        @handler("order.placed", executor=TaskExecutor(queue_name="mail", batch=20))
        def send_receipt(event): ...

    ``backend``, ``queue_name`` and ``priority`` are options of ``Task.using``. ``batch`` is the
    largest number of events in one task. ``executor="task"`` means ``TaskExecutor()``. Before
    Django 6.0, the package ``django-tasks`` has to be installed.
    """

    backend: str = "default"
    queue_name: str = "default"
    priority: int = 0
    batch: int = 50

    name: ClassVar[str] = "task"
    sender: ClassVar[str] = "django_eventbus.integrations.task_executor.send"

    def __post_init__(self) -> None:
        _check_names(self, "backend", "queue_name")
        _check_whole_number(self, "priority", least=-100, most=100)
        _check_whole_number(self, "batch", least=1, most=LARGEST_BATCH)


Executor = CeleryExecutor | TaskExecutor

_BY_NAME: dict[str, type[Executor]] = {each.name: each for each in (CeleryExecutor, TaskExecutor)}


def executor_of(given: Executor | str | None, handler: str) -> Executor | None:
    """Return the executor of a handler; None for the event workers.

    Raises EventBusError for an unknown executor.
    """
    if given is None or given == WORKER:
        return None
    if isinstance(given, Executor):
        return given
    if isinstance(given, str) and given in _BY_NAME:
        return _BY_NAME[given]()
    choices = (WORKER, *_BY_NAME)
    similar = closest(given, choices) if isinstance(given, str) else None
    hint = f" (did you mean {similar!r}?)" if similar else ""
    raise EventBusError(
        f"{handler} has the unknown executor {given!r}{hint}; choose from "
        f"{', '.join(map(repr, choices))}, CeleryExecutor(…) and TaskExecutor(…)"
    )


def _check_names(executor: Executor, *options: str) -> None:
    for option in options:
        value = getattr(executor, option)
        if value is not None and not (isinstance(value, str) and value):
            raise ValueError(f"{_named(executor, option)} must be a name, not {value!r}")


def _check_whole_number(executor: Executor, option: str, *, least: int, most: int) -> None:
    value = getattr(executor, option)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(
            f"{_named(executor, option)} must be a whole number from {least} to {most}, "
            f"not {value!r}"
        )


def _named(executor: Executor, option: str) -> str:
    return f"{type(executor).__name__}.{option}"
