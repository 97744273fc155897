"""Pause and resume: held events use no attempts and continue where they stopped."""

import pytest
from django.db import transaction
from django.test.utils import CaptureQueriesContext

from django_eventbus import (
    EventBusError,
    InvalidPayloadError,
    UnknownQueueError,
    handler,
    pauses,
    poll,
    publish,
    publish_many,
)
from django_eventbus.delivery.deliverer import Deliverer
from django_eventbus.flow import controls
from django_eventbus.flow.controls import FlowControls
from django_eventbus.models import EventLane, EventLog, FlowControl, QueuedEvent
from django_eventbus.signals import flow_paused, flow_resumed
from django_eventbus.store import SEVERAL, postgresql
from django_eventbus.worker.claiming import Claims
from tests.bus import drain, logged, make_due

pytestmark = pytest.mark.django_db


@pytest.fixture
def ran():
    """The calls of the handlers."""
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
    assert pauses.pause(queue="mail", reason="the server moves")
    drain()
    assert ran == [("h", 2)]
    assert untouched()
    assert pauses.resume(queue="mail")
    drain()
    assert sorted(ran) == [("h", 1), ("h", 2), ("h", 3)]


def test_events_of_a_paused_type_wait_and_others_do_not(ran):
    note(ran, "h", "*")
    pauses.pause(type="order.*")
    publish("order.placed", 1)
    publish("user.created", 2)
    drain()
    assert ran == [("h", 2)]
    assert untouched()
    pauses.resume(type="order.*")
    drain()
    assert ran == [("h", 2), ("h", 1)]
    assert EventLog.objects.filter(status="COMPLETED", attempts=1).count() == 2


def test_an_unhandled_event_is_not_given_up_while_its_type_is_paused(settings):
    settings.EVENTBUS = {"UNHANDLED_RETRY": {"max_retries": 0}}
    pauses.pause(type="x")
    publish("x", {})
    drain()
    assert untouched()


def test_only_the_paused_handler_waits(ran):
    note(ran, "ships")
    note(ran, "mails")
    note(ran, "calls", atomic=False)
    pauses.pause(handler="mails")
    event = publish("x", 1)
    drain()
    assert ran == [("ships", 1), ("calls", 1)]
    row = QueuedEvent.objects.get()
    assert {name: each["state"] for name, each in row.deliveries.items()} == {
        "ships": "done",
        "calls": "done",
    }
    pauses.resume(handler="mails")
    drain()
    assert ran == [("ships", 1), ("calls", 1), ("mails", 1)]
    assert logged(event).status == "COMPLETED"


def test_a_paused_handler_outside_of_transactions_waits(ran):
    note(ran, "mails", atomic=False)
    pauses.pause(handler="mails")
    publish("x", 1)
    drain()
    assert ran == []
    assert untouched()


def test_a_handler_paused_between_two_attempts_keeps_its_failures(ran):
    @handler("x", name="h", retry={"max_retries": 1})
    def fail(event):
        ran.append(event.attempt)
        raise ValueError

    event = publish("x", {})
    drain()
    pauses.pause(handler="h")
    make_due()
    drain()
    row = QueuedEvent.objects.get()
    assert (row.attempts, row.deliveries["h"]["failures"], len(row.errors)) == (1, 1, 1)
    pauses.resume(handler="h")
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
    pauses.pause(handler="paused")
    publish("x", 1)
    drain()
    make_due()
    drain()
    assert ran == ["flaky", "flaky"]
    assert QueuedEvent.objects.get().deliveries["flaky"]["state"] == "done"
    pauses.resume(handler="paused")
    drain()
    assert ran == ["flaky", "flaky", ("paused", 1)]


def test_order_per_key_is_kept_through_a_pause(ran):
    note(ran, "h", "*")
    pauses.pause(type="b")
    for n, type_name in enumerate("abab"):
        publish(type_name, n, key="k")
    publish("a", 9, key="other")
    drain()
    assert ran == [("h", 0), ("h", 9)]
    pauses.resume(type="b")
    drain()
    assert ran == [("h", 0), ("h", 9), ("h", 1), ("h", 2), ("h", 3)]
    assert not EventLane.objects.exists()


def test_all_handlers_of_an_atomic_event_wait_for_the_paused_one(settings, ran):
    settings.EVENTBUS = {"ATOMIC": "event"}
    note(ran, "a")
    note(ran, "b")
    pauses.pause(handler="b")
    publish("x", 1)
    drain()
    assert ran == []
    assert untouched()
    pauses.resume(handler="b")
    drain()
    assert ran == [("a", 1), ("b", 1)]


def test_an_event_held_by_two_pauses_runs_each_handler_when_its_pause_ends(ran):
    note(ran, "a")
    note(ran, "b")
    event = publish("x", 1)
    pauses.pause(handler="a")
    pauses.pause(handler="b")
    drain()
    drain()
    assert ran == []
    assert untouched()
    pauses.resume(handler="a")
    drain()
    assert ran == [("a", 1)]
    pauses.resume(handler="b")
    drain()
    assert ran == [("a", 1), ("b", 1)]
    assert logged(event).status == "COMPLETED"


def test_events_held_after_the_end_of_their_pause_are_released(ran):
    """The worker held the event after the pause had ended, and no later change wakes a worker."""
    note(ran, "h")
    pauses.pause(handler="h")
    pauses.resume(handler="h")
    publish("x", 1)
    QueuedEvent.objects.update(held_by=FlowControl.objects.get().pk)
    drain()
    assert ran == [("h", 1)]


def test_events_held_by_a_flow_control_that_was_deleted_are_released(ran, monkeypatch):
    monkeypatch.setattr("django_eventbus.flow.controls.SEARCH_HELD_EVERY", 0.0)
    note(ran, "h")
    pauses.pause(handler="h")
    publish("x", 1)
    drain()
    FlowControl.objects.all().delete()
    drain()
    assert ran == [("h", 1)]


def test_many_held_events_are_all_released(ran):
    note(ran, "h")
    pauses.pause(handler="h")
    publish_many(("x", n) for n in range(2500))
    drain()
    assert ran == []
    pauses.resume(handler="h")
    drain()
    assert len(ran) == 2500


def test_a_held_backlog_costs_a_worker_nothing(ran):
    note(ran, "h")
    pauses.pause(handler="h")
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
        pauses.pause(handler="mails")

    publish_many(("x", n) for n in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_eventbus.flow.controls.READ_EVERY", 0.0)
        drain()
    assert ran == [0]
    assert QueuedEvent.objects.filter(attempts=0, deliveries__isnull=True).count() == 2


def test_a_type_paused_during_a_batch_holds_its_other_events(ran):
    """This includes the remaining handler of an event that another handler has completed."""
    note(ran, "books")

    @handler("x", name="mails", atomic=False)
    def mail(event):
        ran.append(("mails", event.payload))
        pauses.pause(type="*")

    publish_many(("x", n) for n in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_eventbus.flow.controls.READ_EVERY", 0.0)
        drain()
    assert ran == [("books", 0), ("books", 1), ("books", 2), ("mails", 0)]
    pauses.resume(type="*")
    drain()
    assert sorted(ran[4:]) == [("mails", 1), ("mails", 2)]
    assert set(EventLog.objects.values_list("status", "errors")) == {("COMPLETED", None)}


def test_a_queue_paused_during_a_batch_releases_the_rest_of_it(ran):
    @handler("x", name="mails", atomic=False)
    def mail(event):
        ran.append(event.payload)
        pauses.pause(queue="default")

    publish_many(("x", n) for n in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_eventbus.flow.controls.READ_EVERY", 0.0)
        drain()
    assert ran == [0]
    assert untouched()


def test_no_coroutine_of_a_batch_starts_after_its_queue_was_paused(ran, monkeypatch):
    monkeypatch.setattr("django_eventbus.flow.controls.READ_EVERY", 0.0)
    handler("pause", name="pauses")(lambda event: pauses.pause(queue="default"))

    @handler("x", name="mails")
    async def mail(event):
        ran.append(event.payload)

    publish_many(("x", n) for n in range(3))
    publish("pause", {})
    drain()
    assert ran == []
    assert untouched()
    pauses.resume(queue="default")
    drain()
    assert sorted(ran) == [0, 1, 2]


def test_a_queue_paused_between_claim_and_delivery_releases_its_keys(ran, monkeypatch):
    note(ran, "mails")
    claim_from = Claims.claim_from

    def claim_and_be_paused(claims, queue, limit):
        events = claim_from(claims, queue, limit)
        if events and not ran:
            pauses.pause(queue=queue)
            claims.flow_controls.read_again()
            claims.flow_controls.keep_up(claims.store)
        return events

    monkeypatch.setattr(Claims, "claim_from", claim_and_be_paused)
    publish("x", 1, key="k")
    drain()
    assert ran == []
    assert not EventLane.objects.exclude(claim_token=None).exists()
    monkeypatch.undo()
    pauses.resume(queue="default")
    drain()
    assert ran == [("mails", 1)]


def test_order_per_key_is_kept_when_a_queue_is_paused_and_resumed_during_a_batch(ran, monkeypatch):
    """Events that were left out during the pause must not be overtaken after it."""
    paused, run_suspect = set(), Deliverer._run_suspect

    def run_suspect_and_resume(deliverer, batch, run):
        run_suspect(deliverer, batch, run)
        paused.clear()

    monkeypatch.setattr(FlowControls, "is_paused", lambda self, queue: queue in paused)
    monkeypatch.setattr(Deliverer, "_run_suspect", run_suspect_and_resume)
    monkeypatch.setattr(postgresql, "RUN_LENGTH", 1)  # All keys in one batch.
    handler("pause", name="pauses")(lambda event: paused.add("default"))
    note(ran, "mails")
    publish("pause", key="b")
    publish_many((("x", n) for n in (1, 2)), key="c")
    # The first event of the key runs alone, so a pause leaves it out.
    QueuedEvent.objects.filter(type="x", payload=1).update(interruptions=1)
    drain()
    assert not paused
    assert ran == [("mails", 1), ("mails", 2)]


def test_poll_returns_no_event_of_a_paused_queue_or_type():
    publish("x", 1)
    publish("y", 2)
    pauses.pause(type="x")
    event = poll()
    assert event.payload == 2
    assert poll() is None
    pauses.pause(queue="default")
    pauses.resume(type="x")
    publish("z", 3)
    assert poll() is None
    pauses.resume(queue="default")
    assert sorted([poll().payload, poll().payload]) == [1, 3]


def test_pausing_twice_keeps_the_first_reason():
    assert pauses.pause(type="x", reason="first", by="ann")
    assert not pauses.pause(type="x", reason="second", by="bob")
    (paused,) = pauses.list()
    assert (paused.kind, paused.name, paused.reason, paused.paused_by) == (
        "type",
        "x",
        "first",
        "ann",
    )
    assert paused.paused_at is not None
    assert pauses.resume(type="x")
    assert not pauses.resume(type="x")
    assert pauses.list() == []


def test_a_rolled_back_pause_does_not_exist(ran):
    note(ran, "h")
    with transaction.atomic():
        pauses.pause(handler="h")
        transaction.set_rollback(True)
    publish("x", 1)
    drain()
    assert ran == [("h", 1)]


def test_pauses_send_signals_and_are_logged(capture, django_capture_on_commit_callbacks):
    sent = []

    def paused(sender, **facts):
        sent.append(("paused", facts["kind"], facts["name"], facts["by"], facts["reason"]))

    def resumed(sender, **facts):
        sent.append(("resumed", facts["kind"], facts["name"], facts["by"]))

    flow_paused.connect(paused)
    flow_resumed.connect(resumed)
    with django_capture_on_commit_callbacks(execute=True):
        pauses.pause(queue="default", reason="a move", by="ann")
        pauses.resume(queue="default", by="bob")
        pauses.resume(queue="default")
    assert sent == [
        ("paused", "queue", "default", "ann", "a move"),
        ("resumed", "queue", "default", "bob"),
    ]
    assert "the queue default is paused by ann: a move" in capture.text
    assert "the queue default is resumed by bob" in capture.text


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        ({}, EventBusError, "pass exactly one of"),
        ({"queue": "default", "type": "x"}, EventBusError, "pass exactly one of"),
        ({"queue": "defautl"}, UnknownQueueError, "did you mean 'default'"),
        ({"handler": "shop.shipp"}, EventBusError, "did you mean 'shop.ship'"),
        ({"type": ""}, InvalidPayloadError, "the pattern"),
        ({"type": "x" * 201}, InvalidPayloadError, "the pattern"),
        ({"type": "x", "reason": "r" * 501}, EventBusError, "may have at most 500 characters"),
        ({"type": "x", "reason": "two\nlines"}, EventBusError, "one line of printable text"),
        ({"type": "x", "by": "b" * 201}, EventBusError, "may have at most 200 characters"),
    ],
)
def test_a_pause_without_a_known_target_is_refused(chosen, error, message):
    handler("x", name="shop.ship")(lambda event: None)
    with pytest.raises(error, match=message):
        pauses.pause(**chosen)
    assert not FlowControl.objects.exists()


def test_an_event_that_was_partly_handled_before_a_pause_keeps_its_attempt(monkeypatch):
    """Only an event of which no handler ran is released uncharged."""
    monkeypatch.setattr(controls, "READ_EVERY", 0.0)
    ran = []
    handler("x", name="pauses")(lambda event: pauses.pause(handler="late"))
    handler("x", name="late", atomic=False)(lambda event: ran.append(event.payload))
    event = publish("x", 1)
    drain()
    waiting = QueuedEvent.objects.get(event_id=event.event_id)
    assert ran == []
    assert (waiting.status, waiting.attempts, list(waiting.deliveries)) == (
        "PENDING",
        1,
        ["pauses"],
    )
    pauses.resume(handler="late")
    drain()
    assert ran == [1]
    assert logged(event).attempts == 2


def test_an_event_held_by_several_pauses_is_released_although_it_was_settled_late(settings, store):
    """A thread may settle with an old snapshot, after the held events were released."""
    settings.EVENTBUS = {"QUEUES": ["default", "mail"]}
    known = FlowControls(("default",))
    known.keep_up(store)
    late = publish("x", {})
    QueuedEvent.objects.filter(pk=late.pk).update(held_by=SEVERAL)
    known._pause_or_breaker_ended = False
    pauses.pause(queue="mail")
    known.read_again()
    assert known.keep_up(store), "there is an event to claim"
    assert QueuedEvent.objects.get().held_by is None
