"""Handlers, and the event types that each of them receives.

``handler`` declares a handler where the function is defined, ``subscribe`` declares it at run time.
Each process has its registry in memory; the database stores only the names of handlers.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypedDict, TypeVar, Unpack, overload

from asgiref.sync import iscoroutinefunction

from django_eventbus.conf import settings
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.events import Envelope, Event, class_for, classes_declared
from django_eventbus.exceptions import DuplicateHandlerError, EventBusError
from django_eventbus.executors import Executor, executor_of
from django_eventbus.policies import CircuitBreaker, Limits, Rate, check_pace, check_policy
from django_eventbus.retries import A_CENTURY, RetryPolicy
from django_eventbus.schema.names import MAX_NAME_LENGTH, check_name
from django_eventbus.schema.patterns import by_specificity, matches

Subject = str | type[Event]

F = TypeVar("F", bound=Callable[[Envelope[Any]], Any])
E = TypeVar("E", bound=Event)
E2 = TypeVar("E2", bound=Event)
R = TypeVar("R")

#: Functions that yield the event types that an integration publishes, each with the text of its
#: origin, such as "a bridge from auth.User". Integrations append their functions to this list; a
#: system check calls the functions.
TYPE_SOURCES: list[Callable[[], Iterable[tuple[str, str]]]] = []

#: The policies for an event that has no handler.
UNHANDLED_POLICIES = ("retry", "complete")


@dataclass(frozen=True, kw_only=True, eq=False)
class Handler:
    """A function, its event types and its options."""

    name: str
    func: Callable[..., Any]
    subjects: tuple[Subject, ...]
    priority: int = 0
    retry: RetryPolicy | Mapping[str, Any] | None = None
    timeout: float | None = None
    atomic: bool = True
    isolated: bool = False
    breaker: CircuitBreaker | Mapping[str, Any] | bool | None = None
    max_running: int | None = None
    rate: str | None = None
    #: The executor that runs the handler; None for the event workers.
    executor: Executor | None = None
    #: Whether the handler receives events of a replay.
    replay: bool = True
    is_async: bool = False
    position: int = 0
    #: Identifies the subscription for ``unsubscribe``.
    id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def handles(self, type_name: str) -> bool:
        return any(covers(subject, type_name) for subject in self.subjects)

    @property
    def retry_policy(self) -> RetryPolicy:
        if isinstance(self.retry, RetryPolicy):
            return self.retry
        return RetryPolicy.default(**(self.retry or {}))

    @property
    def limits(self) -> Limits | None:
        """The breaker, rate and limit on concurrency of this handler, or None if it has none.

        All workers share these limits.
        """
        limits = Limits(
            breaker=self._breaker(),
            max_running=self.max_running,
            rate=None if self.rate is None else Rate.parse(self.rate),
        )
        return None if limits == Limits() else limits

    def _breaker(self) -> CircuitBreaker | None:
        if isinstance(self.breaker, CircuitBreaker):
            return self.breaker
        if self.breaker is False or (self.breaker is None and settings.BREAKER is None):
            return None
        overrides = self.breaker if isinstance(self.breaker, Mapping) else {}
        return CircuitBreaker.default(**overrides)

    @cached_property
    def stored_name(self) -> bytes:
        return self.name.encode()[:MAX_NAME_LENGTH]

    @property
    def deadline(self) -> float:
        return settings.HANDLER_TIMEOUT if self.timeout is None else self.timeout


class HandlerOptions(TypedDict, total=False):
    """The options of ``handler`` and ``subscribe``, for type checkers."""

    name: str | None
    priority: int
    retry: RetryPolicy | Mapping[str, Any] | None
    timeout: float | None
    atomic: bool | None
    isolated: bool
    breaker: CircuitBreaker | Mapping[str, Any] | bool | None
    max_running: int | None
    rate: str | None
    executor: Executor | str | None
    replay: bool


# The overloads overlap: the third one accepts classes too. Type checkers use the first overload
# that matches.
@overload
def handler(  # type: ignore[overload-overlap]
    subject: type[E], /, **options: Unpack[HandlerOptions]
) -> Callable[[Callable[[Envelope[E]], R]], Callable[[Envelope[E]], R]]: ...


@overload
def handler(  # type: ignore[overload-overlap]
    subject: type[E], other: type[E2], /, **options: Unpack[HandlerOptions]
) -> Callable[[Callable[[Envelope[E | E2]], R]], Callable[[Envelope[E | E2]], R]]: ...


@overload
def handler(
    subject: Subject, /, *subjects: Subject, **options: Unpack[HandlerOptions]
) -> Callable[[F], F]: ...


def handler(*subjects: Subject, **options: Unpack[HandlerOptions]) -> Callable[..., Any]:
    """Declare a function as a handler of one or more event types, patterns or event classes::

        @handler("order.*", retry=RetryPolicy(max_retries=5), timeout=10)
        def reserve_stock(event): ...

    Options: ``name`` (stored in the database; default: app and function name), ``priority``
    (a handler with a higher priority runs first), ``retry`` (a RetryPolicy, or a dict that
    overrides values of the project's policy), ``timeout`` (seconds), ``atomic`` (False: no
    transaction is open while the handler runs), ``isolated`` (True: the handler shares its
    transaction with no other event). These options apply to all workers together: ``breaker`` (a
    CircuitBreaker, a dict that overrides values of the project's breaker, True for the defaults, or
    False for none), ``max_running`` (calls at the same time), ``rate`` (such as ``"100/m"``).
    ``executor`` says which processes run the handler: ``"worker"`` (the default), ``"celery"``,
    ``"task"``, a CeleryExecutor or a TaskExecutor. ``replay=False`` means that the handler never
    receives events of a replay.

    For type checkers, the argument of the function is ``Envelope[OrderPaid]`` for one event class,
    ``Envelope[OrderPaid | OrderSent]`` for two event classes, and ``Envelope[Any]`` otherwise.
    """

    if subjects and inspect.isfunction(subjects[0]):
        name = subjects[0].__qualname__
        raise EventBusError(f'@handler needs an event type: @handler("order.placed") above {name}')
    for option in options.keys() - _OPTIONS:
        raise EventBusError(f"@handler has no option {option!r}{did_you_mean(option, _OPTIONS)}")

    def register(func: F) -> F:
        subscribe(subjects, func, **options)
        return func

    return register


@overload
def subscribe(
    subject: type[E], func: Callable[[Envelope[E]], Any], **options: Unpack[HandlerOptions]
) -> Handler: ...


@overload
def subscribe(
    subject: str | tuple[Subject, ...],
    func: Callable[[Envelope[Any]], Any],
    **options: Unpack[HandlerOptions],
) -> Handler: ...


def subscribe(
    subject: Subject | tuple[Subject, ...],
    func: Callable[[Envelope[Any]], Any],
    *,
    name: str | None = None,
    priority: int = 0,
    retry: RetryPolicy | Mapping[str, Any] | None = None,
    timeout: float | None = None,
    atomic: bool | None = None,
    isolated: bool = False,
    breaker: CircuitBreaker | Mapping[str, Any] | bool | None = None,
    max_running: int | None = None,
    rate: str | None = None,
    executor: Executor | str | None = None,
    replay: bool = True,
) -> Handler:
    """Register a handler at run time, with the options of ``handler``.

    Returns the subscription. Pass the subscription or its ``id`` to ``unsubscribe``.
    """
    is_async = iscoroutinefunction(func) or iscoroutinefunction(type(func).__call__)
    handler_name = name if name is not None else default_name(func)
    new = Handler(
        name=handler_name,
        func=func,
        subjects=subject if isinstance(subject, tuple) else (subject,),
        priority=priority,
        retry=retry,
        timeout=timeout,
        atomic=not is_async if atomic is None else atomic,
        isolated=isolated,
        breaker=breaker,
        max_running=max_running,
        rate=rate,
        executor=executor_of(executor, handler_name),
        replay=replay,
        is_async=is_async,
    )
    _check(new)
    return registry.add(new)


def _check(new: Handler) -> None:
    """Validate a new handler when it is declared, not when its first event arrives.

    Raises EventBusError for an invalid option.
    """
    check_name(new.name, "the handler name")
    if not new.subjects:
        raise EventBusError(f"{new.name} needs at least one event type or pattern")
    for each in new.subjects:
        if isinstance(each, str):
            check_name(each, "the pattern")
        elif not (isinstance(each, type) and issubclass(each, Event)):
            raise EventBusError(
                f"{new.name} can handle a type name, a pattern or an Event class, not {each!r}"
            )
    _check_signature(new)
    if inspect.isgeneratorfunction(new.func) or inspect.isasyncgenfunction(new.func):
        raise EventBusError(
            f"{new.name} is a generator function, so calling it would not run its code: "
            "declare a function without yield"
        )
    if new.is_async and new.atomic:
        raise EventBusError(
            f"{new.name} is async and cannot be atomic: remove atomic=True, because Django has no "
            "async transactions"
        )
    if new.isolated and not new.atomic:
        raise EventBusError(
            f"{new.name} is isolated and not atomic: isolated=True needs the transaction of an "
            "atomic handler"
        )
    if not isinstance(new.priority, int) or isinstance(new.priority, bool):
        raise EventBusError(f"the priority of {new.name} must be an integer, not {new.priority!r}")
    if new.timeout is not None and not (
        isinstance(new.timeout, int | float) and 0 < new.timeout < A_CENTURY
    ):
        raise EventBusError(
            f"the timeout of {new.name} must be a positive number, not {new.timeout!r}"
        )
    check_policy(new.name, "retry", new.retry, RetryPolicy)
    if not isinstance(new.breaker, bool):
        check_policy(new.name, "breaker", new.breaker, CircuitBreaker)
    check_pace(new.name, new.max_running, new.rate)


def _check_signature(new: Handler) -> None:
    try:
        inspect.signature(new.func).bind(None)
    except TypeError:
        raise EventBusError(f"{new.name} must take the event as its only argument") from None
    except ValueError:
        return  # Some functions written in C have no signature.


_OPTIONS = inspect.signature(subscribe).parameters.keys() - {"subject", "func"}


def unsubscribe(subscription: Handler | str) -> None:
    """Remove a subscription. Pass the subscription or its id; an unknown id is ignored."""
    registry.remove(subscription.id if isinstance(subscription, Handler) else subscription)


class HandlersOfType:
    """The handlers of one event type, higher priority first, then in order of registration."""

    __slots__ = ("all", "atomic", "has_executors", "isolated", "names", "outside")

    def __init__(self, handlers: list[Handler]) -> None:
        self.all = handlers
        self.names = frozenset(each.name for each in handlers)
        self.atomic = [each for each in handlers if each.atomic]
        self.outside = [each for each in handlers if not each.atomic]
        self.isolated = any(each.isolated for each in handlers)
        self.has_executors = any(each.executor is not None for each in handlers)

    def for_replay(self, only: str | None) -> HandlersOfType:
        """Return the handlers that receive an event of a replay: all of them, or only one."""
        return HandlersOfType(
            [each for each in self.all if each.replay and only in (None, each.name)]
        )


class Registry:
    """The handlers of this process, with a cache of the handlers of each type."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._by_type: dict[str, HandlersOfType] = {}
        #: The types, patterns and classes of all handlers; None until they are needed.
        self._subjects: set[Subject] | None = None
        self._classes_known = 0
        #: A counter that increases whenever a handler is added or removed.
        self.changes = 0
        self._positions = itertools.count()
        self._lock = threading.Lock()

    def add(self, new: Handler) -> Handler:
        with self._lock:
            known = self._handlers.get(new.name)
            if known is not None and not _same_source(known, new):
                raise DuplicateHandlerError(
                    f"{_source(new.func)} and {_source(known.func)} both have the handler name "
                    f"{new.name!r}; give one of them another name="
                )
            if known is not None and set(known.subjects) != set(new.subjects):
                raise DuplicateHandlerError(
                    f"{_source(new.func)} is registered twice with different patterns: pass all "
                    f"patterns to one @handler(…), or give each registration its own name="
                )
            object.__setattr__(new, "position", next(self._positions))
            # Create a new dict, because other threads may be iterating over the old dict.
            self._handlers = {**self._handlers, new.name: new}
            self._by_type, self._subjects = {}, None
            self.changes += 1
        return new

    def remove(self, subscription_id: str) -> None:
        with self._lock:
            self._handlers = {
                name: each for name, each in self._handlers.items() if each.id != subscription_id
            }
            self._by_type, self._subjects = {}, None
            self.changes += 1

    def handlers_for(self, type_name: str) -> HandlersOfType:
        if self._classes_known != classes_declared():
            # A new event class was declared. If its type is already in the cache, the entry lacks
            # the handlers of the base classes, so the cache is cleared.
            self._classes_known, self._by_type = classes_declared(), {}
        cached = self._by_type
        found = cached.get(type_name)
        if found is None:
            matching = [each for each in self._handlers.values() if each.handles(type_name)]
            found = HandlersOfType(
                sorted(matching, key=lambda each: (-each.priority, each.position))
            )
            if len(cached) >= _MAX_CACHED_TYPES:
                cached.clear()
            # If another thread adds a handler meanwhile, ``found`` is outdated. That thread also
            # replaces ``self._by_type``, so this line writes to the old dict, which is not read
            # again.
            cached[type_name] = found
        return found

    def knows_type(self, type_name: str) -> bool:
        """Return whether an event class or a handler of this process names exactly this type."""
        subjects = self._subjects
        if subjects is None:
            subjects = {each for handler in self.all() for each in handler.subjects}
            self._subjects = subjects
        return type_name in subjects or class_for(type_name) is not None

    def get(self, name: str) -> Handler | None:
        return self._handlers.get(name)

    def all(self) -> list[Handler]:
        return list(self._handlers.values())


#: Types may contain ids (``order.7.shipped``), so their number is unlimited, and the cache must not
#: store all of them.
_MAX_CACHED_TYPES = 10_000

registry = Registry()


def covers(subject: Subject, type_name: str) -> bool:
    """Return whether a type name, pattern or event class includes events of this type."""
    if isinstance(subject, str):
        return matches(subject, type_name)
    cls = class_for(type_name)
    return cls is not None and issubclass(cls, subject)


def unhandled_policy(type_name: str) -> str:
    """Return the policy of EVENTBUS["UNHANDLED"] for this type.

    If several patterns match, the most specific pattern decides.
    """
    given = settings.UNHANDLED
    if isinstance(given, str):
        return given
    fitting = [pattern for pattern in given if matches(pattern, type_name)]
    return given[min(fitting, key=by_specificity)] if fitting else "retry"


def default_name(func: Callable[..., Any]) -> str:
    """Return the app and function name, such as ``shop.reserve_stock`` in ``shop/handlers.py``."""
    if not hasattr(func, "__qualname__"):
        raise EventBusError(f"{func!r} has no __qualname__: pass name=")
    module = func.__module__.removesuffix(".handlers").removesuffix(".events")
    return f"{module}.{func.__qualname__}"


def _same_source(one: Handler, other: Handler) -> bool:
    """Return whether both handlers have the same function.

    A reload of a module creates a new function, so functions with equal names count as the same,
    except lambdas and local functions, whose names are not unique.
    """
    if one.func is other.func:
        return True
    source = _source(one.func)
    return source == _source(other.func) and "<" not in source


def _source(func: Callable[..., Any]) -> str:
    return f"{func.__module__}.{getattr(func, '__qualname__', repr(func))}"
