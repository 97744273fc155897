"""Two handlers that are certain to get into each other's way."""

import uuid

from django_eventbus import publish, publish_many
from tests.shop.models import Effect

#: Tried again and again, soon.
STUBBORN = {"RETRY": {"max_retries": 50, "base_delay": 0.05, "max_delay": 0.5, "jitter": 1.0}}


def some_rows(count):
    return [Effect.objects.create(event_id=uuid.uuid4(), handler="row").pk for _ in range(count)]


def publish_a_meeting(place, rows, *, apart=0):
    """Of two who update these rows in opposite orders, and so many events between them: they are
    claimed by two, and get into each other's way whatever the machine is busy with."""
    publish("fault.meet", {"place": str(place), "me": 0, "rows": rows})
    publish_many(("fault.effect", n) for n in range(apart))
    publish("fault.meet", {"place": str(place), "me": 1, "rows": rows[::-1]})


def what_they_met(place):
    return "\n".join(path.read_text() for path in place.glob("error?"))
