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
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from django.db import Error, connections

from django_eventbus import child as child_module
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
LONGEST_RESTART_WAIT = 30.0


@dataclass(slots=True)
class Child:
    process: BaseProcess
    registration: EventWorker
    board: Board
    lifeline: Connection
    started: float = field(default_factory=time.monotonic)
    #: Why we killed it, if we did, and the row to blame for it.
    verdict: str = ""
    guilty: int | None = None

    def overdue(self) -> tuple[int, str] | None:
        """A handler that ran past its deadline and could not be interrupted from inside."""
        now = time.monotonic()
        for row_id, deadline, handler in self.board.running():
            if now > deadline + KILL_GRACE:
                return row_id, handler
        return None


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
        self._finished = threading.Event()
        self._restarts = 0
        self._starts_owed: list[float] = []

    def counted(self) -> tuple[int, int, int]:
        """Events handled, attempts failed, dead letters, of all children so far."""
        sums = [self._ended, *(each.board.counted() for each in self.children)]
        return sum(s[0] for s in sums), sum(s[1] for s in sums), sum(s[2] for s in sums)

    def run(self) -> int:
        """0 if all ended by themselves or as asked, 1 if any had to be forced."""
        self._install_signals()
        side = threading.Thread(target=self._keep_registered, name="eventbus-renewal", daemon=True)
        side.start()
        for _ in range(self.processes):
            self._start()
        while self.children or self._starts_owed:
            wait_for_any([each.process.sentinel for each in self.children], timeout=TICK)
            self._obey()
            self._enforce_deadlines()
            self._end_the_evicted()
            self._reap()
            self._restart_due()
        self._finished.set()
        side.join(TICK * 2)
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
        registration = new_registration(self.options)
        if self._riding_out(lambda: self.store.register(registration)) is _GAVE_UP:
            return
        context = multiprocessing.get_context("spawn")
        memory = context.RawArray("c", Board.size(self.options.concurrency))
        theirs, ours = context.Pipe(duplex=False)
        process = context.Process(
            target=child_module.main,
            args=(dataclasses.asdict(self.options), registration.pk, memory, theirs),
            name=f"eventbus-worker-{registration.pk}",
        )
        # A child that inherited our connection could end our session by closing it.
        self.store.connection.close()
        process.start()
        theirs.close()
        registration.pid = process.pid or 0
        self.children.append(Child(process, registration, Board(memory), ours))
        self._riding_out(lambda: self.store.note_pid(registration))

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
    def _kill(child: Child, verdict: str) -> None:
        child.verdict = child.verdict or verdict
        child.process.kill()

    def _reap(self) -> None:
        for each in [child for child in self.children if not child.process.is_alive()]:
            each.process.join()
            self.children.remove(each)
            handled = each.board.counted()
            self._ended = tuple(a + b for a, b in zip(self._ended, handled, strict=True))  # type: ignore[assignment]
            each.lifeline.close()
            code = each.process.exitcode
            if code == 0 and each.board.finished():
                self._riding_out(partial(self.store.dismiss, each.registration.pk))
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
                crashed=not self.stopping,
            )
        )
        logger.error(
            "worker process %s ended with %s; %s events are back in the queue",
            child.process.pid,
            _described(code),
            recovered,
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

    def _end_the_evicted(self) -> None:
        for each in self.children:
            if each.registration.pk in self._taken_for_dead and not each.verdict:
                logger.error("worker process %s was taken for dead", each.process.pid)
                self._kill(each, "the worker was taken for dead by another")

    def _keep_registered(self) -> None:
        """In a thread of its own: a database that hangs must not keep us from our children."""
        renewed = time.monotonic()
        try:
            while not self._finished.wait(TICK):
                if time.monotonic() - renewed >= settings.ABANDON_AFTER / 4:
                    renewed = time.monotonic()
                    self._renew()
                self.report(self)
        finally:
            connections.close_all()

    def _renew(self) -> None:
        ours = {each.registration.pk for each in self.children}
        try:
            self._taken_for_dead |= ours - self.store.renew(ours)
        except Error as error:
            logger.warning("registrations could not be renewed: %s", error)
            self.store.connection.close()

    def _riding_out(self, action: Callable[[], T]) -> T | Any:
        """Our own writes wait for a lost database, saying so, but not longer than a shutdown."""
        wait = 0.2
        while True:
            try:
                return action()
            except Error as error:
                if not is_trouble(error):
                    raise
                self.store.connection.close()
                logger.warning("the database does not answer, next try in %.1f s: %s", wait, error)
                if self._gave_up_after(wait):
                    return _GAVE_UP
                wait = min(wait * 2, 5.0)

    def _gave_up_after(self, wait: float) -> bool:
        """Wait, but go on listening to signals and watching the children's deadlines."""
        until = time.monotonic() + wait
        while time.monotonic() < until:
            time.sleep(min(TICK, wait))
            self._obey()
            self._enforce_deadlines()
            alive = any(each.process.is_alive() for each in self.children)
            forced = self._signals > 1 or (self._stop_told and time.monotonic() > self._stop_by)
            if self.stopping and (forced or not alive):
                return True
        return False


#: What is left to others when the shutdown does not wait any longer.
_GAVE_UP: Any = frozenset()


def _described(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
