"""One event on its way through its handlers: who is owed it, how they fared, what to write down.

Pure: it knows no database. ``settlement()`` is the one verdict that picks the store's verb.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django_eventbus import failures
from django_eventbus.conf import settings
from django_eventbus.events import ClaimedEvent
from django_eventbus.models import LogStatus
from django_eventbus.registry import Handler, registry
from django_eventbus.retries import GiveUpAtOnce, RetryIn, RetryPolicy, decide
from django_eventbus.store import Completed, Finished, Postponed, Progressed, Settlement

NO_HANDLER = "(no handler)"

State = dict[str, Any]

DONE, RETRY, DEAD, DISCARDED = "done", "retry", "dead", "discarded"
_GIVEN_UP = (DEAD, DISCARDED)


@dataclass(slots=True)
class Outcome:
    """How one handler fared with one event."""

    handler: str
    attempt: int
    seconds: float
    state: str = DONE
    error: dict[str, Any] | None = None
    retry_in: float | None = None


class Progress:
    """What is known, on disk (``states``, ``errors``) and not yet (``outcomes``)."""

    __slots__ = ("atomic", "current", "errors", "event", "halted", "outcomes", "outside", "states")

    def __init__(self, event: ClaimedEvent) -> None:
        self.event = event
        self.states: dict[str, State] = _parsed(event.deliveries_json) or {}
        self.errors: list[dict[str, Any]] = _parsed(event.errors_json) or []
        self.outcomes: list[Outcome] = []
        self.current: Handler | None = None
        self.halted = False
        handlers = registry.handlers_for(event.type)
        self.atomic, self.outside = handlers.atomic, handlers.outside
        if self.states:
            if handlers.names:
                self.states.pop(NO_HANDLER, None)  # somebody has come since
            self._leave_out_who_is_not_due()

    def _leave_out_who_is_not_due(self) -> None:
        if settings.ATOMIC == "event" and any(self._waits(each.name) for each in self.atomic):
            self.halted = True  # together or not at all
            self.atomic, self.outside = [], []
            return
        self.atomic = [each for each in self.atomic if self._is_due(each.name)]
        self.outside = [each for each in self.outside if self._is_due(each.name)]

    def _waits(self, name: str) -> bool:
        state = self.states.get(name)
        return state is not None and state["state"] == RETRY and not self._is_due(name)

    def _is_due(self, name: str) -> bool:
        state = self.states.get(name)
        if state is None:
            return True
        due = state["state"] == RETRY and datetime.fromisoformat(state["due"])
        return bool(due) and due <= self.event.database_now()

    def unanswered(self) -> list[str]:
        """Names the event is owed to that no code here answers to."""
        known = registry.handlers_for(self.event.type).names
        if not known and not self.states:
            return [NO_HANDLER]
        return [name for name in self.states if name not in known and self._is_due(name)]

    def attempt_of(self, name: str) -> int:
        return self._failures(name) + self.event.crashes + 1

    def _failures(self, name: str) -> int:
        state = self.states.get(name)
        return int(state["failures"]) if state else 0

    def succeed(self, name: str, seconds: float) -> None:
        self.outcomes.append(Outcome(name, self.attempt_of(name), seconds))

    def fail(self, name: str, error: BaseException, policy: RetryPolicy, seconds: float) -> None:
        attempt = self.attempt_of(name)
        record = failures.describe(
            error, handler=name, attempt=attempt, at=self.event.database_now()
        )
        outcome = Outcome(name, attempt, seconds, state=DEAD, error=record)
        decision = decide(policy, failures=self._failures(name) + 1, error=error)
        if isinstance(decision, RetryIn):
            outcome.state, outcome.retry_in = RETRY, decision.seconds
        elif isinstance(decision, GiveUpAtOnce):
            outcome.state = DISCARDED
        self.outcomes.append(outcome)

    def forget(self) -> None:
        """The transaction was rolled back: none of it happened."""
        self.outcomes = []
        self.halted = False

    def commit(self) -> list[Outcome]:
        """The outcomes are on disk: they are the state now."""
        told = self.outcomes
        if told:
            self.states, self.errors = self._with(told)
            ran = {each.handler for each in told}
            self.atomic = [each for each in self.atomic if each.name not in ran]
            self.outside = [each for each in self.outside if each.name not in ran]
            self.outcomes = []
        return told

    def _with(self, outcomes: list[Outcome]) -> tuple[dict[str, State], list[dict[str, Any]]]:
        states, errors = dict(self.states), list(self.errors)
        for each in outcomes:
            failed = self._failures(each.handler)
            states[each.handler] = state = {"state": each.state, "failures": failed}
            if each.error:
                state["failures"] = failed + 1
                errors.append(each.error)
            if each.retry_in is not None:
                due = self.event.database_now() + timedelta(seconds=each.retry_in)
                state["due"] = due.isoformat()
        return states, errors

    def settlement(self) -> Settlement:
        """What to write for the event as things stand."""
        row_id = self.event.row_id
        if not self.states and not self.errors and self._went_smoothly():
            return Completed(row_id)
        states, errors = self._with(self.outcomes)
        if self._goes_on(states):
            return Progressed(row_id=row_id, deliveries=states, errors=errors)
        delay = self._delay(states)
        if delay is not None:
            return Postponed(row_id=row_id, deliveries=states, errors=errors, delay=delay)
        return self._finished(states, errors)

    def _went_smoothly(self) -> bool:
        ran = len(self.outcomes)
        everybody = ran >= len(self.atomic) + len(self.outside)
        return everybody and all(each.state == DONE for each in self.outcomes)

    def _goes_on(self, states: dict[str, State]) -> bool:
        """Handlers are still to run under this claim."""
        if self.halted:
            return False
        ran = {each.handler for each in self.outcomes}
        return any(each.name not in ran for each in (*self.atomic, *self.outside))

    def _delay(self, states: dict[str, State]) -> float | None:
        """Seconds until the next handler that is owed the event is due; None if none is."""
        given_up = any(state["state"] in _GIVEN_UP for state in states.values())
        if given_up and settings.ATOMIC == "event":
            return None  # all or nothing: nothing
        now = self.event.database_now()
        waits = [
            (datetime.fromisoformat(state["due"]) - now).total_seconds()
            for state in states.values()
            if state["state"] == RETRY
        ]
        if not waits:
            # One that joined while the event was waiting has its turn at once.
            return 0.0 if registry.handlers_for(self.event.type).names - states.keys() else None
        return max(0.0, max(waits) if settings.ATOMIC == "event" else min(waits))

    def _finished(self, states: dict[str, State], errors: list[dict[str, Any]]) -> Finished:
        row_id = self.event.row_id
        dead = next((name for name, s in states.items() if s["state"] in _GIVEN_UP), None)
        if dead is None:
            return Finished(row_id=row_id, deliveries=states, errors=errors)
        error = next(each for each in reversed(errors) if each["handler"] == dead)
        return Finished(
            row_id=row_id,
            status=_status({state["state"] for state in states.values()}),
            deliveries=states,
            errors=errors,
            dead_handler=dead,
            error_type=error["type"][:200],
            error_fingerprint=failures.fingerprint(error),
        )


def crashed(event: ClaimedEvent) -> Finished:
    """The verdict on an event that has taken down too many workers. Asks no handler."""
    errors = _parsed(event.errors_json) or []
    deaths = [each for each in errors if each["type"] in CRASHES] or errors
    error = deaths[-1] if deaths else None
    return Finished(
        row_id=event.row_id,
        status=LogStatus.FAILED,
        deliveries=_parsed(event.deliveries_json),
        errors=errors,
        dead_handler=error["handler"] if error else "",
        error_type="crashed",
        error_fingerprint=failures.fingerprint(error) if error else "",
    )


#: The types of error records that stand for a worker's death.
CRASHES = ("WorkerLost", "WorkerCrashed")


def _parsed(text: str | None) -> Any:
    return json.loads(text) if text else None


def _status(states: set[str]) -> str:
    if DONE in states:
        return LogStatus.COMPLETED_WITH_ERRORS
    return LogStatus.DISCARDED if states == {DISCARDED} else LogStatus.FAILED
