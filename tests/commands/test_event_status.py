"""manage.py event_status."""

import io
import json
import os
import subprocess
import sys

import pytest
from django.core.management import CommandError, call_command

from django_eventbus import RetryPolicy, handler, publish
from django_eventbus.status import METRICS
from tests.bus import drain

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
