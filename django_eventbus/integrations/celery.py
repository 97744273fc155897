"""Send Celery tasks if, and only if, the caller's transaction commits.

A call of a task is stored as an event in the caller's transaction. After the commit, an event
worker sends the task to the broker and waits for the broker's confirmation. If the worker dies
before the event is settled, the task is sent again with the same task id.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery.utils.abstract import CallableSignature

from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.events import Envelope
from django_eventbus.exceptions import EventBusError, InvalidPayloadError
from django_eventbus.integrations import celery_broker
from django_eventbus.integrations.celery_broker import SEND_TIMEOUT
from django_eventbus.models import QueuedEvent
from django_eventbus.publishing.publisher import publish
from django_eventbus.registry import Handler, Subject, subscribe

if TYPE_CHECKING:
    from celery import Task

#: The event type of a call of ``delay_durably`` or ``apply_async_durably``.
TASK_CALLED = "celery.task_called"

#: Options of ``apply_async`` that can be stored as JSON and do not delay the task.
TASK_OPTIONS = frozenset(
    {
        *("exchange", "expires", "headers", "ignore_result", "priority", "queue", "routing_key"),
        *("serializer", "shadow", "soft_time_limit", "time_limit"),
    }
)
#: Options of ``apply_async`` that are refused, with the reason for the error message.
REFUSED = {
    "countdown": "use delay=, so that the event waits in the database",
    "eta": "use at=, so that the event waits in the database",
    "task_id": "the id of the event is the id of the task",
}


def delay_durably(task: Task | str, *args: Any, **kwargs: Any) -> QueuedEvent | None:
    """Call a Celery task when the caller's transaction has committed::

        with transaction.atomic():
            order = Order.objects.create(total=10)
            delay_durably(send_receipt, order.pk)

    The arguments of the task must be JSON values. Returns the event; its ``event_id`` is the id of
    the task.
    """
    return apply_async_durably(task, args, kwargs)


def apply_async_durably(
    task: Task | str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    key: str | None = None,
    delay: float | timedelta | None = None,
    at: datetime | None = None,
    using: str | None = None,
    **options: Any,
) -> QueuedEvent | None:
    """Call a Celery task with options when the caller's transaction has committed.

    ``key``, ``delay``, ``at`` and ``using`` have the same meaning as in ``publish()``: for example,
    tasks with the same key are sent in order. All other options are options of Celery's
    ``apply_async``.

    Raises EventBusError for an unknown option, and InvalidPayloadError for arguments that the task
    does not take or that are not JSON values.
    """
    if not isinstance(args, list | tuple):
        raise EventBusError(f"args must be a list or a tuple, not {args!r}")
    call = {
        "task": _name_of(task),
        "args": list(args),
        "kwargs": dict(kwargs or {}),
        "options": _checked(options),
    }
    _check_arguments(task, args, kwargs or {})
    return publish(TASK_CALLED, call, key=key, delay=delay, at=at, using=using)


def forward(
    subject: Subject | tuple[Subject, ...],
    *,
    to: Task | str,
    args: Callable[[Envelope[Any]], Sequence[Any]] | None = None,
    kwargs: Callable[[Envelope[Any]], Mapping[str, Any]] | None = None,
    name: str | None = None,
    **options: Any,
) -> Handler:
    """Send a Celery task for every event of a type, pattern or event class::

        forward("order.placed", to=send_receipt, args=lambda event: [event.payload["order_id"]])

    ``args`` and ``kwargs`` are functions of the event. If neither is given, the task gets the
    payload as its only argument. ``name`` is the stored name of the handler; the default is
    ``forward:`` and the name of the task. All other options are options of Celery's
    ``apply_async``.

    The task id is ``event.idempotency_key``, which is the same for every attempt.
    """
    task_name, chosen = _name_of(to), _checked(options)
    for option, value in (("args", args), ("kwargs", kwargs)):
        if value is not None and not callable(value):
            raise EventBusError(f"{option}= must be a function of the event, not {value!r}")
    if args is None and kwargs is None:
        args = _payload_only

    def send(event: Envelope[Any]) -> None:
        celery_broker.broker.send(
            task_name,
            list(args(event)) if args else [],
            dict(kwargs(event)) if kwargs else {},
            task_id=event.idempotency_key,
            options=chosen,
        )

    handler_name = name if name is not None else f"forward:{task_name}"
    return subscribe(subject, send, name=handler_name, atomic=False, timeout=SEND_TIMEOUT)


def send_called_task(event: Envelope[Any]) -> None:
    """Send the task of a ``delay_durably`` or ``apply_async_durably`` call to the broker."""
    call = event.payload
    celery_broker.broker.send(
        call["task"],
        call["args"],
        call["kwargs"],
        task_id=str(event.id),
        options=_checked(call["options"]),
    )


def register() -> None:
    """Register the handler that sends called tasks.

    The module ``handlers`` calls this function if Celery is installed.
    """
    subscribe(
        TASK_CALLED,
        send_called_task,
        name="django_eventbus.send_task",
        atomic=False,
        timeout=SEND_TIMEOUT,
    )


def _payload_only(event: Envelope[Any]) -> list[Any]:
    return [event.payload]


def _name_of(task: Task | str) -> str:
    name = task if isinstance(task, str) else getattr(task, "name", None)
    # A signature also has a name, but its arguments and options would be lost.
    if isinstance(task, CallableSignature):
        raise EventBusError(f"{task!r} is a signature: pass the task and its arguments separately")
    if not isinstance(name, str) or not name:
        raise EventBusError(f"{task!r} is neither a Celery task nor the name of a task")
    return name


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    for option in options:
        if option in REFUSED:
            raise EventBusError(f"{option}= is not possible here: {REFUSED[option]}")
        if option not in TASK_OPTIONS:
            hint = did_you_mean(option, TASK_OPTIONS)
            raise EventBusError(f"there is no option {option!r} for a durable task{hint}")
    return dict(options)


def _check_arguments(task: Task | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidPayloadError if the task does not take the arguments.

    Like ``apply_async``, this raises in the caller's code. Otherwise the task would fail later, in
    a Celery worker.
    """
    run = getattr(task, "run", None)
    if run is None or not getattr(task, "typing", True):
        return
    try:
        inspect.signature(run).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidPayloadError(
            f"{_name_of(task)} does not take these arguments: {error}"
        ) from None
