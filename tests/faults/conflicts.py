"""Two handlers that always conflict."""

import uuid

from django_eventbus import publish, publish_many
from tests.shop.models import Effect

#: Many quick retries.
STUBBORN = {"RETRY": {"max_retries": 50, "base_delay": 0.05, "max_delay": 0.5, "jitter": 1.0}}


def some_rows(count):
    return [Effect.objects.create(event_id=uuid.uuid4(), handler="row").pk for _ in range(count)]


def publish_conflicting_updates(place, rows, *, apart=0):
    """Publish two events whose handlers update the rows in opposite orders.

    ``apart`` other events between them make two workers claim them.
    """
    publish("fault.meet", {"place": str(place), "me": 0, "rows": rows})
    publish_many(("fault.effect", n) for n in range(apart))
    publish("fault.meet", {"place": str(place), "me": 1, "rows": rows[::-1]})


def errors_they_got(place):
    return "\n".join(path.read_text() for path in place.glob("error?"))
