"""manage.py event_breakers."""

import io
import json

import pytest
from django.core.management import CommandError, call_command

from django_eventbus import CircuitBreaker, breakers, handler, publish_many
from tests.bus import drain

pytestmark = pytest.mark.django_db


def said_by(*arguments):
    output = io.StringIO()
    call_command("event_breakers", *arguments, stdout=output)
    return output.getvalue()


@pytest.fixture
def open_breaker():
    @handler("x", name="pays", breaker=CircuitBreaker(min_calls=3))
    def fail(event):
        raise ConnectionError

    publish_many(("x", n) for n in range(3))
    drain()


def test_no_breaker_at_all():
    assert said_by() == "No handler has a circuit breaker.\n"
    assert json.loads(said_by("--format", "json")) == []


def test_m30_an_open_breaker_is_seen_and_reset(open_breaker):
    assert said_by().startswith("pays: open, 3 of 3 calls failed, since ")
    (record,) = json.loads(said_by("--format", "json"))
    assert (record["handler"], record["state"], record["failures"]) == ("pays", "open", 3)
    assert said_by("--reset", "pays") == "The circuit breaker of pays is closed.\n"
    assert said_by("--reset", "pays") == "The circuit breaker of pays was not open.\n"
    assert said_by() == "pays: closed, 0 of 0 calls failed\n"
    assert breakers.list()[0].state == "closed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reset", "payz"], "did you mean 'pays'"),
        (["--database", "defautl"], "did you mean 'default'"),
    ],
)
def test_a_mistake_is_told_with_what_was_meant(open_breaker, arguments, message):
    with pytest.raises(CommandError, match=message):
        said_by(*arguments)
