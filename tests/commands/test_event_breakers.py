"""manage.py event_breakers."""

import io
import json

import pytest
from django.core.management import CommandError, call_command

from django_eventbus import CircuitBreaker, breakers, handler, publish_many
from tests.bus import drain

pytestmark = pytest.mark.django_db


def output_of(*arguments):
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


def test_no_handler_has_a_breaker():
    assert output_of() == "No handler has a circuit breaker.\n"
    assert json.loads(output_of("--format", "json")) == []


def test_m30_an_open_breaker_is_listed_and_reset(open_breaker):
    assert output_of().startswith("pays: open, 3 of 3 calls failed, open since ")
    (record,) = json.loads(output_of("--format", "json"))
    assert (record["handler"], record["state"], record["failures"]) == ("pays", "open", 3)
    assert output_of("--reset", "pays") == "Reset the circuit breaker of pays.\n"
    assert output_of("--reset", "pays") == (
        "The circuit breaker of pays was not open; nothing changed.\n"
    )
    assert output_of() == "pays: closed, 0 of 0 calls failed\n"
    assert breakers.list()[0].state == "closed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reset", "payz"], "did you mean 'pays'"),
        (["--database", "defautl"], "did you mean 'default'"),
    ],
)
def test_an_error_names_a_similar_value(open_breaker, arguments, message):
    with pytest.raises(CommandError, match=message):
        output_of(*arguments)
