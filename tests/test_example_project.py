"""The example shop works, and its books balance, on the SQLite it brings itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.db import connection

EXAMPLE = Path(__file__).resolve().parent.parent / "example_project"

pytestmark = pytest.mark.skipif(
    connection.vendor != "sqlite", reason="the example brings a SQLite of its own: once is enough"
)


def run(*command):
    environment = {
        name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"
    }
    result = subprocess.run(
        [sys.executable, *command],
        cwd=EXAMPLE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=110,
    )
    return result.returncode, result.stdout


def test_the_project_passes_its_checks_and_has_all_its_migrations():
    assert run("manage.py", "check", "--fail-level", "WARNING")[0] == 0
    assert run("manage.py", "makemigrations", "--check", "--dry-run")[0] == 0


@pytest.mark.parametrize("kills", [0, 2])
def test_the_books_balance_however_often_the_worker_is_killed(kills):
    code, output = run("run.py", "--check", "--seconds", "5", "--kill-worker", str(kills))
    assert code == 0, output
    assert output.count("SIGKILL") == kills
    assert "The books balance." in output
