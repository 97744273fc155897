"""The health of a worker: does its claim loop progress (live), and can it claim events (ready)?

The supervisor judges its worker processes by their boards in shared memory and by the renewals of
their registrations, so a check sends no query. docs/howto/deploy.md explains the states.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_eventbus.conf import settings
from django_eventbus.delivery import deadlines
from django_eventbus.delivery.deadlines import Board, Phase
from django_eventbus.worker.child import KILL_GRACE

if TYPE_CHECKING:
    from django_eventbus.worker.supervisor import Supervisor
    from django_eventbus.worker.worker import Worker

#: A worker process that imports the project for longer than this number of seconds is stuck.
START_WITHIN = 300.0

_STATES = {
    Phase.STARTING: "starting",
    Phase.CLAIMING: "claiming",
    Phase.OUTAGE: "database outage",
    Phase.STOPPING: "stopping",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHealth:
    """The health of one worker process."""

    pid: int
    state: str
    #: The time since the database last answered the dispatcher; at first since the start.
    seconds_since_progress: float
    #: The reason why the process is not live; empty if it is live.
    not_live: str = ""
    #: The reason why the process is not ready; empty if it is ready.
    not_ready: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The health of a worker, with the reasons if it is not live or not ready."""

    processes: tuple[ProcessHealth, ...] = ()
    not_live: tuple[str, ...] = ()
    not_ready: tuple[str, ...] = ()
    stopping: bool = False


class HealthMonitor:
    """Observes the worker of this process, whichever kind of worker it is."""

    def __init__(self) -> None:
        self._health_at: Callable[[float], Health] = lambda now: Health(
            not_ready=("the worker is starting",)
        )

    def observe_supervisor(self, supervisor: Supervisor) -> None:
        self._health_at = lambda now: _of_supervisor(supervisor, now)

    def observe_worker(self, worker: Worker) -> None:
        """Observe a worker without a supervisor."""
        self._health_at = lambda now: _of_worker(worker, now)

    def health(self, now: float | None = None) -> Health:
        """Return the health now, or at another time of the monotonic clock."""
        return self._health_at(time.monotonic() if now is None else now)


def _of_supervisor(supervisor: Supervisor, now: float) -> Health:
    processes = [
        judge(
            each.registration.pid,
            each.board,
            started=each.started,
            renewed=each.renewed,
            now=now,
        )
        for each in list(supervisor.children)
    ]
    silent = now - supervisor.checked
    stuck = f"the supervisor has not checked its processes for {silent:.1f} s"
    return _together(
        processes,
        stopping=supervisor.stopping,
        stuck=stuck if silent > deadlines.LATE_AFTER else "",
    )


def _of_worker(worker: Worker, now: float) -> Health:
    process = judge(
        os.getpid(),
        worker.board,
        started=worker.started,
        renewed=worker.renewed,
        now=now,
    )
    return _together([process], stopping=worker.stopping())


def _together(processes: Iterable[ProcessHealth], *, stopping: bool, stuck: str = "") -> Health:
    """Return the health of the whole worker.

    All processes must be live; the supervisor replaces a process that is not. One process that can
    claim events is enough to be ready. During a shutdown the processes need not be live, because
    SHUTDOWN_TIMEOUT limits how long they take.
    """
    found = tuple(processes)
    not_live = [stuck] if stuck else []
    not_ready = [stuck] if stuck else []
    if stopping:
        not_ready.append("the worker is stopping")
    else:
        not_live += [f"process {each.pid}: {each.not_live}" for each in found if each.not_live]
        if all(each.not_ready for each in found):
            not_ready += [f"process {each.pid}: {each.not_ready}" for each in found] or [
                "no worker process is running"
            ]
    return Health(
        processes=found,
        not_live=tuple(not_live),
        not_ready=tuple(not_ready),
        stopping=stopping,
    )


def judge(pid: int, board: Board, *, started: float, renewed: float, now: float) -> ProcessHealth:
    """Return the health of a worker process. All times are times of the monotonic clock."""
    phase, progressed = board.dispatcher()
    not_live = _why_not_live(board, phase, started=started, renewed=renewed, now=now)
    return ProcessHealth(
        pid=pid,
        state="stuck" if not_live else _STATES[phase],
        seconds_since_progress=round(now - (progressed or started), 3),
        not_live=not_live,
        not_ready=not_live or _why_not_ready(board, phase, renewed=renewed, now=now),
    )


def _why_not_live(board: Board, phase: Phase, *, started: float, renewed: float, now: float) -> str:
    for _, deadline, handler in board.running():
        if now > deadline + KILL_GRACE:
            return f"handler {handler} has ignored its deadline for {now - deadline:.1f} s"
    if phase is Phase.STARTING and now > started + START_WITHIN:
        return f"it has not started within {START_WITHIN:g} s"
    expected = board.expected_by()
    # A thread without a reply of the database is not stuck while the database is unavailable. A
    # successful renewal that was sent when the thread was already late proves that it is available.
    was_available = renewed > expected + deadlines.LATE_AFTER / 2
    if was_available and now > expected + deadlines.LATE_AFTER:
        return f"a thread should have reported {now - expected:.1f} s ago"
    return ""


def _why_not_ready(board: Board, phase: Phase, *, renewed: float, now: float) -> str:
    if phase is not Phase.CLAIMING:
        return f"{_STATES[phase]}, it claims no events"
    if now > board.expected_by() + deadlines.LATE_AFTER:
        return f"the database has not answered for {now - board.expected_by():.1f} s"
    # A renewal is sent every ABANDON_AFTER / 4 seconds, so at least one renewal has failed.
    if now > renewed + settings.ABANDON_AFTER / 2:
        return f"its registration was last renewed {now - renewed:.1f} s ago"
    return ""
