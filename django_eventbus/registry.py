"""Who handles what: handlers, patterns, priorities.

Handlers are known to this process only; the database stores their names. ``handler`` declares
one where the function stands, ``subscribe`` at run time.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar

from asgiref.sync import iscoroutinefunction

from django_eventbus.conf import settings
from django_eventbus.events import (
    MAX_NAME_LENGTH,
    Event,
    check_name,
    class_for,
    classes_declared,
)
from django_eventbus.exceptions import DuplicateHandlerError, EventBusError
from django_eventbus.pacing import CircuitBreaker, Limits, Rate
from django_eventbus.retries import A_CENTURY, RetryPolicy

F = TypeVar("F", bound=Callable[..., Any])
Subject = str | type[Event]

#: Who runs a handler; integrations add theirs.
EXECUTORS = {"worker"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Handler:
    """A function, what it is called for, and how."""

    name: str
    func: Callable[..., Any]
    subjects: tuple[Subject, ...]
    priority: int = 0
    retry: RetryPolicy | Mapping[str, Any] | None = None
    timeout: float | None = None
    atomic: bool = True
    executor: str = "worker"
    breaker: CircuitBreaker | Mapping[str, Any] | bool | None = None
    max_running: int | None = None
    rate: str | None = None
    is_async: bool = False
    position: int = 0
    #: What ``subscribe`` gives and ``unsubscribe`` takes.
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
        """None if it may run whenever there is something for it."""
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


def handler(*subjects: Subject, **options: Any) -> Callable[[F], F]:
    """Declare a function as a handler of one or more event types, patterns or event classes::

        @handler("order.*", retry=RetryPolicy(max_retries=5), timeout=10)
        def reserve_stock(event): ...

    Options: ``name`` (what the database stores; default: app and function name), ``priority``
    (higher first), ``retry`` (a RetryPolicy, or a dict that overrides the project's), ``timeout``
    (seconds), ``atomic`` (False: no transaction is open while it runs), ``executor``; of its pace
    in all workers together: ``breaker`` (a CircuitBreaker, a dict that overrides the project's, or
    False), ``max_running`` (at most so many at a time), ``rate`` (``"100/m"``).
    """

    if subjects and inspect.isfunction(subjects[0]):
        raise EventBusError(f'write @handler("…") over {subjects[0].__qualname__}: handles what?')
    for option in options.keys() - _OPTIONS:
        raise EventBusError(f"@handler has no option {option!r}{did_you_mean(option, _OPTIONS)}")

    def register(func: F) -> F:
        subscribe(subjects, func, **options)
        return func

    return register


def subscribe(
    subject: Subject | tuple[Subject, ...],
    func: Callable[..., Any],
    *,
    name: str | None = None,
    priority: int = 0,
    retry: RetryPolicy | Mapping[str, Any] | None = None,
    timeout: float | None = None,
    atomic: bool | None = None,
    executor: str = "worker",
    breaker: CircuitBreaker | Mapping[str, Any] | bool | None = None,
    max_running: int | None = None,
    rate: str | None = None,
) -> Handler:
    """Register a handler and return its subscription, which has an ``id``."""
    is_async = iscoroutinefunction(func) or iscoroutinefunction(type(func).__call__)
    new = Handler(
        name=name if name is not None else default_name(func),
        func=func,
        subjects=subject if isinstance(subject, tuple) else (subject,),
        priority=priority,
        retry=retry,
        timeout=timeout,
        atomic=not is_async if atomic is None else atomic,
        executor=executor,
        breaker=breaker,
        max_running=max_running,
        rate=rate,
        is_async=is_async,
    )
    _check(new)
    return registry.add(new)


def _check(new: Handler) -> None:
    """What would only show when the first event comes is refused where it is written."""
    check_name(new.name, "the handler name")
    if not new.subjects:
        raise EventBusError(f"{new.name} must name what it handles: a type or a pattern")
    for each in new.subjects:
        if isinstance(each, str):
            check_name(each, "the pattern")
        elif not (isinstance(each, type) and issubclass(each, Event)):
            raise EventBusError(
                f"{new.name} can handle a type name, a pattern or an Event class, not {each!r}"
            )
    _check_signature(new)
    if inspect.isgeneratorfunction(new.func) or inspect.isasyncgenfunction(new.func):
        raise EventBusError(f"{new.name} is a generator: calling it runs nothing of it")
    if new.is_async and new.atomic:
        raise EventBusError(
            f"{new.name} is async and cannot be atomic: Django has no async transactions"
        )
    if new.executor not in EXECUTORS:
        hint = did_you_mean(str(new.executor), EXECUTORS)
        raise EventBusError(f"unknown executor {new.executor!r}{hint}")
    if not isinstance(new.priority, int) or isinstance(new.priority, bool):
        raise EventBusError(f"the priority of {new.name} must be an integer: {new.priority!r}")
    if new.timeout is not None and not (
        isinstance(new.timeout, int | float) and 0 < new.timeout < A_CENTURY
    ):
        raise EventBusError(
            f"the timeout of {new.name} must be a positive number, not {new.timeout!r}"
        )
    _check_policy(new, "retry", RetryPolicy)
    if not isinstance(new.breaker, bool):
        _check_policy(new, "breaker", CircuitBreaker)
    _check_pace(new)


def _check_signature(new: Handler) -> None:
    try:
        inspect.signature(new.func).bind(None)
    except TypeError:
        raise EventBusError(f"{new.name} must take the event as its one argument") from None
    except ValueError:
        return  # some functions written in C do not tell


def _check_policy(new: Handler, option: str, policy: type[RetryPolicy | CircuitBreaker]) -> None:
    given = getattr(new, option)
    if given is None or isinstance(given, policy):
        return
    if not isinstance(given, Mapping):
        raise EventBusError(
            f"the {option} of {new.name} must be a {policy.__name__} or a dict, not {given!r}"
        )
    known = {each.name for each in fields(policy)}
    for name in given:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise EventBusError(f"the {option} of {new.name} has the unknown key {name!r}{hint}")
    try:
        policy(**given)
    except ValueError as error:
        raise EventBusError(f"the {option} of {new.name}: {error}") from None


def _check_pace(new: Handler) -> None:
    most = new.max_running
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise EventBusError(
            f"the max_running of {new.name} must be a whole number from 1 up, not {most!r}; "
            "gates.pause(handler=…) keeps it from running at all"
        )
    if new.rate is None:
        return
    try:
        Rate.parse(str(new.rate))
    except ValueError as error:
        raise EventBusError(f"the rate of {new.name}: {error}") from None


_OPTIONS = inspect.signature(subscribe).parameters.keys() - {"subject", "func"}


def unsubscribe(subscription: Handler | str) -> None:
    """Forget a subscription, given it or its id. Unknown ones are ignored."""
    registry.remove(subscription.id if isinstance(subscription, Handler) else subscription)


class HandlersOfType:
    """The handlers of one event type, higher priority first, then in order of registration."""

    __slots__ = ("all", "atomic", "names", "outside")

    def __init__(self, handlers: list[Handler]) -> None:
        self.all = handlers
        self.names = frozenset(each.name for each in handlers)
        self.atomic = [each for each in handlers if each.atomic]
        self.outside = [each for each in handlers if not each.atomic]


class Registry:
    """The handlers of this process, and a memory of who handles which type."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._by_type: dict[str, HandlersOfType] = {}
        self._classes_known = 0
        #: Moves with every handler that comes or goes.
        self.changes = 0
        self._positions = itertools.count()
        self._lock = threading.Lock()

    def add(self, new: Handler) -> Handler:
        with self._lock:
            known = self._handlers.get(new.name)
            if known is not None and not _same_source(known, new):
                raise DuplicateHandlerError(
                    f"{_source(new.func)} and {_source(known.func)} both claim the handler name "
                    f"{new.name!r}; give one of them another name="
                )
            if known is not None and set(known.subjects) != set(new.subjects):
                raise DuplicateHandlerError(
                    f"{_source(new.func)} is registered twice; give all its patterns in one "
                    f"@handler(…), or each registration a name= of its own; two functions of this "
                    f"name need two names"
                )
            object.__setattr__(new, "position", next(self._positions))
            # A new dict: whoever is going through the old one is not disturbed.
            self._handlers = {**self._handlers, new.name: new}
            self._by_type = {}
            self.changes += 1
        return new

    def remove(self, subscription_id: str) -> None:
        with self._lock:
            self._handlers = {
                name: each for name, each in self._handlers.items() if each.id != subscription_id
            }
            self._by_type = {}
            self.changes += 1

    def handlers_for(self, type_name: str) -> HandlersOfType:
        if self._classes_known != classes_declared():
            # A class declared after its type was looked up has handlers of its bases.
            self._classes_known, self._by_type = classes_declared(), {}
        memory = self._by_type
        found = memory.get(type_name)
        if found is None:
            matching = [each for each in self._handlers.values() if each.handles(type_name)]
            found = HandlersOfType(
                sorted(matching, key=lambda each: (-each.priority, each.position))
            )
            if len(memory) >= _REMEMBERED_TYPES:
                memory.clear()
            # Into the memory of before: who subscribed meanwhile has begun another.
            memory[type_name] = found
        return found

    def get(self, name: str) -> Handler | None:
        return self._handlers.get(name)

    def all(self) -> list[Handler]:
        return list(self._handlers.values())


#: Types may carry ids (``order.7.shipped``), so the memory of them must have an end.
_REMEMBERED_TYPES = 10_000

registry = Registry()


def covers(subject: Subject, type_name: str) -> bool:
    """Does this type name, pattern or event class stand for events of that type?"""
    if isinstance(subject, str):
        return matches(subject, type_name)
    cls = class_for(type_name)
    return cls is not None and issubclass(cls, subject)


def matches(pattern: str, type_name: str) -> bool:
    """``*`` stands for any non-empty run of characters, dots included; nothing else is special.

    Literal pieces are found from left to right, so the time is linear however many stars.
    """
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == type_name
    if not type_name.startswith(first):
        return False
    position = len(first)
    *middle, last = rest
    for piece in middle:
        if not piece:
            continue  # a run of stars is one star
        position = type_name.find(piece, position + 1)
        if position < 0:
            return False
        position += len(piece)
    return len(type_name) - len(last) > position and type_name.endswith(last)


def default_name(func: Callable[..., Any]) -> str:
    """App and function: ``shop.reserve_stock`` for a function of ``shop/handlers.py``."""
    if not hasattr(func, "__qualname__"):
        raise EventBusError(f"{func!r} has no name of its own: give it one with name=")
    module = func.__module__.removesuffix(".handlers").removesuffix(".events")
    return f"{module}.{func.__qualname__}"


def did_you_mean(word: str, choices: Any) -> str:
    """What to append to an error: the likely choice, else the choices there are."""
    known = sorted(map(str, choices))
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; choose from {', '.join(map(repr, known))}" if known else ""


def _same_source(one: Handler, other: Handler) -> bool:
    """The same function, or the one its module defines after a reload."""
    if one.func is other.func:
        return True
    source = _source(one.func)
    return source == _source(other.func) and "<" not in source


def _source(func: Callable[..., Any]) -> str:
    return f"{func.__module__}.{getattr(func, '__qualname__', repr(func))}"
