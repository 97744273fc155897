"""manage.py purge_events, in a terminal and in a cron job."""

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
def no_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())


@pytest.fixture
def answer(monkeypatch):
    questions = []

    def give(word):
        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr("builtins.input", lambda prompt="": questions.append(prompt) or word)
        return questions

    return give


def test_completed_events_are_purged_with_a_yes(no_terminal):
    completed(2, ended=ago(days=40))
    recent = completed(1)
    out = run("--older-than", "30d", "--yes")
    assert out.startswith("Purged 2 completed events that ended before 20")
    assert out.endswith(" UTC.\n")
    assert list(EventLog.objects.all()) == recent


def test_dead_letters_of_that_age_are_kept_and_reported():
    one_of_each(ago(days=40))
    first, second = run("--older-than", "30d", "--yes").splitlines()
    assert first.startswith("Purged 1 completed event that ended before ")
    assert second == "Kept 3 dead letters of the same age: pass --status dead to purge them."
    assert DeadEvent.objects.count() == 3


def test_purging_no_events_is_not_an_error():
    assert run("--older-than", "30d").startswith("Purged no completed events that ended before ")


def test_the_age_is_required():
    with pytest.raises(CommandError, match="--older-than"):
        run()


NO_PROMPT = r"permanently\? Not a terminal, so there is no prompt: pass --yes\."


@pytest.mark.parametrize("age", ["0", "30d"])
def test_completed_events_are_not_purged_without_a_terminal_or_a_yes(no_terminal, age):
    completed(2, ended=ago(days=40))
    with pytest.raises(CommandError, match=f"Delete 2 completed events .* {NO_PROMPT}"):
        run("--older-than", age)
    assert EventLog.objects.count() == 2


def test_purging_completed_events_asks_for_confirmation(answer):
    completed(3, ended=ago(days=40))
    questions = answer("n")
    assert run("--older-than", "0").startswith("Purged no completed events that ended before ")
    assert questions[0].startswith("Delete 3 completed events that ended before ")
    assert questions[0].endswith(" UTC permanently? [y/N] ")
    assert EventLog.objects.count() == 3
    answer("y")
    run("--older-than", "0", "--limit", 2)
    assert questions[-1].startswith("Delete 2 completed events ")
    assert EventLog.objects.count() == 1


@pytest.mark.parametrize("status", ["dead", "failed", "discarded", "completed_with_errors"])
def test_purging_dead_letters_needs_a_yes(no_terminal, status):
    one_of_each(ago(days=40))
    with pytest.raises(CommandError, match=NO_PROMPT):
        run("--older-than", "30d", "--status", status)
    assert EventLog.objects.count() == 4
    out = run("--older-than", "30d", "--status", status, "--yes")
    assert EventLog.objects.count() == (1 if status == "dead" else 3)
    assert (f" with the status {status.upper()} " in out) == (status != "dead")


def test_purging_dead_letters_asks_for_confirmation(answer):
    dead_letter(died_at=ago(days=40))
    questions = answer("n")
    out = run("--older-than", "30d", "--status", "dead")
    assert out.startswith("Purged no dead letters that ended before")
    assert questions[0].startswith("Delete 1 dead letter that ended before ")
    assert DeadEvent.objects.count() == 1
    answer("y")
    assert run("--older-than", "30d", "--status", "dead").startswith("Purged 1 dead letter that ")
    assert DeadEvent.objects.count() == 0


def test_there_is_no_prompt_if_no_dead_letter_matches(no_terminal):
    out = run("--older-than", "30d", "--status", "dead")
    assert out.startswith("Purged no dead letters that ended before ")


def test_a_dry_run_only_counts(no_terminal):
    one_of_each(ago(days=40))
    out = run("--older-than", "30d", "--dry-run")
    assert out.startswith("Would purge 1 completed event that")
    out = run("--older-than", "30d", "--status", "dead", "--dry-run")
    assert out.startswith("Would purge 3 dead letters")
    assert EventLog.objects.count() == 4


def test_a_dry_run_respects_the_limit():
    completed(3, ended=ago(days=40))
    out = run("--older-than", "30d", "--limit", 2, "--dry-run")
    assert out.startswith("Would purge 2 completed events")
    out = run("--older-than", "30d", "--limit", 2, "--yes")
    assert out.startswith("Purged 2 completed events")
    assert EventLog.objects.count() == 1


def test_json_output_is_one_object():
    one_of_each(ago(days=40))
    record = json.loads(run("--older-than", "30d", "--format", "json", "--yes"))
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
    out = run("--older-than", "30d", "--batch-size", 2, "--yes", stdout=Terminal())
    *steps, last = out.split("\r\x1b[2K")
    assert steps == ["", *(f"{count} of 5 purged …" for count in (2, 4, 5))]
    assert last.startswith("Purged 5 completed events ")


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
def test_invalid_input_is_refused_with_the_valid_form(arguments, right):
    with pytest.raises(CommandError, match=right):
        run(*arguments)


@pytest.mark.django_db(transaction=True)
@pytest.mark.processes
def test_the_command_runs_in_a_cron_job():
    completed(3, ended=ago(days=40))
    done = subprocess.run(
        [sys.executable, "-m", "django", "purge_events", "--older-than", "30d", "--yes"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Purged 3 completed events ")
    assert EventLog.objects.count() == 0
