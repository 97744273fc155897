"""One event on its way through its handlers: who is owed it, how they fared, what to write down.

Pure: it knows no database. ``settlement()`` is the one verdict that picks the store's verb.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django_eventbus import failures
from django_eventbus.conf import settings
from django_eventbus.events import ClaimedEvent
from django_eventbus.models import LogStatus
from django_eventbus.registry import Handler, registry
from django_eventbus.retries import GiveUpAtOnce, RetryIn, RetryPolicy, decide
from django_eventbus.store import Completed, Finished, Held, Postponed, Progressed, Settlement

NO_HANDLER = "(no handler)"
EVERYBODY = "(everybody)"

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
    exception: BaseException | None = None
    retry_in: float | None = None


class Progress:
    """What is known, on disk (``states``, ``errors``) and not yet (``outcomes``)."""

    __slots__ = (
        "atomic",
        "current",
        "errors",
        "event",
        "halted",
        "held",
        "held_for",
        "outcomes",
        "outside",
        "ran",
        "states",
    )

    def __init__(self, event: ClaimedEvent) -> None:
        self.event = event
        self.states: dict[str, State] = _parsed(event.deliveries_json) or {}
        self.errors: list[dict[str, Any]] = _parsed(event.errors_json) or []
        self.outcomes: list[Outcome] = []
        self.current: Handler | None = None
        self.halted = self.ran = False
        #: Names of handlers that gates keep from running, and for how long.
        self.held: set[str] | None = None
        self.held_for = 0.0
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

    def hold(self, handlers: Collection[Handler], delay: float) -> None:
        """A gate is shut: these are owed the event as before, but they are not run now."""
        self.held = {each.name for each in handlers} | (self.held or set())
        self.held_for = delay
        if settings.ATOMIC == "event" and any(each.atomic for each in handlers):
            self.halted = True  # together or not at all
            self.atomic, self.outside = [], []
            return
        self.atomic = [each for each in self.atomic if each not in handlers]
        self.outside = [each for each in self.outside if each not in handlers]

    def hold_all(self, delay: float) -> None:
        """A gate is shut for the event itself, whoever handles it."""
        self.held, self.held_for = {EVERYBODY}, delay
        self.atomic, self.outside = [], []

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
        if self.held and EVERYBODY in self.held:
            return []
        known = registry.handlers_for(self.event.type).names
        if not known and not self.states:
            return [NO_HANDLER]
        return [name for name in self.states if name not in known and self._is_due(name)]

    def attempt_of(self, name: str) -> int:
        crashes = self.event.crashes
        return self._failures(name) + crashes + 1 if self.states else crashes + 1

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
        record["seconds"] = round(seconds, 3)
        outcome = Outcome(name, attempt, seconds, state=DEAD, error=record, exception=error)
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

    def is_told_by(self, deliveries: dict[str, State] | None) -> bool:
        """Whether the outcomes are on disk: then they were committed, and the answer was lost."""
        disk, told = deliveries or {}, self._with(self.outcomes)[0]
        return bool(self.outcomes) and all(
            _in_short(disk.get(each.handler)) == _in_short(told[each.handler])
            for each in self.outcomes
        )

    def commit(self) -> list[Outcome]:
        """The outcomes are on disk: they are the state now."""
        told = self.outcomes
        if told:
            self.states, self.errors = self._with(told)
            ran = {each.handler for each in told}
            self.atomic = [each for each in self.atomic if each.name not in ran]
            self.outside = [each for each in self.outside if each.name not in ran]
            self.outcomes = []
            self.ran = True
        return told

    def _with(self, outcomes: list[Outcome]) -> tuple[dict[str, State], list[dict[str, Any]]]:
        states, errors = dict(self.states), list(self.errors)
        for each, ended_at in zip(outcomes, self._ends(outcomes), strict=True):
            failed = self._failures(each.handler)
            states[each.handler] = state = {"state": each.state, "failures": failed}
            if each.error:
                state["failures"] = failed + 1
                errors.append(each.error)
            else:
                state |= {"at": ended_at.isoformat(), "seconds": round(each.seconds, 3)}
            if each.retry_in is not None:
                due = self.event.database_now() + timedelta(seconds=each.retry_in)
                state["due"] = due.isoformat()
        return states, errors

    def _ends(self, outcomes: list[Outcome]) -> list[datetime]:
        """When each ended: they ran one after the other, the last until now."""
        ends: list[datetime] = []
        end = self.event.database_now()
        for each in reversed(outcomes):
            if each.error:
                end = datetime.fromisoformat(each.error["at"])
            ends.append(end)
            end -= timedelta(seconds=each.seconds)
        return ends[::-1]

    def settlement(self) -> Settlement:
        """What to write for the event as things stand."""
        row_id = self.event.row_id
        if not self.states and not self.errors and self._went_smoothly():
            return Completed(row_id)
        if self.held and not (self.ran or self.outcomes or self.atomic or self.outside):
            return Held(row_id, self._wait_at_gate(self.states))
        states, errors = self._with(self.outcomes)
        if self._goes_on(states):
            return Progressed(row_id=row_id, deliveries=states, errors=errors)
        delay = self._delay(states)
        if delay is not None:
            return Postponed(row_id=row_id, deliveries=states, errors=errors, delay=delay)
        return self._finished(states, errors)

    def _went_smoothly(self) -> bool:
        if self.held or len(self.outcomes) < len(self.atomic) + len(self.outside):
            return False
        for each in self.outcomes:  # noqa: SIM110 (every event comes by here: all() costs more)
            if each.state != DONE:
                return False
        return True

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
        if self.held:
            return self._wait_at_gate(states)
        waits = self._waits_for_retries(states)
        if not waits:
            # One that joined while the event was waiting has its turn at once.
            return 0.0 if registry.handlers_for(self.event.type).names - states.keys() else None
        return max(0.0, max(waits) if settings.ATOMIC == "event" else min(waits))

    def _waits_for_retries(self, states: dict[str, State]) -> list[float]:
        now = self.event.database_now()
        return [
            (datetime.fromisoformat(state["due"]) - now).total_seconds()
            for state in states.values()
            if state["state"] == RETRY
        ]

    def _wait_at_gate(self, states: dict[str, State]) -> float:
        """Until it opens or, where only some handlers are held, the retry of another is due."""
        held = self.held or set()
        if EVERYBODY in held or settings.ATOMIC == "event":
            return self.held_for
        others = {name: state for name, state in states.items() if name not in held}
        return max(0.0, min([self.held_for, *self._waits_for_retries(others)]))

    def _finished(self, states: dict[str, State], errors: list[dict[str, Any]]) -> Finished:
        row_id = self.event.row_id
        dead = next((name for name, s in states.items() if s["state"] in _GIVEN_UP), None)
        if dead is None:
            return Finished(row_id=row_id, deliveries=states, errors=errors)
        error = next(each for each in reversed(errors) if each["handler"] == dead)
        status = _status({state["state"] for state in states.values()})
        return Finished(
            row_id=row_id,
            status=status,
            deliveries=states,
            errors=errors,
            dead_handler=dead,
            error_type=error["type"][:200],
            error_fingerprint=failures.fingerprint(error),
            blocks_lane=None if status == LogStatus.DISCARDED else _held_up_lane(self.event),
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
        error_fingerprint=failures.fingerprint(error or {"handler": "", "type": "crashed"}),
        blocks_lane=_held_up_lane(event),
    )


#: The types of error records that stand for a worker's death.
CRASHES = ("WorkerLost", "WorkerCrashed")


def _held_up_lane(event: ClaimedEvent) -> int | None:
    """By a dead event of a key, where that is wanted; a discarded one is nobody's worry."""
    return event.lane_id if settings.DEAD_HEAD == "block" else None


def _in_short(state: State | None) -> tuple[str, int] | None:
    """What no two outcomes of a handler have in common; when it is due is told anew each time."""
    return (state["state"], state["failures"]) if state else None


def _parsed(text: str | None) -> Any:
    return json.loads(text) if text else None


def _status(states: set[str]) -> str:
    if DONE in states:
        return LogStatus.COMPLETED_WITH_ERRORS
    return LogStatus.DISCARDED if states == {DISCARDED} else LogStatus.FAILED
