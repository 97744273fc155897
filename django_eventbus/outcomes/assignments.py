"""The handlers that a process runs: all, those without an executor, or those of one executor."""

from __future__ import annotations

from dataclasses import dataclass

from django_eventbus.executors import Executor
from django_eventbus.registry import Handler, HandlersOfType, registry
from django_eventbus.schema.claims import ClaimedEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The handlers that a process may call. The default is the assignment of an event worker."""

    #: Whether the process calls all handlers, whatever their executor is.
    is_every: bool = False
    #: The executor whose handlers the process calls; None for the handlers without an executor.
    executor: Executor | None = None
    #: The name of the process, such as "celery web1:4711"; empty for an event worker. The admin
    #: shows it on the page of an event whose handler this process has called.
    by: str = ""

    def includes(self, handler: Handler) -> bool:
        return self.is_every or handler.executor == self.executor


EVENT_WORKER = Assignment()
EVERY_HANDLER = Assignment(is_every=True)


def handlers_of(event: ClaimedEvent) -> HandlersOfType:
    """Return the handlers of this process that receive the event, whatever their executor is."""
    found = registry.handlers_for(event.type)
    return found if event.replay_of is None else found.for_replay(event.only_handler)


def no_handler_receives(event: ClaimedEvent) -> bool:
    """Return whether the event is a copy that none of its handlers receives.

    All of them are declared with replay=False, or the only handler of the copy does not handle
    events of this type.
    """
    if event.replay_of is None:
        return False
    if event.only_handler is not None:
        only = registry.get(event.only_handler)
        return only is not None and not (only.replay and only.handles(event.type))
    every = registry.handlers_for(event.type).all
    return bool(every) and not any(each.replay for each in every)
