"""Running what is owed: a claim's events in, one settlement per event out.

Atomic handlers run in a transaction shared by many events (group commit), the others when no
transaction is open. Whatever goes wrong with a group, its events are run again one by one, so
that only the guilty one suffers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from django.db import Error

from django_eventbus import failures
from django_eventbus.conf import settings
from django_eventbus.deadlines import Watch
from django_eventbus.events import ClaimedEvent, Envelope, now_handling
from django_eventbus.exceptions import ClaimLostError, EventBusError, HandlerTimeout
from django_eventbus.models import LogStatus
from django_eventbus.progress import NO_HANDLER, Outcome, Progress, crashed
from django_eventbus.registry import Handler, did_you_mean, registry
from django_eventbus.retries import RetryPolicy
from django_eventbus.signals import delivery_failed, delivery_succeeded, event_dead_lettered
from django_eventbus.store import (
    Completed,
    Finished,
    Postponed,
    Progressed,
    Settlement,
    Store,
    is_trouble,
)
from django_eventbus.transactions import GroupLostError, GroupTransaction, in_transaction

logger = logging.getLogger(__name__)
T = TypeVar("T")

GROUP_SECONDS = 0.05
GROUP_SAVEPOINTS = 50
LOOP_GRACE = 1.0
NO_ROW = -1


@dataclass(slots=True)
class Tally:
    """What a batch came to: events that ended, that wait for a retry, attempts that failed …"""

    handled: int = 0
    postponed: int = 0
    failed: int = 0
    dead: int = 0
    lost: int = 0


@dataclass(slots=True)
class Batch:
    """The events of one claim, and what became of them so far."""

    token: uuid.UUID
    tally: Tally = field(default_factory=Tally)
    #: Events with handlers that want no transaction, ready to be given to them.
    outside: list[Progress] = field(default_factory=list)
    unstarted: list[Progress] = field(default_factory=list)
    #: Lanes held, and for how many seconds those are blocked whose head failed.
    lanes: set[int] = field(default_factory=set)
    blocked: dict[int, float] = field(default_factory=dict)

    def next_wave(self, waiting: list[Progress]) -> tuple[list[Progress], list[Progress]]:
        """Of each lane, events up to the first that cannot be finished inside a group."""
        wave: list[Progress] = []
        later: list[Progress] = []
        busy: set[int] = set()
        for each in waiting:
            lane = each.event.lane_id
            if lane is None:
                wave.append(each)
                continue
            self.lanes.add(lane)
            if lane in busy:
                later.append(each)
                continue
            wave.append(each)
            if each.outside or each.event.crashes:
                busy.add(lane)
        return wave, later

    def is_blocked(self, progress: Progress) -> bool:
        return progress.event.lane_id in self.blocked

    def note(self, progress: Progress, settlement: Settlement) -> None:
        """An event that goes back to the queue holds up the rest of its lane."""
        lane = progress.event.lane_id
        if lane is not None and isinstance(settlement, Postponed):
            self.blocked[lane] = settlement.delay


@dataclass(slots=True)
class Suspects:
    """Events that a worker process runs although they may kill it; shared by its threads."""

    worker_id: uuid.UUID
    rows: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


class AsyncLoop:
    """An event loop in a thread of its own, started when the first coroutine comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="eventbus-async", daemon=True
                )
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """A coroutine that blocks the loop for good stays behind with it."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LOOP_GRACE)
        if not self._thread.is_alive():
            self._loop.close()
        self._loop = None


class Deliverer:
    """Delivers the batches of one thread."""

    def __init__(
        self,
        store: Store,
        *,
        watch: Watch,
        suspects: Suspects,
        loop: AsyncLoop,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.store = store
        self.watch = watch
        self.suspects = suspects
        self.loop = loop
        self.stopping = stopping
        self._group_size = settings.BATCH_SIZE

    def deliver(self, events: list[ClaimedEvent]) -> Tally:
        """Run the handlers of a claim's events; give back what a shutdown leaves unstarted."""
        batch = Batch(token=events[0].claim.token)
        self.watch.driver = self.store.connection.connection
        waiting = []
        for event in events:
            if event.crashes >= settings.MAX_CRASHES:
                self._bury(batch, event)
            else:
                waiting.append(Progress(event))
        while waiting and not self.stopping():
            wave, waiting = batch.next_wave(waiting)
            self._deliver_wave(batch, wave)
        batch.unstarted += waiting
        self._give_back(batch)
        return batch.tally

    def _deliver_wave(self, batch: Batch, wave: list[Progress]) -> None:
        grouped = deque(each for each in wave if not each.event.crashes)
        while grouped and not self.stopping():
            self._run_group(batch, grouped)
        batch.unstarted += grouped
        self._run_outside(batch)
        for each in wave:
            if each.event.crashes:
                self._run_suspect(batch, each)

    # -- in a transaction, together

    def _run_group(self, batch: Batch, grouped: deque[Progress]) -> None:
        """Run as many events as fit one transaction, and commit them together."""
        members: list[Progress] = []
        settlements: list[Settlement] = []
        full_at = time.monotonic() + GROUP_SECONDS
        try:
            with self._transaction() as group:
                while grouped and len(members) < self._group_size and not self.stopping():
                    progress = grouped.popleft()
                    if batch.is_blocked(progress):
                        batch.unstarted.append(progress)
                        continue
                    members.append(progress)
                    self._run_atomic(progress, progress.atomic, group)
                    settlements.append(settlement := progress.settlement())
                    batch.note(progress, settlement)
                    if group.savepoints >= GROUP_SAVEPOINTS or time.monotonic() > full_at:
                        break
                self._settle(batch, settlements)
        except (GroupLostError, ClaimLostError, Error) as error:
            logger.info("%s events are run again one by one: %s", len(members), error)
            self._group_size = 1
            self._run_each_alone(batch, members)
        else:
            self._group_size = min(self._group_size * 2, settings.BATCH_SIZE)
            quiet = not delivery_succeeded.has_listeners()
            for progress, settlement in zip(members, settlements, strict=True):
                if quiet and isinstance(settlement, Completed):
                    batch.tally.handled += 1
                else:
                    self._committed(batch, progress, settlement)

    def _transaction(self) -> GroupTransaction:
        return GroupTransaction(self.store.using, self._guarded)

    def _guarded(self, hook: Callable[[], Any]) -> Callable[[], Any]:
        """An on_commit callback has a deadline too, and can only harm itself."""

        def run() -> None:
            self.watch.start(NO_ROW, b"on_commit", settings.HANDLER_TIMEOUT)
            try:
                try:
                    hook()
                finally:
                    self.watch.stop()
            except BaseException:
                logger.exception("an on_commit callback of a handler failed: %r", hook)

        return run

    def _run_atomic(
        self, progress: Progress, handlers: list[Handler], group: GroupTransaction
    ) -> None:
        if progress.states or not (handlers or progress.outside):
            self._fail_unanswered(progress)
        if settings.ATOMIC == "event" and handlers:
            self._run_in_savepoint(progress, handlers, group)
            return
        for handler in handlers:
            self._run_in_savepoint(progress, [handler], group)

    def _run_in_savepoint(
        self, progress: Progress, handlers: list[Handler], group: GroupTransaction
    ) -> None:
        """These handlers' work stands or falls together."""
        started = time.monotonic()
        group.start()
        try:
            for handler in handlers:
                self._call(progress, handler)
            group.keep()
        except GroupLostError:
            raise
        except BaseException as error:
            try:
                group.undo()
            except GroupLostError as lost:
                raise lost from error
            progress.halted = settings.ATOMIC == "event"
            self._failed(progress, handler, error, started)
        else:
            seconds = time.monotonic() - started
            for handler in handlers:
                progress.succeed(handler.name, seconds)

    def _call(self, progress: Progress, handler: Handler) -> None:
        event = progress.event
        progress.current = handler
        envelope = self._envelope(progress, handler)
        self.watch.start(event.row_id, handler.stored_name, handler.deadline)
        now_handling(event.event_id)
        try:
            result = handler.func(envelope)
        finally:
            now_handling(None)
            self.watch.stop()
        if result is not None and asyncio.iscoroutine(result):
            result.close()
            raise EventBusError(
                f"{handler.name} gave a coroutine that nobody awaits: declare it with async def"
            )

    @staticmethod
    def _envelope(progress: Progress, handler: Handler) -> Envelope[Any]:
        return Envelope(
            progress.event,
            handler_name=handler.name,
            attempt=progress.attempt_of(handler.name),
        )

    @staticmethod
    def _failed(progress: Progress, handler: Handler, error: BaseException, started: float) -> None:
        seconds = time.monotonic() - started
        progress.fail(handler.name, _explained(error, handler), handler.retry_policy, seconds)

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

    # -- alone

    def _run_each_alone(self, batch: Batch, members: list[Progress]) -> None:
        for each in members:
            each.forget()
            if each.event.lane_id is not None:
                batch.blocked.pop(each.event.lane_id, None)
        lanes = (each.event.lane_id for each in batch.unstarted)
        passed_over = {lane_id for lane_id in lanes if lane_id is not None}
        held = self._still_held(batch, members)
        for each in members:
            if each.event.row_id not in held:
                batch.tally.lost += 1
            elif batch.is_blocked(each):
                batch.unstarted.append(each)
            else:
                self._run_alone(batch, each)
        # Their heads may have made it now, but nothing may overtake what was passed over.
        for lane_id in passed_over:
            batch.blocked.setdefault(lane_id, 0.0)

    def _still_held(self, batch: Batch, members: list[Progress]) -> set[int]:
        """Also the answer to a COMMIT whose reply was lost: what was settled is not held."""
        self._drop_connection()
        rows = [each.event.row_id for each in members]
        return self.ride_out(lambda: self.store.still_held(batch.token, rows))

    def _run_alone(self, batch: Batch, progress: Progress) -> None:
        """A transaction for each handler, so that what breaks it is known."""
        together = settings.ATOMIC == "event" or not progress.atomic
        units = [progress.atomic] if together else [[each] for each in progress.atomic]
        for unit in units:
            settlement = self._run_unit(batch, progress, unit)
            if settlement is None:
                return
            batch.note(progress, settlement)
            self._committed(batch, progress, settlement)

    def _run_unit(
        self, batch: Batch, progress: Progress, handlers: list[Handler]
    ) -> Settlement | None:
        """None if the event is not ours any more."""
        try:
            with self._transaction() as group:
                self._run_atomic(progress, handlers, group)
                settlement = progress.settlement()
                self._settle(batch, [settlement])
        except ClaimLostError:
            batch.tally.lost += 1
            return None
        except (GroupLostError, Error) as error:
            progress.forget()
            if not self._still_held(batch, [progress]):
                batch.tally.lost += 1
                return None
            guilty = progress.current
            if guilty is None:
                raise
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

        try:
            self.ride_out(write)
        except ClaimLostError:
            batch.tally.lost += 1
            return False
        return True

    def _run_suspect(self, batch: Batch, progress: Progress) -> None:
        """An event that was there when a worker died runs alone, and that is written down first."""
        if batch.is_blocked(progress) or self.stopping():
            batch.unstarted.append(progress)
            return
        self._announce(progress, runs=True)
        try:
            self._run_alone(batch, progress)
            self._run_outside(batch)
        except Exception as error:
            # A fault of our own, and this event's: it must not take the others with it again.
            if is_trouble(error):
                raise
            logger.exception("%s could not be delivered", progress.event.event_id)
            self.take_back(batch.token, error, progress.event, only_this=True)
            if progress.event.lane_id is not None:
                batch.blocked.setdefault(progress.event.lane_id, 0.0)
        finally:
            self._announce(progress, runs=False)

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
        if event.lane_id is not None:
            batch.lanes.add(event.lane_id)
        settlement = crashed(event)
        if self._settle_now(batch, settlement):
            batch.tally.handled += 1
            batch.tally.dead += 1
            event_dead_lettered.send_robust(Deliverer, event=event, status=settlement.status)

    def _announce(self, progress: Progress, *, runs: bool) -> None:
        with self.suspects.lock:
            change = self.suspects.rows.add if runs else self.suspects.rows.discard
            change(progress.event.row_id)
            rows = sorted(self.suspects.rows)
            self.ride_out(lambda: self.store.suspect(self.suspects.worker_id, rows))

    # -- outside of transactions

    def _run_outside(self, batch: Batch) -> None:
        """Async handlers overlap with each other and with the rest, which run in order."""
        members, batch.outside = batch.outside, []
        running = {
            id(progress): [
                (handler, time.monotonic(), self._start_async(progress, handler))
                for handler in progress.outside
                if handler.is_async
            ]
            for progress in members
        }
        for progress in members:
            if self.stopping() and not running[id(progress)]:
                batch.unstarted.append(progress)
                continue
            for handler in progress.outside:
                if not handler.is_async:
                    self._run_plain(progress, handler)
            if not running[id(progress)]:
                self._settle_outside(batch, progress)
        for progress in members:
            for handler, started, future in running[id(progress)]:
                self._collect_async(progress, handler, started, future)
            if running[id(progress)]:
                self._settle_outside(batch, progress)

    def _settle_outside(self, batch: Batch, progress: Progress) -> None:
        """At once: what it did outside cannot be taken back if the worker dies."""
        settlement = progress.settlement()
        batch.note(progress, settlement)
        if self._settle_now(batch, settlement):
            self._committed(batch, progress, settlement)

    def _run_plain(self, progress: Progress, handler: Handler) -> None:
        started = time.monotonic()
        error: BaseException | None = None
        try:
            self._call(progress, handler)
        except BaseException as raised:
            error = raised
        if self._left_open():
            error = error or EventBusError("the handler left a transaction open")
        if error is None:
            progress.succeed(handler.name, time.monotonic() - started)
        else:
            self._failed(progress, handler, error, started)
            self._drop_connection()

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

    def _start_async(self, progress: Progress, handler: Handler) -> Future[None]:
        envelope = self._envelope(progress, handler)

        async def run() -> None:
            now_handling(progress.event.event_id)
            async with asyncio.timeout(handler.deadline):
                await handler.func(envelope)

        return self.loop.submit(run())

    def _collect_async(
        self, progress: Progress, handler: Handler, started: float, future: Future[None]
    ) -> None:
        # A coroutine that blocks its loop keeps its own timeout from firing; ours is the second.
        self.watch.start(progress.event.row_id, handler.stored_name, handler.deadline + LOOP_GRACE)
        try:
            try:
                future.result()
            finally:
                self.watch.stop()
        except BaseException as error:
            future.cancel()
            self._failed(progress, handler, error, started)
        else:
            progress.succeed(handler.name, time.monotonic() - started)

    # -- afterwards

    def _committed(self, batch: Batch, progress: Progress, settlement: Settlement) -> None:
        """Count and tell what is now on disk."""
        for outcome in progress.commit():
            batch.tally.failed += outcome.error is not None
            _tell(progress.event, outcome)
        if isinstance(settlement, Progressed):
            if not progress.atomic:
                batch.outside.append(progress)
            return
        if isinstance(settlement, Postponed):
            batch.tally.postponed += 1
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
                logger.warning("the database does not answer, next try in %.1f s: %s", wait, error)
                time.sleep(wait)
                wait = min(wait * 2, 5.0)


def _explained(error: BaseException, handler: Handler) -> BaseException:
    """The error a reader at night needs to see."""
    if isinstance(error, HandlerTimeout | TimeoutError) and not str(error):
        text = f"{handler.name} ran longer than {handler.deadline:g} s"
        return TimeoutError(text).with_traceback(error.__traceback__)
    if isinstance(error, RuntimeError) and "durable atomic block" in str(error):
        error.add_note(
            "Handlers run inside the worker's transaction; one that needs its own declares "
            "@handler(..., atomic=False)."
        )
    return error


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
            Deliverer, error=outcome.error, retry_in=outcome.retry_in, **facts
        )
