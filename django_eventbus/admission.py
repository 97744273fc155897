"""Which deliveries may run now: pauses, open circuit breakers, limits on running.

A worker process looks at the gates twice a second and remembers what it saw. Nothing is asked for
single events: slots and tokens are taken for a whole batch, and what may not run is parked behind
its gate, from where it is let out when there is room. A parked event costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import Error

from django_eventbus.models import EventGate, GateKind
from django_eventbus.pacing import Limits, totals
from django_eventbus.progress import DISCARDED, Outcome, Progress
from django_eventbus.registry import Handler, matches, registry
from django_eventbus.signals import breaker_closed, breaker_opened
from django_eventbus.store import Report, Store, until_opened

logger = logging.getLogger(__name__)

LOOK_EVERY = 0.5
LOOK_FOR_PARKED_EVERY = 10.0
REPORT_EVERY = 1.0
#: How many are let out at a time where there is room for all, and for each free slot.
LET_OUT = 1000
LET_OUT_PER_SLOT = 100
#: A probe may be given to another when its handler's deadline is so many seconds past.
PROBE_GRACE = 60.0
#: Where events wait that several gates hold up: they are looked at when any of them opens.
SEVERAL = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The gates as they were when last looked at."""

    queues: frozenset[str] = frozenset()
    types: tuple[tuple[str, int], ...] = ()
    #: Handlers that are paused or whose breaker is open, and their gate.
    shut: dict[str, int] = field(default_factory=dict)
    #: Those whose breaker waits for somebody to try.
    probes: frozenset[str] = frozenset()
    limits: dict[str, Limits] = field(default_factory=dict)
    gates: dict[str, int] = field(default_factory=dict)

    @property
    def holds_up(self) -> bool:
        return bool(self.types or self.shut)

    def all_shut(self) -> set[Any]:
        return {*self.types, *self.shut}


class Gates:
    """What a worker process knows of the gates; shared by its threads."""

    def __init__(self, queues: Collection[str] = ()) -> None:
        self.view = View()
        self.queues = tuple(queues)
        self._looked_at, self._sought_at = float("-inf"), time.monotonic()
        self._changes = -1
        #: Some gate has opened. One who comes new cannot know.
        self._opened = True
        self._lock = threading.Lock()

    def is_paused(self, queue: str) -> bool:
        return queue in self.view.queues

    def gate_before(self, type_name: str) -> int | None:
        """The gate that holds up all events of this type, if one does."""
        for pattern, gate_id in self.view.types:
            if matches(pattern, type_name):
                return gate_id
        return None

    def next_look(self) -> float | None:
        """Seconds until it is worth looking again; None if there are no gates."""
        if not self.view.gates and not self.view.queues and not self.view.types:
            return None
        return max(0.0, self._looked_at + LOOK_EVERY - time.monotonic())

    def keep_up(self, store: Store) -> None:
        """Look again if it is time, and let out what may go."""
        never_looked = self._changes < 0
        # One thread looks, the others go on with what is known, if anything is.
        if self._is_time() and self._lock.acquire(blocking=never_looked):
            try:
                if self._is_time():
                    self._look(store)
            finally:
                self._lock.release()

    def _is_time(self) -> bool:
        passed = time.monotonic() - self._looked_at
        return passed >= LOOK_EVERY or self._changes != registry.changes

    def look_again(self) -> None:
        """Something has changed: do not wait for the next look."""
        self._looked_at = float("-inf")

    def _look(self, store: Store) -> None:
        self._looked_at, changes = time.monotonic(), registry.changes
        limits = {each.name: found for each in registry.all() if (found := each.limits)}
        rows = store.look_at_gates()
        known = {row.name for row in rows if row.kind == GateKind.HANDLER}
        if missing := sorted(limits.keys() - known):
            store.make_gates(GateKind.HANDLER, missing)
            rows = store.look_at_gates()
        now = store.read_clock() if rows else datetime.max
        before, self.view = self.view, _view(rows, limits, now)
        self._changes = changes
        self._opened |= bool(before.all_shut() - self.view.all_shut())
        if rows or time.monotonic() - self._sought_at >= LOOK_FOR_PARKED_EVERY:
            self._sought_at = time.monotonic()
            self._let_out(store, {row.pk: row for row in rows}, now)

    def _let_out(self, store: Store, rows: dict[int, EventGate], now: datetime) -> None:
        for gate_id in store.parked(self.queues):
            if gate_id == SEVERAL:
                room, self._opened = self._room_for_several(), False
            elif gate_id in rows:
                room = _room(rows[gate_id], self.view, now)
            else:
                room = LET_OUT  # a gate that is no more
            if room and store.let_out(gate_id, limit=room, queues=self.queues) >= LET_OUT:
                self._opened |= gate_id == SEVERAL
                self.look_again()

    def _room_for_several(self) -> int:
        return LET_OUT if self._opened else len(self.view.probes)


def _view(rows: list[EventGate], limits: dict[str, Limits], now: datetime) -> View:
    paused = [row for row in rows if row.paused_at is not None]
    opened = [row for row in rows if row.kind == GateKind.HANDLER and _is_open(row, limits)]
    shut = [row for row in paused if row.kind == GateKind.HANDLER]
    return View(
        queues=frozenset(row.name for row in paused if row.kind == GateKind.QUEUE),
        types=tuple((row.name, row.pk) for row in paused if row.kind == GateKind.TYPE),
        shut={row.name: row.pk for row in (*opened, *shut)},
        probes=frozenset(row.name for row in opened if row not in shut and _probe_due(row, now)),
        limits=limits,
        gates={row.name: row.pk for row in rows if row.kind == GateKind.HANDLER},
    )


def _is_open(row: EventGate, limits: dict[str, Limits]) -> bool:
    """A breaker that is not declared any more holds nobody up."""
    declared = limits.get(row.name)
    return row.opened_at is not None and declared is not None and declared.breaker is not None


def _probe_due(row: EventGate, now: datetime) -> bool:
    return row.probe_at is None or row.probe_at <= now


def _room(row: EventGate, view: View, now: datetime) -> int:
    """How many of the events parked behind a gate may be let out."""
    if row.paused_at is not None:
        return 0
    room = LET_OUT
    limits = view.limits.get(row.name) if row.kind == GateKind.HANDLER else None
    if limits is None:
        return room
    if limits.breaker is not None and row.opened_at is not None:
        room = int(_probe_due(row, now))
    if limits.max_running is not None:
        room = min(room, int(limits.free_slots(row.running)) * LET_OUT_PER_SLOT)
    if limits.rate is not None and row.tokens_at is not None:
        passed = (now - row.tokens_at).total_seconds()
        room = min(room, int(limits.rate.tokens(row.tokens, seconds=passed)))
    return room


class Admission:
    """The doorkeeper of one thread of a worker."""

    def __init__(self, store: Store, gates: Gates, holder: str) -> None:
        self.store = store
        self.gates = gates
        self.holder = holder
        self._granted: dict[str, int] = {}
        #: Handlers whose deliveries were granted, with their limits.
        self._entered: dict[str, Limits] = {}
        self._probes: set[str] = set()
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._told: dict[str, Report] = defaultdict(Report)
        self._urgent = False
        self._reported_at = time.monotonic()

    def upkeep(self) -> None:
        """Between batches."""
        if self._entered:
            self.end()  # of one that was cut short
        self.keep_up()

    def keep_up(self) -> None:
        """Between groups, when no transaction is open: tell, and look."""
        overdue = time.monotonic() - self._reported_at >= REPORT_EVERY
        if self._told and (self._urgent or overdue):
            self._report()
        self.gates.keep_up(self.store)

    def begin(self, batch: Iterable[Progress]) -> None:
        """Take slots and tokens for all deliveries of a batch at once."""
        limits = self.gates.view.limits
        if not limits:
            return
        wanted: dict[Handler, int] = defaultdict(int)
        for progress in batch:
            for handler in (*progress.atomic, *progress.outside):
                if handler.name in limits:
                    wanted[handler] += 1
        for handler, want in wanted.items():
            self._enter(handler, want)

    def _enter(self, handler: Handler, want: int) -> None:
        name, view = handler.name, self.gates.view
        limits = view.limits[name]
        is_probe = name in view.probes
        if name in view.shut and not is_probe:
            return
        if not is_probe and limits.max_running is None and limits.rate is None:
            return  # a breaker that is closed: come in
        entry = self.store.enter(
            view.gates[name],
            limits,
            holder=self.holder,
            want=want,
            one_by_one=not handler.is_async,
            patience=handler.deadline + PROBE_GRACE,
        )
        self._granted[name] = entry.granted
        if entry.granted:
            self._entered[name] = limits
        if entry.is_probe:
            self._probes.add(name)
            self._told.pop(name, None)  # what was before has nothing to say about the probe
        if handler.is_async and limits.max_running is not None:
            self._turns[name] = asyncio.Semaphore(max(1, entry.slots))

    @property
    def is_needed(self) -> bool:
        """Whether there is anything that might hold up an event of this batch."""
        return bool(self._granted) or self.gates.view.holds_up

    def hold_back(self, progress: Progress) -> None:
        """Before anything of an event runs: leave out the handlers that may not."""
        view = self.gates.view
        gate_id = self.gates.gate_before(progress.event.type)
        if gate_id is not None:
            progress.hold_all(until_opened(gate_id))
            return
        handlers = (*progress.atomic, *progress.outside)
        self._hold_shut(progress, handlers)
        full = [each for each in handlers if not self._has_room(each.name)]
        if full:
            # Even if other gates hold it too: this one lets it out soon.
            progress.hold(full, until_opened(view.gates.get(full[0].name, SEVERAL)))

    def hold_back_again(self, progress: Progress) -> None:
        """Time has passed since the event was let in: a gate may have been shut. Coroutines have
        been started already."""
        plain = [each for each in progress.outside if not each.is_async]
        gate_id = self.gates.gate_before(progress.event.type)
        if plain and gate_id is not None:
            progress.hold(plain, until_opened(gate_id))
        elif self.gates.view.shut:
            self._hold_shut(progress, plain)

    def _hold_shut(self, progress: Progress, handlers: Collection[Handler]) -> None:
        shut = {
            each: gate_id
            for each in handlers
            if each.name not in self._probes
            and (gate_id := self.gates.view.shut.get(each.name)) is not None
        }
        if shut:
            behind = set(shut.values())
            alone = len(behind) == 1 and not progress.held
            progress.hold(shut, until_opened(behind.pop() if alone else SEVERAL))

    def _has_room(self, name: str) -> bool:
        left = self._granted.get(name)
        if left is None:
            return True
        self._granted[name] = max(0, left - 1)
        return left > 0

    def turn_of(self, handler: Handler) -> asyncio.Semaphore | None:
        """What a coroutine has to hold while it runs, if only so many may at a time."""
        return self._turns.get(handler.name)

    @property
    def counts(self) -> bool:
        """Whether anybody wants to know how deliveries go."""
        return bool(self.gates.view.limits)

    def note(self, outcome: Outcome) -> None:
        limits = self.gates.view.limits.get(outcome.handler)
        if limits is None or limits.breaker is None:
            return
        told = self._told[outcome.handler]
        told.calls += 1
        if outcome.error is not None and outcome.state != DISCARDED:
            told.failures += 1
            self._urgent = True
        self._urgent |= outcome.handler in self._probes

    def end(self) -> None:
        """After a batch: slots are free, tokens and probes that were not used go back."""
        freed = []
        for name, limits in self._entered.items():
            unused = self._granted[name]
            if limits.max_running is not None:
                freed.append(name)
            if unused or limits.max_running is not None or name in self._probes:
                self._told[name].unused, self._told[name].leaves = unused, True
                self._urgent = True
        if self._urgent:
            self._report()
        self._granted, self._entered, self._turns = {}, {}, {}
        self._probes.clear()
        for name in freed:
            if (gate_id := self.gates.view.gates.get(name)) is not None:
                self.store.let_out(gate_id, limit=LET_OUT_PER_SLOT, queues=self.gates.queues)

    def finish(self) -> None:
        """Before the thread ends. Not worth waiting for a database that does not answer."""
        try:
            self.end()
            self._report()
        except Error as error:
            logger.warning("the last calls of breakers are not counted: %s", error)

    def _report(self) -> None:
        self._reported_at, self._urgent = time.monotonic(), False
        while self._told:
            name, told = next(iter(self._told.items()))
            limits = self._entered.get(name) or self.gates.view.limits.get(name)
            gate_id = self.gates.view.gates.get(name)
            if limits is not None and gate_id is not None:
                changed = self.store.report(gate_id, limits, self.holder, told)
                if changed is not None:
                    self._tell(changed)
            del self._told[name]

    def _tell(self, gate: EventGate) -> None:
        self.gates.look_again()
        if gate.opened_at is None:
            breaker_closed.send_robust(Admission, handler=gate.name, by="")
        else:
            calls, failures = totals(gate.calls)
            breaker_opened.send_robust(Admission, handler=gate.name, calls=calls, failures=failures)
