"""manage.py publish_event: validated like publish()."""

import io
import uuid

import pytest
from django.core.management import CommandError, call_command

from django_eventbus import Event, handler
from django_eventbus.models import QueuedEvent

pytestmark = pytest.mark.django_db


class OrderTyped(Event, type="order.typed"):
    order_id: int


def run(*arguments):
    stdout, stderr = io.StringIO(), io.StringIO()
    call_command("publish_event", *map(str, arguments), stdout=stdout, stderr=stderr)
    return stdout.getvalue(), stderr.getvalue()


def test_an_event_is_published_and_its_id_is_shown():
    handler("order.placed", name="h")(print)
    out, warning = run("order.placed", '{"order_id": 7}')
    event = QueuedEvent.objects.get()
    assert out == f"Published order.placed {event.event_id}.\n"
    assert warning == ""
    assert event.payload == {"order_id": 7}


def test_every_option_reaches_the_event(settings):
    settings.EVENTBUS = {"QUEUES": ["default", "mail"]}
    chosen = uuid.uuid4()
    run(
        *("order.placed", "[1]", "--key", "order:7", "--queue", "mail", "--priority", -3),
        *("--delay", 3600, "--headers", '{"tenant": "north"}', "--dedup-key", "d"),
        *("--event-id", chosen),
    )
    event = QueuedEvent.objects.get()
    assert (event.payload, event.key, event.queue, event.priority) == ([1], "order:7", "mail", -3)
    assert (event.headers, event.dedup_key) == ({"tenant": "north"}, "d")
    assert event.event_id == chosen
    assert event.available_at > event.created_at


def test_the_default_payload_is_null():
    run("order.placed")
    assert QueuedEvent.objects.get().payload is None


def test_a_payload_may_come_from_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"from": "a file"}'))
    run("order.placed", "-")
    assert QueuedEvent.objects.get().payload == {"from": "a file"}


def test_a_type_without_a_handler_is_published_with_a_warning():
    _, warning = run("ordr.placed", "{}")
    assert warning == "No handler of this project handles 'ordr.placed'.\n"
    assert QueuedEvent.objects.count() == 1


def test_a_type_without_a_handler_is_compared_with_the_known_ones():
    handler("order.placed", "shop.*", name="h")(print)
    assert run("order.placd")[1].endswith(" Did you mean 'order.placed'?\n")
    assert run("order.typd", '{"order_id": 7}')[1].endswith(" Did you mean 'order.typed'?\n")
    assert run("shop.opened")[1] == ""


def test_a_payload_is_compared_with_the_class_of_its_type():
    run("order.typed", '{"order_id": 7}')
    with pytest.raises(CommandError, match="OrderTyped has no field ordr_id"):
        run("order.typed", '{"ordr_id": 7}')
    assert QueuedEvent.objects.count() == 1


@pytest.mark.parametrize("option", [("--dedup-key", "d"), ("--event-id", uuid.uuid4())])
def test_a_known_event_is_not_added_again(option):
    run("order.placed", *option)
    out, _ = run("order.placed", *option)
    assert out.startswith("No event was published: an event with the ")
    assert QueuedEvent.objects.count() == 1


def test_a_dropped_event_is_an_error(settings):
    settings.EVENTBUS = {"LIMITS": {"default": {"max_size": 1, "overflow": "drop"}}}
    run("order.placed")
    with pytest.raises(CommandError, match="a limit is reached"):
        run("order.placed")
    assert QueuedEvent.objects.count() == 1


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["order.placed", "{order: 7}"], "not valid JSON"),
        (["order.placed", "[" * 100_000], "not valid JSON"),
        (["order.placed", "NaN"], "payload"),
        (["", "{}"], "event type"),
        (["order.placed", "--queue", "defualt"], "did you mean 'default'"),
        (["order.placed", "--delay", "-1"], "the delay must be"),
        (["order.placed", "--delay", "nan"], "the delay must be"),
        (["order.placed", "--headers", "[]"], "headers must be a dict"),
        (["order.placed", "--event-id", "7"], "an event id, which looks like"),
        (["order.placed", "--database", "defautl"], "did you mean 'default'"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_bad_input_is_refused_before_anything_is_written(arguments, right):
    with pytest.raises(CommandError, match=right):
        run(*arguments)
    assert QueuedEvent.objects.count() == 0
