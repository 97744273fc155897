"""Check the handlers that run in other processes, and the project's Celery app if it is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, register
from django.core.checks import Warning as CheckWarning

from django_eventbus.checks.messages import TAG, check_id
from django_eventbus.checks.setting_rules import RULES
from django_eventbus.conf import settings
from django_eventbus.errors import failures
from django_eventbus.errors.text import one_line
from django_eventbus.executors import CeleryExecutor, TaskExecutor
from django_eventbus.registry import Handler, registry

if TYPE_CHECKING:
    from django_eventbus.integrations.celery_setup import Setup

#: The module of the functions that ``forward()`` registers. The handler FORWARDING_OWN is in the
#: same module, but the bus registers it in every project with Celery, so it does not count.
FORWARDING = "django_eventbus.integrations.celery"
FORWARDING_OWN = "django_eventbus.send_task"

_, timeout_rule = RULES["HANDLER_TIMEOUT"]


@register(TAG)
def check_executors(**kwargs: Any) -> list[CheckMessage]:
    elsewhere = [each for each in registry.all() if each.executor is not None]
    in_celery = [each for each in elsewhere if isinstance(each.executor, CeleryExecutor)]
    in_tasks = [each for each in elsewhere if isinstance(each.executor, TaskExecutor)]
    return [
        *_shared_transactions(elsewhere),
        *_tasks_faults(in_tasks),
        *_celery_faults(in_celery),
    ]


def _shared_transactions(elsewhere: Sequence[Handler]) -> Iterator[CheckMessage]:
    atomic = [each for each in elsewhere if each.atomic]
    if atomic and settings.ATOMIC == "event":
        yield Error(
            f"EVENTBUS['ATOMIC'] is 'event', but other processes run {_names(atomic)}: the "
            "handlers of an event cannot share a transaction across processes.",
            hint="Set EVENTBUS['ATOMIC'] = 'handler', pass atomic=False to these handlers, or "
            "remove their executor.",
            id=check_id("E302"),
        )


def _tasks_faults(in_tasks: Sequence[Handler]) -> Iterator[CheckMessage]:
    if in_tasks and not find_spec("django.tasks") and not find_spec("django_tasks"):
        yield Error(
            f"Django's Tasks framework is not installed, but it is required by {_names(in_tasks)}.",
            hint="Use Django 6.0, pip install django-tasks, or remove executor='task'.",
            id=check_id("E303"),
        )
        return
    for each in in_tasks:
        assert isinstance(each.executor, TaskExecutor)
        try:
            # The import also fails if the setting TASKS has no default backend.
            from django_eventbus.integrations.task_executor import task_of

            task_of(each.executor)
        except Exception as error:  # Each backend raises its own errors.
            yield Error(
                f"The setting TASKS does not allow the executor of {_names([each])}: "
                f"{failures.in_a_line(error)}",
                hint=f"TASKS has {_known_backends()}.",
                id=check_id("E304"),
            )


def _known_backends() -> str:
    """Return the backends of Django's setting TASKS with their queues, as a text."""
    known = getattr(django_settings, "TASKS", None) or {"default": {}}
    backends = (
        f"the backend {alias!r} with {_queues(backend.get('QUEUES', ['default']))}"
        for alias, backend in known.items()
    )
    return " and ".join(backends)


def _queues(names: Collection[str]) -> str:
    listed = ", ".join(repr(name) for name in sorted(names))
    return f"the queue{'s' if len(names) > 1 else ''} {listed}" if names else "any queue"


def _celery_faults(in_celery: Sequence[Handler]) -> list[CheckMessage]:
    forwarding = [each for each in registry.all() if _is_forwarding(each)]
    users = _users([*in_celery, *forwarding])
    if not users:
        return []
    if find_spec("celery") is None:
        wrong = f"Celery is not installed, but it is required by {users}."
        right = "pip install 'django-durable-events[celery]', or do not use Celery there."
        return [Error(wrong, hint=right, id=check_id("E301"))]
    # Celery is imported only here, because projects without such handlers do not need it.
    from django_eventbus.integrations.celery_setup import current_setup

    setup = current_setup()
    if setup is None:
        return [_no_app(users)]
    return [
        *_missing_tasks(setup, _users(in_celery)),
        *_unknown_queues(setup, in_celery),
        *_repeated_messages(setup, in_celery),
        *_faults_of_own_calls(setup),
    ]


def _is_forwarding(handler: Handler) -> bool:
    module = getattr(handler.func, "__module__", None)
    return module == FORWARDING and handler.name != FORWARDING_OWN


def _no_app(users: str) -> CheckMessage:
    return CheckWarning(
        f"The project has loaded no Celery app, which is required by {users}.",
        hint="Import the Celery app in the __init__.py of the project: "
        "from .celery import app as celery_app",
        id=check_id("W301"),
    )


def _missing_tasks(setup: Setup, users: str) -> Iterator[CheckMessage]:
    if users and not setup.has_tasks_of_the_bus:
        yield CheckWarning(
            f"The Celery app {setup.name!r} does not load the tasks of the bus, such as "
            f"'django_eventbus.deliver', so its workers would discard the messages of {users}.",
            hint="Call app.autodiscover_tasks() in the module of the app, or add "
            "'django_eventbus.tasks' to Celery's setting 'imports'.",
            id=check_id("W302"),
        )


def _unknown_queues(setup: Setup, in_celery: Sequence[Handler]) -> Iterator[CheckMessage]:
    """Find queues of executors that are not in Celery's setting ``task_queues``."""
    if setup.queues is None:
        return
    for each in in_celery:
        assert isinstance(each.executor, CeleryExecutor)
        queue = each.executor.queue
        if queue is None or queue in setup.queues:
            continue
        wrong = f"Celery's task_queues does not have the queue {queue!r} of {_names([each])}"
        one_of = "one of " if len(setup.queues) > 1 else ""
        right = f"Choose {one_of}{_queues(setup.queues)}, or add {queue!r} to task_queues."
        if setup.creates_queues:
            wrong += ", so only Celery workers with the option --queues would read it."
            yield CheckWarning(wrong, hint=right, id=check_id("W306"))
        else:
            wrong += ", so no message of the handler could be sent."
            yield Error(wrong, hint=right, id=check_id("E305"))


def _repeated_messages(setup: Setup, in_celery: Sequence[Handler]) -> Iterator[CheckMessage]:
    limit = setup.redelivers_after
    if limit is None or timeout_rule(settings.HANDLER_TIMEOUT) is not None:
        return  # Check E110 reports the wrong setting.
    slow = [each for each in in_celery if limit < each.deadline]
    if slow:
        longest = max(each.deadline for each in slow)
        yield CheckWarning(
            f"Redis delivers a message again after {limit:g} seconds (visibility_timeout with "
            f"task_acks_late), but the timeout of {_names(slow)} is up to {longest:g} seconds. The "
            "bus ignores the second message, but Celery runs a task of the project twice if the "
            f"task takes longer than {limit:g} seconds.",
            hint="Set 'visibility_timeout' in Celery's broker_transport_options to more than "
            f"{longest:g}, in every app that uses this Redis server.",
            id=check_id("W305"),
        )


def _faults_of_own_calls(setup: Setup) -> Iterator[CheckMessage]:
    """Find missing options that affect the tasks which the project sends itself.

    The messages of the bus do not need these options, because the bus has its own connection.
    """
    if not setup.has_own_tasks:
        return
    if setup.is_unconfirmed:
        yield CheckWarning(
            "RabbitMQ does not confirm the tasks that the project sends itself by task.delay(), so "
            "such a task may be lost without an error. The messages of the bus are always "
            "confirmed.",
            hint="Set Celery's broker_transport_options = {'confirm_publish': True}. If the "
            "project calls all tasks with delay_durably(), silence this check.",
            id=check_id("W303"),
        )
    if setup.missing_timeouts:
        yield CheckWarning(
            "A task.delay() of the project may wait for the broker forever, because the "
            f"configuration of Celery has no {' and no '.join(setup.missing_timeouts)}. The "
            "messages of the bus always have timeouts.",
            hint="Set these options to a number of seconds, such as 10. If the project calls all "
            "tasks with delay_durably(), silence this check.",
            id=check_id("W304"),
        )


def _users(handlers: Sequence[Handler]) -> str:
    """Return the handlers and settings that need Celery, as a text."""
    users = [_names(handlers)] if handlers else []
    if settings.CELERY_DRAIN is True:
        users.append("EVENTBUS['CELERY_DRAIN']")
    return " and ".join(users)


def _names(handlers: Sequence[Handler]) -> str:
    plural = "s" if len(handlers) > 1 else ""
    return f"the handler{plural} {one_line(', '.join(repr(each.name) for each in handlers), 200)}"
