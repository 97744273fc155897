"""manage.py event_status."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest
from django.core.management import CommandError, call_command
from django.db import Error, connection

from django_eventbus import RetryPolicy, handler, publish, status
from django_eventbus.management.commands import event_status
from django_eventbus.status import METRICS
from tests.bus import drain
from tests.workers import eventually

pytestmark = pytest.mark.django_db


def output_of(*arguments):
    output = io.StringIO()
    call_command("event_status", *arguments, stdout=output)
    return output.getvalue()


@pytest.fixture
def dead_letter():
    @handler("bad", name="billing.charge", retry=RetryPolicy(max_retries=0))
    def fail(event):
        raise ValueError("no money")

    publish("bad")
    drain()


def test_the_table_has_every_metric_and_the_problems(dead_letter):
    output = output_of()
    assert [line.split()[0] for line in output.splitlines()[: len(METRICS)]] == list(METRICS)
    assert "- 1 dead letter in billing.charge: ValueError" in output


def test_a_rate_without_events_is_unknown():
    assert "failure_rate       -\n" in output_of()


def test_json_has_the_metrics_the_handlers_and_the_problems(dead_letter):
    record = json.loads(output_of("--format", "json"))
    assert record["dead"] == 1
    assert record["handlers"]["billing.charge"]["runs"] == 1
    assert {each["about"] for each in record["needs_attention"]} == {"workers", "dead"}
    assert set(METRICS) < set(record)


def test_m35_a_condition_that_is_met_sets_the_exit_code_and_prints_the_reason(dead_letter):
    with pytest.raises(CommandError, match=r"dead is 1 \(dead > 0\)") as caught:
        output_of("--fail-if", "lag>60, dead>0")
    assert caught.value.returncode == 2


@pytest.mark.parametrize(
    "condition", ["dead>1", "dead>=2", "dead<1", "p95>1000", "failure_rate>=101"]
)
def test_a_condition_that_is_not_met_does_not_set_the_exit_code(dead_letter, condition):
    assert "dead" in output_of("--fail-if", condition), "the metrics are shown too"


def test_an_unknown_value_meets_no_condition():
    assert "p95" in output_of("--fail-if", "p95>0,failure_rate>=0")


def test_a_missing_worker_can_be_a_condition():
    with pytest.raises(CommandError, match="workers is 0"):
        output_of("--fail-if", "workers<1")


@pytest.mark.parametrize(
    ("conditions", "complaint"),
    [
        ("dad>0", "did you mean 'dead'"),
        ("dead", "is not a condition"),
        ("dead>x", "is not a condition"),
        ("", "is not a condition"),
    ],
)
def test_an_invalid_condition_is_refused_with_another_exit_code(conditions, complaint):
    with pytest.raises(CommandError, match=complaint) as caught:
        output_of("--fail-if", conditions)
    assert caught.value.returncode == 1


def shell(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "django", "event_status", *arguments],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=60,
    )


@pytest.mark.django_db(transaction=True)
def test_a_mistake_never_ends_with_the_exit_code_of_an_alarm():
    typo = shell("--fail-if", "deads>0")
    assert (typo.returncode, typo.stdout) == (1, "")
    assert "there is no metric 'deads'; did you mean 'dead'?" in typo.stderr
    assert shell("--formt", "json").returncode == 1
    assert shell("--format", "xml").returncode == 1
    assert shell("--help").returncode == 0


@pytest.mark.django_db(transaction=True)
def test_an_alarm_has_its_own_exit_code():
    alarm = shell("--fail-if", "workers<1")
    assert (alarm.returncode, alarm.stderr) == (2, "CommandError: workers is 0 (workers < 1)\n")


def test_an_unknown_database_is_refused():
    with pytest.raises(CommandError, match="there is no database 'defualt'"):
        output_of("--database", "defualt")


@pytest.fixture
def watched(tmp_path, transactional_db):
    """Start ``event_status --watch`` with options; its output goes to files."""
    started = []

    def start(*options):
        path = tmp_path / "output"
        with path.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "django", "event_status", "--watch", *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ,
            )
        process.output = path.read_text
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.processes
def test_the_watched_status_is_printed_again_as_plain_text_until_ctrl_c(watched):
    process = watched()
    eventually(lambda: process.output().count("pending ") >= 2, process.output)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert "\x1b" not in process.output()
    assert "Traceback" not in process.output()


@pytest.mark.processes
def test_the_watched_status_is_one_line_of_json(watched):
    process = watched("--format", "json")
    eventually(lambda: process.output().count("\n") >= 2, process.output)
    first, second = (json.loads(line) for line in process.output().splitlines()[:2])
    assert first["at"] < second["at"]


@pytest.mark.processes
def test_a_condition_that_is_met_ends_the_watch(watched):
    process = watched("--fail-if", "pending>0")
    eventually(lambda: "pending " in process.output(), process.output)
    assert process.poll() is None
    publish("process.nothing")
    assert process.wait(60) == 2
    assert process.output().endswith("CommandError: pending is 1 (pending > 0)\n")


def test_the_watch_continues_after_a_database_error(monkeypatch):
    """The third status ends the watch."""
    looks = iter([Error("the server was restarted"), status.look(), KeyboardInterrupt()])

    def look(using):
        found = next(looks)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(event_status, "WATCH_EVERY", 0)
    monkeypatch.setattr(event_status.status, "look", look)
    # The command closes the connection, which would end the transaction of the test.
    monkeypatch.setattr(connection, "close", lambda: None)
    output, errors = io.StringIO(), io.StringIO()
    call_command("event_status", "--watch", stdout=output, stderr=errors)
    assert "database error, retrying" in errors.getvalue()
    assert output.getvalue().count("pending ") == 1
