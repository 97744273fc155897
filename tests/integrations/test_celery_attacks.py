"""Hand-offs beside pauses, limits, outages, lost replies, and each other."""

import json
import time
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest

from django_eventbus import CircuitBreaker, pauses, publish, publish_many, status, subscribe
from django_eventbus.executors import CeleryExecutor
from django_eventbus.integrations import celery_drain
from django_eventbus.models import EventLane, EventLog, EventWorker, FlowControl, QueuedEvent
from django_eventbus.statistics.problems import find_problems
from django_eventbus.store import store_for
from django_eventbus.tasks import deliver
from tests.bus import drain, make_due
from tests.celery_messages import CLOSED_PORT, sent
from tests.shop.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "celery.effect"
OPTIONS = {"name": NAME, "executor": "celery", "retry": {"max_retries": 9, "base_delay": 0.0}}


def write(event):
    Effect.objects.create(event_id=event.id, handler=NAME)


def past():
    return "2000-01-01T00:00:00Z"


@contextmanager
def choices_end():
    """Fail if the choice of a hand-off never ends, instead of waiting for ever."""
    from django_eventbus.flow.hand_offs import HandOffs

    before, calls = HandOffs._holder_of, []

    class Endless(BaseException):
        pass

    def counted(self, handler):
        calls.append(handler)
        if len(calls) > 1000:
            raise Endless
        return before(self, handler)

    HandOffs._holder_of = counted
    try:
        yield
    except Endless:
        pytest.fail("the worker chooses for ever")
    finally:
        HandOffs._holder_of = before


def test_a_breaker_of_a_handler_in_celery_closes_again(app, celery):
    broken = [True]

    def call(event):
        if broken[0]:
            raise ValueError("down")

    subscribe(
        "order.placed",
        call,
        breaker=CircuitBreaker(min_calls=2, failure_rate=0.5, open_for=5.0),
        **OPTIONS,
    )
    publish_many(("order.placed", n) for n in range(3))
    drain()
    celery()
    assert FlowControl.objects.get(kind="handler").opened_at is not None
    broken[0] = False
    for _ in range(5):
        FlowControl.objects.filter(kind="handler").update(probe_at=past(), probe_by="")
        drain()
        celery()
    assert FlowControl.objects.get(kind="handler").opened_at is None
    assert EventLog.objects.count() == 3


def test_with_atomic_event_a_full_window_does_not_block_the_worker(app, celery, settings):
    settings.EVENTBUS = {**settings.EVENTBUS, "HANDOFF_WINDOW": 1, "ATOMIC": "event"}
    subscribe("order.placed", write, **OPTIONS)
    publish_many(("order.placed", n) for n in range(2))
    with choices_end():
        drain()


def test_with_atomic_event_a_closed_broker_does_not_block_the_worker(use, settings):
    settings.EVENTBUS = {**settings.EVENTBUS, "ATOMIC": "event"}
    use(broker=CLOSED_PORT)
    subscribe("order.placed", write, **OPTIONS)
    publish("order.placed")
    with choices_end():
        drain()
        publish("order.placed")
        drain()


def test_with_atomic_event_a_pause_charges_no_attempt(app, settings):
    settings.EVENTBUS = {**settings.EVENTBUS, "ATOMIC": "event"}
    subscribe("order.placed", write, **OPTIONS)
    pauses.pause(handler=NAME)
    publish("order.placed")
    with choices_end():
        drain()
    assert sent(app) == []
    assert QueuedEvent.objects.get().attempts == 0


def test_events_held_by_a_rate_are_not_handed_off_again_and_again(app, celery):
    subscribe("order.placed", write, rate="1/h", **OPTIONS)
    publish_many(("order.placed", n) for n in range(10))
    rounds = []
    for _ in range(8):
        drain()
        rounds.append(sum(len(each["rows"]) for each in celery()))
    print(rounds, Effect.objects.count())
    assert rounds[-1] == 0


def test_a_rate_does_not_double_the_deadline(app, celery):
    subscribe("order.placed", write, rate="1/h", **OPTIONS)
    publish_many(("order.placed", n) for n in range(10))
    for _ in range(5):
        drain()
        celery()
    make_due()
    drain()
    now = store_for().read_clock()
    for each in QueuedEvent.objects.filter(handed_off_to=NAME):
        assert each.available_at - now <= timedelta(seconds=61)


def test_a_broker_outage_does_not_double_the_deadline(use):
    use(broker=CLOSED_PORT)
    subscribe("order.placed", write, **OPTIONS)
    publish("order.placed")
    for _ in range(4):
        FlowControl.objects.filter(kind="executor").update(probe_at=past())
        drain()
    use()
    FlowControl.objects.filter(kind="executor").update(probe_at=past())
    drain()
    row = QueuedEvent.objects.get()
    assert row.handed_off_to == NAME
    assert row.available_at - store_for().read_clock() <= timedelta(seconds=61)


@pytest.mark.parametrize("keys", [(None, None), ("a", "b")], ids=["unkeyed", "keyed"])
def test_a_paused_queue_does_not_fill_the_window_of_other_queues(app, celery, settings, keys):
    settings.EVENTBUS = {
        **settings.EVENTBUS,
        "HANDOFF_WINDOW": 2,
        "QUEUES": ["default", "bulk"],
    }
    subscribe("order.placed", write, **OPTIONS)
    for key in keys:
        publish("order.placed", key=key, queue="bulk")
    drain()
    sent(app)  # lost
    pauses.pause(queue="bulk")
    QueuedEvent.objects.update(available_at=None)  # the deadlines have passed
    EventLane.objects.update(ready_at=past())
    publish("order.placed", "urgent")
    for _ in range(5):
        drain()
        celery()
    assert Effect.objects.count() == 1


def test_a_handler_with_a_wrong_celery_queue_does_not_stop_other_handlers(use):
    app = use(task_create_missing_queues=False)
    subscribe("bad", write, name="bad", executor=CeleryExecutor(queue="missing"))
    subscribe("good", write, name="good", executor="celery")
    publish_many(("bad", n) for n in range(60))
    drain()
    assert FlowControl.objects.get(kind="executor").opened_at is None
    publish("good")
    got = []
    drain()
    for _ in range(5):
        FlowControl.objects.filter(kind="executor").update(probe_at=past())
        drain()
        got += sent(app)
    assert [each["handler"] for each in got] == ["good"]


def test_the_status_shows_a_handler_whose_messages_cannot_be_sent(use):
    use(task_create_missing_queues=False)
    wrong = subscribe("bad", write, name="bad", executor=CeleryExecutor(queue="missing"))
    publish("bad")
    drain()
    (problem,) = (each.text for each in find_problems(status.look()) if each.about == "executors")
    assert problem.startswith("For ")
    assert ", no event of bad could be handed off, " in problem
    assert "although the broker is available: " in problem
    assert "missing" in problem
    use(task_create_missing_queues=True)
    make_due()
    drain()
    assert not [each for each in find_problems(status.look()) if each.about == "executors"]
    assert FlowControl.objects.get(kind="handler", name=wrong.name).send_error == ""


def test_drain_releases_events_of_a_deleted_flow_control():
    subscribe("x", lambda event: None, name="x")
    pauses.pause(type="x")
    publish("x")
    celery_drain.drain()
    FlowControl.objects.all().delete()
    for _ in range(3):
        celery_drain.drain()
    assert EventLog.objects.count() == 1


def test_drain_requests_another_run_after_its_seconds(monkeypatch):
    asked = []
    monkeypatch.setattr(celery_drain, "request", asked.append)
    subscribe("x", lambda event: None, name="x")
    publish_many(("x", n) for n in range(50))
    celery_drain.drain(max_seconds=0.0)
    assert QueuedEvent.objects.exists()
    assert asked == ["default"]


def test_a_thread_reports_between_the_messages_of_a_slow_broker(app, monkeypatch):
    from django_eventbus.delivery import handing_off
    from django_eventbus.worker.threads import Delivery

    dues = []
    boards = []
    init = Delivery.__init__

    def spy(self, worker, index):
        init(self, worker, index)
        boards.append(worker.board)

    monkeypatch.setattr(Delivery, "__init__", spy)

    def slow(executor, message, expires):
        dues.append(boards[-1].expected_by())
        time.sleep(0.05)

    monkeypatch.setattr(handing_off, "_sender", lambda path: slow)
    subscribe("order.placed", write, name=NAME, executor=CeleryExecutor(batch=1))
    publish_many(("order.placed", n) for n in range(5))
    drain()
    assert len(dues) == 5
    assert dues == sorted(set(dues))


def test_the_slots_of_a_local_handler_are_free_while_messages_are_sent(app, monkeypatch):
    from django_eventbus.delivery import handing_off

    seen = []

    def slow(executor, message, expires):
        seen.append(FlowControl.objects.get(kind="handler", name="local").running)

    monkeypatch.setattr(handing_off, "_sender", lambda path: slow)
    subscribe("order.placed", write, **OPTIONS)
    subscribe("order.placed", lambda event: None, name="local", max_running=1)
    publish("order.placed")
    drain()
    assert seen == [{}]


# -- controls: these show that the tests above fail for the stated reason


# -- more attacks


@pytest.mark.parametrize("key", [None, "k"])
def test_an_event_is_handed_off_again_after_a_real_deadline(app, celery, settings, key):
    settings.EVENTBUS = {**settings.EVENTBUS, "HANDOFF_DEADLINE": 0.3}
    subscribe("order.placed", write, **OPTIONS)
    publish("order.placed", key=key)
    drain()
    sent(app)
    time.sleep(0.5)
    drain()
    assert len(celery()) == 1
    assert Effect.objects.count() == 1


def test_a_message_does_not_release_the_events_of_several_pauses(app):
    subscribe("order.placed", write, **OPTIONS)
    for name in ("one", "two"):
        subscribe("a", write, name=name)
        pauses.pause(handler=name)
    publish("order.placed")
    drain()
    publish_many(("a", n) for n in range(5))
    drain()
    held = QueuedEvent.objects.filter(type="a", held_by__isnull=False)
    assert held.count() == 5
    (message,) = sent(app)
    deliver(**message)
    assert held.count() == 5


def test_without_event_workers_the_next_event_of_a_key_is_requested(app, settings, monkeypatch):
    settings.EVENTBUS = {**settings.EVENTBUS, "CELERY_DRAIN": True}
    asked = []
    monkeypatch.setattr(celery_drain, "request", asked.append)
    subscribe("order.placed", write, **OPTIONS)
    publish_many((("order.placed", n) for n in range(3)), key="k")
    celery_drain.drain()
    asked.clear()
    (message,) = sent(app)
    deliver(**message)
    assert EventLog.objects.count() == 1
    assert asked == ["default"]


def test_a_late_message_finds_no_event_that_was_cancelled_or_run_now(app, celery):
    from django_eventbus import queued

    subscribe("order.placed", write, **OPTIONS)
    first = publish("order.placed", key="k")
    publish("order.placed", key="k")
    drain()
    (old,) = sent(app)
    assert queued.run_now([first.event_id]) == 1
    deliver(**old)
    assert Effect.objects.count() == 1
    drain()
    (second,) = sent(app)
    assert queued.cancel([QueuedEvent.objects.get().event_id]) == 1
    deliver(**second)
    assert Effect.objects.count() == 1
    assert not EventLane.objects.filter(claim_token__isnull=False).exists()


def test_a_busy_celery_process_with_more_handlers_does_not_stop_completion(app):
    """Celery imports tasks.py, and a handler is declared there; event workers do not import it."""
    calls = []
    subscribe("x", calls.append, name="local")
    other = EventWorker(
        id="01a1edf3-0000-7000-8000-000000000001",
        host="celery",
        pid=1,
        queues=["default"],
        handlers={"local": ["x"], "only.celery": ["x"]},
        handlers_digest="other",
    )
    store_for().register(other)
    publish("x")
    for _ in range(4):
        drain()
        QueuedEvent.objects.update(available_at=None)
    row = QueuedEvent.objects.first()
    print(len(calls), row and (row.attempts, row.deliveries))
    assert row is None or row.attempts <= 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("atomic", [True, False])
def test_random_sequences_keep_order_and_effects(app, settings, seed, atomic):
    import random

    from django_eventbus import queued

    rng = random.Random(seed)
    settings.EVENTBUS = {**settings.EVENTBUS, "HANDOFF_WINDOW": rng.choice([1, 2, 5])}
    seen, failed = {}, set()

    def call(event):
        if atomic:
            write(event)
        if rng.random() < 0.2 and event.id not in failed:
            failed.add(event.id)
            raise ValueError("once")
        seen.setdefault(event.key, []).append(event.payload)

    local = {}

    def locally(event):
        local.setdefault(event.key, []).append(event.payload)

    subscribe(
        "x",
        call,
        name=NAME,
        executor=CeleryExecutor(batch=rng.choice([1, 3])),
        atomic=atomic,
        retry={"max_retries": 5, "base_delay": 0.0},
    )
    subscribe("x", locally, name="local")
    for n in range(24):
        key = rng.choice(["a", "b", None])
        publish("x", n, **({"key": key} if key else {}))
    old = []
    for _turn in range(200):
        if not QueuedEvent.objects.exists():
            break
        act = rng.random()
        drain()
        got = sent(app)
        rng.shuffle(got)
        for each in got:
            if rng.random() < 0.2:
                old.append(each)
                continue
            for _ in range(rng.choice([1, 1, 2])):
                deliver(**json.loads(json.dumps(each)))
        if old and rng.random() < 0.5:
            deliver(**rng.choice(old))
        if act < 0.2:
            make_due()
        elif act < 0.3:
            queued.run_now(list(QueuedEvent.objects.values_list("event_id", flat=True)))
        elif act < 0.35:
            pauses.pause(handler=NAME)
        elif act < 0.5:
            pauses.resume(handler=NAME)
    assert not QueuedEvent.objects.exists()
    assert EventLog.objects.filter(status="COMPLETED").count() == 24
    if atomic:
        assert Effect.objects.count() == 24
    assert sum(map(len, seen.values())) == 24
    for key in ("a", "b"):
        assert seen.get(key, []) == sorted(seen.get(key, []))
        assert local.get(key, []) == sorted(local.get(key, []))
    assert not EventLane.objects.exists()
    assert not EventWorker.objects.exists()


@pytest.fixture
def failpoint():
    from django_eventbus.errors import failpoints

    def once(name, error, times=1):
        left = [times]

        def act(reached):
            if reached == name and left[0]:
                left[0] -= 1
                raise error

        failpoints.on_reaching = act

    yield once
    failpoints.on_reaching = None


def local_effect(event):
    Effect.objects.create(event_id=event.id, handler="local")


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize(
    "where", ["settle.committed", "settle.before_commit", "hand_off.before_send"]
)
@pytest.mark.parametrize("isolated", [False, True])
def test_a_lost_reply_or_a_failed_batch_of_the_worker_has_no_effect(
    app, celery, failpoint, key, where, isolated
):
    from django.db import OperationalError

    subscribe("order.placed", write, isolated=isolated, **OPTIONS)
    subscribe("order.placed", local_effect, name="local", isolated=isolated)
    for _ in range(3):
        publish("order.placed", key=key)
    failpoint(where, OperationalError("server closed the connection unexpectedly"))
    for _ in range(8):
        drain()
        celery()
        make_due()
    assert EventLog.objects.filter(status="COMPLETED").count() == 3
    assert Effect.objects.filter(handler=NAME).count() == 3
    assert Effect.objects.filter(handler="local").count() == 3
    assert {(each.crashes, each.interruptions) for each in EventLog.objects.all()} == {(0, 0)}


@pytest.mark.parametrize(
    "where", ["settle.committed", "settle.before_commit", "handed_off.claimed"]
)
def test_a_lost_reply_in_celery_has_no_effect(app, celery, failpoint, where):
    from django.db import OperationalError

    subscribe("order.placed", write, **OPTIONS)
    for n in range(3):
        publish("order.placed", key="k" if n else None)
    drain()
    failpoint(where, OperationalError("server closed the connection unexpectedly"))
    for _ in range(8):
        with suppress(OperationalError):
            celery()
        make_due()
        drain()
    assert EventLog.objects.filter(status="COMPLETED").count() == 3
    assert Effect.objects.count() == 3
    assert {(each.crashes, each.interruptions) for each in EventLog.objects.all()} == {(0, 0)}
    assert not EventWorker.objects.exists()


@pytest.mark.parametrize("key", [None, "k"])
def test_a_handler_moves_to_the_worker_while_handed_off(app, celery, key):
    from django_eventbus.registry import unsubscribe

    before = subscribe("order.placed", write, **OPTIONS)
    publish("order.placed", key=key)
    drain()
    unsubscribe(before)
    subscribe("order.placed", write, **OPTIONS | {"executor": "worker"})
    celery()
    assert not Effect.objects.exists()
    make_due()
    drain()
    assert Effect.objects.count() == EventLog.objects.count() == 1


def test_a_blocked_lane_is_not_claimed_by_a_message(app, celery, settings):
    from django_eventbus import dead_letters

    settings.EVENTBUS = {**settings.EVENTBUS, "DEAD_HEAD": "block"}
    broken, seen = [True], []

    def call(event):
        if broken[0]:
            raise ValueError("x")
        seen.append(event.payload)

    subscribe("order.placed", call, **OPTIONS | {"retry": {"max_retries": 0}})
    publish_many((("order.placed", n) for n in range(3)), key="k")
    for _ in range(3):
        drain()
        celery()
        make_due()
    assert EventLog.objects.count() == 1
    broken[0] = False
    assert dead_letters.retry(type="*") == 1
    for _ in range(4):
        drain()
        celery()
        make_due()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("ends", ["first", "second"])
def test_two_processes_claim_two_messages_at_a_time(app, ends):
    """The claim of one message must not hide the events of the other message."""
    import threading
    import uuid

    from django.db import connection, connections, transaction

    if connection.vendor == "sqlite":
        pytest.skip("one writer at a time")
    subscribe("order.placed", write, name=NAME, executor=CeleryExecutor(batch=5))
    publish_many(("order.placed", n) for n in range(10))
    drain()
    both = sorted(sent(app), key=lambda each: min(each["rows"]))
    mine, other = both if ends == "first" else both[::-1]
    claimed, done = threading.Event(), threading.Event()
    errors = []

    def claim_slowly():
        try:
            store = store_for()
            process = EventWorker(id=uuid.uuid4(), host="slow", pid=1, queues=["default"])
            store.register(process)
            with transaction.atomic():
                store.claim_handed_off(
                    "default",
                    other["rows"],
                    handlers=[NAME],
                    limit=50,
                    limit_of_others=50,
                    token=uuid.UUID(other["token"]),
                    worker_id=process.pk,
                )
                claimed.set()
                done.wait(20)
        except BaseException as error:
            errors.append(error)
            claimed.set()
        finally:
            connections.close_all()

    thread = threading.Thread(target=claim_slowly)
    thread.start()
    claimed.wait(20)
    try:
        deliver(**mine)
        assert Effect.objects.count() == 5
    finally:
        done.set()
        thread.join()
    assert errors == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_races_of_deadline_and_claim_keep_one_effect(app, settings, seed, transactional_db):
    import queue
    import random
    import threading

    from django.db import connection, connections

    if connection.vendor == "sqlite":
        pytest.skip("one writer at a time")
    settings.EVENTBUS = {**settings.EVENTBUS, "HANDOFF_DEADLINE": 0.05, "HANDOFF_WINDOW": 20}
    order, lock, errors = {}, threading.Lock(), []

    def call(event):
        write(event)
        time.sleep(random.random() * 0.01)
        with lock:
            order.setdefault(event.key, []).append(event.payload)

    subscribe("x", call, name=NAME, executor=CeleryExecutor(batch=3))
    for n in range(120):
        key = random.choice(["a", "b", "c", None])
        publish("x", n, **({"key": key} if key else {}))
    work, ends = queue.Queue(), time.monotonic() + 300

    def over():
        return time.monotonic() > ends or not QueuedEvent.objects.exists()

    def loop(action):
        try:
            while not over():
                action()
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    def feed():
        for each in sent(app):
            work.put(each)
        time.sleep(0.01)

    def handle():
        try:
            each = work.get(timeout=0.1)
        except queue.Empty:
            return
        time.sleep(random.random() * 0.1)
        deliver(**each)

    jobs = [drain, drain, feed, handle, handle, handle]
    threads = [threading.Thread(target=loop, args=(each,)) for each in jobs]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []
    assert Effect.objects.count() == EventLog.objects.count()
    assert not QueuedEvent.objects.exists()
    assert Effect.objects.count() == 120
    assert {(e.crashes, e.interruptions) for e in EventLog.objects.all()} == {(0, 0)}
    for key in ("a", "b", "c"):
        assert order[key] == sorted(order[key])


def test_events_that_wait_for_a_slot_are_not_handed_off_again_and_again(app, celery):
    import uuid

    subscribe("order.placed", write, max_running=1, **OPTIONS)
    busy = EventWorker(id=uuid.uuid4(), host="busy", pid=1, queues=["default"])
    store_for().register(busy)
    publish_many(("order.placed", n) for n in range(10))
    drain()
    FlowControl.objects.filter(kind="handler").update(running={f"{busy.pk}/0": 1})
    rounds = []
    for _ in range(6):
        rounds.append(sum(len(each["rows"]) for each in celery()))
        drain()
    print(rounds)
    assert rounds[-1] == 0
