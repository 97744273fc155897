"""Events behind a slow handler are released if an idle worker could handle them."""

import threading

import pytest
from django.db import connection

from django_eventbus import handler, publish_many
from django_eventbus.models import EventLog, QueuedEvent
from tests.bus import drain
from tests.shop.models import Effect
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)


class Drain:
    """A worker in a thread; its handlers block at the events that a test names."""

    def __init__(self, *, blocks_at, **options):
        self.go_on, self.errors, self.options = threading.Event(), [], options
        self.thread = threading.Thread(target=self.run)

        @handler("x", name="h", timeout=600, atomic=options.pop("atomic", True))
        def wait_for_the_test(event):
            if event.payload == blocks_at:
                self.go_on.wait()
            Effect.objects.create(event_id=event.id, handler="h", note=str(event.payload))

    def run(self):
        try:
            drain(**self.options)
        except BaseException as error:
            self.errors.append(error)
        finally:
            connection.close()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.go_on.set()
        self.thread.join()
        assert not self.errors


def pending():
    return QueuedEvent.objects.filter(status="PENDING", attempts=0).count()


def handled():
    notes = Effect.objects.order_by("id").values_list("note", flat=True)
    return [int(note) for note in notes]


def everything_was_handled_at_the_first_attempt(count):
    counted = EventLog.objects.values_list("status", "attempts", "crashes", "interruptions")
    return list(counted) == [("COMPLETED", 1, 0, 0)] * count


@pytest.mark.parametrize("atomic", [True, False])
def test_unstarted_events_behind_a_slow_handler_are_released(atomic):
    publish_many(("x", n) for n in range(10))
    with Drain(blocks_at=0, atomic=atomic):
        eventually(lambda: pending() == 9)
    assert sorted(handled()) == list(range(10))
    assert everything_was_handled_at_the_first_attempt(10)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_key_keeps_its_order_when_its_unstarted_events_are_released(atomic):
    if atomic and connection.vendor == "sqlite":
        pytest.skip("the open transaction of the first two events has the only write lock")
    publish_many((("x", n) for n in range(10)), key="a")
    with Drain(blocks_at=2, atomic=atomic):
        eventually(lambda: pending() == 7)
    assert handled() == list(range(10))
    assert everything_was_handled_at_the_first_attempt(10)


def test_an_idle_thread_handles_events_that_waited_behind_a_slow_handler():
    publish_many(("x", n) for n in range(10))
    with Drain(blocks_at=0, atomic=False, concurrency=2):
        eventually(lambda: len(handled()) == 9)
        assert 0 not in handled()
    assert everything_was_handled_at_the_first_attempt(10)


def test_events_claimed_ahead_of_a_slow_batch_are_released():
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("this database has one writer: nothing is claimed ahead")
    publish_many(("x", n) for n in range(30))
    with Drain(blocks_at=6, batch_size=5):
        eventually(lambda: pending() == 23 or pending() == 24)
    assert sorted(handled()) == list(range(30))
    assert everything_was_handled_at_the_first_attempt(30)
