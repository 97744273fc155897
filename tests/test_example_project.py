"""The example shop works, its books balance after crashes, and it leaves no processes or files.

``make demo-check`` runs the complete demo on SQLite and PostgreSQL.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from django.db import connection

from tests.probes import get
from tests.workers import PATIENCE

EXAMPLE = Path(__file__).resolve().parent.parent / "example_project"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        connection.vendor != "sqlite", reason="the example has a SQLite database of its own"
    ),
]


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
        timeout=280,
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
def test_the_books_balance_after_failed_payments_and_two_killed_workers():
    code, output = run("run.py", "--check", "--seconds", "5", "--kill-worker", "2")
    assert code == 0, output
    assert output.count("SIGKILL") == 2
    assert "the payment provider goes down" in output
    assert "The books balance." in output


@pytest.mark.costly
def test_the_books_balance_if_celery_ships_and_all_workers_are_killed():
    options = ("--celery", "folder", "--seconds", "5", "--kill-worker", "1")
    code, output = run("run.py", "--check", *options)
    assert code == 0, output
    assert "SIGKILL for the Celery worker" in output
    (paid,) = re.findall(r"paid and shipped +([\d,]+)", output)
    assert re.findall(r"shipped by Celery +([\d,]+)", output) == [paid] != ["0"]
    assert "The books balance." in output


def test_the_project_loads_no_celery_app_without_a_broker():
    code, output = run("-c", "import sys, config; sys.exit('config.celery' in sys.modules)")
    assert code == 0, output


@pytest.fixture(params=[(), ("--celery", "folder")], ids=["plain", "with Celery"])
def demo(tmp_path, request):
    """The running demo, as the leader of its process group like in a terminal."""
    process = subprocess.Popen(
        [sys.executable, "run.py", *request.param],
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
def test_ctrl_c_stops_the_demo_without_leftovers(demo, tmp_path):
    assert "user admin, password admin" in demo.greeting
    assert "user viewer, password viewer" in demo.greeting
    assert list(tmp_path.iterdir())
    os.killpg(demo.pid, signal.SIGINT)
    output, _ = demo.communicate(timeout=PATIENCE)
    assert output.endswith("\nThe shop is closed.\n")
    assert "Traceback" not in output
    assert demo.returncode == 0
    assert survivors(demo) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.costly
@pytest.mark.parametrize("demo", [()], ids=["plain"], indirect=True)
def test_the_demo_prints_the_addresses_of_health_and_metrics(demo):
    (health,) = re.findall(r"^Health +(http://\S+)/readyz$", demo.greeting, re.MULTILINE)
    assert get(health, "/readyz").status == 200
    (metrics,) = re.findall(r"^Metrics +(.+)$", demo.greeting, re.MULTILINE)
    if metrics.startswith("http"):
        assert metrics == f"{health}/metrics"
        assert "# TYPE eventbus_" in get(health, "/metrics").text
    else:
        assert metrics == 'not served: run pip install "django-durable-events[prometheus]"'


@pytest.mark.costly
def test_the_processes_of_the_demo_end_even_if_the_demo_is_killed(demo):
    demo.kill()
    assert survivors(demo) == []


def survivors(demo):
    assert len(demo.family) >= 2
    _, alive = psutil.wait_procs(demo.family, timeout=PATIENCE)
    return alive
