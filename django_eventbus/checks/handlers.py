"""Check the handlers, and report event types without a handler."""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from django.core.checks import CheckMessage, register
from django.core.checks import Warning as CheckWarning

from django_eventbus import schedules
from django_eventbus.checks.messages import TAG, check_id
from django_eventbus.checks.setting_rules import unhandled_policies
from django_eventbus.conf import settings
from django_eventbus.errors.suggestions import closest
from django_eventbus.events import Event, declared_types
from django_eventbus.registry import TYPE_SOURCES, Handler, registry, unhandled_policy


@register(TAG)
def check_handlers(**kwargs: Any) -> list[CheckMessage]:
    return [*_handlers_imported_twice(), *_handlers_without_a_type()]


def _handlers_imported_twice() -> Iterator[CheckMessage]:
    """Find functions that were registered twice, because their file was imported as two modules.

    A function that is registered under two names in one module is allowed.
    """
    by_source: dict[str, list[Handler]] = defaultdict(list)
    for each in registry.all():
        if source := _source_of(each.func):
            by_source[source].append(each)
    for source, same in by_source.items():
        if len({each.func.__module__ for each in same}) > 1:
            names = " and ".join(repr(each.name) for each in same)
            yield CheckWarning(
                f"The handlers {names} are one function that was imported by different paths: each "
                f"event runs it {len(same)} times.",
                hint=f"Import {source} everywhere by the path that INSTALLED_APPS uses.",
                id=check_id("W002"),
            )


def _source_of(func: Callable[..., Any]) -> str | None:
    code = getattr(inspect.unwrap(func), "__code__", None)
    return f"{os.path.realpath(code.co_filename)}:{code.co_firstlineno}" if code else None


def _handlers_without_a_type() -> Iterator[CheckMessage]:
    for each in registry.all():
        for subject in each.subjects:
            if isinstance(subject, type) and not _has_a_type(subject):
                yield CheckWarning(
                    f"{subject.__qualname__} declares no event type, so the handler {each.name!r} "
                    "would never run.",
                    hint=f'Give {subject.__qualname__} or a subclass a type="…", and import it.',
                    id=check_id("W003"),
                )


def _has_a_type(cls: type[Event]) -> bool:
    return cls.event_type is not None or any(map(_has_a_type, cls.__subclasses__()))


@register(TAG)
def check_unhandled_types(**kwargs: Any) -> list[CheckMessage]:
    """Report declared event types that have no handler, unless UNHANDLED completes their events.

    The check cannot find a type that the code only passes to ``publish()`` as a string.
    """
    if unhandled_policies(settings.UNHANDLED) is not None:
        return []  # Check E113 reports the wrong setting.
    origins = dict(reversed(list(_types_to_be_published())))
    return [
        _unhandled(type_name, origin)
        for type_name, origin in sorted(origins.items())
        if not registry.handlers_for(type_name).names and unhandled_policy(type_name) == "retry"
    ]


def _types_to_be_published() -> Iterator[tuple[str, str]]:
    for type_name, cls in declared_types().items():
        yield type_name, f"the class {cls.__module__}.{cls.__qualname__}"
    for schedule in schedules.declared():
        if isinstance(schedule.type, str):
            yield schedule.type, f"the schedule {schedule.name!r}"
    for source in TYPE_SOURCES:
        yield from source()


def _unhandled(type_name: str, origin: str) -> CheckMessage:
    handled = {subject for each in registry.all() for subject in each.subjects}
    # The required similarity is high, because the types of one model, such as order.created and
    # order.updated, are similar but not typing errors.
    close = closest(type_name, (s for s in handled if isinstance(s, str)), similarity=0.85)
    meant = f" Did you mean {close!r}, which has a handler?" if close else ""
    return CheckWarning(
        f"The event type {type_name!r} ({origin}) has no handler: its events will be dead letters.",
        hint=f"Add a handler for it.{meant} If its events need no handler, set "
        f"EVENTBUS['UNHANDLED'] = {{{type_name!r}: 'complete'}}.",
        id=check_id("W006"),
    )
