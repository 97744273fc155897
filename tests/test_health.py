"""Judgements about the health of a worker, from its boards and renewals."""

from types import SimpleNamespace

import pytest

from django_eventbus.delivery.deadlines import LATE_AFTER, Board, Phase
from django_eventbus.worker import health
from django_eventbus.worker.child import KILL_GRACE
from django_eventbus.worker.health import HealthMonitor, judge

NOW = 10_000.0
#: Renewals are sent every 15 seconds.
ABANDON_AFTER = 60.0


@pytest.fixture(autouse=True)
def lease(settings):
    settings.EVENTBUS = {"ABANDON_AFTER": ABANDON_AFTER}


def board_of(phase=Phase.CLAIMING, *, due=NOW, row_id=0):
    """The board of a process with one thread, which has to report, or runs a handler, until due."""
    board = Board.local(1)
    board.enter(phase)
    if phase is not Phase.STARTING:
        board.slot(0)[0](row_id, due, b"shop.ship", row_id)
    return board


def judged(board, *, started=NOW - 1000, renewed=NOW):
    return judge(7, board, started=started, renewed=renewed, now=NOW)


def test_a_process_that_reports_is_live_and_ready():
    found = judged(board_of())
    assert (found.pid, found.state, found.not_live, found.not_ready) == (7, "claiming", "", "")


def test_the_time_since_progress_counts_from_the_start_at_first():
    assert judged(board_of(Phase.STARTING), started=NOW - 3).seconds_since_progress == 3
    board = board_of()
    board.progress()
    _, progressed = board.dispatcher()
    found = judge(7, board, started=0.0, renewed=NOW, now=progressed + 2)
    assert found.seconds_since_progress == 2


@pytest.mark.parametrize(
    ("late", "is_live"), [(LATE_AFTER - 1, True), (LATE_AFTER + 1, False)], ids=["less", "more"]
)
def test_a_process_whose_report_is_late_is_not_live(late, is_live):
    found = judged(board_of(due=NOW - late))
    assert (found.not_live == "") is is_live
    assert (found.not_ready == "") is is_live


@pytest.mark.parametrize("renewed_after", [-1, LATE_AFTER / 2 - 1])
def test_a_late_report_is_no_fault_of_the_process_if_the_database_may_be_unavailable(renewed_after):
    """A renewal shortly after the last report does not prove that the database is available."""
    due = NOW - LATE_AFTER - 1
    found = judged(board_of(due=due), renewed=due + renewed_after)
    assert found.not_live == ""
    assert found.not_ready == "the database has not answered for 21.0 s"


def test_a_process_is_not_late_while_its_handler_may_run():
    found = judged(board_of(due=NOW + 500, row_id=3))
    assert (found.state, found.not_live, found.not_ready) == ("claiming", "", "")


@pytest.mark.parametrize(("past", "is_live"), [(KILL_GRACE - 1, True), (KILL_GRACE + 1, False)])
def test_a_process_whose_handler_ignores_its_deadline_is_not_live(past, is_live):
    found = judged(board_of(due=NOW - past, row_id=3))
    assert (found.not_live == "") is is_live
    if not is_live:
        assert found.not_live == "handler shop.ship has ignored its deadline for 6.0 s"


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.OUTAGE, Phase.STOPPING])
def test_a_process_that_claims_no_events_is_live_and_not_ready(phase):
    found = judged(board_of(phase), started=NOW - 1)
    assert found.not_live == ""
    assert "it claims no events" in found.not_ready


def test_a_process_that_never_starts_is_not_live():
    board = board_of(Phase.STARTING)
    assert judged(board, started=NOW - health.START_WITHIN + 1).not_live == ""
    found = judged(board, started=NOW - health.START_WITHIN - 1)
    assert (found.state, found.not_live) == ("stuck", "it has not started within 300 s")


def test_a_process_whose_registration_is_not_renewed_in_time_is_not_ready():
    assert judged(board_of(), renewed=NOW - ABANDON_AFTER / 2 + 1).not_ready == ""
    found = judged(board_of(), renewed=NOW - ABANDON_AFTER / 2 - 1)
    assert found.not_live == ""
    assert found.not_ready == "its registration was last renewed 31.0 s ago"


# -- a supervisor and its processes

STUCK = {"board": board_of(due=NOW - 500), "renewed": NOW}
CLAIMING = {"board": board_of(), "renewed": NOW}
WAITING = {"board": board_of(Phase.OUTAGE), "renewed": NOW}


def health_of(*children, stopping=False, checked=NOW):
    monitor = HealthMonitor()
    supervisor = SimpleNamespace(
        children=[
            SimpleNamespace(**each, started=NOW - 600, registration=SimpleNamespace(pid=pid))
            for pid, each in enumerate(children, 1)
        ],
        stopping=stopping,
        checked=checked,
    )
    monitor.observe_supervisor(supervisor)
    return monitor.health(NOW)


def test_all_processes_must_be_live_and_one_must_be_ready():
    found = health_of(STUCK, CLAIMING)
    assert found.not_live == ("process 1: a thread should have reported 500.0 s ago",)
    assert found.not_ready == ()
    assert [each.state for each in found.processes] == ["stuck", "claiming"]


def test_a_worker_is_not_ready_if_no_process_is_ready():
    found = health_of(WAITING, WAITING)
    assert found.not_live == ()
    assert len(found.not_ready) == 2


def test_a_supervisor_without_processes_is_live_and_not_ready():
    """It waits for the database, or for the restart of a process that crashed."""
    found = health_of()
    assert (found.not_live, found.not_ready) == ((), ("no worker process is running",))


def test_a_supervisor_whose_loop_hangs_is_neither_live_nor_ready():
    found = health_of(CLAIMING, checked=NOW - LATE_AFTER - 1)
    reason = ("the supervisor has not checked its processes for 21.0 s",)
    assert (found.not_live, found.not_ready) == (reason, reason)


def test_a_stopping_worker_is_live_and_not_ready():
    found = health_of(STUCK, CLAIMING, stopping=True)
    assert (found.not_live, found.not_ready) == ((), ("the worker is stopping",))


def test_a_worker_is_live_and_not_ready_before_it_is_observed():
    found = HealthMonitor().health()
    assert (found.not_live, found.not_ready) == ((), ("the worker is starting",))
