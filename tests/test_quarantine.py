"""An event that cannot be read or settled stops neither its worker nor its neighbours."""

import asyncio
import threading
import time

import pytest
from django.db import connection, transaction

from django_eventbus import dead_letters, finalize, handler, poll, publish, publish_many
from django_eventbus.delivery.kills import record_kill
from django_eventbus.events import uuid7
from django_eventbus.exceptions import UnsettleableError
from django_eventbus.flow.admission import Admission
from django_eventbus.models import EventLane, EventLog, EventWorker, QueuedEvent
from django_eventbus.signals import event_dead_lettered
from django_eventbus.statistics.recorder import StatisticsRecorder
from django_eventbus.store import Charge, SetAside, set_aside, store_for
from tests.bus import drain, drain_with_retries, logged, make_due
from tests.log_rows import EARLIER, log_entry, log_refuses
from tests.shop.models import Effect

pytestmark = pytest.mark.django_db

FROM_A_NEWER_VERSION = {"h": {"state": "handed off", "to": "celery"}}
ERROR = {"handler": "", "type": "E", "message": "", "traceback": ""}


@pytest.fixture(autouse=True)
def effects():
    @handler("*", name="h")
    def write(event):
        Effect.objects.create(event_id=event.id, handler="h", note=str(event.payload))


@pytest.fixture
def dead_lettered():
    """The events that event_dead_lettered was sent for, with their status."""
    heard = []

    def hear(event, status, **kwargs):
        heard.append((event.event_id, status))

    event_dead_lettered.connect(hear)
    yield heard
    event_dead_lettered.disconnect(hear)


def notes():
    return sorted(int(note) for note in Effect.objects.values_list("note", flat=True))


def neighbours_are_untouched():
    """Whether all other events were handled at the first attempt, uncharged and without errors."""
    others = EventLog.objects.exclude(producer=EARLIER)
    counted = others.values_list("status", "attempts", "crashes", "interruptions", "errors")
    return set(counted) == {("COMPLETED", 1, 0, 0, None)}


def poisoned(*, key=None, **changes):
    """Publish twenty events, the tenth of which cannot be handled."""
    publish_many((("x", n) for n in range(10)), key=key)
    poison = publish("x", 10, key=key)
    publish_many((("x", n) for n in range(11, 21)), key=key)
    QueuedEvent.objects.filter(pk=poison.pk).update(**changes)
    return poison


def test_the_coroutine_of_an_event_that_was_set_aside_is_cancelled(monkeypatch, capture):
    ended = []

    @handler("y", name="async", timeout=30)
    async def work(event):
        try:
            await asyncio.sleep(20 if event.payload == 1 else 0)
        finally:
            ended.append(event.payload)

    hold_back_again = Admission.hold_back_again

    def fail_once(admission, run):
        if run.event.event_id == guilty.event_id:
            monkeypatch.undo()
            raise ValueError("not its handler")
        hold_back_again(admission, run)

    monkeypatch.setattr(Admission, "hold_back_again", fail_once)
    _, guilty, _ = [publish("y", n) for n in range(3)]
    began = time.monotonic()
    drain()
    assert time.monotonic() - began < 15
    (row,) = QueuedEvent.objects.all()
    assert (row.payload, row.interruptions, row.errors[-1]["type"]) == (1, 1, "ValueError")
    assert "lost the claim" not in capture.text
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize("key", [None, "a"])
def test_a_queued_event_that_is_in_the_log_is_removed(key, capture):
    poison = poisoned(key=key)
    log_entry(event_id=poison.event_id)
    drain()
    assert notes() == [n for n in range(21) if n != 10]
    assert not QueuedEvent.objects.exists()
    assert not EventLane.objects.exists()
    assert EventLog.objects.count() == 21
    assert neighbours_are_untouched()
    assert f"{poison.event_id} could not be read or settled" in capture.text
    assert "removed: the log shows that it ended before" in capture.text


def test_an_event_whose_row_id_exists_in_the_log_is_handled_under_another_id(capture):
    """TRUNCATE … RESTART IDENTITY makes new ids collide with those of the log."""
    poison = poisoned()
    log_entry(id=poison.pk)
    drain()
    assert notes() == list(range(21))
    assert logged(poison).pk < 0
    assert neighbours_are_untouched()
    assert "another event in the log has its row id" in capture.text


def test_several_events_whose_row_ids_exist_in_the_log_are_handled():
    events = [publish("x", n) for n in range(3)]
    for event in events:
        log_entry(id=event.pk)
    drain()
    assert notes() == [0, 1, 2]
    assert len({logged(event).pk for event in events}) == 3


def test_an_unreadable_event_waits_with_its_error_and_the_others_are_handled():
    poison = poisoned(deliveries=FROM_A_NEWER_VERSION)
    tally = drain()
    assert (tally.handled, tally.postponed) == (20, 1)
    assert notes() == [n for n in range(21) if n != 10]
    assert neighbours_are_untouched()
    left = QueuedEvent.objects.get()
    assert left.event_id == poison.event_id
    assert (left.status, left.crashes, left.interruptions) == ("PENDING", 0, 1)
    assert left.deliveries == FROM_A_NEWER_VERSION
    assert "cannot be read by this version" in left.errors[0]["message"]
    assert left.available_at is not None


def test_an_event_that_stays_unreadable_becomes_a_dead_letter(dead_lettered):
    poison = poisoned(deliveries=FROM_A_NEWER_VERSION)
    for _ in range(5):
        drain()
        let_time_pass()
    (dead,) = dead_letters.list()
    assert (dead.event_id, dead.status, dead.error_type) == (
        poison.event_id,
        "FAILED",
        "unsettleable",
    )
    assert dead.deliveries == FROM_A_NEWER_VERSION
    assert len(dead.errors) == 5
    assert dead_lettered == [(poison.event_id, "FAILED")]


def let_time_pass():
    """Make waiting events due without ``make_due``, which reads the unreadable state."""
    QueuedEvent.objects.update(available_at=None)
    EventLane.objects.update(ready_at="2000-01-01T00:00:00Z", held_by=None)


def test_an_unreadable_event_blocks_only_its_own_key():
    head = publish("x", 0, key="a")
    publish("x", 1, key="a")
    publish("x", 2, key="b")
    QueuedEvent.objects.filter(pk=head.pk).update(deliveries=FROM_A_NEWER_VERSION)
    drain()
    assert notes() == [2]
    assert QueuedEvent.objects.filter(status="PENDING", crashes=0).count() == 2
    QueuedEvent.objects.update(deliveries=None)
    make_due()
    drain()
    assert notes() == [0, 1, 2]
    assert list(Effect.objects.order_by("id").values_list("note", flat=True)) == ["2", "0", "1"]


def test_events_before_an_unreadable_one_of_their_key_are_handled():
    publish_many((("x", n) for n in range(5)), key="a")
    third = QueuedEvent.objects.order_by("id")[2]
    QueuedEvent.objects.filter(pk=third.pk).update(deliveries=FROM_A_NEWER_VERSION)
    drain()
    assert notes() == [0, 1]
    left = QueuedEvent.objects.order_by("id").values_list("attempts", "crashes", "interruptions")
    assert list(left) == [(1, 0, 1), (0, 0, 0), (0, 0, 0)]


def test_events_before_one_that_crashed_too_often_are_handled_though_it_blocks_its_key(settings):
    settings.EVENTBUS = {"DEAD_HEAD": "block"}
    publish_many((("x", n) for n in range(5)), key="a")
    third = QueuedEvent.objects.order_by("id")[2]
    QueuedEvent.objects.filter(pk=third.pk).update(crashes=3)
    drain()
    assert notes() == [0, 1]
    assert EventLane.objects.get().blocked_by == third.event_id


def test_errors_that_are_not_a_list_only_make_their_event_unreadable():
    poisoned(errors={"written by": "a newer version"})
    drain()
    assert notes() == [n for n in range(21) if n != 10]
    assert neighbours_are_untouched()
    assert QueuedEvent.objects.get().interruptions == 1


def test_an_event_that_crashed_too_often_and_cannot_be_settled_does_not_affect_others():
    poison = poisoned(crashes=3)
    log_entry(event_id=poison.event_id)
    drain()
    assert notes() == [n for n in range(21) if n != 10]
    assert neighbours_are_untouched()
    assert not QueuedEvent.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_result_that_the_log_refuses_leaves_the_event_in_the_queue():
    """The reason does not matter; here it is a constraint of the project."""
    publish_many(("x", n) for n in range(5))
    bad = publish("bad", 5)
    publish_many(("x", n) for n in range(6, 10))
    with log_refuses("type = 'bad'"):
        for _ in range(7):
            drain()
            make_due()
    left = QueuedEvent.objects.get()
    assert (left.event_id, left.status, left.crashes) == (bad.event_id, "PENDING", 0)
    assert left.interruptions == 7
    assert "no_bad" in left.errors[-1]["message"]
    assert notes() == [n for n in range(10) if n != 5]
    assert neighbours_are_untouched()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("key", [None, "a"])
def test_a_polled_event_that_the_log_refuses_waits_and_poll_continues(key):
    publish("bad", 0, key=key)
    publish("x", 1)
    with log_refuses("type = 'bad'"):
        polled = finalized_until_idle()
        assert polled == {"bad": ["refused"], "x": [True]}
        left = QueuedEvent.objects.get()
        assert (left.status, left.crashes, left.interruptions) == ("PENDING", 0, 1)
        assert "no_bad" in left.errors[0]["message"]
        assert not EventWorker.objects.exists()
        let_time_pass()
        assert finalized_until_idle() == {"bad": ["refused"]}
    let_time_pass()
    assert finalized_until_idle() == {"bad": [True]}
    assert not EventLane.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_polled_event_that_the_log_refuses_blocks_only_its_own_key():
    for n, (type_name, key) in enumerate([("bad", "a"), ("x", "a"), ("y", "b")]):
        publish(type_name, n, key=key)
    with log_refuses("type = 'bad'"):
        assert finalized_until_idle() == {"bad": ["refused"], "y": [True]}
    let_time_pass()
    assert finalized_until_idle() == {"bad": [True], "x": [True]}


@pytest.mark.django_db(transaction=True)
def test_a_polled_event_whose_end_the_log_refuses_is_set_aside_by_poll():
    """No caller gets an event that crashed too often, so poll() has to settle it."""
    bad = publish("bad", 0)
    QueuedEvent.objects.filter(pk=bad.pk).update(crashes=3)
    publish("x", 1)
    with log_refuses("type = 'bad'"):
        assert finalized_until_idle() == {"x": [True]}
    assert QueuedEvent.objects.get().interruptions == 1
    let_time_pass()
    assert finalized_until_idle() == {}
    assert logged(bad).error_type == "crashed"


@pytest.mark.django_db(transaction=True)
def test_a_polled_event_that_is_refused_repeatedly_becomes_a_dead_letter(dead_lettered):
    bad = publish("bad", 0)
    with log_refuses("type = 'bad' AND status = 'COMPLETED'"):
        for _ in range(5):
            assert finalized_until_idle() == {"bad": ["refused"]}
            let_time_pass()
        assert finalized_until_idle() == {}
    assert (logged(bad).status, logged(bad).error_type) == ("FAILED", "unsettleable")
    assert len(logged(bad).errors) == 5
    assert dead_lettered == [(bad.event_id, "FAILED")]


@pytest.mark.parametrize(
    "unreadable", [{"deliveries": FROM_A_NEWER_VERSION}, {"errors": {"no": "list"}, "crashes": 3}]
)
def test_poll_sets_aside_an_event_that_cannot_be_read(unreadable):
    poison = publish("bad", 0)
    QueuedEvent.objects.filter(pk=poison.pk).update(**unreadable)
    publish("x", 1)
    assert finalized_until_idle() == {"x": [True]}
    left = QueuedEvent.objects.get()
    assert (left.status, left.interruptions) == ("PENDING", 1)


def finalized_until_idle():
    """Poll and finalize until poll() returns None; return the results of finalize() by type."""
    answers = {}
    for _ in range(9):
        event = poll()
        if event is None:
            return answers
        try:
            answer = finalize(event)
        except UnsettleableError:
            answer = "refused"
        answers.setdefault(event.type, []).append(answer)
    raise AssertionError(f"poll() returns the same events for ever: {answers}")


def test_finalize_removes_an_event_that_is_in_the_log():
    log_entry(event_id=publish("x", {}).event_id)
    event = poll()
    assert finalize(event) is False
    assert not QueuedEvent.objects.exists()
    assert EventLog.objects.count() == 1


def test_a_finalize_that_fails_an_event_sends_the_signal_of_a_dead_letter(dead_lettered):
    published = publish("x", {})
    finalize(poll(), [ValueError("no")], failed=True)
    assert dead_lettered == [(published.event_id, "FAILED")]


def test_an_event_whose_worker_is_repeatedly_killed_outside_of_its_handler_is_dead(
    store, worker_id
):
    """For example because its result cannot be written. No handler is charged."""
    published = publish("x", 0)
    for _ in range(5):
        register_again(store, worker_id)
        (event,) = store.claim("default", limit=1, worker_id=worker_id)
        store.recover_worker(
            worker_id, blamed=[event.row_id], error=ERROR, charge=Charge.INTERRUPTION
        )
    drain()
    (dead,) = dead_letters.list()
    assert (dead.event_id, dead.error_type) == (published.event_id, "interrupted")
    assert (dead.crashes, dead.interruptions, len(dead.errors)) == (0, 5, 5)
    assert notes() == []


def register_again(store, worker_id):
    EventWorker.objects.filter(pk=worker_id).delete()
    store.register(EventWorker(id=worker_id, host="h", pid=1, queues=["default"]))


def test_setting_aside_under_a_lost_claim_changes_nothing(store, worker_id):
    publish("x", {})
    (event,) = store.claim("default", limit=1, worker_id=worker_id)
    other = uuid7()
    became = set_aside(store, other, event.row_id, error=ERROR, delay=1.0, verdict=None)
    assert became is SetAside.LOST
    assert QueuedEvent.objects.get().status == "PROCESSING"


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="SQLite has one writer")
def test_an_event_published_again_behind_an_old_snapshot_is_handled_once(transactional_db):
    """At REPEATABLE READ the log row of an event that has just ended cannot be seen."""
    event_id = uuid7()

    def handle_it_elsewhere():
        publish("x", 1, event_id=event_id)
        drain()
        connection.close()

    with connection.cursor() as cursor:
        if connection.vendor == "mysql":  # On MySQL the statement applies to the next transaction.
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    with transaction.atomic():
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert not EventLog.objects.exists()  # This query takes the snapshot.
        elsewhere = threading.Thread(target=handle_it_elsewhere)
        elsewhere.start()
        elsewhere.join()
        assert not EventLog.objects.exists()
        publish("x", 1, event_id=event_id)
    drain_with_retries()
    assert notes() == [1]
    assert EventLog.objects.count() == 1
    assert not QueuedEvent.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_the_event_of_a_killed_handler_that_the_log_refuses_waits_with_its_key(store, worker_id):
    handler("bad", name="slow", retry={"max_retries": 0})(lambda event: None)
    bad = publish("bad", 0, key="a")
    QueuedEvent.objects.update(deliveries={"h": {"state": "done", "failures": 0}})
    store.claim("default", limit=1, worker_id=worker_id)
    with log_refuses("type = 'bad'"):
        assert kill(store, worker_id, bad)
    left = QueuedEvent.objects.get()
    assert (left.status, left.interruptions, left.crashes) == ("PENDING", 1, 0)
    assert "no_bad" in left.errors[0]["message"]
    lane = EventLane.objects.get()
    assert lane.claim_token is None
    assert lane.ready_at > store.read_clock()


def test_a_kill_whose_event_was_claimed_by_another_worker_changes_nothing(store, worker_id):
    event = publish("x", 0)
    poll()
    assert not kill(store, worker_id, event)
    assert QueuedEvent.objects.get().status == "PROCESSING"


def kill(store, worker_id, event):
    minutes = StatisticsRecorder(worker_id)
    return record_kill(store, minutes, worker_id=worker_id, row_id=event.pk, handler="slow")


def test_the_event_of_a_worker_that_ended_can_be_read_by_its_supervisor(clock):
    store = store_for(clock=clock)
    published = publish("x", {"n": 1})
    event = poll(clock=clock)
    clock.tick(7)
    found = store.find_claimed(event._event.claim.worker_id, published.pk)
    assert (found.event_id, found.payload_json) == (published.event_id, event._event.payload_json)
    assert round((found.database_now() - clock.now).total_seconds()) == 0
    assert store.find_claimed(uuid7(), published.pk) is None


def test_a_dead_letter_with_a_negative_row_id_can_be_retried_under_its_key():
    event = publish("x", 1, key="a")
    QueuedEvent.objects.filter(pk=event.pk).update(id=-5, crashes=3)
    drain()
    assert dead_letters.retry(event.event_id) == 1
    drain()
    assert notes() == [1]
