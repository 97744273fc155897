"""The configuration of the project's Celery app, for the system checks.

Nothing here connects to the broker or imports the tasks of the project.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from celery import current_app, signals
from celery.utils.functional import maybe_list
from django.apps import apps
from django.utils.module_loading import module_has_submodule

from django_eventbus.integrations import celery_broker
from django_eventbus.integrations.celery_executor import DELIVER

PACKAGE = "django_eventbus"
#: Prefixes of the names of tasks that the project does not define.
FOREIGN = ("celery.", f"{PACKAGE}.")
#: For each kind of broker, the transport options without which a call may wait forever. For Redis,
#: socket_timeout also limits the time to connect.
TIMEOUTS = {"amqp": ("read_timeout", "write_timeout"), "redis": ("socket_timeout",)}
#: The visibility_timeout of kombu's transport for Redis.
DEFAULT_VISIBILITY = 3600


class Setup(NamedTuple):
    """The options of a Celery app that the checks need."""

    name: str
    #: Whether Celery workers of the app have the tasks of the bus.
    has_tasks_of_the_bus: bool
    #: Whether the project has tasks. The project may call them without the bus.
    has_own_tasks: bool
    #: Whether RabbitMQ is the broker and does not confirm the tasks that the project sends.
    is_unconfirmed: bool
    #: The options that would limit how long the project waits for the broker, but are not set.
    missing_timeouts: tuple[str, ...]
    #: Seconds after which Redis delivers a message again while its task runs; None if the broker
    #: does not deliver it again.
    redelivers_after: float | None
    #: The names of Celery's declared queues; None if ``task_queues`` is not set and Celery creates
    #: missing queues.
    queues: Collection[str] | None
    #: Whether Celery creates a queue that is not in ``task_queues``.
    creates_queues: bool


def current_setup() -> Setup | None:
    """Return the configuration of the current Celery app; None if the project has loaded none."""
    if not celery_broker.has_app():
        return None
    app = current_app
    kind, options = _kind_of_broker(app), app.conf.broker_transport_options or {}
    is_remote = not app.conf.task_always_eager
    return Setup(
        name=app.main or "",
        has_tasks_of_the_bus=_has_tasks_of_the_bus(app),
        has_own_tasks=_has_own_tasks(app),
        is_unconfirmed=is_remote and kind == "amqp" and not options.get("confirm_publish"),
        missing_timeouts=tuple(_missing_timeouts(app, kind, options)) if is_remote else (),
        redelivers_after=_redelivers_after(app, kind, options) if is_remote else None,
        queues=_queues(app),
        creates_queues=bool(app.conf.task_create_missing_queues),
    )


def _queues(app: Any) -> Collection[str] | None:
    if app.conf.task_queues is None and app.conf.task_create_missing_queues:
        return None
    return tuple(app.amqp.queues)


def _kind_of_broker(app: Any) -> str:
    """Return the kind of the broker, such as "redis"; an empty text if it is unknown."""
    try:
        return str(app.connection_for_write().get_transport_cls().driver_type)
    except (ImportError, KeyError, ValueError):
        return ""  # Celery reports an invalid URL or a missing library when it connects.


def _has_tasks_of_the_bus(app: Any) -> bool:
    """Return whether a Celery worker of the app would import the module with the tasks of the bus.

    ``app.autodiscover_tasks()`` imports modules only when a Celery worker starts. Until then,
    Celery stores each of its calls as a receiver of the signal ``import_modules``.
    """
    listed = (*(maybe_list(app.conf.imports) or ()), *(maybe_list(app.conf.include) or ()))
    return DELIVER in app.tasks or f"{PACKAGE}.tasks" in listed or any(_discoveries(app))


def _discoveries(app: Any) -> Iterator[bool]:
    """For each call of ``app.autodiscover_tasks()``, yield whether it finds the tasks of the bus.

    If the arguments of a call have an unknown form, the function yields True, so that a new version
    of Celery causes no wrong warning.
    """
    for _, receiver in signals.import_modules.receivers:
        if getattr(getattr(receiver, "fun", None), "__self__", None) == app:
            match receiver.args:
                case (packages, related_name):
                    packages = packages() if callable(packages) else packages
                    yield related_name == "tasks" and (not packages or PACKAGE in packages)
                case _:
                    yield True


def _has_own_tasks(app: Any) -> bool:
    """Return whether the project has tasks: registered ones, or a module ``tasks`` in an app.

    The modules are not imported. Otherwise the result would depend on the order of the checks:
    checks of URLs import the views, and views import tasks.
    """
    if any(not name.startswith(FOREIGN) for name in app.tasks):
        return True
    others = (each for each in apps.get_app_configs() if each.name != PACKAGE)
    return any(module_has_submodule(each.module, "tasks") for each in others)


def _missing_timeouts(app: Any, kind: str, options: Mapping[str, Any]) -> Iterator[str]:
    conf = app.conf
    if kind in TIMEOUTS and conf.broker_pool_limit and conf.broker_pool_acquire_timeout is None:
        yield "broker_pool_acquire_timeout"
    for name in TIMEOUTS.get(kind, ()):
        if options.get(name) is None:
            yield f"broker_transport_options[{name!r}]"


def _redelivers_after(app: Any, kind: str, options: Mapping[str, Any]) -> float | None:
    if kind != "redis" or not app.conf.task_acks_late:
        return None
    seconds = options.get("visibility_timeout", DEFAULT_VISIBILITY)
    return seconds if isinstance(seconds, int | float) else None
