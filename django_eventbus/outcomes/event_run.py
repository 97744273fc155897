"""The run of one event: its due handlers, their outcomes, and the settlement.

This module does not use the database. ``settlement()`` returns the settlement, and another module
writes it to the database.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django_eventbus.conf import settings
from django_eventbus.errors import failures
from django_eventbus.models import LogStatus
from django_eventbus.outcomes.assignments import (
    EVERY_HANDLER,
    Assignment,
    handlers_of,
    no_handler_receives,
)
from django_eventbus.outcomes.endings import blocked_lane, status_of
from django_eventbus.outcomes.stored import errors_of, identity_of, states_of
from django_eventbus.registry import Handler
from django_eventbus.retries import GiveUpAtOnce, RetryIn, RetryPolicy, decide
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.schema.deliveries import (
    DEAD,
    DISCARDED,
    DONE,
    GIVEN_UP,
    HANDED_OFF,
    RETRY,
    State,
)
from django_eventbus.store import (
    AT_ONCE,
    After,
    Completed,
    Finished,
    HandOff,
    Held,
    Postponed,
    Progressed,
    Settlement,
    Wait,
    soonest,
)
from django_eventbus.tracing.spans import ProcessSpan

NO_HANDLER = "(no handler)"
ALL_HANDLERS = "(all handlers)"
#: The longest time, in seconds, that an executor has to claim an event.
LONGEST_DEADLINE = 3600.0
#: An event worker usually finds an event whose hand-off deadline has passed within twice the
#: deadline plus this number of seconds.
LATE_AT_MOST = 10.0


@dataclass(slots=True)
class Outcome:
    """The result of one call of one handler with one event."""

    handler: str
    attempt: int
    seconds: float
    state: str = DONE
    error: dict[str, Any] | None = None
    exception: BaseException | None = None
    retry_in: float | None = None
    #: The monotonic time at which the call ended.
    ended: float = field(default_factory=time.monotonic, compare=False)


class EventRun:
    """The committed state of an event (``states``, ``errors``) and its uncommitted ``outcomes``."""

    __slots__ = (
        "assignment",
        "atomic",
        "current",
        "elsewhere",
        "errors",
        "event",
        "halted",
        "hand_off",
        "held",
        "held_for",
        "isolated",
        "outcomes",
        "outside",
        "ran",
        "spans",
        "states",
    )

    def __init__(self, event: ClaimedEvent, assignment: Assignment = EVERY_HANDLER) -> None:
        self.event = event
        self.assignment = assignment
        self.states: dict[str, State] = states_of(event)
        self.errors: list[dict[str, Any]] = errors_of(event)
        self.outcomes: list[Outcome] = []
        self.current: Handler | None = None
        #: The recorded spans of the handler calls since the last settlement.
        self.spans: tuple[ProcessSpan, ...] = ()
        self.halted = self.ran = False
        #: ``held`` contains the names of the handlers that do not run now, because a flow control
        #: stops them or only other workers have them. ``held_for`` is how long the event waits.
        self.held: set[str] | None = None
        self.held_for: Wait = AT_ONCE
        handlers = handlers_of(event)
        self.atomic, self.outside = handlers.atomic, handlers.outside
        if self.states:
            if handlers.names:
                # The event had no handler at an earlier attempt, but has a handler now.
                self.states.pop(NO_HANDLER, None)
            self._select_due_handlers()
        #: ``elsewhere`` contains the due handlers that other processes run. ``hand_off`` is the
        #: hand-off to one of these handlers, if there is one.
        self.elsewhere: list[Handler] = []
        self.hand_off: HandOff | None = None
        if not assignment.is_every and (handlers.has_executors or assignment.executor):
            self._select_assigned_handlers()
        #: Whether a handler of the event needs a transaction without other events.
        self.isolated = handlers.isolated and any(each.isolated for each in self.atomic)

    def _select_due_handlers(self) -> None:
        if settings.ATOMIC == "event" and any(self._waits(each.name) for each in self.atomic):
            self.halted = True  # ATOMIC="event": all handlers run, or none.
            self.atomic, self.outside = [], []
            return
        self.atomic = [each for each in self.atomic if self._is_due(each.name)]
        self.outside = [each for each in self.outside if self._is_due(each.name)]

    def _select_assigned_handlers(self) -> None:
        due = (*self.atomic, *self.outside)
        self.elsewhere = [each for each in due if not self.assignment.includes(each)]
        self.atomic = [each for each in self.atomic if self.assignment.includes(each)]
        self.outside = [each for each in self.outside if self.assignment.includes(each)]

    def hand_off_to(self, handler: Handler, token: uuid.UUID) -> None:
        """Let another executor run the handler, after the handlers of this process.

        Each time that the executor does not claim the event in time, the next deadline is twice as
        long. Otherwise no message would be in time while the broker has a long backlog.
        """
        first = settings.HANDOFF_DEADLINE
        doubled = first * 2.0 ** min(self._hand_offs_of(handler.name), 30)
        self.hand_off = HandOff(handler.name, token, max(first, min(doubled, LONGEST_DEADLINE)))

    def _hand_offs_of(self, name: str) -> int:
        """Return how many times in succession the executor did not claim the event in time.

        If the event returned before its deadline, the executor was not late: the message could not
        be sent, or the executor has claimed and released the event. If the event returned long
        after its deadline, a flow control has held the event.
        """
        state = self.states.get(name)
        if state is None or state["state"] != HANDED_OFF:
            return 0
        elapsed = (self.event.database_now() - datetime.fromisoformat(state["at"])).total_seconds()
        deadline = float(state.get("seconds", settings.HANDOFF_DEADLINE))
        was_late = deadline <= elapsed <= 2 * deadline + LATE_AT_MOST
        return int(state.get("times", 1)) if was_late else 0

    def hold(self, handlers: Collection[Handler], wait: Wait) -> None:
        """Do not run these handlers now. A later claim delivers the event to these handlers."""
        self.held = {each.name for each in handlers} | (self.held or set())
        self.held_for = wait
        if settings.ATOMIC == "event" and any(each.atomic for each in handlers):
            self.halted = True  # ATOMIC="event": all handlers run, or none.
            self.atomic, self.outside, self.elsewhere = [], [], []
            return
        self.atomic = [each for each in self.atomic if each not in handlers]
        self.outside = [each for each in self.outside if each not in handlers]
        self.elsewhere = [each for each in self.elsewhere if each not in handlers]

    def hold_all(self, wait: Wait) -> None:
        """Hold all handlers of the event for ``wait``."""
        self.held, self.held_for = {ALL_HANDLERS}, wait
        self.atomic, self.outside, self.elsewhere = [], [], []

    def leave_to_others(self, names: Collection[str], wait: After, *, one_has_all: bool) -> bool:
        """Keep the event in the queue if a handler in ``names``, which other workers have, is due.

        Return whether such a handler is due. With ATOMIC="event" and ``one_has_all``, this worker
        runs no handler, because another worker has all handlers of the event.
        """
        only = self.event.only_handler
        owed = {name for name in names if only in (None, name) and self._is_due(name)}
        if not owed:
            return False
        self.held_for = soonest(wait, self.held_for) if self.held else wait
        self.held = owed | (self.held or set())
        self.states.pop(NO_HANDLER, None)
        if settings.ATOMIC == "event" and one_has_all:
            self.halted = True
            self.atomic, self.outside = [], []
        return True

    def _waits(self, name: str) -> bool:
        state = self.states.get(name)
        return state is not None and state["state"] == RETRY and not self._is_due(name)

    def _is_due(self, name: str) -> bool:
        state = self.states.get(name)
        if state is None or state["state"] == HANDED_OFF:
            return True
        due = state["state"] == RETRY and datetime.fromisoformat(state["due"])
        return bool(due) and due <= self.event.database_now()

    def missing_handlers(self) -> list[str]:
        """Return the names of due handlers that neither this process nor a live worker has."""
        held = self.held or set()
        if ALL_HANDLERS in held:
            return []
        known = handlers_of(self.event).names
        if not known and not self.states:
            if no_handler_receives(self.event):
                return []
            return [] if held else [NO_HANDLER]
        missing = (name for name in self.states if name not in known and name not in held)
        return [name for name in missing if self._is_due(name)]

    def attempt_of(self, name: str) -> int:
        lost = self.event.crashes + self.event.interruptions
        return self._failures(name) + lost + 1 if self.states else lost + 1

    def _failures(self, name: str) -> int:
        state = self.states.get(name)
        return int(state["failures"]) if state else 0

    def succeed(self, name: str, seconds: float) -> None:
        self.outcomes.append(Outcome(name, self.attempt_of(name), seconds))

    def fail(
        self,
        name: str,
        error: BaseException,
        policy: RetryPolicy,
        seconds: float,
        record: dict[str, Any] | None = None,
    ) -> None:
        """Add the outcome of a failed attempt: a retry, dead, or discarded.

        ``record`` is the error record. If it is None, ``failures.describe`` creates the record from
        ``error``.
        """
        attempt = self.attempt_of(name)
        if record is None:
            at = self.event.database_now()
            record = failures.describe(error, handler=name, attempt=attempt, at=at)
        record["seconds"] = round(seconds, 3)
        outcome = Outcome(name, attempt, seconds, state=DEAD, error=record, exception=error)
        decision = decide(policy, failures=self._failures(name) + 1, error=error)
        if isinstance(decision, RetryIn):
            outcome.state, outcome.retry_in = RETRY, decision.seconds
        elif isinstance(decision, GiveUpAtOnce):
            outcome.state = DISCARDED
        self.outcomes.append(outcome)

    def forget(self) -> None:
        """Drop the outcomes of a transaction that was rolled back."""
        self.outcomes = []
        self.halted = False

    def is_stored_in(self, deliveries: dict[str, State] | None) -> bool:
        """Return whether the stored row contains the outcomes.

        This is used when the reply to COMMIT was lost. If the row contains the outcomes, the
        transaction was committed.
        """
        stored, expected = deliveries or {}, self._with(self.outcomes)[0]
        return bool(self.outcomes) and all(
            identity_of(stored.get(each.handler)) == identity_of(expected[each.handler])
            for each in self.outcomes
        )

    def commit(self) -> list[Outcome]:
        """Add the committed outcomes to ``states`` and ``errors``, and return the outcomes."""
        committed = self.outcomes
        if committed:
            self.states, self.errors = self._with(committed)
            ran = {each.handler for each in committed}
            self.atomic = [each for each in self.atomic if each.name not in ran]
            self.outside = [each for each in self.outside if each.name not in ran]
            self.outcomes = []
            self.ran = True
        return committed

    def _with(self, outcomes: list[Outcome]) -> tuple[dict[str, State], list[dict[str, Any]]]:
        states, errors = dict(self.states), list(self.errors)
        for each, ended_at in zip(outcomes, self._ends(outcomes), strict=True):
            failed = self._failures(each.handler)
            states[each.handler] = state = {"state": each.state, "failures": failed}
            state |= self._hand_off_of(each.handler)
            if each.error:
                state["failures"] = failed + 1
                errors.append(each.error)
            else:
                state |= {"at": ended_at.isoformat(), "seconds": round(each.seconds, 3)}
            if each.retry_in is not None:
                due = self.event.database_now() + timedelta(seconds=each.retry_in)
                state["due"] = due.isoformat()
        return states, failures.bounded(errors)

    def _hand_off_of(self, handler: str) -> State:
        """Return when a delivery was handed off, and when and by which process it was claimed."""
        before = self.states.get(handler)
        if before is None or before["state"] != HANDED_OFF:
            return {}
        picked_up = self.event.processing_started_at.isoformat()
        return {"handed_off_at": before["at"], "picked_up_at": picked_up, "by": self.assignment.by}

    def _ends(self, outcomes: list[Outcome]) -> list[datetime]:
        """Return the end time of each call.

        The time of a failed call is in its error record. The other times are computed as if the
        calls had run in sequence and the last call had ended now.
        """
        ends: list[datetime] = []
        end = self.event.database_now()
        for each in reversed(outcomes):
            if each.error:
                end = datetime.fromisoformat(each.error["at"])
            ends.append(end)
            end -= timedelta(seconds=each.seconds)
        return ends[::-1]

    def settlement(self, *, claim_ends: bool = False) -> Settlement:
        """Return the settlement to write for the outcomes up to now.

        With ``claim_ends``, the event returns to the queue if handlers have not been called yet.
        """
        row_id = self.event.row_id
        if not self.states and not self.errors and self._all_succeeded():
            return Completed(row_id)
        if self.held and not self._has_work_for_a_process():
            return Held(row_id, self._wait_while_held(self.states))
        states, errors = self._with(self.outcomes)
        if self._goes_on(states):
            if claim_ends:
                return Postponed(row_id=row_id, deliveries=states, errors=errors, wait=AT_ONCE)
            return Progressed(row_id=row_id, deliveries=states, errors=errors)
        if self.elsewhere and not self.halted:
            return self._passed_on(states, errors)
        wait = self._wait(states)
        if wait is not None:
            return Postponed(row_id=row_id, deliveries=states, errors=errors, wait=wait)
        return self._finished(states, errors)

    def _has_work_for_a_process(self) -> bool:
        return bool(self.ran or self.outcomes or self.atomic or self.outside or self.elsewhere)

    def _passed_on(self, states: dict[str, State], errors: list[dict[str, Any]]) -> Postponed:
        """Return the settlement of an event that has due handlers of another process.

        The event is handed off, or returns to the queue, where an event worker finds it.
        """
        wait: Wait = AT_ONCE
        if self.hand_off is not None:
            name, at = self.hand_off.handler, self.event.database_now()
            states[name] = {
                "state": HANDED_OFF,
                "failures": self._failures(name),
                "at": at.isoformat(),
                "seconds": self.hand_off.seconds,
                "times": self._hand_offs_of(name) + 1,
            }
            retries = [After(max(0.0, seconds)) for seconds in self._waits_for_retries(states)]
            wait = soonest(After(self.hand_off.seconds), *retries)
        return Postponed(
            row_id=self.event.row_id,
            deliveries=states,
            errors=errors,
            wait=wait,
            hand_off=self.hand_off,
        )

    def _all_succeeded(self) -> bool:
        if self.held or self.elsewhere or len(self.outcomes) < len(self.atomic) + len(self.outside):
            return False
        for each in self.outcomes:  # noqa: SIM110 (this runs for every event, and all() is slower)
            if each.state != DONE:
                return False
        return True

    def _goes_on(self, states: dict[str, State]) -> bool:
        """Return whether handlers remain to be called under this claim."""
        if self.halted:
            return False
        ran = {each.handler for each in self.outcomes}
        return any(each.name not in ran for each in (*self.atomic, *self.outside))

    def _wait(self, states: dict[str, State]) -> Wait | None:
        """Return the wait until the next delivery of the event; None if no delivery remains."""
        given_up = any(state["state"] in GIVEN_UP for state in states.values())
        if given_up and settings.ATOMIC == "event":
            return None  # ATOMIC="event": if one handler gives up, the event ends.
        if self.held:
            return self._wait_while_held(states)
        waits = self._waits_for_retries(states)
        if not waits:
            # A handler that was registered while the event was waiting is due at once.
            return AT_ONCE if handlers_of(self.event).names - states.keys() else None
        return After(max(0.0, max(waits) if settings.ATOMIC == "event" else min(waits)))

    def _waits_for_retries(self, states: dict[str, State]) -> list[float]:
        now = self.event.database_now()
        return [
            (datetime.fromisoformat(state["due"]) - now).total_seconds()
            for state in states.values()
            if state["state"] == RETRY
        ]

    def _wait_while_held(self, states: dict[str, State]) -> Wait:
        """Return the shorter wait: that of the hold, or that for a retry of another handler."""
        held = self.held or set()
        if ALL_HANDLERS in held or settings.ATOMIC == "event":
            return self.held_for
        others = {name: state for name, state in states.items() if name not in held}
        retries = [After(max(0.0, seconds)) for seconds in self._waits_for_retries(others)]
        return soonest(self.held_for, *retries)

    def _finished(self, states: dict[str, State], errors: list[dict[str, Any]]) -> Finished:
        row_id = self.event.row_id
        dead = next((name for name, s in states.items() if s["state"] in GIVEN_UP), None)
        if dead is None:
            return Finished(row_id=row_id, deliveries=states, errors=errors)
        error = next(each for each in reversed(errors) if each["handler"] == dead)
        status = status_of({state["state"] for state in states.values()})
        return Finished(
            row_id=row_id,
            status=status,
            deliveries=states,
            errors=errors,
            dead_handler=dead,
            error_type=error["type"][:200],
            error_fingerprint=failures.fingerprint(error),
            blocks_lane=None if status == LogStatus.DISCARDED else blocked_lane(self.event),
        )
