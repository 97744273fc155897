"""manage.py erase_events: count, confirm, erase."""

import io
import json

import pytest
from django.core.management import CommandError, call_command

from django_eventbus import poll, publish
from django_eventbus.erasure import TOMBSTONE
from django_eventbus.models import QueuedEvent
from tests.commands.test_purge_events import answer, no_terminal  # noqa: F401
from tests.test_dead_letters import dead_letter
from tests.test_erasure import ANN, BOB, EMAIL, completed, stored

pytestmark = pytest.mark.django_db

FIELD = ("--field", f"customer.email={EMAIL}")


def run(*arguments):
    stdout = io.StringIO()
    call_command("erase_events", *map(str, arguments), stdout=stdout)
    return stdout.getvalue()


@pytest.fixture
def events():
    return [
        completed(),
        completed(),
        dead_letter(payload=ANN),
        publish("later", ANN, delay=60, key="customer:7"),
        publish("later", BOB, delay=60),
    ]


COUNTS = """\
queued events             1
completed events          2
dead letters              1
"""


def test_a_dry_run_shows_the_counts_of_each_table(events, no_terminal):  # noqa: F811
    before = list(map(stored, events))
    assert run(*FIELD, "--dry-run") == f"{COUNTS}Would erase the data of 4 events.\n"
    assert list(map(stored, events)) == before


def test_the_command_shows_the_counts_and_asks_for_confirmation(events, answer):  # noqa: F811
    questions = answer("n")
    assert run(*FIELD) == f"{COUNTS}Erased the data of 0 events.\n"
    assert questions == ["Erase the data of 4 events permanently? [y/N] "]
    assert all(EMAIL in stored(each) for each in events[:-1])
    answer("y")
    first, *_ = run(*FIELD).removeprefix(COUNTS).splitlines()
    assert first == "Erased the data of 4 events."
    assert not any(EMAIL in stored(each) for each in events)
    assert events[-1].payload == BOB


def test_without_a_terminal_a_yes_is_needed(events, no_terminal):  # noqa: F811
    with pytest.raises(CommandError, match="so there is no prompt: pass --yes"):
        run(*FIELD)
    assert all(EMAIL in stored(each) for each in events[:-1])
    assert "Erased the data of 4 events." in run(*FIELD, "--yes")


def test_the_kept_key_of_a_queued_event_is_reported(events):
    out = run("--key", "customer:7", "--yes")
    assert out.endswith(
        "Queued events keep their keys until they end. Run the command again later.\n"
    )


def test_only_the_named_fields_are_erased(events):
    run(*FIELD, "--only", "customer.email", "--only", "customer.name", "--yes")
    stored(events[0])
    customer = {"email": TOMBSTONE, "name": TOMBSTONE, "id": 7}
    assert events[0].payload == {"customer": customer, "total": 12}


def test_an_event_that_is_being_handled_is_reported_as_skipped():
    publish("fine", ANN)
    assert poll()
    out = run(*FIELD, "--yes")
    assert out.endswith("Skipped 1 event: being handled. Run the command again later.\n")
    assert QueuedEvent.objects.get().payload == ANN


def test_json_output_is_one_object(events):
    counted = {"queued": 1, "completed": 2, "dead": 1, "skipped": 0}
    assert json.loads(run(*FIELD, "--dry-run", "--format", "json")) == {"dry_run": True, **counted}
    assert json.loads(run(*FIELD, "--yes", "--format", "json")) == {"dry_run": False, **counted}


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ([], "one of the arguments --key --field is required"),
        (["--key", "k", *FIELD], "not allowed with"),
        (["--field", "customer.email"], "is not PATH=VALUE"),
        (["--field", "customer..email=x"], "is not a path"),
        ([*FIELD, "--batch-size", "0"], "a number from 1 to 10000"),
    ],
)
def test_invalid_input_is_refused_with_the_valid_form(arguments, right):
    with pytest.raises(CommandError, match=right):
        run(*arguments)
