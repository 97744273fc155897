"""Running what is owed: a claim's events in, one settlement per event out.

Atomic handlers run in a transaction shared by many events (group commit), the others when no
transaction is open. Whatever goes wrong with a group, its events are run again one by one, so
that only the guilty one suffers.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from django.db import Error

from django_eventbus import failures
from django_eventbus.admission import Admission
from django_eventbus.batch import Batch, Tally
from django_eventbus.calling import Caller, explained
from django_eventbus.conf import settings
from django_eventbus.coroutines import AsyncLoop, LoopBlockedError
from django_eventbus.deadlines import Watch
from django_eventbus.events import ClaimedEvent
from django_eventbus.exceptions import ClaimLostError, EventBusError
from django_eventbus.failpoints import reached
from django_eventbus.minutes import Minutes, Settled
from django_eventbus.models import LogStatus
from django_eventbus.progress import NO_HANDLER, Outcome, Progress, crashed
from django_eventbus.registry import Handler, did_you_mean, registry
from django_eventbus.retries import RetryPolicy
from django_eventbus.signals import delivery_failed, delivery_succeeded, event_dead_lettered
from django_eventbus.store import (
    CONFLICT_RETRIES,
    Completed,
    Finished,
    Held,
    Postponed,
    Progressed,
    Settlement,
    Store,
    is_shortage,
    is_trouble,
)
from django_eventbus.transactions import (
    GroupLostError,
    GroupTransaction,
    SessionWatch,
    in_transaction,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

GROUP_SECONDS = 0.05
GROUP_SAVEPOINTS = 50
NOT_AT_ALL = 0.0


@dataclass(slots=True)
class Suspects:
    """Events that a worker process runs although they may kill it; shared by its threads."""

    worker_id: uuid.UUID
    rows: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Deliverer:
    """Delivers the batches of one thread."""

    def __init__(
        self,
        store: Store,
        *,
        watch: Watch,
        suspects: Suspects,
        loop: AsyncLoop,
        admission: Admission,
        minutes: Minutes,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.store = store
        self.admission = admission
        self.minutes = minutes
        self.caller = Caller(watch, loop)
        self.suspects = suspects
        self.stopping = stopping
        self._group_size = settings.BATCH_SIZE
        self._together = False
        self._announced: int | None = None

    def deliver(self, events: list[ClaimedEvent]) -> Tally:
        """Run the handlers of a claim's events; give back what a shutdown leaves unstarted."""
        batch = Batch(
            token=events[0].claim.token,
            queue=events[0].claim.queue,
            lanes=frozenset(each.lane_id for each in events if each.lane_id is not None),
        )
        self._together = settings.ATOMIC == "event"
        self.caller.watch.connection = self.store.connection
        waiting = []
        for event in events:
            if event.crashes >= settings.MAX_CRASHES:
                self._bury(batch, event)
            else:
                waiting.append(Progress(event))
        self.admission.begin(waiting)
        while waiting and not self._halted(batch):
            wave, waiting = batch.next_wave(waiting)
            self._deliver_wave(batch, wave)
        batch.unstarted += waiting
        self._give_back(batch)
        self.ride_out(self.admission.end)
        if batch.tally.lost:
            logger.warning(
                "%s of %s events are not held here any more: others took them over, and what was "
                "done for them here was rolled back; or they were settled, and the answer was lost",
                batch.tally.lost,
                len(events),
            )
        return batch.tally

    def _halted(self, batch: Batch) -> bool:
        batch.halted |= self.stopping() or self.admission.gates.is_paused(batch.queue)
        return batch.halted

    def _deliver_wave(self, batch: Batch, wave: list[Progress]) -> None:
        grouped = deque(each for each in wave if not each.event.crashes)
        while grouped and not self._halted(batch):
            self._run_group(batch, grouped)
            self.ride_out(self.admission.keep_up)
        batch.unstarted += grouped
        self._run_outside(batch)
        try:
            for each in wave:
                if each.event.crashes:
                    self._run_suspect(batch, each)
        finally:
            self._announce(None)

    # -- in a transaction, together

    def _run_group(self, batch: Batch, grouped: deque[Progress]) -> None:
        """Run as many events as fit one transaction, and commit them together."""
        members: list[Progress] = []
        settlements: list[Settlement] = []
        full_at = time.monotonic() + GROUP_SECONDS
        guarded = self.admission.is_needed
        try:
            with self._transaction() as group:
                while grouped and len(members) < self._group_size and not self.stopping():
                    progress = grouped.popleft()
                    if batch.is_blocked(progress):
                        batch.unstarted.append(progress)
                        continue
                    members.append(progress)
                    if guarded:
                        self.admission.hold_back(progress)
                    self._run_atomic(progress, progress.atomic, group)
                    settlements.append(settlement := progress.settlement())
                    batch.note(progress.event, settlement)
                    full = group.disturbed or group.savepoints >= GROUP_SAVEPOINTS
                    if full or time.monotonic() > full_at:
                        break
                self._settle(batch, settlements)
            reached("settle.committed")
        except (GroupLostError, ClaimLostError, Error) as error:
            logger.info(
                "%s events are run again one by one: %s", len(members), failures.in_a_line(error)
            )
            self._group_size = 1
            self._run_each_alone(batch, members, settlements)
        else:
            self._group_size = min(self._group_size * 2, settings.BATCH_SIZE)
            quiet = not (delivery_succeeded.has_listeners() or self.admission.counts)
            completed: list[Settled] = []
            for progress, settlement in zip(members, settlements, strict=True):
                if quiet and isinstance(settlement, Completed):
                    completed.append((progress.event, settlement, progress.outcomes))
                else:
                    self._committed(batch, progress, settlement)
            batch.tally.handled += len(completed)
            self.minutes.count(batch.queue, completed)

    def _transaction(self) -> GroupTransaction:
        return GroupTransaction(self.store.using, self.caller.guarded)

    def _run_atomic(
        self, progress: Progress, handlers: list[Handler], group: GroupTransaction
    ) -> None:
        if progress.states or not (handlers or progress.outside):
            self._fail_unanswered(progress)
        if self._together and handlers:
            self._run_in_savepoint(progress, handlers, group)
            return
        for handler in handlers:
            if group.disturbed:
                raise GroupLostError("a handler changed its session: the next gets another")
            self._run_in_savepoint(progress, [handler], group)

    def _run_in_savepoint(
        self, progress: Progress, handlers: list[Handler], group: GroupTransaction
    ) -> None:
        """These handlers' work stands or falls together."""
        started = time.monotonic()
        group.start()
        try:
            for handler in handlers:
                self.caller.call(progress, handler)
            group.keep()
        except GroupLostError:
            raise
        except BaseException as error:
            if group.savepoints > 1 and self.store.is_conflict(error):
                # With the locks of those before it in the group, which alone it would not hold.
                raise GroupLostError("a handler was the victim of a deadlock") from error
            try:
                group.undo()
            except GroupLostError as lost:
                raise lost from error
            progress.halted = self._together
            self._failed(progress, handler, error, started)
        else:
            seconds = time.monotonic() - started
            for handler in handlers:
                progress.succeed(handler.name, seconds)

    @staticmethod
    def _failed(progress: Progress, handler: Handler, error: BaseException, started: float) -> None:
        seconds = time.monotonic() - started
        progress.fail(handler.name, explained(error, handler), handler.retry_policy, seconds)

    @staticmethod
    def _fail_unanswered(progress: Progress) -> None:
        for name in progress.unanswered():
            if name == NO_HANDLER and settings.UNHANDLED == "complete":
                continue
            error = EventBusError(_nobody(progress.event.type, name))
            progress.fail(name, error, RetryPolicy(**settings.UNHANDLED_RETRY), 0.0)

    def _settle(self, batch: Batch, settlements: list[Settlement]) -> None:
        """A mere Progressed without deliveries tells nothing that is not on disk."""
        telling = [
            each for each in settlements if not isinstance(each, Progressed) or each.deliveries
        ]
        self.store.settle(batch.token, telling)
        reached("settle.before_commit")

    # -- alone

    def _run_each_alone(
        self, batch: Batch, members: list[Progress], settlements: list[Settlement]
    ) -> None:
        held = self._still_held(batch, members)
        unheard = dict(zip(map(id, members), settlements, strict=False))
        for each in members:
            if not each.is_told_by(held.get(each.event.row_id)):
                unheard.pop(id(each), None)
                each.forget()
            if each.event.lane_id is not None:
                batch.blocked.pop(each.event.lane_id, None)
        lanes = (each.event.lane_id for each in batch.unstarted)
        passed_over = {lane_id for lane_id in lanes if lane_id is not None}
        for each in members:
            if each.event.row_id not in held:
                batch.tally.lost += 1
                batch.hold_up(each)
            elif id(each) in unheard:
                self._committed(batch, each, unheard[id(each)])
            elif batch.is_blocked(each):
                batch.unstarted.append(each)
            else:
                self._run_alone(batch, each)
        # Their heads may have made it now, but nothing may overtake what was passed over.
        for lane_id in passed_over:
            batch.blocked.setdefault(lane_id, 0.0)

    def _still_held(self, batch: Batch, members: list[Progress]) -> dict[int, Any]:
        """Also the answer to a COMMIT whose reply was lost: what was settled is not held, and
        what was to go on under this claim has the outcomes in its deliveries."""
        self._drop_connection()
        rows = [each.event.row_id for each in members]
        return self.ride_out(lambda: self.store.still_held(batch.token, rows))

    def _run_alone(self, batch: Batch, progress: Progress) -> None:
        """A transaction for each handler, so that what breaks it is known."""
        together = self._together or not progress.atomic
        units = [progress.atomic] if together else [[each] for each in progress.atomic]
        for unit in units:
            settlement = self._run_unit(batch, progress, unit)
            if settlement is None:
                batch.hold_up(progress)
                return
            batch.note(progress.event, settlement)
            self._committed(batch, progress, settlement)

    def _run_unit(
        self,
        batch: Batch,
        progress: Progress,
        handlers: list[Handler],
        chances: int = CONFLICT_RETRIES,
    ) -> Settlement | None:
        """None if the event is not ours any more."""
        settlement: Settlement | None = None
        try:
            with self._transaction() as group:
                self._run_atomic(progress, handlers, group)
                settlement = progress.settlement()
                self._settle(batch, [settlement])
            reached("settle.committed")
        except ClaimLostError:
            batch.tally.lost += 1
            return None
        except (GroupLostError, Error) as error:
            held = self._still_held(batch, [progress])
            if not held:
                progress.forget()
                batch.tally.lost += 1
                return None
            if progress.is_told_by(held[progress.event.row_id]):
                return settlement
            progress.forget()
            guilty = progress.current
            if guilty is None or is_shortage(error):
                raise
            handlers_are_done = settlement is not None
            if handlers_are_done and chances and self.store.is_conflict(error):
                # A deadlock of ours, no failure of theirs: InnoDB locks gaps at REPEATABLE READ.
                return self._run_unit(batch, progress, handlers, chances - 1)
            cause = error.__cause__ if isinstance(error, GroupLostError) else None
            self._failed(progress, guilty, cause or error, time.monotonic())
            settlement = progress.settlement()
            if not self._settle_now(batch, settlement):
                return None
        return settlement

    def _settle_now(self, batch: Batch, settlement: Settlement) -> bool:
        def write() -> None:
            with self.store.atomic():
                self._settle(batch, [settlement])
            reached("settle.committed")

        try:
            self.ride_out(write)
        except ClaimLostError:
            batch.tally.lost += 1
            return False
        return True

    def _run_suspect(self, batch: Batch, progress: Progress) -> None:
        """An event that was there when a worker died runs alone, and that is written down first."""
        if batch.is_blocked(progress) or self._halted(batch):
            batch.unstarted.append(progress)
            return
        self.admission.hold_back(progress)
        self._announce(progress.event.row_id)
        try:
            self._run_alone(batch, progress)
            self._run_outside(batch)
        except Exception as error:
            # A fault of our own, and this event's: it must not take the others with it again.
            if is_trouble(error):
                raise
            logger.error(
                "%s could not be delivered: %s",
                progress.event.event_id,
                failures.in_a_line(error),
            )
            self.take_back(batch.token, error, progress.event, only_this=True)
            batch.hold_up(progress)

    def take_back(
        self, token: uuid.UUID, error: Exception, event: ClaimedEvent, *, only_this: bool = False
    ) -> None:
        """Nobody may wait for events that this living worker forgot: blame them, free them."""
        record = failures.describe(error, handler="", attempt=0, at=event.database_now())
        record["type"] = "WorkerCrashed"
        ids = [event.row_id] if only_this else None
        self._drop_connection()
        self.ride_out(lambda: self.store.recover_claim(token, error=record, ids=ids))

    def _bury(self, batch: Batch, event: ClaimedEvent) -> None:
        settlement = crashed(event)
        batch.note(event, settlement)
        if self._settle_now(batch, settlement):
            batch.tally.handled += 1
            batch.tally.dead += 1
            self.minutes.count(batch.queue, [(event, settlement, ())])
            event_dead_lettered.send_robust(Deliverer, event=event, status=settlement.status)

    def _announce(self, row_id: int | None) -> None:
        """Write down which suspect runs. The name of one stands until that of the next: a death
        in between is not laid at the door of all the others."""
        if row_id == self._announced:
            return
        with self.suspects.lock:
            self.suspects.rows.discard(self._announced or 0)
            self.suspects.rows |= {row_id} if row_id else set()
            self._announced = row_id
            rows = sorted(self.suspects.rows)
            self.ride_out(lambda: self.store.suspect(self.suspects.worker_id, rows))

    # -- outside of transactions

    def _run_outside(self, batch: Batch) -> None:
        """Async handlers overlap with each other and with the rest, which run in order."""
        members, batch.outside = batch.outside, []
        running = {
            id(progress): [
                (
                    handler,
                    time.monotonic(),
                    self.caller.start(progress, handler, self.admission.turn_of(handler)),
                )
                for handler in progress.outside
                if handler.is_async
            ]
            for progress in members
        }
        for progress in members:
            if self._halted(batch) and not running[id(progress)]:
                batch.unstarted.append(progress)
                continue
            self.admission.hold_back_again(progress)
            for handler in progress.outside:
                if not handler.is_async:
                    self._run_plain(progress, handler)
            if not running[id(progress)]:
                self._settle_outside(batch, progress)
        for progress in members:
            for handler, started, future in running[id(progress)]:
                try:
                    self.caller.collect(progress, handler, future)
                except LoopBlockedError:
                    progress.hold([handler], NOT_AT_ALL)
                except BaseException as error:
                    self._failed(progress, handler, error, started)
                else:
                    progress.succeed(handler.name, time.monotonic() - started)
            if running[id(progress)]:
                self._settle_outside(batch, progress)

    def _settle_outside(self, batch: Batch, progress: Progress) -> None:
        """At once: what it did outside cannot be taken back if the worker dies."""
        settlement = progress.settlement()
        batch.note(progress.event, settlement)
        if self._settle_now(batch, settlement):
            self._committed(batch, progress, settlement)
        self.ride_out(self.admission.keep_up)

    def _run_plain(self, progress: Progress, handler: Handler) -> None:
        started = time.monotonic()
        error: BaseException | None = None
        session = SessionWatch()
        try:
            with self.store.connection.execute_wrapper(session):
                self.caller.call(progress, handler)
        except BaseException as raised:
            error = raised
        if self._left_open():
            error = error or EventBusError("the handler left a transaction open")
        if error or session.changed:
            self._drop_connection()
        if error is None:
            progress.succeed(handler.name, time.monotonic() - started)
        else:
            self._failed(progress, handler, error, started)

    def _left_open(self) -> bool:
        """A transaction left open would swallow the settlements of all that follow."""
        connection = self.store.connection
        if connection.in_atomic_block:
            if connection.atomic_blocks[0]._from_testcase:
                return False
            connection.in_atomic_block = False
            connection.atomic_blocks.clear()
            connection.savepoint_ids.clear()
        elif connection.connection is None or (
            connection.get_autocommit() and not in_transaction(connection)
        ):
            return False
        connection.close()
        return True

    # -- afterwards

    def _committed(self, batch: Batch, progress: Progress, settlement: Settlement) -> None:
        """Count and tell what is now on disk."""
        outcomes = progress.commit()
        self.minutes.count(batch.queue, [(progress.event, settlement, outcomes)])
        for outcome in outcomes:
            batch.tally.failed += outcome.error is not None
            self.admission.note(outcome)
            _tell(progress.event, outcome)
        if isinstance(settlement, Progressed):
            if not progress.atomic:
                batch.outside.append(progress)
            return
        if isinstance(settlement, Postponed):
            batch.tally.postponed += 1
            return
        if isinstance(settlement, Held):
            return
        batch.tally.handled += 1
        if isinstance(settlement, Finished) and settlement.status != LogStatus.COMPLETED:
            batch.tally.dead += 1
            event_dead_lettered.send_robust(
                Deliverer, event=progress.event, status=settlement.status
            )

    def _give_back(self, batch: Batch) -> None:
        """Unstarted events return uncharged, lanes become free."""
        rows = [each.event.row_id for each in batch.unstarted]
        if rows:
            reached("release.before")
            self.ride_out(lambda: self.store.release(batch.token, rows))
        if batch.lanes:
            waits = {lane: batch.blocked.get(lane, 0.0) for lane in batch.lanes}
            self.ride_out(lambda: self.store.release_lanes(batch.token, waits))

    def _drop_connection(self) -> None:
        connection = self.store.connection
        if not connection.in_atomic_block:
            connection.close()

    def ride_out(self, action: Callable[[], T]) -> T:
        """Do it, waiting through a lost database for as long as the worker may."""
        wait = 0.1
        give_up_at: float | None = None
        while True:
            try:
                return action()
            except Error as error:
                if self.store.connection.in_atomic_block or not is_trouble(error):
                    raise
                self.store.connection.close()
                if self.stopping():
                    give_up_at = give_up_at or time.monotonic() + settings.SHUTDOWN_TIMEOUT
                if give_up_at and time.monotonic() > give_up_at:
                    raise
                logger.warning(
                    "the database does not answer, next try in %.1f s: %s",
                    wait,
                    failures.in_a_line(error),
                )
                self.caller.watch.expect(wait)
                time.sleep(wait)
                wait = min(wait * 2, 5.0)


def _nobody(type_name: str, name: str) -> str:
    if name == NO_HANDLER:
        return f"no handler is registered for {type_name!r}"
    hint = did_you_mean(name, [each.name for each in registry.all()])
    return (
        f"the event is owed to the handler {name!r}, which is not registered{hint} "
        f"(a renamed function keeps its deliveries with name={name!r})"
    )


def _tell(event: ClaimedEvent, outcome: Outcome) -> None:
    facts: dict[str, Any] = {
        "event": event,
        "handler": outcome.handler,
        "attempt": outcome.attempt,
        "seconds": outcome.seconds,
    }
    if outcome.error is None:
        if delivery_succeeded.has_listeners():
            delivery_succeeded.send_robust(Deliverer, **facts)
    else:
        delivery_failed.send_robust(
            Deliverer,
            error=outcome.error,
            exception=outcome.exception,
            retry_in=outcome.retry_in,
            **facts,
        )
