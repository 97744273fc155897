"""manage.py event_pause."""

import io
import json

import pytest
from django.core.management import CommandError, call_command

from django_eventbus import handler, pauses
from django_eventbus.store import store_for

pytestmark = pytest.mark.django_db


def output_of(*arguments):
    output = io.StringIO()
    call_command("event_pause", *arguments, stdout=output)
    return output.getvalue()


def test_a_queue_is_paused_listed_and_resumed():
    assert output_of() == "Nothing is paused.\n"
    assert output_of("queue", "default", "--reason", "a move") == ("Paused queue 'default'.\n")
    assert output_of("queue", "default") == (
        "The queue 'default' was already paused; its reason is unchanged.\n"
    )
    (paused,) = pauses.list()
    assert "@" in paused.paused_by
    assert output_of().startswith("queue default, since ")
    assert output_of().endswith(f"by {paused.paused_by}: a move\n")
    assert output_of("queue", "default", "--resume") == "Resumed queue 'default'.\n"
    assert pauses.list() == []


def test_the_list_as_json():
    assert json.loads(output_of("--format", "json")) == []
    pauses.pause(type="order.*", reason="why", by="ann")
    (record,) = json.loads(output_of("--format", "json"))
    assert record.pop("paused_at")
    assert record == {"kind": "type", "name": "order.*", "paused_by": "ann", "reason": "why"}


def test_a_name_cannot_forge_a_line():
    store_for().pause("type", "x\u202e", by="\x1b[2J", reason="\n")
    assert output_of().rstrip("\n").isprintable()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["queue"], "The name of the queue is missing"),
        (["queue", "defautl"], "did you mean 'default'"),
        (["handler", "shop.shipp"], "did you mean 'shop.ship'"),
        (["type", "order.placd", "--resume"], "did you mean 'order.placed'"),
        (["--resume"], "--resume and --reason need a kind"),
        (["lane", "x"], "invalid choice: 'lane'"),
        (["--database", "defautl"], "did you mean 'default'"),
        (["type", "x", "--reason", "r" * 501], "500 characters"),
    ],
)
def test_an_error_names_a_similar_value(arguments, message):
    handler("x", name="shop.ship")(print)
    pauses.pause(type="order.placed")
    with pytest.raises(CommandError, match=message):
        output_of(*arguments)
