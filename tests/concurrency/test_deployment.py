"""A deployment: worker processes of two versions side by side on one queue."""

import signal
from pathlib import Path

import pytest

from django_eventbus.models import EventLog, EventWorker, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from tests.shop.models import Effect
from tests.workers import PATIENT, eventually

pytestmark = pytest.mark.django_db(transaction=True)

NEXT_VERSION = {"EVENTBUS_TEST_IMPORT": "tests.concurrency.handlers_of_the_next_version"}
PLAIN, KEYED = 30, 10


def effects_of(handler):
    return list(
        Effect.objects.filter(handler=handler).order_by("id").values_list("note", flat=True)
    )


def logged():
    return EventLog.objects.filter(type="process.effect")


def keyed(notes):
    return [note for note in notes if note.startswith("k")]


def test_a_handler_that_a_deployment_adds_sees_every_event_once(start_worker, tmp_path):
    """The only new worker is busy while an old worker runs its own handlers of the events."""
    started, go_on = tmp_path / "started", tmp_path / "go_on"
    publish("process.signal_outside", {"started": str(started), "go_on": str(go_on)})
    new = start_worker(eventbus=PATIENT, env=NEXT_VERSION)
    eventually(started.exists, lambda: new.log)
    old = start_worker(eventbus=PATIENT)

    publish_many(("process.effect", n) for n in range(PLAIN))
    for n in range(KEYED):
        publish("process.effect", f"k{n}", key="key")
    eventually(lambda: len(effects_of("effect")) == PLAIN + 1, lambda: old.log)
    assert not logged().exists()
    assert keyed(effects_of("effect")) == ["k0"], "the rest of the key waits for the first"
    assert effects_of("tomorrow") == []

    Path(go_on).touch()
    eventually(lambda: not QueuedEvent.objects.exists(), lambda: new.log + old.log)
    for handler in ("effect", "tomorrow"):
        notes = effects_of(handler)
        assert sorted(notes) == sorted([*map(str, range(PLAIN)), *(f"k{n}" for n in range(KEYED))])
        assert keyed(notes) == [f"k{n}" for n in range(KEYED)]
    ended = set(logged().values_list("status", "crashes", "error_type"))
    assert ended == {("COMPLETED", 0, "")}
    assert all(not event.errors for event in logged())

    new.signal(signal.SIGTERM)
    assert new.wait() == 0, new.log
    assert EventWorker.objects.count() == 1
    publish("process.effect", "last")
    eventually(lambda: not QueuedEvent.objects.exists(), lambda: old.log)
    assert "last" in effects_of("effect"), "a worker that has ended holds nothing"
    assert "last" not in effects_of("tomorrow")
