"""Handlers that run in Celery workers: the hand-off, the messages and their delivery."""

import uuid
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import dead_letters, handler, pauses, publish, publish_many, subscribe, testing
from django_eventbus.delivery.deadlines import Watch
from django_eventbus.exceptions import EventBusError
from django_eventbus.executors import CeleryExecutor
from django_eventbus.integrations import celery_executor
from django_eventbus.models import EventLane, EventLog, EventWorker, FlowControl, QueuedEvent
from django_eventbus.registry import unsubscribe
from django_eventbus.store import store_for
from django_eventbus.tasks import deliver
from django_eventbus.worker.claiming import Pace
from django_eventbus.worker.registration import Heartbeat, WorkerOptions, new_registration
from django_eventbus.worker.worker import Worker
from tests.bus import drain, let_hand_off_expire, make_due
from tests.celery_messages import CLOSED_PORT, sent
from tests.shop.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "celery.effect"
OPTIONS = {"name": NAME, "executor": "celery", "retry": {"max_retries": 1, "base_delay": 0.0}}


def write(event):
    Effect.objects.create(event_id=event.id, handler=NAME)


@pytest.fixture
def effects():
    """A handler in Celery that writes a row for each event."""
    return subscribe("order.placed", write, **OPTIONS)


def queued():
    return QueuedEvent.objects.get()


# -- the way of an event


def test_an_event_is_handed_off_and_handled_by_celery(celery, effects):
    event = publish("order.placed", {"n": 1})
    drain()
    assert (queued().status, queued().handed_off_to, queued().attempts) == ("PENDING", NAME, 0)
    assert not Effect.objects.exists()
    (message,) = celery()
    assert message["handler"] == NAME
    logged = EventLog.objects.get()
    assert (logged.status, logged.attempts, logged.crashes) == ("COMPLETED", 1, 0)
    assert Effect.objects.get().event_id == event.event_id
    assert not EventWorker.objects.exists()


def test_the_log_shows_when_and_to_whom_an_event_was_handed_off(celery, effects):
    publish("order.placed")
    drain()
    celery()
    state = EventLog.objects.get().deliveries[NAME]
    assert state["state"] == "done"
    assert state["handed_off_at"] <= state["picked_up_at"] <= state["at"]
    assert state["by"].startswith("celery ")


def test_handlers_of_the_worker_run_before_the_hand_off(celery, effects):
    calls = []
    handler("order.placed", name="local")(lambda event: calls.append("local"))
    publish("order.placed")
    drain()
    assert calls == ["local"]
    celery()
    drain()
    assert calls == ["local"]
    assert EventLog.objects.get().status == "COMPLETED"
    assert Effect.objects.count() == 1


def test_handlers_with_the_same_executor_run_after_one_hand_off(celery, effects):
    subscribe("order.*", write, name="second", executor="celery")
    publish("order.placed")
    drain()
    assert len(celery()) == 1
    assert Effect.objects.count() == 2
    assert EventLog.objects.get().status == "COMPLETED"


def test_an_event_is_handed_off_to_one_executor_after_the_other(celery, effects):
    subscribe("order.*", write, name="second", executor=CeleryExecutor(priority=3))
    publish("order.placed")
    for name in (NAME, "second"):
        drain()
        (message,) = celery()
        assert message["handler"] == name
    assert Effect.objects.count() == 2
    assert EventLog.objects.get().status == "COMPLETED"


def test_a_handler_of_the_worker_that_failed_is_retried_beside_a_hand_off(celery, effects):
    calls = []

    def fail_once(event):
        calls.append(event.id)
        if len(calls) == 1:
            raise ValueError("no stock")

    handler("order.placed", name="local", retry={"base_delay": 0.0})(fail_once)
    publish("order.placed")
    drain()
    celery()
    drain()
    celery()
    assert len(calls) == 2
    assert Effect.objects.count() == 1
    assert EventLog.objects.get().status == "COMPLETED"


def test_a_coroutine_can_run_in_celery(celery):
    calls = []

    async def notify(event):
        calls.append(event.id)

    subscribe("order.placed", notify, name="async", executor="celery")
    publish("order.placed")
    drain()
    celery()
    assert len(calls) == EventLog.objects.count() == 1


def test_drain_of_the_test_helpers_runs_handlers_of_all_executors(app, effects):
    publish("order.placed")
    testing.drain()
    assert Effect.objects.count() == EventLog.objects.count() == 1
    assert sent(app) == []


def test_with_eager_tasks_the_worker_delivers_at_once(use, effects):
    app = use(task_always_eager=True)
    app.task(name=celery_executor.DELIVER, shared=False)(deliver)
    publish("order.placed")
    drain()
    assert Effect.objects.count() == EventLog.objects.count() == 1


# -- messages


def test_a_message_has_up_to_batch_events(celery):
    executor = CeleryExecutor(batch=4)
    subscribe("order.placed", write, name=NAME, executor=executor)
    publish_many(("order.placed", n) for n in range(10))
    drain()
    assert sorted(len(each["rows"]) for each in celery()) == [2, 4, 4]
    assert Effect.objects.count() == EventLog.objects.count() == 10


def test_a_message_has_the_options_of_its_executor(app):
    executor = CeleryExecutor(queue=app.conf.task_default_queue, priority=3)
    subscribe("order.placed", write, name=NAME, executor=executor)
    publish("order.placed")
    drain()
    with app.connection_for_read() as broker:
        queue = app.amqp.queues[app.conf.task_default_queue].bind(broker.default_channel)
        message = queue.get(no_ack=True)
    assert message.properties["priority"] == 3
    assert message.headers["expires"] is not None
    assert message.headers["ignore_result"] is True
    assert message.content_type == "application/json"


def test_a_message_is_json_even_if_the_project_pickles_its_tasks(use, effects):
    app = use(task_serializer="pickle")
    publish("order.placed")
    drain()
    with app.connection_for_read() as broker:
        queue = app.amqp.queues[app.conf.task_default_queue].bind(broker.default_channel)
        assert queue.get(no_ack=True).content_type == "application/json"


def test_a_message_that_is_delivered_three_times_has_one_effect(celery, effects):
    publish_many(("order.placed", n) for n in range(5))
    drain()
    celery(times=3)
    assert Effect.objects.count() == EventLog.objects.count() == 5


def test_a_lost_message_is_sent_again_after_the_deadline(app, celery, effects):
    publish("order.placed")
    drain()
    (lost,) = sent(app)
    make_due()
    drain()
    (again,) = celery()
    assert again["rows"] == lost["rows"]
    assert again["token"] != lost["token"]
    assert Effect.objects.count() == EventLog.objects.count() == 1


def test_a_late_message_has_no_effect_after_the_event_was_handed_off_again(app, effects):
    publish("order.placed")
    drain()
    (late,) = sent(app)
    make_due()
    drain()
    deliver(**late)
    assert not Effect.objects.exists()
    assert queued().handed_off_to == NAME


def test_the_deadline_is_a_setting(app, effects, settings):
    settings.EVENTBUS = {**settings.EVENTBUS, "HANDOFF_DEADLINE": 500.0}
    publish("order.placed")
    drain()
    wait = queued().available_at - store_for().read_clock()
    assert timedelta(seconds=490) < wait <= timedelta(seconds=500)


def test_the_deadline_doubles_each_time_that_it_passes(app, effects):
    """With a constant deadline, no message would be in time behind a long backlog."""
    publish("order.placed")
    waits = []
    for _ in range(8):
        drain()
        waits.append(round((queued().available_at - store_for().read_clock()).total_seconds()))
        let_hand_off_expire()
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600]


# -- keys


def test_events_of_a_key_run_in_order_in_celery(celery):
    seen = []
    subscribe("order.placed", lambda event: seen.append(event.payload), **OPTIONS)
    publish_many((("order.placed", n) for n in range(5)), key="order:1")
    for _ in range(5):
        drain()
        celery()
    assert seen == [0, 1, 2, 3, 4]
    assert EventLog.objects.count() == 5


def test_a_handed_off_event_blocks_the_later_events_of_its_key(app, effects):
    publish_many((("order.placed", n) for n in range(3)), key="order:1")
    drain()
    drain()
    ((row,),) = (each["rows"] for each in sent(app))
    assert row == QueuedEvent.objects.order_by("id").first().pk
    assert QueuedEvent.objects.filter(handed_off_to=NAME).count() == 1


def test_a_lost_message_of_a_key_is_sent_again_after_the_deadline(app, celery, effects):
    publish("order.placed", key="order:1")
    drain()
    sent(app)
    make_due()
    drain()
    celery()
    assert Effect.objects.count() == EventLog.objects.count() == 1
    assert not EventLane.objects.exists()


# -- failures


def test_a_failed_attempt_in_celery_is_retried_and_dies_by_the_policy(celery):
    def fail(event):
        raise ValueError("no stock")

    subscription = subscribe("order.placed", fail, **OPTIONS)
    publish("order.placed")
    for _ in range(2):
        drain()
        celery()
    letter = EventLog.objects.get()
    assert (letter.status, letter.dead_handler) == ("FAILED", NAME)
    assert [each["attempt"] for each in letter.errors] == [1, 2]
    unsubscribe(subscription)
    subscribe("order.placed", write, **OPTIONS)
    assert dead_letters.retry(type="*") == 1
    drain()
    celery()
    assert EventLog.objects.get().status == "COMPLETED"


def test_a_failed_event_does_not_roll_back_the_others_of_its_message(celery):
    def fail_for_two(event):
        write(event)
        if event.payload == 2:
            raise ValueError("no stock")

    subscribe("order.placed", fail_for_two, name=NAME, executor="celery", retry={"max_retries": 0})
    publish_many(("order.placed", n) for n in range(5))
    drain()
    celery()
    assert Effect.objects.count() == 4
    assert EventLog.objects.filter(status="FAILED").count() == 1


def test_events_of_a_dead_celery_process_are_handed_off_again(app, celery, effects):
    """The process registered, claimed the events and disappeared."""
    publish_many(("order.placed", n) for n in range(3))
    drain()
    (message,) = sent(app)
    store = store_for()
    dead = EventWorker(id=uuid.uuid4(), host="gone", pid=1, queues=["default"])
    store.register(dead)
    claimed = store.claim_handed_off(
        "default",
        message["rows"],
        handlers=[NAME],
        limit=50,
        limit_of_others=50,
        token=uuid.UUID(message["token"]),
        worker_id=dead.pk,
    )
    assert len(claimed.events) == 3
    EventWorker.objects.update(expires_at="2000-01-01T00:00:00Z")
    drain()
    celery()
    assert Effect.objects.count() == EventLog.objects.count() == 3
    assert {each.interruptions for each in EventLog.objects.all()} == {1}


@pytest.mark.parametrize(("seconds", "renews"), [(-100, False), (100, True)])
def test_a_process_whose_handler_ignores_its_deadline_is_abandoned(seconds, renews):
    """Celery has no supervisor that kills the process."""
    options = WorkerOptions(using="default", queues=("default",))
    registration = new_registration(options)
    store_for().register(registration)
    EventWorker.objects.update(renewed_at="2000-01-01T00:00:00Z")
    worker = Worker(options, registration.pk)
    Watch(worker.board).start(1, b"stuck", seconds)
    Heartbeat(worker)._beat()
    assert EventWorker.objects.filter(renewed_at__year__gt=2000).exists() == renews


def test_interrupted_events_do_not_wait_behind_a_backlog_in_the_broker(app, effects, paces):
    paces[NAME] = Pace(20)
    publish_many(("order.placed", n) for n in range(2))
    drain()
    (backlog,) = sent(app)
    QueuedEvent.objects.update(interruptions=1)
    publish("order.placed", "older message")
    drain()
    (older,) = sent(app)
    deliver(**older)
    assert Effect.objects.count() == EventLog.objects.count() == 3
    deliver(**backlog)
    assert Effect.objects.count() == 3


def test_interrupted_events_do_not_wait_behind_messages_of_other_handlers(app, effects):
    subscribe("order.sent", lambda event: None, name="other", executor="celery")
    publish("order.placed")
    publish("order.sent")
    drain()
    QueuedEvent.objects.filter(type="order.placed").update(interruptions=1)
    (other,) = (each for each in sent(app) if each["handler"] == "other")
    deliver(**other)
    assert Effect.objects.count() == 1
    assert EventLog.objects.count() == 2


# -- flow control


def test_a_paused_handler_is_not_handed_off(app, celery, effects):
    pauses.pause(handler=NAME)
    publish("order.placed")
    drain()
    assert sent(app) == []
    pauses.resume(handler=NAME)
    drain()
    drain()
    celery()
    assert EventLog.objects.count() == 1


@pytest.mark.parametrize("pause", [{"handler": NAME}, {"type": "order.*"}, {"queue": "default"}])
def test_celery_obeys_a_pause_that_began_after_the_hand_off(app, effects, pause):
    publish("order.placed")
    drain()
    (message,) = sent(app)
    pauses.pause(**pause)
    deliver(**message)
    assert not Effect.objects.exists()
    assert (queued().attempts, queued().interruptions) == (0, 0)


def test_at_most_a_window_of_events_is_handed_off(app, celery, effects, settings):
    settings.EVENTBUS = {**settings.EVENTBUS, "HANDOFF_WINDOW": 4}
    publish_many(("order.placed", n) for n in range(10))
    drain()
    assert QueuedEvent.objects.filter(handed_off_to=NAME).count() == 4
    assert QueuedEvent.objects.filter(held_by__isnull=False).count() == 6
    while QueuedEvent.objects.exists():
        drain()
        assert QueuedEvent.objects.filter(handed_off_to=NAME).count() <= 4
        celery()
    assert Effect.objects.count() == 10


def test_a_window_that_is_almost_full_waits_for_room_for_a_whole_message(app, settings):
    settings.EVENTBUS = {"HANDOFF_WINDOW": 100}
    subscribe("order.placed", write, name=NAME, executor=CeleryExecutor(batch=10))
    publish_many(("order.placed", n) for n in range(110))
    drain()
    first, *others = sent(app)
    assert [len(each["rows"]) for each in (first, *others)] == [10] * 10
    part = {**first, "rows": first["rows"][:9]}
    deliver(**part)
    drain()
    assert sent(app) == []
    deliver(**first)
    drain()
    (next_one,) = sent(app)
    assert len(next_one["rows"]) == 10


def test_the_slots_of_a_handler_apply_in_celery(celery):
    subscribe("order.placed", write, max_running=1, **OPTIONS)
    publish_many(("order.placed", n) for n in range(5))
    while QueuedEvent.objects.exists():
        drain()
        celery()
    assert Effect.objects.count() == 5


def test_celery_does_not_release_events_that_a_rate_holds(app):
    subscribe("order.placed", write, rate="1/h", **OPTIONS)
    publish_many(("order.placed", n) for n in range(5))
    drain()
    held = QueuedEvent.objects.filter(held_by__isnull=False)
    for message in sent(app):
        deliver(**message)
    assert held.count() > 0
    before = held.count()
    publish("order.placed")
    drain()
    for message in sent(app):
        deliver(**message)
    assert held.count() == before + 1


# -- the broker


def test_an_event_waits_uncharged_while_the_broker_is_unavailable(use, effects):
    use(broker=CLOSED_PORT)
    publish_many(("order.placed", n) for n in range(3))
    publish("order.placed", key="order:1")
    drain()
    control = FlowControl.objects.get(kind="executor")
    assert control.opened_at is not None
    rows = QueuedEvent.objects.all()
    assert {(each.handed_off_to, each.attempts, each.crashes) for each in rows} == {(None, 0, 0)}
    assert rows.filter(held_by=control.pk).count() == 3
    assert EventLane.objects.get().held_by == control.pk


def test_held_events_are_handed_off_when_the_broker_works_again(use, effects):
    use(broker=CLOSED_PORT)
    publish("order.placed")
    publish("order.placed", key="order:1")
    drain()
    works = use()
    FlowControl.objects.filter(kind="executor").update(probe_at="2000-01-01T00:00:00Z")
    drain()
    drain()
    for content in sent(works):
        deliver(**content)
    assert Effect.objects.count() == EventLog.objects.count() == 2
    assert FlowControl.objects.get(kind="executor").opened_at is None


def test_the_wait_for_a_broker_grows_up_to_half_a_minute():
    from django_eventbus.flow.decisions import executor_failed

    now = store_for().read_clock()
    for since, wait in ((0, 1), (5, 5), (600, 30)):
        control = FlowControl(opened_at=now - timedelta(seconds=since))
        assert executor_failed(control, now).changes["probe_at"] == now + timedelta(seconds=wait)


# -- declarations


@pytest.mark.parametrize(
    ("executor", "message"),
    [
        ("celry", "the unknown executor 'celry' (did you mean 'celery'?)"),
        ("", "the unknown executor ''"),
        (7, "the unknown executor 7"),
        (CeleryExecutor, f"the unknown executor {CeleryExecutor!r}"),
    ],
)
def test_an_unknown_executor_is_refused(executor, message):
    choices = "choose from 'worker', 'celery', 'task', CeleryExecutor(…) and TaskExecutor(…)"
    with pytest.raises(EventBusError) as refusal:
        handler("x", name="x", executor=executor)(print)
    assert str(refusal.value) == f"x has {message}; {choices}"


@pytest.mark.parametrize(
    "options",
    [
        *({"batch": value} for value in (0, 1001, True, "5", None)),
        *({"priority": value} for value in (-1, 256, 1.5)),
        *({"queue": value} for value in ("", 7)),
        {"routing_key": ""},
    ],
    ids=str,
)
def test_a_wrong_option_of_an_executor_is_refused(options):
    with pytest.raises(ValueError, match=f"CeleryExecutor.{next(iter(options))}"):
        CeleryExecutor(**options)


def test_the_default_executor_is_the_event_worker():
    assert subscribe("x", write, name="x", executor="worker").executor is None


def test_a_message_of_many_events_needs_few_statements(celery, effects, paces):
    paces[NAME] = Pace(20)
    publish_many(("order.placed", n) for n in range(20))
    drain()
    with CaptureQueriesContext(connection) as captured:
        (message,) = celery()
    assert len(message["rows"]) == 20
    # Each handler call needs a savepoint and an INSERT.
    assert len(captured) < 20 * 3 + 50
