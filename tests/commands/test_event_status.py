"""manage.py event_status."""

import io
import json

import pytest
from django.core.management import CommandError, call_command

from django_eventbus import RetryPolicy, handler, publish
from django_eventbus.status import NAMES
from tests.bus import drain

pytestmark = pytest.mark.django_db


def said_by(*arguments):
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


def test_every_figure_has_a_line_and_what_needs_attention_is_said_in_words(dead_letter):
    said = said_by()
    assert [line.split()[0] for line in said.splitlines()[: len(NAMES)]] == list(NAMES)
    assert "- 1 dead in billing.charge: ValueError" in said


def test_where_nothing_happened_a_share_is_not_known():
    assert "failure_rate       -\n" in said_by()


def test_json_has_the_figures_the_handlers_and_the_findings(dead_letter):
    told = json.loads(said_by("--format", "json"))
    assert told["dead"] == 1
    assert told["handlers"]["billing.charge"]["runs"] == 1
    assert {each["about"] for each in told["needs_attention"]} == {"workers", "dead"}
    assert set(NAMES) < set(told)


def test_m35_a_condition_that_is_met_is_an_exit_code_with_its_reason(dead_letter):
    with pytest.raises(CommandError, match=r"dead is 1 \(dead > 0\)") as caught:
        said_by("--fail-if", "lag>60, dead>0")
    assert caught.value.returncode == 2


@pytest.mark.parametrize(
    "condition", ["dead>1", "dead>=2", "dead<1", "p95>1000", "failure_rate>=101"]
)
def test_a_condition_that_is_not_met_is_none(dead_letter, condition):
    assert "dead" in said_by("--fail-if", condition), "the figures are told all the same"


def test_what_is_not_known_is_no_reason_to_fail():
    assert "p95" in said_by("--fail-if", "p95>0,failure_rate>=0")


def test_no_worker_can_be_a_reason():
    with pytest.raises(CommandError, match="workers is 0"):
        said_by("--fail-if", "workers<1")


@pytest.mark.parametrize(
    ("conditions", "complaint"),
    [
        ("dad>0", "did you mean 'dead'"),
        ("dead", "is not like"),
        ("dead>x", "is not like"),
        ("", "like"),
    ],
)
def test_a_condition_that_makes_no_sense_is_refused_with_another_code(conditions, complaint):
    with pytest.raises(CommandError, match=complaint) as caught:
        said_by("--fail-if", conditions)
    assert caught.value.returncode == 1


def test_an_unknown_database_is_refused():
    with pytest.raises(CommandError, match="there is no database 'defualt'"):
        said_by("--database", "defualt")
