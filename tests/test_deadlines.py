"""The watch of a handler's thread leaves the interpreter as it found it."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection

from django_eventbus.delivery.deadlines import Board, Watch, Watchdog
from tests.workers import PATIENCE

#: Runs in its own process, because a thread that loops for ever cannot be stopped.
TRACED = """
import sys, threading
from django_eventbus.delivery.deadlines import Board, Watch
from django_eventbus.exceptions import HandlerTimeout

def called():
    pass

def run():
    watch = Watch(Board.local(1))
    watch.start(1, b"h", {seconds})
    try:
        if watch.overdue():
            watch.interrupt()
    except HandlerTimeout:
        print("interrupted")
    watch.stop()
    sys.settrace(lambda *args: None)
    called()
    print("ended")

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(("seconds", "printed"), [(60, ["ended"]), (-1, ["interrupted", "ended"])])
@pytest.mark.processes
def test_a_thread_can_be_traced_after_its_watch_was_stopped(seconds, printed):
    """A tracer made threaded workers hang on CPython 3.11."""
    process = subprocess.run(
        [sys.executable, "-c", TRACED.format(seconds=seconds)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (process.stdout.split(), process.stderr) == (printed, "")


def test_the_watchdog_continues_after_a_check_that_failed(capture):
    watchdog, checks, again = Watchdog(), [], threading.Event()

    def fail():
        checks.append(True)
        if len(checks) > 1:
            again.set()
        raise ValueError("no")

    # The watch of the main thread would replace the handler of SIGALRM.
    with ThreadPoolExecutor(1) as other:
        watch = other.submit(Watch, Board.local(1)).result()
    watchdog.supervise(watch, fail)
    watchdog.start()
    assert again.wait(30)
    watchdog.stop()
    assert "the check for slow batches failed; the watchdog continues: ValueError" in capture.text


@pytest.mark.django_db
def test_each_reply_of_the_database_is_a_report_of_the_thread():
    """On a slow network, one round of the dispatcher may take longer than the limit for a reply."""
    board = Board.local(1)
    watch = Watch(board)
    watch.expect(-1000)
    before = time.monotonic()
    with connection.execute_wrapper(watch.report_after), connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    assert board.expected_by() >= before


@pytest.mark.django_db
@pytest.mark.parametrize("seconds", [1000, float("inf")])
def test_a_reply_does_not_shorten_an_announced_wait(seconds):
    board = Board.local(1)
    watch = Watch(board)
    watch.expect(seconds)
    announced = board.expected_by()
    with connection.execute_wrapper(watch.report_after), connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    assert board.expected_by() == announced


@pytest.mark.django_db
def test_a_reply_to_a_handler_does_not_end_its_deadline():
    board = Board.local(1)
    watch = Watch(board)
    watch.start(7, b"slow", 1000)
    with connection.execute_wrapper(watch.report_after), connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    ((row_id, _, name),) = board.running()
    assert (row_id, name) == (7, "slow")
