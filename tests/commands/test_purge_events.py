"""manage.py purge_events: for cron as for people, and never a dead letter by accident."""

import io
import json
import os
import subprocess
import sys
from datetime import datetime, timedelta

import pytest
from django.core.management import CommandError, call_command

from django_eventbus.models import DeadEvent, EventLog
from tests.test_dead_letters import dead_letter
from tests.test_retention import ago, completed, one_of_each

pytestmark = pytest.mark.django_db


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(*arguments, stdout=None):
    stdout = io.StringIO() if stdout is None else stdout
    call_command("purge_events", *map(str, arguments), stdout=stdout)
    return stdout.getvalue()


@pytest.fixture
def nobody_at_the_keyboard(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())


@pytest.fixture
def answer(monkeypatch):
    questions = []

    def give(word):
        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr("builtins.input", lambda prompt="": questions.append(prompt) or word)
        return questions

    return give


def test_completed_events_are_purged_without_a_question(nobody_at_the_keyboard):
    completed(2, ended=ago(days=40))
    recent = completed(1)
    out = run("--older-than", "30d")
    assert out.startswith("2 completed events that ended by 20")
    assert out.endswith(" UTC purged.\n")
    assert list(EventLog.objects.all()) == recent


def test_dead_letters_of_that_age_are_kept_and_said_to_be():
    one_of_each(ago(days=40))
    first, second = run("--older-than", "30d").splitlines()
    assert first.startswith("1 completed event that ended by ")
    assert second == "3 dead letters are as old, and kept: see --status."
    assert DeadEvent.objects.count() == 3


def test_nothing_to_purge_is_no_error():
    assert run("--older-than", "30d").startswith("No completed events that ended by ")


def test_an_age_has_to_be_given():
    with pytest.raises(CommandError, match="--older-than"):
        run()


@pytest.mark.parametrize("status", ["dead", "failed", "discarded", "completed_with_errors"])
def test_dead_letters_need_a_yes(nobody_at_the_keyboard, status):
    one_of_each(ago(days=40))
    with pytest.raises(CommandError, match=r"would be purged\. Nobody is there .* give --yes"):
        run("--older-than", "30d", "--status", status)
    assert EventLog.objects.count() == 4
    out = run("--older-than", "30d", "--status", status, "--yes")
    assert EventLog.objects.count() == (1 if status == "dead" else 3)
    assert (f" of status {status.upper()} " in out) == (status != "dead")


def test_a_person_is_asked_about_dead_letters(answer):
    dead_letter(died_at=ago(days=40))
    questions = answer("n")
    out = run("--older-than", "30d", "--status", "dead")
    assert out.startswith("No dead letters that ended by")
    assert questions[0].startswith("Delete 1 dead letter that ended by ")
    assert DeadEvent.objects.count() == 1
    answer("y")
    assert run("--older-than", "30d", "--status", "dead").startswith("1 dead letter that ")
    assert DeadEvent.objects.count() == 0


def test_nobody_is_asked_about_no_dead_letters(nobody_at_the_keyboard):
    out = run("--older-than", "30d", "--status", "dead")
    assert out.startswith("No dead letters that ended by ")


def test_a_dry_run_only_counts(nobody_at_the_keyboard):
    one_of_each(ago(days=40))
    assert "1 completed event that" in (out := run("--older-than", "30d", "--dry-run"))
    assert "would be purged." in out
    assert run("--older-than", "30d", "--status", "dead", "--dry-run").startswith("3 dead letters")
    assert EventLog.objects.count() == 4


def test_a_limit_counts_in_a_dry_run_too():
    completed(3, ended=ago(days=40))
    assert run("--older-than", "30d", "--limit", 2, "--dry-run").startswith("2 completed events")
    assert run("--older-than", "30d", "--limit", 2).startswith("2 completed events")
    assert EventLog.objects.count() == 1


def test_a_script_gets_one_object():
    one_of_each(ago(days=40))
    record = json.loads(run("--older-than", "30d", "--format", "json"))
    ended_by = datetime.fromisoformat(record.pop("ended_by"))
    assert abs(ended_by - ago(days=30)) < timedelta(hours=1)
    assert record == {
        "status": "completed",
        "dry_run": False,
        "purged": 1,
        "dead_letters_kept": 3,
    }


def test_a_terminal_shows_the_progress_of_a_long_run():
    completed(5, ended=ago(days=40))
    *steps, last = run("--older-than", "30d", "--batch-size", 2, stdout=Terminal()).split(
        "\r\x1b[2K"
    )
    assert steps == ["", *(f"{count} of 5 purged …" for count in (2, 4, 5))]
    assert last.startswith("5 completed events ")


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["--older-than", "soon"], "30d, 12h, 90m"),
        (["--older-than", "30d", "--batch-size", "0"], "a number from 1 to 10000"),
        (["--older-than", "30d", "--limit", "0"], "a number from 1 to"),
        (["--older-than", "30d", "--status", "pending"], "choose from '?completed"),
        (["--older-than", "30d", "--database", "defautl"], "did you mean 'default'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_answered_with_the_right_form(arguments, right):
    with pytest.raises(CommandError, match=right):
        run(*arguments)


@pytest.mark.django_db(transaction=True)
def test_cron_may_run_it():
    completed(3, ended=ago(days=40))
    done = subprocess.run(
        [sys.executable, "-m", "django", "purge_events", "--older-than", "30d"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("3 completed events ")
    assert EventLog.objects.count() == 0
