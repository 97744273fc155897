"""Flow controls: pauses, circuit breakers and limits, and the events that they hold.

Every method is a short transaction of its own, never part of a handler's transaction. All workers
write these rows, so no row may stay locked for as long as a handler runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Protocol, TypeVar

from django.db.models import QuerySet

from django_eventbus.conf import settings
from django_eventbus.models import FlowControl, FlowControlKind
from django_eventbus.store.rows import Rows, retried


class Decision(Protocol):
    """The result of a decision about a flow control."""

    @property
    def changes(self) -> Mapping[str, Any]:
        """The columns to update, with their new values."""


Decided = TypeVar("Decided", bound=Decision)


class FlowControls(Rows):
    """The rows of flow controls, and the column ``held_by`` of events and lanes."""

    # -- pauses

    def pause(self, kind: str, name: str, *, by: str, reason: str) -> bool:
        """Pause a queue, type or handler; return False if it is paused already."""
        self.make_flow_controls(kind, [name])
        running = self.flow_controls.filter(kind=kind, name=name, paused_at__isnull=True)
        return bool(running.update(paused_at=self.now, paused_by=by, reason=reason))

    def resume(self, kind: str, name: str) -> bool:
        """End a pause, so that workers release the held events; return False if no pause is set."""
        paused = self.flow_controls.filter(kind=kind, name=name, paused_at__isnull=False)
        return bool(paused.update(paused_at=None, paused_by="", reason=""))

    def make_flow_controls(self, kind: str, names: Collection[str]) -> None:
        """Insert a flow control for each name that has none yet."""
        new = [FlowControl(namespace=settings.NAMESPACE, kind=kind, name=name) for name in names]
        FlowControl.objects.using(self.using).bulk_create(new, ignore_conflicts=True)

    # -- decisions

    @retried
    def decide(
        self,
        flow_control_id: int,
        decision: Callable[[FlowControl, datetime], Decided],
        *,
        ignore_dead_workers: bool = False,
    ) -> Decided | None:
        """Lock a flow control, call ``decision`` with it, write the changes; return the decision.

        Return None if the row was deleted. ``decision`` may be called again after a deadlock.

        With ``ignore_dead_workers`` the decision does not see the slots and the probe of workers
        that are no longer registered. This option costs one more statement.
        """
        with self.atomic():
            this = self.flow_controls.filter(id=flow_control_id)
            control: FlowControl | None = self.waiting_lock(this).first()
            if control is None:
                return None
            if ignore_dead_workers:
                self._remove_dead_workers([control])
            decided = decision(control, self.read_clock())
            if decided.changes:
                this.update(**decided.changes)
            return decided

    def close_breaker(self, name: str) -> bool:
        """Close a circuit breaker; return False if it was not open."""
        handlers = self.flow_controls.filter(kind=FlowControlKind.HANDLER, name=name)
        was_open = handlers.filter(opened_at__isnull=False).exists()
        handlers.update(opened_at=None, probe_at=None, probe_by="", calls={})
        return was_open

    def read_flow_controls(self) -> list[FlowControl]:
        """Return all flow controls, without the slots and probes of dead workers."""
        found = list(self.flow_controls.order_by("id"))
        self._remove_dead_workers(found)
        return found

    def _remove_dead_workers(self, controls: Collection[FlowControl]) -> None:
        """Remove slots and probes of workers that are not registered: they run no handler any more.

        This method changes the given objects, not the rows in the database.
        """
        alive = self._alive(
            holder for each in controls for holder in (*each.running, each.probe_by) if holder
        )
        for each in controls:
            each.running = {who: slots for who, slots in each.running.items() if who in alive}
            if each.probe_by and each.probe_by not in alive:
                each.probe_by, each.probe_at = "", None

    def _alive(self, holders: Iterable[str]) -> set[str]:
        workers = {holder: holder.partition("/")[0] for holder in holders}
        if not workers:
            return set()
        known = self.workers.filter(pk__in=set(workers.values())).values_list("pk", flat=True)
        alive = set(map(str, known))
        return {holder for holder, worker in workers.items() if worker in alive}

    # -- held events and lanes

    def ids_that_hold(self, queues: Collection[str]) -> set[int]:
        """Return the ids of flow controls that hold events or lanes, by one index lookup per id."""
        events = self.queued.filter(held_by__isnull=False).order_by("namespace", "held_by")
        found = set(_distinct_holders(events))
        for queue in queues:
            found.update(_distinct_holders(self._held_lanes_of(queue)))
        return found

    @retried
    def release_held(self, flow_control_id: int, *, limit: int, queues: Collection[str]) -> int:
        """Make the events and lanes ready that this flow control holds.

        ``limit`` is the maximum number of events, and the maximum number of lanes of each queue.
        Return how many events and lanes were made ready.
        """
        with self.atomic():
            held = self.queued.order_by("namespace", "held_by", "id")
            events = self._lock_held(held, flow_control_id, limit)
            released = self.queued.filter(id__in=events).update(held_by=None)
            for queue in queues:
                lanes = self._lock_held(self._held_lanes_of(queue), flow_control_id, limit)
                ready = self.lanes.filter(id__in=lanes)
                released += ready.update(ready_at=self.now, held_by=None)
        return released

    def _held_lanes_of(self, queue: str) -> QuerySet[Any]:
        """Return the held lanes of a queue, in the order of the index that the query uses."""
        lanes = self.lanes.filter(queue=queue, ready_at__isnull=True, held_by__isnull=False)
        return lanes.order_by("namespace", "queue", "ready_at", "held_by")

    def _lock_held(self, rows: QuerySet[Any], flow_control_id: int, limit: int) -> list[int]:
        # The id of the flow control is passed as a range. With an equality condition, a scan of the
        # primary key would also return the rows in the requested order, and PostgreSQL might choose
        # that scan instead of the index on held_by.
        held = rows.filter(held_by__gte=flow_control_id, held_by__lte=flow_control_id)
        return list(self.locked(held).values_list("id", flat=True)[:limit])


def _distinct_holders(rows: QuerySet[Any]) -> Iterator[int]:
    """Yield each value of ``held_by`` once, without reading the rows between two values."""
    holder = rows.values_list("held_by", flat=True).first()
    while holder is not None:
        yield holder
        later = rows.filter(held_by__gt=holder)
        holder = later.values_list("held_by", flat=True).first()
