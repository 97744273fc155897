"""Read exceptions whose class, metaclass or ``__str__`` may fail.

The only overridden method that these functions call is ``__str__``. Except for ``exact``, they
raise only ``HandlerTimeout``: if ``__str__`` hangs, the deadline of the handler has to end it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from django_eventbus.errors.text import clean
from django_eventbus.exceptions import HandlerTimeout
from django_eventbus.schema.names import MAX_NAME_LENGTH


def type_name(error: BaseException) -> str:
    return clean(_full_name(type(error)), MAX_NAME_LENGTH)


# These descriptors read the original attribute, even if a class or its metaclass overrides it.
_NAME, _QUALNAME = type.__dict__["__name__"].__get__, type.__dict__["__qualname__"].__get__
_MRO = type.__dict__["__mro__"].__get__
_CAUSE = BaseException.__dict__["__cause__"].__get__
_CONTEXT = BaseException.__dict__["__context__"].__get__
_TRACEBACK = BaseException.__dict__["__traceback__"].__get__
_MEMBERS = BaseExceptionGroup.__dict__["exceptions"].__get__


def _full_name(cls: type) -> str:
    name = exact(_QUALNAME(cls))
    module = type.__getattribute__(cls, "__dict__").get("__module__")
    if type(module) is not str or module == "builtins":
        return name
    return f"{module}.{name}"


def exact(text: object) -> str:
    """Return ``str(text)``, converted to a plain str if it is an instance of a subclass of str."""
    return str.__str__(str(text))


def message(error: BaseException) -> str:
    """Return ``str(error)``, or the reason why ``str()`` failed. Raises only HandlerTimeout."""
    try:
        return exact(error)
    except HandlerTimeout:
        raise
    except BaseException as broken:
        return f"<no message: its __str__ raised {type_name(broken)}>"


def traceback_of(error: BaseException) -> TracebackType | None:
    found: TracebackType | None = _TRACEBACK(error)
    return found


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes and contexts, and the members of groups, each object once."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [_CAUSE(each), _CONTEXT(each)]
        if issubclass(type(each), BaseExceptionGroup):
            waiting += _MEMBERS(each)


def is_database_error(error: BaseException) -> bool:
    """Return whether a database driver raised the error. PEP 249 defines the class names."""
    return any(_NAME(cls) in ("DatabaseError", "InterfaceError") for cls in _MRO(type(error)))
