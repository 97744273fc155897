"""Replay: copy ended events into the queue again, for all handlers or for one."""

from datetime import timedelta

import pytest

from django_eventbus import publish, replay
from django_eventbus.exceptions import EventBusError
from django_eventbus.models import EventLog, QueuedEvent, ReplayState
from django_eventbus.registry import handler, subscribe
from django_eventbus.retries import RetryPolicy
from django_eventbus.store import store_for
from django_eventbus.testing import drain

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _step_handler():
    """Each test begins with an empty registry."""
    replay.register()


def handled(name="projection", subject="order.*", **options):
    """Register a handler that collects its events, and return the list."""
    seen = []
    subscribe(subject, seen.append, name=name, **options)
    return seen


def replay_all(**filters):
    """Start a replay and handle its steps and copies."""
    started = replay.start(**{"type": "order.*", **filters})
    drain(until=timedelta(minutes=10))
    started.refresh_from_db()
    return started


def test_a_completed_event_is_handled_again_by_all_its_handlers():
    """M36"""
    first, second = handled("first"), handled("second")
    event = publish("order.placed", {"id": 1}, key="order:1", headers={"a": "b"})
    drain()
    replay_all()
    assert len(first) == len(second) == 2
    copy = first[1]
    assert (copy.payload, copy.headers, copy.key) == ({"id": 1}, {"a": "b"}, "order:1")
    assert [each.is_replay for each in first] == [False, True]
    assert copy.id != copy.original_id == event.event_id
    assert copy.created_at == first[0].created_at
    assert copy.idempotency_key == first[0].idempotency_key


def test_a_replay_to_one_handler_does_not_touch_the_others():
    """M36"""
    old = handled("old")
    publish("order.placed", {"id": 1})
    drain()
    new = handled("new")
    replay_all(handler="new")
    assert [each.payload for each in new] == [{"id": 1}]
    assert len(old) == 1


def test_a_dead_letter_is_replayed_and_stays_a_dead_letter():
    """M36"""
    broken = True

    @handler("order.placed", name="shop.reserve", retry=RetryPolicy(max_retries=0))
    def reserve(event):
        if broken:
            raise ValueError("no stock")

    publish("order.placed", {"id": 1})
    drain(raise_errors=False)
    broken = False
    started = replay_all(status="dead")
    assert started.copied == 1
    original, copy = EventLog.objects.exclude(type=replay.STEP).order_by("id")
    assert (original.status, copy.status) == ("FAILED", "COMPLETED")
    assert copy.replay_of == original.event_id


def test_a_handler_can_refuse_replays():
    mails, rows = handled("mails", replay=False), handled("rows")
    publish("order.placed")
    drain()
    replay_all()
    assert (len(mails), len(rows)) == (1, 2)
    with pytest.raises(EventBusError, match="declared with replay=False"):
        replay.start(type="order.*", handler="mails")


def test_a_copy_ends_at_once_if_all_its_handlers_refuse_replays():
    handled("mails", replay=False)
    publish("order.placed")
    drain()
    replay_all()
    copy = EventLog.objects.get(replay_id__isnull=False)
    assert (copy.status, copy.errors) == ("COMPLETED", None)


def test_a_copy_keeps_its_only_handler_through_retries_and_death():
    others, fails = handled("others"), []
    publish("order.placed")
    drain()

    @handler("order.placed", name="new", retry=RetryPolicy(max_retries=1))
    def fail(event):
        fails.append(event.attempt)
        raise ValueError("broken")

    replay.start(type="order.placed", handler="new")
    drain(until=timedelta(minutes=10), raise_errors=False)
    assert (len(others), fails) == (1, [1, 2])
    dead = EventLog.objects.get(status="FAILED")
    assert (dead.dead_handler, dead.only_handler) == ("new", "new")


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"type": "order.*"}, [1, 2, 3]),
        ({"type": "order.placed"}, [1, 3]),
        ({"type": "*"}, [1, 2, 3, 4]),
        ({"key": "order:3"}, [3]),
        ({"status": "completed"}, [1, 2, 3]),
        ({"status": "dead"}, [4]),
        ({"type": "order.*", "status": "failed"}, []),
    ],
)
def test_filters_select_events(filters, expected):
    handled()
    handled("mail", "mail.sent", retry=RetryPolicy(max_retries=0))

    @handler("mail.sent", name="broken", retry=RetryPolicy(max_retries=0))
    def fail(event):
        raise ValueError("broken")

    publish("order.placed", 1)
    publish("order.paid", 2)
    publish("order.placed", 3, key="order:3")
    publish("mail.sent", 4)
    drain(raise_errors=False)
    assert replay.prepare(**filters).total == len(expected)
    replay.start(**filters)
    drain(until=timedelta(seconds=2), raise_errors=False)
    store = store_for()
    copies = [
        *store.queued.filter(replay_id__isnull=False).values_list("payload", flat=True),
        *EventLog.objects.filter(replay_id__isnull=False).values_list("payload", flat=True),
    ]
    assert sorted(copies) == expected


def test_the_period_includes_its_start_and_excludes_its_end():
    handled()
    for number in range(3):
        publish("order.placed", number)
        drain()
    ends = list(EventLog.objects.order_by("finished_at").values_list("finished_at", flat=True))
    assert replay.prepare(since=ends[1]).total == 2
    assert replay.prepare(until=ends[1]).total == 1
    assert replay.prepare(since=ends[0], until=ends[2]).total == 2


def test_copies_of_a_key_are_handled_in_the_order_of_their_originals(monkeypatch):
    monkeypatch.setattr(replay, "STEP_SIZE", 7)
    seen = handled()
    for number in range(50):
        publish("order.placed", number, key=f"order:{number % 3}")
    drain()
    seen.clear()
    replay_all()
    for key in range(3):
        numbers = [each.payload for each in seen if each.key == f"order:{key}"]
        assert numbers == list(range(key, 50, 3))


def test_a_step_that_is_rolled_back_leaves_no_gap_and_no_second_copy(monkeypatch):
    monkeypatch.setattr(replay, "STEP_SIZE", 4)
    seen = handled()
    for number in range(10):
        publish("order.placed", number)
    drain()
    seen.clear()
    publish_step, failed = replay._publish_step, []

    def fail_sometimes(replayed, store, delay=None):
        publish_step(replayed, store, delay)
        if delay != replay.FIRST_STEP_AFTER and len(failed) < 2:
            failed.append(True)
            raise ValueError("after the copy")

    monkeypatch.setattr(replay, "_publish_step", fail_sometimes)
    replay.start(type="order.*")
    drain(until=timedelta(minutes=10), raise_errors=False)
    assert len(failed) == 2
    assert sorted(each.payload for each in seen) == list(range(10))


def test_copies_are_not_replayed_again():
    seen = handled()
    publish("order.placed")
    drain()
    replay_all()
    replay_all(type="*")
    assert len(seen) == 3


def test_a_rate_limits_the_copies_per_second():
    handled()
    for number in range(10):
        publish("order.placed", number)
    drain()
    started = replay.start(type="order.*", rate=4)
    steps = QueuedEvent.objects.filter(type=replay.STEP)
    steps.delete()
    for copied in (4, 8):
        replay.take_step(step_of(started))
        assert replay.status(started).copied == copied
        step = steps.get()
        assert step.due_at - step.created_at == timedelta(seconds=1)
        steps.delete()
    replay.take_step(step_of(started))
    assert replay.status(started).state == ReplayState.COPIED


def test_a_cancelled_replay_copies_no_further_event_and_deletes_its_waiting_copies():
    seen = handled()
    for number in range(10):
        publish("order.placed", number, key="one" if number % 2 else None)
    drain()
    seen.clear()
    started = replay.start(type="order.*", rate=4)
    drain(queues=("mail",), until=timedelta(seconds=1))
    replay.take_step(step_of(started))
    assert replay.status(started).waiting == 4
    assert replay.cancel(started)
    drain(until=timedelta(minutes=1))
    assert seen == []
    progress = replay.status(started)
    assert (progress.state, progress.handled, progress.waiting) == (ReplayState.CANCELLED, 0, 0)
    assert progress.is_over
    assert not replay.cancel(started)


def step_of(started):
    class Step:
        payload = {"replay": started.pk}
        using = "default"

    return Step()


def test_the_progress_of_a_replay_is_shown():
    handled()
    for number in range(3):
        publish("order.placed", number)
    drain()
    started = replay.start(type="order.*", by="ada")
    assert replay.status(started) == replay.ReplayStatus(
        state=ReplayState.STARTING, total=3, copied=0, waiting=0, dead=0
    )
    drain(until=timedelta(minutes=1))
    progress = replay.status(started.pk)
    assert (progress.state, progress.handled, progress.is_over) == (ReplayState.COPIED, 3, True)
    assert [each.created_by for each in replay.list()] == ["ada"]


def test_the_copies_of_a_replay_do_not_fill_the_queue(monkeypatch):
    monkeypatch.setattr(replay, "MOST_WAITING", 6)
    seen, most = [], []

    def record(event):
        seen.append(event)
        if event.is_replay:
            most.append(QueuedEvent.objects.filter(replay_id__isnull=False).count())

    subscribe("order.*", record, name="shop.record")
    for number in range(20):
        publish("order.placed", number)
    drain()
    replay_all()
    assert len(seen) == 40
    assert max(most) <= 6


def test_limits_do_not_apply_to_steps(settings):
    settings.EVENTBUS = {
        **settings.EVENTBUS,
        "LIMITS": {"default": {"max_size": 1, "overflow": "drop"}},
    }
    seen = handled()
    publish("order.placed")
    drain()
    publish("order.placed", delay=3600)
    replay.start(type="order.*")
    drain(until=timedelta(minutes=1))
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass a filter"),
        ({"type": "order.*.paid"}, "only at its end"),
        ({"type": "*", "handler": "shop.projektion"}, "no handler 'shop.projektion'"),
        ({"type": "mail.sent", "handler": "projection"}, "does not handle"),
        ({"type": "*", "status": "done"}, "status must be one of"),
        ({"type": "*", "rate": 0}, "more than 0"),
        ({"type": "*", "rate": float("nan")}, "more than 0"),
        ({"type": "*", "queue": "nowhere"}, "nowhere"),
        ({"event_id": []}, None),
    ],
)
def test_a_replay_refuses_wrong_arguments(arguments, message):
    handled()
    if message is None:
        assert replay.start(**arguments).total == 0
        return
    with pytest.raises(EventBusError, match=message):
        replay.start(**arguments)


def test_single_events_can_be_replayed():
    seen = handled()
    events = [publish("order.placed", number) for number in range(3)]
    drain()
    seen.clear()
    replay_all(type="", event_id=[events[0].event_id, events[2].event_id])
    assert sorted(each.payload for each in seen) == [0, 2]


def test_a_replay_that_has_copied_all_events_can_be_cancelled():
    seen = handled()
    publish("order.placed")
    drain()
    started = replay.start(type="order.*")
    replay.take_step(step_of(started))
    assert replay.status(started).state == ReplayState.COPIED
    assert replay.cancel(started)
    assert replay.status(started).state == ReplayState.CANCELLED
    assert replay.status(started).handled == 0
    drain(until=timedelta(minutes=1))
    assert len(seen) == 1


def test_only_events_that_the_handler_handles_are_selected():
    handled("orders")
    handled("pairs", "pair.*.done")
    for type_name in ("order.placed", "pair.a.done", "pair.a.begun", "mail.sent"):
        publish(type_name, type_name)
    handled("rest", "*")
    drain()
    assert replay.prepare(type="*", handler="orders").total == 1
    assert replay.prepare(type="*", handler="pairs").total == 2


def test_a_copy_that_its_only_handler_does_not_handle_ends_at_once():
    """The selection ends a pattern after its first ``*``, so it may contain other types."""
    pairs = handled("pairs", "pair.*.done")
    handled("rest", "pair.*")
    publish("pair.a.begun")
    drain()
    replay_all(type="pair.*", handler="pairs")
    assert pairs == []
    assert EventLog.objects.get(replay_id__isnull=False).status == "COMPLETED"
