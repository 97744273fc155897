"""What a person sees: a live line in a terminal, plain lines in a pipe, a restart on saving."""

import contextlib
import os
import pty
import signal
import subprocess
import sys

import pytest
from django.db import connection

from django_eventbus.models import EventLog
from django_eventbus.publishing import publish, publish_many
from tests.shop.models import Effect
from tests.workers import eventually, on_one_database

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_terminal_gets_a_live_status_line(tmp_path):
    publish_many(("process.effect", n) for n in range(5))
    leader, follower = pty.openpty()
    worker = subprocess.Popen(
        [sys.executable, "-m", "django", "run_event_worker"],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    os.set_blocking(leader, False)
    seen = bytearray()

    def status_line():
        with contextlib.suppress(BlockingIOError):
            seen.extend(os.read(leader, 65536))
        return "0 queued · 5 handled" in seen.decode("utf-8", "ignore")

    try:
        eventually(status_line, lambda: seen.decode())
        assert "events/s" in seen.decode()
        assert b"\r" in seen
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait()
        os.close(leader)


@on_one_database
def test_a_pipe_gets_plain_lines(start_worker):
    publish_many(("process.effect", n) for n in range(5))
    worker = start_worker("--drain")
    assert worker.wait() == 0
    assert "\x1b" not in worker.log
    assert "5 events handled, 0 failed attempts, 0 dead letters." in worker.log


@on_one_database
def test_under_debug_a_saved_file_restarts_the_worker(start_worker, tmp_path):
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
        pytest.skip("a file is always there")
    url = {"postgresql": "EVENTBUS_TEST_POSTGRES_URL", "mysql": "EVENTBUS_TEST_MARIADB_URL"}
    nowhere = {
        "postgresql": "postgresql://nobody@127.0.0.1:1/none",
        "mysql": "mysql://nobody@127.0.0.1:1/none",
    }
    worker = start_worker(env={url[connection.vendor]: nowhere[connection.vendor]})
    eventually(lambda: worker.log.count("the database does not answer") >= 2, lambda: worker.log)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.log
