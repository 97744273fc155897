"""Decide which deliveries of a batch may run now.

Slots and the tokens of a rate (one token per call) are reserved for a whole batch at once. A
handler that may not run is not called, and the flow control that stopped the handler holds the
event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import partial

from django.db import Error

from django_eventbus.errors import failures
from django_eventbus.flow.controls import FlowControls
from django_eventbus.flow.decisions import (
    RELEASED_PER_SLOT,
    Grant,
    Recorded,
    Report,
    grant,
    record,
    totals,
)
from django_eventbus.flow.fleet import LEAVE_FOR, OtherWorkers
from django_eventbus.flow.hand_offs import HandOffs
from django_eventbus.logs import about
from django_eventbus.outcomes.event_run import EventRun, Outcome
from django_eventbus.policies import Limits
from django_eventbus.registry import Handler
from django_eventbus.schema.deliveries import DISCARDED
from django_eventbus.signals import breaker_closed, breaker_opened
from django_eventbus.store import SEVERAL, After, HeldBy, Store

logger = logging.getLogger(__name__)

REPORT_EVERY = 1.0
#: A probe is the one call that tests whether an open breaker may close. If a worker does not report
#: the result of a probe, another worker can get the probe this number of seconds after the deadline
#: of the handler.
PROBE_GRACE = 60.0


class Turns:
    """Limits how many coroutines of a handler run at a time in each event loop.

    Each event loop has its own semaphore, because an asyncio semaphore works in one loop only. A
    batch has several loops if a blocked or closed loop was replaced.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._semaphores: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    def here(self) -> asyncio.Semaphore:
        """Return the semaphore of the running event loop."""
        loop = asyncio.get_running_loop()
        return self._semaphores.setdefault(loop, asyncio.Semaphore(self._slots))


class Admission:
    """Decides for one thread of a worker which deliveries may run, and reports their results."""

    def __init__(
        self,
        store: Store,
        controls: FlowControls,
        others: OtherWorkers,
        holder: str,
        *,
        hands_off: bool = True,
    ) -> None:
        """Initialize. With ``hands_off``, events are handed off to the executors of handlers."""
        self.store = store
        self.hand_offs = HandOffs(store, controls) if hands_off else None
        self.controls = controls
        self.others = others
        #: The name under which this thread owns slots and probes.
        self.holder = holder
        #: The number of granted deliveries of the batch that are not used yet, by handler.
        self._granted: dict[str, int] = {}
        #: Handlers that were granted deliveries, with their limits.
        self._entered: dict[str, Limits] = {}
        self._probes: set[str] = set()
        self._probes_handed_off: set[str] = set()
        self._turns: dict[str, Turns] = {}
        self._reports: dict[str, Report] = defaultdict(Report)
        self._is_urgent = self._left_to_others = False
        self._reported_at = time.monotonic()

    # -- between batches and groups

    def upkeep(self) -> None:
        """End a batch that an error interrupted, then call ``keep_up``. Called between batches."""
        if self._entered:
            self.end()
        self.keep_up()

    def keep_up(self) -> None:
        """Send reports, and read changed flow controls and handlers of other workers.

        Called between groups, when no transaction is open.
        """
        is_overdue = time.monotonic() - self._reported_at >= REPORT_EVERY
        if self._reports and (self._is_urgent or is_overdue):
            self._send_reports()
        self.controls.keep_up(self.store)
        self.others.keep_up(self.store)

    def is_paused(self, queue: str) -> bool:
        return self.controls.is_paused(queue)

    # -- a batch begins

    def begin(self, batch: Iterable[EventRun]) -> None:
        """Reserve slots and tokens of rates for all deliveries of a batch at once."""
        limits = self.controls.snapshot.limits
        self._probes_handed_off.clear()
        if self.hand_offs is not None:
            self.hand_offs.begin(batch)
        if not limits:
            return
        wanted: dict[Handler, int] = defaultdict(int)
        for progress in batch:
            for handler in (*progress.atomic, *progress.outside):
                if handler.name in limits:
                    wanted[handler] += 1
        for handler, deliveries in wanted.items():
            if self._needs_grant(handler.name):
                self._enter(handler, deliveries)

    def _needs_grant(self, name: str) -> bool:
        """Return whether a handler needs a grant: for slots, for tokens, or for a probe."""
        known = self.controls.snapshot
        if name in known.probes_due:
            return True
        limits = known.limits[name]
        is_counted = limits.max_running is not None or limits.rate is not None
        return is_counted and name not in known.stopped_handlers

    def _enter(self, handler: Handler, wanted: int) -> None:
        name, limits = handler.name, self.controls.snapshot.limits[handler.name]
        granted = self._request_grant(handler, limits, wanted)
        self._granted[name] = granted.deliveries
        if granted.deliveries:
            self._entered[name] = limits
        if granted.is_probe:
            self._probes.add(name)
            self._reports.pop(name, None)  # Only the probe may decide whether the breaker closes.
        if handler.is_async and limits.max_running is not None:
            self._turns[name] = Turns(max(1, granted.slots))

    def _request_grant(self, handler: Handler, limits: Limits, wanted: int) -> Grant:
        decision = partial(
            grant,
            limits=limits,
            holder=self.holder,
            wanted=wanted,
            one_by_one=not handler.is_async,
            probe_seconds=handler.deadline + PROBE_GRACE,
        )
        flow_control_id = self.controls.snapshot.handler_ids[handler.name]
        return self.store.decide(flow_control_id, decision, ignore_dead_workers=True) or Grant()

    # -- before an event runs

    @property
    def is_needed(self) -> bool:
        """Whether ``hold_back`` has to be called for the events of this batch.

        The call is needed if a flow control may stop handlers, if events may be handed off, or if
        other workers have other handlers.
        """
        hands_off = self.hand_offs is not None and self.hand_offs.are_needed
        stops = bool(self._granted) or self.controls.snapshot.stops_events
        return stops or hands_off or self.others.differ

    def hold_back(self, progress: EventRun) -> None:
        """Hold the handlers that may not run. Call this before any handler of the event runs."""
        pause_id = self.controls.pause_of_type(progress.event.type)
        if pause_id is not None:
            progress.hold_all(HeldBy(pause_id))
            return
        handlers = (*progress.atomic, *progress.outside)
        self._hold_stopped(progress, (*handlers, *self._without_probe(progress.elsewhere)))
        self._hold_without_grant(progress, handlers)
        if self.hand_offs is not None:
            self.hand_offs.choose(progress)
        if self.others.differ:
            self._leave_to_others(progress)

    def hold_back_again(self, progress: EventRun) -> None:
        """Hold plain handlers that a flow control has stopped since ``hold_back``.

        Coroutines are not held, because they have been started already.
        """
        plain = [each for each in progress.outside if not each.is_async]
        pause_id = self.controls.pause_of_type(progress.event.type)
        if plain and pause_id is not None:
            progress.hold(plain, HeldBy(pause_id))
        elif self.controls.snapshot.stopped_handlers:
            self._hold_stopped(progress, plain)

    def _hold_stopped(self, progress: EventRun, handlers: Collection[Handler]) -> None:
        """Hold handlers that are paused or whose breaker is open, except probes of this thread."""
        known = self.controls.snapshot.stopped_handlers
        stopped = {
            each: flow_control_id
            for each in handlers
            if each.name not in self._probes
            and (flow_control_id := known.get(each.name)) is not None
        }
        if stopped:
            holders = set(stopped.values())
            is_one = len(holders) == 1 and not progress.held
            progress.hold(stopped, HeldBy(holders.pop() if is_one else SEVERAL))

    def _without_probe(self, elsewhere: Collection[Handler]) -> list[Handler]:
        """Return the handlers of other executors that a flow control may stop.

        For a handler whose probe is due, one event of the batch is handed off. The process of the
        executor then gets the probe.
        """
        due = self.controls.snapshot.probes_due - self._probes_handed_off
        self._probes_handed_off |= {each.name for each in elsewhere} & due
        return [each for each in elsewhere if each.name not in due]

    def _hold_without_grant(self, progress: EventRun, handlers: Collection[Handler]) -> None:
        refused = [each for each in handlers if not self._use_grant(each.name)]
        if refused:
            # A pause or breaker may hold the event too. The limit is stored as the only holder,
            # because the limit releases the event sooner.
            known = self.controls.snapshot.handler_ids
            progress.hold(refused, HeldBy(known.get(refused[0].name, SEVERAL)))

    def _use_grant(self, name: str) -> bool:
        left = self._granted.get(name)
        if left is None:
            return True
        self._granted[name] = max(0, left - 1)
        return left > 0

    def _leave_to_others(self, progress: EventRun) -> None:
        event = progress.event
        names, one_has_all = self.others.elsewhere(event.claim.queue, event.type)
        if progress.leave_to_others(names, After(LEAVE_FOR), one_has_all=one_has_all):
            self._left_to_others = True

    def turns_of(self, handler: Handler) -> Turns | None:
        """Return the limit on the running coroutines of this handler, or None."""
        return self._turns.get(handler.name)

    # -- after a delivery

    @property
    def counts(self) -> bool:
        """Whether ``note`` has to be called for each outcome."""
        return bool(self.controls.snapshot.limits)

    def note(self, outcome: Outcome) -> None:
        """Count an outcome for the breaker of its handler."""
        limits = self.controls.snapshot.limits.get(outcome.handler)
        if limits is None or limits.breaker is None:
            return
        report = self._reports[outcome.handler]
        report.calls += 1
        if outcome.error is not None and outcome.state != DISCARDED:
            report.failures += 1
            self._is_urgent = True
        self._is_urgent |= outcome.handler in self._probes

    # -- a batch ends

    def end(self) -> None:
        """Release all slots of the batch, and the unused tokens and probes."""
        if self._left_to_others:
            # Without this wake-up, an idle worker would find these events only at its next poll.
            self._left_to_others = False
            self.store.wake()
        self._report_free_slots()
        if self._is_urgent:
            self._send_reports()
        freed = [name for name, limits in self._entered.items() if limits.max_running is not None]
        self._granted, self._entered, self._turns = {}, {}, {}
        self._probes.clear()
        for name in freed:
            self._release_held_by(name)

    def _report_free_slots(self) -> None:
        for name, limits in self._entered.items():
            unused = self._granted[name]
            if unused or limits.max_running is not None or name in self._probes:
                self._reports[name].unused, self._reports[name].leaves = unused, True
                self._is_urgent = True

    def _release_held_by(self, name: str) -> None:
        """Release the events that wait for a slot of the handler, before the next regular check."""
        flow_control_id = self.controls.snapshot.handler_ids.get(name)
        if flow_control_id is not None:
            queues = self.controls.queues
            self.store.release_held(flow_control_id, limit=RELEASED_PER_SLOT, queues=queues)

    def finish(self) -> None:
        """Send all reports before the thread ends or becomes idle.

        A database error is logged and not raised. A thread that was idle keeps the remaining
        reports, and ``keep_up`` sends them later.
        """
        try:
            self.end()
            self._send_reports()
        except Error as error:
            logger.warning(
                "could not report the last handler calls to the circuit breakers: %s",
                failures.in_a_line(error),
                extra=about(),
            )

    def _send_reports(self) -> None:
        self._reported_at, self._is_urgent = time.monotonic(), False
        while self._reports:
            name, report = next(iter(self._reports.items()))
            self._send_report(name, report)
            del self._reports[name]

    def _send_report(self, name: str, report: Report) -> None:
        known = self.controls.snapshot
        limits = self._entered.get(name) or known.limits.get(name)
        flow_control_id = known.handler_ids.get(name)
        if limits is None or flow_control_id is None:
            return
        decision = partial(record, limits=limits, holder=self.holder, report=report)
        recorded = self.store.decide(flow_control_id, decision)
        if recorded is not None:
            self._send_signals(name, recorded)

    def _send_signals(self, name: str, recorded: Recorded) -> None:
        if recorded.breaker_opened:
            self.controls.read_again()
            calls, failures = totals(recorded.changes["calls"])
            breaker_opened.send_robust(Admission, handler=name, calls=calls, failures=failures)
        elif recorded.breaker_closed:
            self.controls.read_again()
            breaker_closed.send_robust(Admission, handler=name, by="")
