"""Gates: who may run now, who waits, and how what waits gets out again.

Every verb is a short transaction of its own, never part of a handler's: what all workers write
must not be locked for as long as one handler runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Min, QuerySet

from django_eventbus.conf import settings
from django_eventbus.models import EventGate, GateKind
from django_eventbus.pacing import CircuitBreaker, Limits, counted, totals
from django_eventbus.store.rows import NEVER, PARKED, Rows, parked_at, retried


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a worker's thread may do with one handler: so many deliveries, so many at a time."""

    granted: int = 0
    slots: int = 0
    #: It is the one that tries whether an open breaker may close.
    is_probe: bool = False


@dataclass(slots=True, kw_only=True)
class Report:
    """What a worker's thread has to tell about one handler."""

    calls: int = 0
    failures: int = 0
    #: Deliveries it was granted and did not make.
    unused: int = 0
    #: It runs none any more: its slots are free, and its probe, if any, is given back.
    leaves: bool = False


class Gates(Rows):
    """Pauses, circuit breakers and limits on running."""

    # -- pauses

    def pause(self, kind: str, name: str, *, by: str, reason: str) -> bool:
        """False, and nothing changes, if it was paused before."""
        self.make_gates(kind, [name])
        running = self.gates.filter(kind=kind, name=name, paused_at__isnull=True)
        return bool(running.update(paused_at=self.now, paused_by=by, reason=reason))

    def resume(self, kind: str, name: str) -> bool:
        """False if it was not paused. What it held up is let out by the workers."""
        paused = self.gates.filter(kind=kind, name=name, paused_at__isnull=False)
        return bool(paused.update(paused_at=None, paused_by="", reason=""))

    def make_gates(self, kind: str, names: Collection[str]) -> None:
        new = [EventGate(namespace=settings.NAMESPACE, kind=kind, name=name) for name in names]
        EventGate.objects.using(self.using).bulk_create(new, ignore_conflicts=True)

    # -- entering and leaving

    @retried
    def enter(
        self,
        gate_id: int,
        limits: Limits,
        *,
        holder: str,
        want: int,
        one_by_one: bool,
        patience: float,
    ) -> Entry:
        """Ask for ``want`` deliveries of a handler at once, one by one or as many together as may
        be. A probe is given to another when its holder died, or after ``patience`` seconds."""
        with self.atomic():
            gate = self._locked_gate(gate_id)
            if gate is None or gate.paused_at:
                return Entry()
            now = self.read_clock()
            is_probe = limits.breaker is not None and gate.opened_at is not None
            if is_probe and not self._probe_is_free(gate, now):
                return Entry()
            alive = self._of_the_living(gate.running)
            others = {who: n for who, n in gate.running.items() if who in alive and who != holder}
            tokens = _tokens(gate, limits, now)
            granted = int(min(1 if is_probe else want, tokens))
            slots = int(min(limits.free_slots(others), 1 if one_by_one else granted))
            if not granted or not slots:
                return Entry()
            if limits.rate is not None:
                gate.tokens, gate.tokens_at = tokens - granted, now
            if limits.max_running is not None:
                gate.running = {**others, holder: slots}
            if is_probe:
                gate.probe_by, gate.probe_at = holder, now + timedelta(seconds=patience)
            gate.save(using=self.using)
            return Entry(granted=granted, slots=slots, is_probe=is_probe)

    @retried
    def report(self, gate_id: int, limits: Limits, holder: str, told: Report) -> EventGate | None:
        """Count what happened. Returns the gate if its breaker has opened or closed."""
        with self.atomic():
            gate = self._locked_gate(gate_id)
            if gate is None:
                return None
            now = self.read_clock()
            was_open = gate.opened_at is not None
            if told.leaves:
                gate.running.pop(holder, None)
            if gate.tokens is not None:
                gate.tokens += told.unused
            if limits.breaker is not None:
                _judge(gate, limits.breaker, holder, told, now)
            gate.save(using=self.using)
            return gate if was_open != (gate.opened_at is not None) else None

    def close_breaker(self, name: str) -> bool:
        """False if it was not open."""
        handlers = self.gates.filter(kind=GateKind.HANDLER, name=name)
        was_open = handlers.filter(opened_at__isnull=False).exists()
        handlers.update(opened_at=None, probe_at=None, probe_by="", calls={})
        return was_open

    def _locked_gate(self, gate_id: int) -> EventGate | None:
        """None if somebody has deleted it: the next look makes it again."""
        gate: EventGate | None = self.waiting_lock(self.gates.filter(id=gate_id)).first()
        return gate

    def _probe_is_free(self, gate: EventGate, now: datetime) -> bool:
        if gate.probe_at is None or gate.probe_at <= now:
            return True
        return bool(gate.probe_by) and not self._of_the_living([gate.probe_by])

    def _of_the_living(self, holders: Iterable[str]) -> set[str]:
        """Who is not registered any more runs nothing."""
        workers = {holder: holder.partition("/")[0] for holder in holders}
        if not workers:
            return set()
        known = self.workers.filter(pk__in=set(workers.values())).values_list("pk", flat=True)
        alive = set(map(str, known))
        return {holder for holder, worker in workers.items() if worker in alive}

    # -- looking

    def look_at_gates(self) -> list[EventGate]:
        """All there are, without the slots and probes of the dead."""
        found = list(self.gates.order_by("id"))
        alive = self._of_the_living(
            holder for gate in found for holder in (*gate.running, gate.probe_by) if holder
        )
        for gate in found:
            gate.running = {who: n for who, n in gate.running.items() if who in alive}
            if gate.probe_by and gate.probe_by not in alive:
                gate.probe_by, gate.probe_at = "", None
        return found

    # -- what is parked

    def parked(self, queues: Collection[str]) -> set[int]:
        """The gates that hold something up, by a look into the indexes for each."""
        delayed = self.queued.filter(available_at__isnull=False)
        found = set(_gates_of(delayed, "available_at"))
        for queue in queues:
            found.update(_gates_of(self.lanes.filter(queue=queue), "ready_at"))
        return found

    @retried
    def let_out(self, gate_id: int, *, limit: int, queues: Collection[str]) -> int:
        """Make up to ``limit`` events without a key, and lanes of each queue, due."""
        with self.atomic():
            events = self._parked_here(self.queued, "available_at", gate_id, limit)
            out = self.queued.filter(id__in=events).update(available_at=None)
            for queue in queues:
                of_queue = self.lanes.filter(queue=queue)
                lanes = self._parked_here(of_queue, "ready_at", gate_id, limit)
                out += of_queue.filter(id__in=lanes).update(ready_at=self.now)
        return out

    def _parked_here(self, rows: QuerySet[Any], field: str, gate_id: int, limit: int) -> list[int]:
        # A range in order, though it is one moment: so that the index is the only way to go.
        this = {f"{field}__gte": parked_at(gate_id), f"{field}__lt": parked_at(gate_id + 1)}
        here = self.locked(rows.filter(**this).order_by(field))
        return list(here.values_list("id", flat=True)[:limit])


def _gates_of(rows: QuerySet[Any], field: str) -> Iterator[int]:
    """From one moment to the next: what stands between them is not looked at."""
    after = parked_at(-1)
    while True:
        later = rows.filter(**{f"{field}__gt": after, f"{field}__lt": NEVER})
        after = later.aggregate(at=Min(field))["at"]
        if after is None:
            return
        yield int((after - PARKED).total_seconds())


def _judge(
    gate: EventGate, breaker: CircuitBreaker, holder: str, told: Report, now: datetime
) -> None:
    """What the breaker makes of it."""
    if gate.probe_by == holder:
        if told.failures:
            _open(gate, breaker, now)
        elif told.calls:
            gate.opened_at = gate.probe_at = None
            gate.probe_by, gate.calls = "", {}
        elif told.leaves:
            gate.probe_by, gate.probe_at = "", now
    elif gate.opened_at is None:
        gate.calls = counted(
            gate.calls,
            window=breaker.window,
            now=now.timestamp(),
            calls=told.calls,
            failures=told.failures,
        )
        if breaker.opens_at(*totals(gate.calls)):
            _open(gate, breaker, now)


def _open(gate: EventGate, breaker: CircuitBreaker, now: datetime) -> None:
    gate.opened_at = gate.opened_at or now
    gate.probe_at = now + timedelta(seconds=breaker.open_for)
    gate.probe_by = ""


def _tokens(gate: EventGate, limits: Limits, now: datetime) -> float:
    if limits.rate is None:
        return math.inf
    passed = (now - gate.tokens_at).total_seconds() if gate.tokens_at else 0.0
    return limits.rate.tokens(gate.tokens, seconds=passed)
