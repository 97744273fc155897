"""Run the atomic handlers of one event inside an open group transaction."""

from __future__ import annotations

import time

from django_eventbus.conf import settings
from django_eventbus.delivery.call import Caller
from django_eventbus.delivery.group import GroupLostError, GroupTransaction
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.exceptions import EventBusError
from django_eventbus.outcomes.event_run import NO_HANDLER, EventRun
from django_eventbus.registry import Handler, registry, unhandled_policy
from django_eventbus.retries import RetryPolicy
from django_eventbus.store import Store


class AtomicHandlers:
    """Runs atomic handlers, each in a savepoint, and records their outcomes in the event run."""

    def __init__(self, store: Store, caller: Caller) -> None:
        self.store = store
        self.caller = caller
        #: Whether all atomic handlers of an event succeed or fail together (ATOMIC="event").
        self.together = False

    def begin_batch(self) -> None:
        self.together = settings.ATOMIC == "event"

    def transaction(self) -> GroupTransaction:
        return GroupTransaction(self.store, self.caller.guarded)

    def run(self, run: EventRun, handlers: list[Handler], group: GroupTransaction) -> None:
        """Run the handlers. Raises GroupLostError if the events of the group must be run again."""
        if run.states or not (handlers or run.outside):
            _fail_missing_handlers(run)
        if self.together and handlers:
            self._run_in_savepoint(run, handlers, group)
            return
        for handler in handlers:
            if group.disturbed:
                raise GroupLostError(
                    "a handler changed the database session; the next handler needs a new session"
                )
            self._run_in_savepoint(run, [handler], group)

    def _run_in_savepoint(
        self, run: EventRun, handlers: list[Handler], group: GroupTransaction
    ) -> None:
        """Run the handlers, and keep the work of all handlers or roll back the work of all."""
        started = time.monotonic()
        group.start()
        try:
            for handler in handlers:
                self.caller.call(run, handler)
            group.keep()
        except GroupLostError:
            raise
        except BaseException as error:
            if group.savepoints > 1 and self.store.is_conflict(error):
                # The locks or the snapshot of earlier events of the group may have caused the
                # conflict: a deadlock, a serialization failure or a lock wait timeout. So all
                # events of the group are run again, each in its own transaction.
                raise GroupLostError("a handler had a conflict with another transaction") from error
            charged = group.undo(error)
            self.charge(run, handler, charged, time.monotonic() - started)
        else:
            seconds = time.monotonic() - started
            for handler in handlers:
                run.succeed(handler.name, seconds)

    def charge(
        self, run: EventRun, handler: Handler, error: BaseException, seconds: float = 0.0
    ) -> None:
        """Record that an atomic handler failed."""
        run.halted = self.together
        self.caller.blame(run, handler, error, seconds)


def _fail_missing_handlers(run: EventRun) -> None:
    for name in run.missing_handlers():
        if name == NO_HANDLER and unhandled_policy(run.event.type) == "complete":
            continue
        error = EventBusError(_missing(run.event.type, name))
        run.fail(name, error, RetryPolicy(**settings.UNHANDLED_RETRY), 0.0)


def _missing(type_name: str, name: str) -> str:
    if name == NO_HANDLER:
        return f"no handler is registered for {type_name!r}"
    hint = did_you_mean(name, [each.name for each in registry.all()])
    return (
        f"the event has to be delivered to the handler {name!r}, which is not registered{hint} "
        f"(if the function was renamed, declare it with name={name!r})"
    )
