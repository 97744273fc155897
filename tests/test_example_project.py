"""The example shop works, its books balance whatever dies, and it leaves nothing behind.

As a whole it is run by ``make demo-check``, on SQLite and PostgreSQL.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from django.db import connection

EXAMPLE = Path(__file__).resolve().parent.parent / "example_project"

pytestmark = pytest.mark.skipif(
    connection.vendor != "sqlite", reason="the example brings a SQLite of its own: once is enough"
)


def environment(**changed):
    kept = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    return {**kept, **changed}


def run(*command):
    result = subprocess.run(
        [sys.executable, *command],
        cwd=EXAMPLE,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=110,
    )
    return result.returncode, result.stdout


def test_the_project_passes_its_checks_and_has_all_its_migrations():
    assert run("manage.py", "check", "--fail-level", "WARNING")[0] == 0
    assert run("manage.py", "makemigrations", "--check", "--dry-run")[0] == 0


def test_the_project_passes_its_own_tests():
    code, output = run("-W", "error", "manage.py", "test")
    assert code == 0, output
    assert "Found 0 test(s)" not in output


@pytest.mark.costly
def test_the_books_balance_although_payments_break_and_the_worker_is_killed_twice():
    code, output = run("run.py", "--check", "--seconds", "5", "--kill-worker", "2")
    assert code == 0, output
    assert output.count("SIGKILL") == 2
    assert "the payment provider goes down" in output
    assert "The books balance." in output


@pytest.fixture
def demo(tmp_path):
    """The demo, open for business, and the leader of its process group as in a terminal."""
    process = subprocess.Popen(
        [sys.executable, "run.py"],
        cwd=EXAMPLE,
        env=environment(TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        process_group=0,
    )
    process.greeting = ""
    for line in process.stdout:
        process.greeting += line
        if "Ctrl-C closes the shop" in line:
            break
    process.family = psutil.Process(process.pid).children(recursive=True)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.costly
def test_ctrl_c_closes_the_shop_and_leaves_nothing_behind(demo, tmp_path):
    assert "user admin, password admin" in demo.greeting
    assert "user viewer, password viewer" in demo.greeting
    assert list(tmp_path.iterdir())
    os.killpg(demo.pid, signal.SIGINT)
    output, _ = demo.communicate(timeout=60)
    assert output.endswith("\nThe shop is closed.\n")
    assert "Traceback" not in output
    assert demo.returncode == 0
    assert survivors(demo) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.costly
def test_its_processes_end_with_it_even_if_it_is_killed(demo):
    demo.kill()
    assert survivors(demo) == []


def survivors(demo):
    assert len(demo.family) >= 2
    _, alive = psutil.wait_procs(demo.family, timeout=60)
    return alive
