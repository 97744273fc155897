"""The supervisor: it renews registrations, restarts worker processes and enforces deadlines.

The supervisor runs no handler, so a handler that keeps the GIL, leaks memory or crashes cannot
block it. When a worker process dies, its board in shared memory shows which events were running.
Only these events are charged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait as wait_for_any
from typing import Any, TypeVar

from django.db import Error, OperationalError, connections

from django_eventbus.conf import settings
from django_eventbus.delivery import deadlines
from django_eventbus.delivery.deadlines import Board
from django_eventbus.delivery.kills import record_kill
from django_eventbus.errors.failpoints import reached
from django_eventbus.errors.text import one_line
from django_eventbus.models import EventWorker
from django_eventbus.statistics.recorder import recorder_of_process
from django_eventbus.store import Charge, is_outage, store_for, through_outage
from django_eventbus.worker import process as child_module
from django_eventbus.worker.child import TICK, Child
from django_eventbus.worker.registration import WorkerOptions, new_registration
from django_eventbus.worker.renewals import Renewals
from django_eventbus.worker.worker import slots

logger = logging.getLogger(__name__)
T = TypeVar("T")

HEALTHY_AFTER = 10.0
WORN_OUT = 'it uses more memory than EVENTBUS["MAX_MEMORY"] allows'
LONGEST_RESTART_WAIT = 30.0
FIRST_TIMEOUT = 10.0


class Supervisor:
    """Runs ``processes`` worker processes until they end or the supervisor is stopped."""

    def __init__(
        self,
        options: WorkerOptions,
        *,
        processes: int = 1,
        report: Callable[[Supervisor], None] = lambda supervisor: None,
        say: Callable[[str], Any] = lambda text: None,
    ) -> None:
        self.options = options
        self.processes = processes
        self.report = report
        self.say = say
        self.store = store_for(options.using)
        self.children: list[Child] = []
        self.exit_code = 0
        self._ended = (0, 0, 0)
        self._signals = 0
        self._stop_sent = False
        self._stop_by = 0.0
        self._renewals = Renewals(self.store, lambda: self.children, lambda: report(self))
        self._restarts = 0
        self._restart_times: list[float] = []
        #: The monotonic time of the last check of the processes.
        self.checked = time.monotonic()

    def counted(self) -> tuple[int, int, int]:
        """Return handled events, failed attempts and dead letters of all processes so far."""
        sums = [self._ended, *(each.board.counted() for each in self.children)]
        return sum(s[0] for s in sums), sum(s[1] for s in sums), sum(s[2] for s in sums)

    def run(self) -> int:
        """Run the processes until all have ended.

        Return 1 if, during a shutdown, a process crashed or was killed. Return 0 otherwise.
        """
        self._install_signals()
        # From now on, this thread does not query the database. Other threads query it, with their
        # own connections.
        connections.close_all()
        self._renewals.start()
        for _ in range(self.processes):
            self._start()
        while self.children or self._restart_times:
            wait_for_any([each.process.sentinel for each in self.children], timeout=TICK)
            self._supervise_children()
            self._reap()
            self._restart_due()
        self._renewals.stop()
        return self.exit_code

    def _install_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, signum: int, frame: Any) -> None:
        self._signals += 1

    def stop(self) -> None:
        self._signals = max(self._signals, 1)

    @property
    def stopping(self) -> bool:
        return self._signals > 0

    def _start(self) -> None:
        registered = self._through_outage(self._register)
        if registered is _GAVE_UP:
            return
        registration, sent_at = registered
        if self.stopping:
            # The stop signal has been sent to all processes already. A process that is started now
            # would not receive it.
            self._through_outage(partial(self.store.dismiss, registration.pk))
            return
        self.children.append(self._spawn(registration, sent_at))
        self._through_outage(lambda: self.store.note_pid(registration))

    def _spawn(self, registration: EventWorker, sent_at: float) -> Child:
        context = multiprocessing.get_context("spawn")
        memory = context.RawArray("c", Board.size(slots(self.options)))
        theirs, ours = context.Pipe(duplex=False)
        process = context.Process(
            target=child_module.main,
            args=(dataclasses.asdict(self.options), registration.pk, memory, theirs),
            name=f"eventbus-worker-{registration.pk}",
        )
        with _stop_signals_blocked():
            process.start()
        theirs.close()
        registration.pid = process.pid or 0
        return Child(process, registration, Board(memory), ours, renewed=sent_at)

    def _register(self) -> tuple[EventWorker, float]:
        """Register a worker under a new id.

        A retry uses another id, because a registration whose reply was lost may be committed.
        """
        registration, sent_at = new_registration(self.options), time.monotonic()
        self.store.register(registration)
        reached("start.registered")
        return registration, sent_at

    def _supervise_children(self) -> None:
        self.checked = time.monotonic()
        self._handle_stop_signals()
        self._enforce_deadlines()
        self._kill_lost_children()
        self._renewals.watch()

    def _handle_stop_signals(self) -> None:
        """Stop the processes at the first signal; kill them at the second or after the timeout."""
        if not self._signals:
            return
        self._restart_times.clear()
        if not self._stop_sent:
            self._stop_sent = True
            self._stop_by = time.monotonic() + settings.SHUTDOWN_TIMEOUT
            for each in self.children:
                each.process.terminate()
            self.say(
                "Stopping: running handlers may finish. "
                "Send the signal again (or press Ctrl-C again) to stop immediately."
            )
        elif self._signals > 1 or time.monotonic() > self._stop_by:
            for each in self.children:
                self._kill(each, "interrupted by a forced shutdown")

    def _enforce_deadlines(self) -> None:
        for each in self.children:
            overdue = each.overdue()
            if overdue and not each.verdict:
                logger.error(
                    "handler %s ignored its deadline, killing its process %s",
                    one_line(overdue[1]),
                    each.process.pid,
                    extra=each.about(overdue[1]),
                )
                each.guilty = overdue
                self._kill(each, f"{overdue[1]} ran past its deadline and could not be interrupted")

    @staticmethod
    def _kill(child: Child, verdict: str, charge: Charge = Charge.CRASH) -> None:
        if not child.verdict:
            child.verdict, child.charge = verdict, charge
        child.process.kill()

    def _reap(self) -> None:
        for each in [child for child in self.children if not child.process.is_alive()]:
            each.process.join()
            self.children.remove(each)
            handled = each.board.counted()
            self._ended = tuple(a + b for a, b in zip(self._ended, handled, strict=True))  # type: ignore[assignment]
            each.lifeline.close()
            code = each.process.exitcode
            if code in (0, child_module.WORN_OUT) and each.board.finished():
                self._through_outage(partial(self.store.dismiss, each.registration.pk))
                if code == child_module.WORN_OUT and not self.stopping:
                    logger.info(
                        "replacing worker process %s: %s",
                        each.process.pid,
                        WORN_OUT,
                        extra=each.about(),
                    )
                    self._schedule_restart(healthy=True)
            else:
                self._recover_crashed(each, code)

    def _recover_crashed(self, child: Child, code: int | None) -> None:
        """Charge the running events, release the other events, and replace the process."""
        running = child.board.running()
        blamed, charge = self._through_outage(partial(self._blamed, child)) or (
            set(),
            Charge.NOTHING,
        )
        error = {
            "handler": next((name for row_id, _, name in running if row_id in blamed), ""),
            "type": "WorkerCrashed",
            "message": child.verdict or f"the worker process ended with {_described(code)}",
            "traceback": "",
        }
        recovered = self._through_outage(
            lambda: self.store.recover_worker(
                child.registration.pk, blamed=blamed, error=error, charge=charge
            )
        )
        logger.error(
            "worker process %s ended with %s; released %s events",
            child.process.pid,
            _described(code),
            recovered or 0,
            extra=child.about(error["handler"]),
        )
        if self.stopping:
            self.exit_code = 1
        else:
            self._schedule_restart(healthy=time.monotonic() - child.started > HEALTHY_AFTER)

    def _record_kill(self, child: Child, row_id: int, handler: str) -> bool:
        worker_id = child.registration.pk
        # A recorder with the id of the child would replace the rows that the child has written.
        statistics = recorder_of_process(self.options.using)
        recorded = record_kill(
            self.store, statistics, worker_id=worker_id, row_id=row_id, handler=handler
        )
        if recorded:
            statistics.write(self.store)
        return recorded

    def _blamed(self, child: Child) -> tuple[set[int], Charge]:
        """Return the events to charge with the end of a process, and the kind of charge.

        Only an event whose handler was running can have caused a crash. If no handler was running,
        an interruption is counted for each announced suspect (see ``delivery.suspects``). If no
        suspect was announced either, the set is empty, and the store selects the events to charge.
        """
        running = {row_id for row_id, *_ in child.board.running()}
        if self.stopping:
            return running, Charge.NOTHING
        if child.guilty is not None:
            recorded = self._record_kill(child, *child.guilty)
            return {child.guilty[0]}, Charge.NOTHING if recorded else Charge.INTERRUPTION
        suspects = self.store.suspects_of(child.registration.pk)
        if not running:
            return suspects, Charge.INTERRUPTION
        return running & suspects or running, child.charge

    def _schedule_restart(self, *, healthy: bool) -> None:
        """Schedule a restart.

        The first restart is immediate. If processes die again soon after their start, each restart
        has a longer delay.
        """
        self._restarts = 0 if healthy else self._restarts + 1
        wait = 0.0 if self._restarts <= 1 else min(2.0**self._restarts / 4, LONGEST_RESTART_WAIT)
        self._restart_times.append(time.monotonic() + wait)

    def _restart_due(self) -> None:
        """Start the replacement processes that are due. A stop signal cancels the others."""
        while self._restart_times and min(self._restart_times) <= time.monotonic():
            self._restart_times.remove(min(self._restart_times))
            self._start()

    def _kill_lost_children(self) -> None:
        """Kill processes that lost their registration, may lose it soon, or are stuck."""
        for each in self.children:
            if each.verdict:
                continue
            if each.registration.pk in self._renewals.evicted:
                verdict = "another worker has removed the registration of this worker"
            elif each.outlived():
                verdict = "the worker's registration could not be renewed in time"
            elif each.stuck():
                verdict = "a thread of the worker does not report any more"
            else:
                continue
            logger.error(
                "killing worker process %s: %s",
                each.process.pid,
                verdict,
                extra=each.about(),
            )
            self._kill(each, verdict, Charge.INTERRUPTION)

    def _through_outage(self, action: Callable[[], T]) -> T | Any:
        """Run the action, and retry it during a database outage.

        Return _GAVE_UP if a shutdown allows no further retry.
        """
        patience = FIRST_TIMEOUT

        def attempt() -> T:
            nonlocal patience
            allowed, patience = patience, min(patience * 2, deadlines.NO_ANSWER_AFTER)
            return self._run_while_supervising(action, allowed)

        try:
            return through_outage(self.store, attempt, lambda wait: not self._gives_up_after(wait))
        except Error as error:
            if is_outage(error):
                return _GAVE_UP
            raise

    def _run_while_supervising(self, action: Callable[[], T], patience: float) -> T:
        """Run the action in a new thread with a new connection. Supervise the processes meanwhile.

        The supervisor's own thread must not wait for the database.
        """
        outcome: Future[T] = Future()
        threading.Thread(target=_run_and_store, args=(outcome, action), daemon=True).start()
        give_up_at = time.monotonic() + patience
        while not wait_for_all([outcome], timeout=TICK).done:
            self._supervise_children()
            if time.monotonic() > give_up_at:
                raise OperationalError(f"the database did not answer within {patience:g} s")
        return outcome.result()

    def _gives_up_after(self, wait: float) -> bool:
        """Wait, and supervise the processes. Return True if a shutdown allows no retry."""
        until = time.monotonic() + wait
        while time.monotonic() < until:
            time.sleep(min(TICK, wait))
            self._supervise_children()
            alive = any(each.process.is_alive() for each in self.children)
            forced = self._signals > 1 or (self._stop_sent and time.monotonic() > self._stop_by)
            if self.stopping and (forced or not alive):
                return True
        return False


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block the stop signals while a process is started.

    The process inherits the blocked signals, and unblocks them when it can handle them.
    """
    # Start multiprocessing's resource tracker first, because its start unblocks the signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, child_module.STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_and_store(outcome: Future[T], action: Callable[[], T]) -> None:
    try:
        outcome.set_result(action())
    except BaseException as error:
        outcome.set_exception(error)
    finally:
        connections.close_all()


#: The result of an action that was given up because the shutdown allows no further retry. Other
#: workers recover the events of this worker.
_GAVE_UP: Any = frozenset()


def _described(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
