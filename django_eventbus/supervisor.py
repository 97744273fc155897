"""Parent of the worker processes: keeps them registered, alive and within their deadlines.

It runs no handler, so a handler that holds the GIL, leaks or crashes cannot starve it. When a
child dies it knows from the board which events were running, and blames only those.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import signal
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from django.db import Error, OperationalError, connections

from django_eventbus import child as child_module
from django_eventbus import deadlines, failures
from django_eventbus.conf import settings
from django_eventbus.deadlines import Board
from django_eventbus.models import EventWorker
from django_eventbus.store import is_trouble, store_for
from django_eventbus.worker import WorkerOptions, new_registration

logger = logging.getLogger(__name__)
T = TypeVar("T")

TICK = 0.2
KILL_GRACE = 5.0
HEALTHY_AFTER = 10.0
WORN_OUT = 'it has more memory than EVENTBUS["MAX_MEMORY"] allows'
LONGEST_RESTART_WAIT = 30.0
FIRST_PATIENCE = 10.0


@dataclass(slots=True)
class Child:
    process: BaseProcess
    registration: EventWorker
    board: Board
    lifeline: Connection
    #: When the renewal of its registration was sent that is known to have been made.
    renewed: float
    started: float = field(default_factory=time.monotonic)
    #: Why we killed it, if we did, and the row to blame for it.
    verdict: str = ""
    guilty: int | None = None
    #: Whether what it ran is charged with its death.
    charged: bool = True

    def overdue(self) -> tuple[int, str] | None:
        """A handler that ran past its deadline and could not be interrupted from inside."""
        now = time.monotonic()
        for row_id, deadline, handler in self.board.running():
            if now > deadline + KILL_GRACE:
                return row_id, handler
        return None

    def outlived(self) -> bool:
        """It runs a handler although its events may be given to others any moment."""
        safe_until = self.renewed + settings.ABANDON_AFTER - TICK
        return time.monotonic() > safe_until and bool(self.board.running())

    def stuck(self) -> bool:
        """It runs no handler and has not moved for longer than any answer should take."""
        patience = max(settings.ABANDON_AFTER, deadlines.NO_ANSWER_AFTER)
        return time.monotonic() > self.board.expected_by() + patience


class Supervisor:
    """Runs ``processes`` children until they are done or it is told to stop."""

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
        self._stop_told = False
        self._stop_by = 0.0
        self._taken_for_dead: set[uuid.UUID] = set()
        self._renewer: threading.Thread | None = None
        self._renewal_began = 0.0
        self._restarts = 0
        self._starts_owed: list[float] = []

    def counted(self) -> tuple[int, int, int]:
        """Events handled, attempts failed, dead letters, of all children so far."""
        sums = [self._ended, *(each.board.counted() for each in self.children)]
        return sum(s[0] for s in sums), sum(s[1] for s in sums), sum(s[2] for s in sums)

    def run(self) -> int:
        """0 if all ended by themselves or as asked, 1 if any had to be forced."""
        self._install_signals()
        connections.close_all()  # what asks the database from here on are threads
        self._start_renewing()
        for _ in range(self.processes):
            self._start()
        while self.children or self._starts_owed:
            wait_for_any([each.process.sentinel for each in self.children], timeout=TICK)
            self._look_after_children()
            self._reap()
            self._restart_due()
        renewer, self._renewer = self._renewer, None
        if renewer:
            renewer.join(TICK * 2)
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
        registered = self._riding_out(self._register)
        if registered is _GAVE_UP:
            return
        registration, asked = registered
        context = multiprocessing.get_context("spawn")
        memory = context.RawArray("c", Board.size(self.options.concurrency))
        theirs, ours = context.Pipe(duplex=False)
        process = context.Process(
            target=child_module.main,
            args=(dataclasses.asdict(self.options), registration.pk, memory, theirs),
            name=f"eventbus-worker-{registration.pk}",
        )
        process.start()
        theirs.close()
        registration.pid = process.pid or 0
        self.children.append(Child(process, registration, Board(memory), ours, renewed=asked))
        self._riding_out(lambda: self.store.note_pid(registration))

    def _register(self) -> tuple[EventWorker, float]:
        """A new one each time: the last may have been made although nobody heard of it."""
        registration, asked = new_registration(self.options), time.monotonic()
        self.store.register(registration)
        return registration, asked

    def _look_after_children(self) -> None:
        self._obey()
        self._enforce_deadlines()
        self._end_the_lost()
        self._watch_renewals()

    def _obey(self) -> None:
        """The first signal asks the children, the second (or time) forces them."""
        if not self._signals:
            return
        self._starts_owed.clear()
        if not self._stop_told:
            self._stop_told = True
            self._stop_by = time.monotonic() + settings.SHUTDOWN_TIMEOUT
            for each in self.children:
                each.process.terminate()
            self.say("Stopping: handlers that run may finish. Once more to force.")
        elif self._signals > 1 or time.monotonic() > self._stop_by:
            for each in self.children:
                self._kill(each, "interrupted by a forced shutdown")

    def _enforce_deadlines(self) -> None:
        for each in self.children:
            overdue = each.overdue()
            if overdue and not each.verdict:
                logger.error("handler %s ignores its deadline; its process is killed", overdue[1])
                each.guilty = overdue[0]
                self._kill(each, f"{overdue[1]} ran past its deadline and had to be killed")

    @staticmethod
    def _kill(child: Child, verdict: str, *, charged: bool = True) -> None:
        if not child.verdict:
            child.verdict, child.charged = verdict, charged
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
                self._riding_out(partial(self.store.dismiss, each.registration.pk))
                if code == child_module.WORN_OUT and not self.stopping:
                    logger.info("worker process %s is replaced: %s", each.process.pid, WORN_OUT)
                    self._owe_start(healthy=True)
            else:
                self._bury(each, code)

    def _bury(self, child: Child, code: int | None) -> None:
        """Blame what was running, give back the rest, and replace the child."""
        running = child.board.running()
        blamed = self._riding_out(partial(self._blamed, child))
        error = {
            "handler": next((name for row_id, _, name in running if row_id in blamed), ""),
            "type": "TimeoutError" if "deadline" in child.verdict else "WorkerCrashed",
            "message": child.verdict or f"the worker process ended with {_described(code)}",
            "traceback": "",
        }
        recovered = self._riding_out(
            lambda: self.store.recover_worker(
                child.registration.pk,
                blamed=blamed,
                error=error,
                crashed=child.charged and not self.stopping,
            )
        )
        logger.error(
            "worker process %s ended with %s; %s events are back in the queue",
            child.process.pid,
            _described(code),
            recovered or 0,
        )
        if self.stopping:
            # One that had not yet come up dies of the signal that asks the others to finish.
            if child.verdict or running or code != -signal.SIGTERM:
                self.exit_code = 1
        else:
            self._owe_start(healthy=time.monotonic() - child.started > HEALTHY_AFTER)

    def _blamed(self, child: Child) -> set[int]:
        """What it was killed for; else the suspects among what ran, if any did; else all of it."""
        if child.guilty is not None:
            return {child.guilty}
        running = {row_id for row_id, *_ in child.board.running()}
        return running & self.store.suspects_of(child.registration.pk) or running

    def _owe_start(self, *, healthy: bool) -> None:
        """At once the first time, then slower and slower while children keep dying young."""
        self._restarts = 0 if healthy else self._restarts + 1
        wait = 0.0 if self._restarts <= 1 else min(2.0**self._restarts / 4, LONGEST_RESTART_WAIT)
        self._starts_owed.append(time.monotonic() + wait)

    def _restart_due(self) -> None:
        now = time.monotonic()
        due = [moment for moment in self._starts_owed if moment <= now]
        for moment in due:
            self._starts_owed.remove(moment)
            self._start()

    def _end_the_lost(self) -> None:
        """Those whose events others have, or may have any moment, or wait for in vain."""
        for each in self.children:
            if each.verdict:
                continue
            if each.registration.pk in self._taken_for_dead:
                verdict = "the worker was taken for dead by another"
            elif each.outlived():
                verdict = "the worker's registration could not be renewed in time"
            elif each.stuck():
                verdict = "the worker did not move any more"
            else:
                continue
            logger.error("worker process %s is ended: %s", each.process.pid, verdict)
            self._kill(each, verdict, charged=False)

    def _start_renewing(self) -> None:
        self._renewal_began = time.monotonic()
        self._renewer = threading.Thread(
            target=self._keep_registered, name="eventbus-renewal", daemon=True
        )
        self._renewer.start()

    def _watch_renewals(self) -> None:
        """One that gets no answer is left behind: another thread tries on another connection."""
        if time.monotonic() - self._renewal_began > settings.ABANDON_AFTER * 0.75 + TICK:
            logger.warning("a renewal of the registrations got no answer; it is tried anew")
            self._start_renewing()

    def _keep_registered(self) -> None:
        """In a thread of its own: a database that hangs must not keep us from our children."""
        due = time.monotonic()
        try:
            while self._renewer is threading.current_thread():
                if time.monotonic() >= due:
                    self._renewal_began = time.monotonic()
                    due = self._renewal_began + settings.ABANDON_AFTER / 4
                    self._renew()
                self.report(self)
                time.sleep(TICK)
        finally:
            connections.close_all()

    def _renew(self) -> None:
        sent = time.monotonic()
        asked = {each.registration.pk: each for each in self.children}
        if not asked:
            return
        try:
            renewed = self.store.renew(asked)
        except Error as error:
            logger.warning("registrations could not be renewed: %s", failures.in_a_line(error))
            self.store.connection.close()
            return
        for worker_id, child in asked.items():
            if worker_id in renewed:
                child.renewed = max(child.renewed, sent)
            else:
                self._taken_for_dead.add(worker_id)

    def _riding_out(self, action: Callable[[], T]) -> T | Any:
        """Our own writes wait for a lost database, saying so, but not longer than a shutdown."""
        wait, patience = 0.2, FIRST_PATIENCE
        while True:
            try:
                return self._beside_the_children(action, patience)
            except Error as error:
                if not is_trouble(error):
                    raise
                logger.warning(
                    "the database does not answer, next try in %.1f s: %s",
                    wait,
                    failures.in_a_line(error),
                )
                if self._gave_up_after(wait):
                    return _GAVE_UP
                wait = min(wait * 2, 5.0)
                patience = min(patience * 2, deadlines.NO_ANSWER_AFTER)

    def _beside_the_children(self, action: Callable[[], T], patience: float) -> T:
        """In a thread and on a connection of its own, as ours would be of days ago."""
        outcome: Future[T] = Future()
        threading.Thread(target=_run_into, args=(outcome, action), daemon=True).start()
        give_up_at = time.monotonic() + patience
        while not wait_for_all([outcome], timeout=TICK).done:
            self._look_after_children()
            if time.monotonic() > give_up_at:
                raise OperationalError(f"no answer within {patience:g} s")
        return outcome.result()

    def _gave_up_after(self, wait: float) -> bool:
        """Wait, but go on listening to signals and watching the children."""
        until = time.monotonic() + wait
        while time.monotonic() < until:
            time.sleep(min(TICK, wait))
            self._look_after_children()
            alive = any(each.process.is_alive() for each in self.children)
            forced = self._signals > 1 or (self._stop_told and time.monotonic() > self._stop_by)
            if self.stopping and (forced or not alive):
                return True
        return False


def _run_into(outcome: Future[T], action: Callable[[], T]) -> None:
    try:
        outcome.set_result(action())
    except BaseException as error:
        outcome.set_exception(error)
    finally:
        connections.close_all()


#: What is left to others when the shutdown does not wait any longer.
_GAVE_UP: Any = frozenset()


def _described(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
