"""Pause and resume: what waits burns nothing, and goes on where it stood."""

import pytest
from django.db import transaction
from django.test.utils import CaptureQueriesContext

from django_eventbus import (
    EventBusError,
    InvalidPayloadError,
    UnknownQueueError,
    delivery,
    gates,
    handler,
    poll,
    publish,
    publish_many,
)
from django_eventbus.admission import Gates
from django_eventbus.models import EventGate, EventLane, EventLog, QueuedEvent
from django_eventbus.signals import gate_paused, gate_resumed
from django_eventbus.store import postgresql
from django_eventbus.store.rows import parked_at
from django_eventbus.worker import WorkerLoop
from tests.bus import drain, logged, make_due

pytestmark = pytest.mark.django_db


@pytest.fixture
def ran():
    """What handlers note."""
    return []


def note(ran, name, subject="x", **options):
    handler(subject, name=name, **options)(lambda event: ran.append((name, event.payload)))


def untouched():
    return set(QueuedEvent.objects.values_list("status", "attempts", "deliveries", "errors")) == {
        ("PENDING", 0, None, None)
    }


def test_a_paused_queue_is_not_claimed(settings, ran, django_assert_num_queries):
    settings.EVENTBUS = {"QUEUES": ["default", "mail"]}
    note(ran, "h")
    publish("x", 1, queue="mail")
    publish("x", 2)
    publish("x", 3, queue="mail", key="k")
    assert gates.pause(queue="mail", reason="the server moves")
    drain()
    assert ran == [("h", 2)]
    assert untouched()
    assert gates.resume(queue="mail")
    drain()
    assert sorted(ran) == [("h", 1), ("h", 2), ("h", 3)]


def test_events_of_a_paused_type_wait_and_others_do_not(ran):
    note(ran, "h", "*")
    gates.pause(type="order.*")
    publish("order.placed", 1)
    publish("user.created", 2)
    drain()
    assert ran == [("h", 2)]
    assert untouched()
    gates.resume(type="order.*")
    drain()
    assert ran == [("h", 2), ("h", 1)]
    assert EventLog.objects.filter(status="COMPLETED", attempts=1).count() == 2


def test_an_event_nobody_handles_is_not_given_up_while_its_type_is_paused(settings):
    settings.EVENTBUS = {"UNHANDLED_RETRY": {"max_retries": 0}}
    gates.pause(type="x")
    publish("x", {})
    drain()
    assert untouched()


def test_only_the_paused_handler_waits(ran):
    note(ran, "ships")
    note(ran, "mails")
    note(ran, "calls", atomic=False)
    gates.pause(handler="mails")
    event = publish("x", 1)
    drain()
    assert ran == [("ships", 1), ("calls", 1)]
    row = QueuedEvent.objects.get()
    assert {name: each["state"] for name, each in row.deliveries.items()} == {
        "ships": "done",
        "calls": "done",
    }
    gates.resume(handler="mails")
    drain()
    assert ran == [("ships", 1), ("calls", 1), ("mails", 1)]
    assert logged(event).status == "COMPLETED"


def test_a_paused_handler_outside_of_transactions_waits(ran):
    note(ran, "mails", atomic=False)
    gates.pause(handler="mails")
    publish("x", 1)
    drain()
    assert ran == []
    assert untouched()


def test_a_handler_paused_between_two_tries_keeps_its_failures(ran):
    @handler("x", name="h", retry={"max_retries": 1})
    def fail(event):
        ran.append(event.attempt)
        raise ValueError

    event = publish("x", {})
    drain()
    gates.pause(handler="h")
    make_due()
    drain()
    row = QueuedEvent.objects.get()
    assert (row.attempts, row.deliveries["h"]["failures"], len(row.errors)) == (1, 1, 1)
    gates.resume(handler="h")
    drain()
    assert ran == [1, 2]
    assert logged(event).status == "FAILED"


def test_another_handler_is_retried_while_one_is_paused(ran):
    answers = [ValueError, None]

    @handler("x", name="flaky")
    def flaky(event):
        ran.append("flaky")
        if error := answers.pop(0):
            raise error

    note(ran, "paused")
    gates.pause(handler="paused")
    publish("x", 1)
    drain()
    make_due()
    drain()
    assert ran == ["flaky", "flaky"]
    assert QueuedEvent.objects.get().deliveries["flaky"]["state"] == "done"
    gates.resume(handler="paused")
    drain()
    assert ran == ["flaky", "flaky", ("paused", 1)]


def test_order_per_key_is_kept_through_a_pause(ran):
    note(ran, "h", "*")
    gates.pause(type="b")
    for n, type_name in enumerate("abab"):
        publish(type_name, n, key="k")
    publish("a", 9, key="other")
    drain()
    assert ran == [("h", 0), ("h", 9)]
    gates.resume(type="b")
    drain()
    assert ran == [("h", 0), ("h", 9), ("h", 1), ("h", 2), ("h", 3)]
    assert not EventLane.objects.exists()


def test_all_handlers_of_an_atomic_event_wait_for_the_paused_one(settings, ran):
    settings.EVENTBUS = {"ATOMIC": "event"}
    note(ran, "a")
    note(ran, "b")
    gates.pause(handler="b")
    publish("x", 1)
    drain()
    assert ran == []
    assert untouched()
    gates.resume(handler="b")
    drain()
    assert ran == [("a", 1), ("b", 1)]


def test_an_event_behind_two_gates_goes_as_far_as_it_can_when_one_opens(ran):
    note(ran, "a")
    note(ran, "b")
    event = publish("x", 1)
    gates.pause(handler="a")
    gates.pause(handler="b")
    drain()
    drain()
    assert ran == []
    assert untouched()
    gates.resume(handler="a")
    drain()
    assert ran == [("a", 1)]
    gates.resume(handler="b")
    drain()
    assert ran == [("a", 1), ("b", 1)]
    assert logged(event).status == "COMPLETED"


def test_what_was_parked_by_a_worker_that_had_not_heard_yet_is_let_out(ran):
    """It parked the event after the gate had been opened: nobody will tell it."""
    note(ran, "h")
    gates.pause(handler="h")
    gates.resume(handler="h")
    publish("x", 1)
    QueuedEvent.objects.update(available_at=parked_at(EventGate.objects.get().pk))
    drain()
    assert ran == [("h", 1)]


def test_what_is_parked_behind_a_gate_that_somebody_deleted_is_let_out(ran, monkeypatch):
    monkeypatch.setattr("django_eventbus.admission.LOOK_FOR_PARKED_EVERY", 0.0)
    note(ran, "h")
    gates.pause(handler="h")
    publish("x", 1)
    drain()
    EventGate.objects.all().delete()
    drain()
    assert ran == [("h", 1)]


def test_many_parked_events_are_let_out_to_the_last(ran):
    note(ran, "h")
    gates.pause(handler="h")
    publish_many(("x", n) for n in range(2500))
    drain()
    assert ran == []
    gates.resume(handler="h")
    drain()
    assert len(ran) == 2500


def test_a_parked_backlog_costs_a_worker_nothing(ran):
    note(ran, "h")
    gates.pause(handler="h")
    publish_many(("x", n) for n in range(1000))
    drain()
    with CaptureQueriesContext(transaction.get_connection()) as queries:
        drain()
    assert not [q for q in queries if q["sql"].startswith("UPDATE") and "queuedevent" in q["sql"]]


def test_a_pause_is_effective_before_the_batch_is_over(ran):
    """A handler that pauses itself is not called for the other events of its batch."""

    @handler("x", name="mails", atomic=False)
    def mail(event):
        ran.append(event.payload)
        gates.pause(handler="mails")

    publish_many(("x", n) for n in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_eventbus.admission.LOOK_EVERY", 0.0)
        drain()
    assert ran == [0]
    assert QueuedEvent.objects.filter(attempts=0, deliveries__isnull=True).count() == 2


def test_a_type_paused_in_the_middle_of_a_batch_stops_its_other_events(ran):
    """Also for the handler that is still to come of an event that another has done with."""
    note(ran, "books")

    @handler("x", name="mails", atomic=False)
    def mail(event):
        ran.append(("mails", event.payload))
        gates.pause(type="*")

    publish_many(("x", n) for n in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_eventbus.admission.LOOK_EVERY", 0.0)
        drain()
    assert ran == [("books", 0), ("books", 1), ("books", 2), ("mails", 0)]
    gates.resume(type="*")
    drain()
    assert sorted(ran[4:]) == [("mails", 1), ("mails", 2)]
    assert set(EventLog.objects.values_list("status", "errors")) == {("COMPLETED", None)}


def test_a_queue_paused_in_the_middle_of_a_batch_gives_the_rest_back(ran):
    @handler("x", name="mails", atomic=False)
    def mail(event):
        ran.append(event.payload)
        gates.pause(queue="default")

    publish_many(("x", n) for n in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_eventbus.admission.LOOK_EVERY", 0.0)
        drain()
    assert ran == [0]
    assert untouched()


def test_a_queue_paused_between_claim_and_delivery_keeps_no_key_from_others(ran, monkeypatch):
    note(ran, "mails")
    claim_from = WorkerLoop.claim_from

    def claim_and_be_paused(loop, queue):
        events = claim_from(loop, queue)
        if events and not ran:
            gates.pause(queue=queue)
            loop.gates.look_again()
            loop.gates.keep_up(loop.store)
        return events

    monkeypatch.setattr(WorkerLoop, "claim_from", claim_and_be_paused)
    publish("x", 1, key="k")
    drain()
    assert ran == []
    assert not EventLane.objects.exclude(claim_token=None).exists()
    monkeypatch.undo()
    gates.resume(queue="default")
    drain()
    assert ran == [("mails", 1)]


def test_order_per_key_is_kept_when_a_queue_is_paused_and_resumed_during_a_batch(ran, monkeypatch):
    """What was passed over while it was paused must not be overtaken when it goes on."""
    paused = {"now": False}
    monkeypatch.setattr(Gates, "is_paused", lambda self, queue: paused["now"])
    monkeypatch.setattr(delivery, "GROUP_SECONDS", -1.0)  # an event a group
    monkeypatch.setattr(postgresql, "RUN_LENGTH", 1)  # all keys in one batch

    @handler("resume", name="resumes")
    async def resume(event):
        paused["now"] = False

    handler("pause", name="pauses")(lambda event: paused.update(now=True))
    note(ran, "mails", atomic=False)
    publish("resume", key="a")
    publish("pause", key="b")
    publish_many((("x", n) for n in (1, 2)), key="c")
    drain()
    assert ran == [("mails", 1), ("mails", 2)]


def test_a_poll_takes_nothing_of_a_paused_queue_or_type():
    publish("x", 1)
    publish("y", 2)
    gates.pause(type="x")
    event = poll()
    assert event.payload == 2
    assert poll() is None
    gates.pause(queue="default")
    gates.resume(type="x")
    publish("z", 3)
    assert poll() is None
    gates.resume(queue="default")
    assert sorted([poll().payload, poll().payload]) == [1, 3]


def test_pausing_twice_keeps_the_first_reason():
    assert gates.pause(type="x", reason="first", by="ann")
    assert not gates.pause(type="x", reason="second", by="bob")
    (paused,) = gates.list()
    assert (paused.kind, paused.name, paused.reason, paused.paused_by) == (
        "type",
        "x",
        "first",
        "ann",
    )
    assert paused.paused_at is not None
    assert gates.resume(type="x")
    assert not gates.resume(type="x")
    assert gates.list() == []


def test_a_pause_that_is_rolled_back_never_was(ran):
    note(ran, "h")
    with transaction.atomic():
        gates.pause(handler="h")
        transaction.set_rollback(True)
    publish("x", 1)
    drain()
    assert ran == [("h", 1)]


def test_pauses_are_told_and_logged(capture, django_capture_on_commit_callbacks):
    told = []

    def paused(sender, **facts):
        told.append(("paused", facts["kind"], facts["name"], facts["by"], facts["reason"]))

    def resumed(sender, **facts):
        told.append(("resumed", facts["kind"], facts["name"], facts["by"]))

    gate_paused.connect(paused)
    gate_resumed.connect(resumed)
    with django_capture_on_commit_callbacks(execute=True):
        gates.pause(queue="default", reason="a move", by="ann")
        gates.resume(queue="default", by="bob")
        gates.resume(queue="default")
    assert told == [
        ("paused", "queue", "default", "ann", "a move"),
        ("resumed", "queue", "default", "bob"),
    ]
    assert "the queue default is paused by ann: a move" in capture.text
    assert "the queue default is resumed by bob" in capture.text


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        ({}, EventBusError, "name one thing"),
        ({"queue": "default", "type": "x"}, EventBusError, "name one thing"),
        ({"queue": "defautl"}, UnknownQueueError, "did you mean 'default'"),
        ({"handler": "shop.shipp"}, EventBusError, "did you mean 'shop.ship'"),
        ({"type": ""}, InvalidPayloadError, "the pattern"),
        ({"type": "x" * 201}, InvalidPayloadError, "the pattern"),
        ({"type": "x", "reason": "r" * 501}, EventBusError, "may have 500 characters"),
        ({"type": "x", "reason": "two\nlines"}, EventBusError, "one line of printable text"),
        ({"type": "x", "by": "b" * 201}, EventBusError, "may have 200 characters"),
    ],
)
def test_a_pause_that_would_pause_nothing_is_refused(chosen, error, message):
    handler("x", name="shop.ship")(lambda event: None)
    with pytest.raises(error, match=message):
        gates.pause(**chosen)
    assert not EventGate.objects.exists()
