"""F02: the Nth statement of a worker fails, for every N."""

from contextlib import suppress

import pytest
from django.db import Error, transaction

from django_eventbus import Retry, dead_letters, handler, publish
from django_eventbus.models import EventLane, EventLog, QueuedEvent
from django_eventbus.worker import wakeup
from tests.bus import drain, make_due
from tests.faults import invariants
from tests.faults.statements import sweep
from tests.shop.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]

#: The result of every run, with any fault.
ENDS = {"plain": "COMPLETED", "keyed": "COMPLETED", "twice": "COMPLETED", "outside": "COMPLETED"}


@pytest.fixture
def handlers(monkeypatch):
    monkeypatch.setattr(wakeup, "OUTAGE_WAIT", 0.01)

    def effect(event):
        Effect.objects.create(event_id=event.id, handler=event.handler_name)

    handler("plain", "keyed", name="effect")(effect)
    handler("outside", name="outside", atomic=False)(effect)

    @handler("twice", name="twice")
    def fail_first(event):
        effect(event)
        if event.attempt == 1:
            raise Retry(delay=0)

    @handler("never", name="never", retry={"max_retries": 0})
    def fail(event):
        effect(event)
        raise ValueError("never")


def publish_afresh():
    for model in (QueuedEvent, EventLog, EventLane, Effect):
        model.objects.all().delete()
    for type_name in (*ENDS, "never"):
        publish(type_name, {}, key="k" if type_name == "keyed" else None)
    publish("keyed", {}, key="k")


def drain_if_possible():
    """Drain. A worker without a supervisor raises if it cannot register."""
    with suppress(Error):
        drain()


def finish_and_check(hit):
    for _ in range(3):
        make_due()
        drain()
    assert not QueuedEvent.objects.exists(), hit
    invariants.check()
    ends = dict(EventLog.objects.exclude(type="never").values_list("type", "status"))
    assert ends == ENDS, hit
    inside = Effect.objects.exclude(handler="outside").values_list("handler", flat=True)
    assert sorted(inside) == ["effect"] * 3 + ["twice"], hit
    assert [dead.type for dead in dead_letters.list()] == ["never"], hit


@pytest.mark.parametrize("answer_lost", [False, True], ids=["not sent", "answer lost"])
def test_a_worker_recovers_from_the_loss_of_any_statement(handlers, answer_lost, figures):
    swept = sweep(publish_afresh, drain_if_possible, finish_and_check, answer_lost=answer_lost)
    figures(f"{swept} statements")
    assert swept > 20


@pytest.mark.parametrize("answer_lost", [False, True], ids=["not sent", "answer lost"])
def test_a_publisher_that_loses_a_statement_has_published_all_or_nothing(answer_lost):
    def publish_three():
        with suppress(Error), transaction.atomic():
            for n in range(3):
                publish("plain", n)

    def check(hit):
        # The statement after the commit is a NOTIFY, whose loss has no effect.
        assert QueuedEvent.objects.count() == (0 if hit and "INSERT" in hit else 3), hit

    swept = sweep(QueuedEvent.objects.all().delete, publish_three, check, answer_lost=answer_lost)
    assert swept >= 3
