"""The output of a worker: a live line in a terminal, plain lines in a pipe, restarts on saving."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios

import pytest
from django.db import connection

from django_eventbus.models import EventLog
from django_eventbus.publishing.publisher import publish, publish_many
from tests.shop.models import Effect
from tests.workers import eventually, on_one_database

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes]


class Screen:
    """A terminal of a given width that records its output."""

    def __init__(self, columns):
        self.columns = columns
        self.leader, self.follower = pty.openpty()
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self.follower, termios.TIOCSWINSZ, size)
        os.set_blocking(self.leader, False)
        self._seen = bytearray()

    @property
    def text(self):
        # Linux ends reading with an error when the program has ended.
        with contextlib.suppress(BlockingIOError, OSError):
            while chunk := os.read(self.leader, 65536):
                self._seen.extend(chunk)
        return self._seen.decode("utf-8", "ignore")

    def lines(self):
        """The visible lines: CR returns to the start, CSI 2K clears the line."""
        return [_shown(line) for line in self.text.split("\n")]


def _shown(line):
    cells, column = [], 0
    for piece in re.findall("\x1b\\[2K|\r|.", line):
        if piece == "\x1b[2K":
            cells = [" "] * len(cells)
        elif piece == "\r":
            column = 0
        else:
            cells[column : column + 1] = piece
            column += 1
    return "".join(cells).rstrip()


@pytest.fixture
def worker_on():
    started = []

    def start(screen):
        # The test runner may export the width of its own terminal.
        env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        worker = subprocess.Popen(
            [sys.executable, "-m", "django", "run_event_worker"],
            env={**env, "DJANGO_SETTINGS_MODULE": "tests.settings"},
            stdout=screen.follower,
            stderr=screen.follower,
            start_new_session=True,
        )
        os.close(screen.follower)
        started.append((worker, screen))
        return worker

    yield start
    for worker, screen in started:
        worker.kill()
        worker.wait()
        os.close(screen.leader)


def test_a_terminal_gets_a_live_status_line(worker_on):
    publish_many(("process.effect", n) for n in range(5))
    screen = Screen(100)
    worker = worker_on(screen)
    eventually(lambda: "0 queued · 5 handled" in screen.text, lambda: screen.text)
    assert "events/s" in screen.text
    assert "\r" in screen.text
    worker.send_signal(signal.SIGTERM)
    worker.wait()


@on_one_database
@pytest.mark.parametrize("columns", [60, 30])
def test_the_live_line_fits_a_narrow_terminal_and_is_erased(worker_on, columns):
    publish_many(("process.effect", n) for n in range(5))
    screen = Screen(columns)
    worker = worker_on(screen)
    eventually(lambda: "0 queued · 5 handled" in screen.text, lambda: screen.text)
    live = [each for each in re.split("\r|\n|\x1b\\[2K", screen.text) if "queued" in each]
    assert max(map(len, live)) < columns
    worker.send_signal(signal.SIGTERM)
    worker.wait()
    hello, *rest = [line for line in screen.lines() if line]
    assert hello.startswith("Serving queues default on database ")
    assert rest == [
        "Stopping: running handlers may finish. "
        "Send the signal again (or press Ctrl-C again) to stop immediately.",
        "Handled 5 events, 0 failed attempts, 0 dead letters.",
    ]


@on_one_database
def test_a_pipe_gets_plain_lines(start_worker):
    publish_many(("process.effect", n) for n in range(5))
    worker = start_worker("--drain")
    assert worker.wait() == 0
    assert "\x1b" not in worker.log
    assert "Handled 5 events, 0 failed attempts, 0 dead letters." in worker.log


@on_one_database
def test_with_debug_a_saved_file_restarts_the_worker(start_worker, tmp_path):
    module = tmp_path / "watched.py"
    module.write_text("x = 1\n")
    worker = start_worker(
        env={
            "EVENTBUS_TEST_DEBUG": "1",
            "EVENTBUS_TEST_IMPORT": "watched",
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}",
        }
    )
    publish("process.effect", 1)
    eventually(Effect.objects.exists, lambda: worker.log)
    eventually(lambda: "effect handled process.effect" in worker.log, lambda: worker.log)
    assert worker.log.count("Serving") == 1

    def save_until_restarted():
        module.write_text(module.read_text() + "#\n")
        return worker.log.count("Serving") > 1

    eventually(save_until_restarted, lambda: worker.log)
    publish("process.effect", 2)
    eventually(lambda: EventLog.objects.count() == 2, lambda: worker.log)


def test_a_worker_waits_for_a_database_that_is_not_there_yet(start_worker):
    if connection.vendor == "sqlite":
        pytest.skip("a SQLite file always exists")
    url = {"postgresql": "EVENTBUS_TEST_POSTGRES_URL", "mysql": "EVENTBUS_TEST_MARIADB_URL"}
    nowhere = {
        "postgresql": "postgresql://nobody@127.0.0.1:1/none",
        "mysql": "mysql://nobody@127.0.0.1:1/none",
    }
    worker = start_worker(env={url[connection.vendor]: nowhere[connection.vendor]})
    eventually(lambda: worker.log.count("database error, retrying") >= 2, lambda: worker.log)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.log
