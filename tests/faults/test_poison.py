"""Rows that cannot be read or settled, while other events keep arriving at a real worker."""

import pytest

from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from tests.log_rows import EARLIER, log_entry
from tests.shop.models import Effect
from tests.workers import IN_ONE_PROCESS, PATIENT, eventually

pytestmark = pytest.mark.django_db(transaction=True)

ROUNDS, PER_ROUND = 20, 20


def already_ended(event):
    """As after a restored backup: the log has the event, and so has the queue."""
    log_entry(id=10**12 + event.pk, event_id=event.event_id)


def make_unreadable(event):
    state = {"effect": {"state": "of a newer version"}}
    QueuedEvent.objects.filter(pk=event.pk).update(deliveries=state, producer=EARLIER)


def row_id_taken(event):
    """As after TRUNCATE … RESTART IDENTITY: the log has another event under the row's id."""
    log_entry(id=event.pk)


@pytest.mark.parametrize("options", [IN_ONE_PROCESS, ("--concurrency", "3")])
def test_poison_rows_neither_stop_a_worker_nor_charge_other_events(start_worker, options):
    delayed = [publish("process.effect", -1, delay=3600, key=key) for key in (None, None, "a", "b")]
    for poison, spoil in zip(
        delayed, (already_ended, make_unreadable, already_ended, make_unreadable), strict=True
    ):
        spoil(poison)
    row_id_taken(renumbered := publish("process.effect", -2, delay=3600))
    worker = start_worker(*options, eventbus=PATIENT)
    for number in range(ROUNDS):
        publish_many(("process.effect", n) for n in range(PER_ROUND // 2))
        publish_many((("process.effect", n) for n in range(PER_ROUND // 2)), key=f"k{number % 5}")
        if number == 2:
            QueuedEvent.objects.filter(pk__in=[each.pk for each in delayed]).update(
                available_at=None
            )
            QueuedEvent.objects.filter(pk=renumbered.pk).update(available_at=None)
    expected = ROUNDS * PER_ROUND + 1
    eventually(lambda: Effect.objects.count() == expected, lambda: worker.log)
    others = EventLog.objects.exclude(producer=EARLIER)
    eventually(lambda: others.count() == expected, lambda: worker.log)
    assert set(others.values_list("status", "attempts", "crashes", "interruptions")) == {
        ("COMPLETED", 1, 0, 0)
    }
    assert worker.process.poll() is None
    left = QueuedEvent.objects.filter(producer=EARLIER, status="PENDING", crashes=0)
    eventually(lambda: left.filter(interruptions__gte=1).count() == 2, lambda: worker.log)
    assert EventLog.objects.get(event_id=renumbered.event_id).pk < 0
