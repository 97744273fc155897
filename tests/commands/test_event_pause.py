"""manage.py event_pause."""

import io
import json

import pytest
from django.core.management import CommandError, call_command

from django_eventbus import gates, handler
from django_eventbus.store import store_for

pytestmark = pytest.mark.django_db


def said_by(*arguments):
    output = io.StringIO()
    call_command("event_pause", *arguments, stdout=output)
    return output.getvalue()


def test_pause_list_resume():
    assert said_by() == "Nothing is paused.\n"
    assert said_by("queue", "default", "--reason", "a move") == (
        "The queue 'default' is now paused.\n"
    )
    assert said_by("queue", "default") == "The queue 'default' is already paused.\n"
    (paused,) = gates.list()
    assert "@" in paused.paused_by
    assert said_by().startswith("queue default, since ")
    assert said_by().endswith(f"by {paused.paused_by}: a move\n")
    assert said_by("queue", "default", "--resume") == "The queue 'default' goes on.\n"
    assert gates.list() == []


def test_the_list_for_scripts():
    assert json.loads(said_by("--format", "json")) == []
    gates.pause(type="order.*", reason="why", by="ann")
    (record,) = json.loads(said_by("--format", "json"))
    assert record.pop("paused_at")
    assert record == {"kind": "type", "name": "order.*", "paused_by": "ann", "reason": "why"}


def test_what_stands_in_a_name_cannot_forge_a_line():
    store_for().pause("type", "x\u202e", by="\x1b[2J", reason="\n")
    assert said_by().rstrip("\n").isprintable()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["queue"], "Say which queue"),
        (["queue", "defautl"], "did you mean 'default'"),
        (["handler", "shop.shipp"], "did you mean 'shop.ship'"),
        (["type", "order.placd", "--resume"], "did you mean 'order.placed'"),
        (["--resume"], "Say what"),
        (["lane", "x"], "invalid choice: 'lane'"),
        (["--database", "defautl"], "did you mean 'default'"),
        (["type", "x", "--reason", "r" * 501], "500 characters"),
    ],
)
def test_a_mistake_is_told_with_what_was_meant(arguments, message):
    handler("x", name="shop.ship")(print)
    gates.pause(type="order.placed")
    with pytest.raises(CommandError, match=message):
        said_by(*arguments)
