"""Celery tasks that are sent when the caller's transaction has committed."""

import os
import signal
import socket
import time
import uuid

import kombu
import pytest
from celery import _state
from django.db import transaction

from django_eventbus import handler, publish
from django_eventbus.exceptions import (
    BrokerUnavailableError,
    EventBusError,
    HandlerTimeout,
    InvalidPayloadError,
)
from django_eventbus.integrations import celery_broker
from django_eventbus.integrations.celery import apply_async_durably, delay_durably, forward
from django_eventbus.models import EventLog, QueuedEvent
from tests import celery_app
from tests.bus import drain, make_due
from tests.celery_messages import CLOSED_PORT, messages
from tests.faults import failpoints
from tests.workers import IN_ONE_PROCESS, eventually

pytestmark = pytest.mark.django_db(transaction=True)


def task(app):
    return app.tasks["shop.send_receipt"]


def test_a_task_is_sent_after_the_commit_with_the_id_of_its_event(app):
    with transaction.atomic():
        event = delay_durably(task(app), 7, copies=2)
        assert messages(app) == []
    drain()
    assert messages(app) == [("shop.send_receipt", str(event.event_id), [7], {"copies": 2})]
    assert EventLog.objects.get().status == "COMPLETED"


def test_a_task_of_a_rolled_back_transaction_is_never_sent(app):
    with transaction.atomic():
        delay_durably(task(app), 7)
        transaction.set_rollback(True)
    drain()
    assert messages(app) == []


def test_a_task_can_be_given_by_its_name(app):
    delay_durably("another.project.task", 1)
    drain()
    ((name, _, args, _),) = messages(app)
    assert (name, args) == ("another.project.task", [1])


def test_tasks_with_the_same_key_are_sent_in_order(app):
    for n in range(20):
        apply_async_durably(task(app), [n], key="order:1")
    drain(concurrency=3)
    assert [args for _, _, args, _ in messages(app)] == [[n] for n in range(20)]


def test_celery_gets_the_options_of_the_task(app):
    apply_async_durably(task(app), [1], expires=60, headers={"tenant": "a"}, priority=5)
    drain()
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[app.conf.task_default_queue].bind(connection.default_channel)
        message = queue.get(no_ack=True)
    assert message.headers["expires"] is not None
    assert message.headers["tenant"] == "a"
    assert message.properties["priority"] == 5


def test_an_event_waits_without_a_charge_while_the_broker_is_down(use, caplog):
    use(broker=CLOSED_PORT)
    for n in range(3):
        delay_durably("shop.send_receipt", n)
    drain()
    waiting = QueuedEvent.objects.filter(status="PENDING", available_at__isnull=False)
    assert waiting.count() == 3
    assert not EventLog.objects.exists()
    assert [event.errors for event in waiting] == [None] * 3
    warnings = [each for each in caplog.messages if "broker is unavailable" in each]
    assert len(warnings) == 1, "the second task is not tried before the wait has passed"

    app = use()
    make_due()
    drain()
    assert [args for _, _, args, _ in messages(app)] == [[0], [1], [2]]
    assert set(EventLog.objects.values_list("status", "attempts")) == {("COMPLETED", 1)}


def test_a_broker_that_stays_down_is_tried_less_often(use):
    use(broker=CLOSED_PORT)
    waits = []
    for _ in range(7):
        celery_broker.broker._closed_until = 0.0
        with pytest.raises(EventBusError) as raised:
            celery_broker.broker.send("x", [], {}, task_id="1", options={})
        waits.append(raised.value.retry_in)
    assert waits == [1, 2, 4, 8, 16, 30, 30]


@pytest.fixture
def silent_server():
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield "{}:{}".format(*server.getsockname())


@pytest.mark.parametrize("kind", ["redis", "amqp"])
def test_a_broker_that_never_answers_blocks_no_worker(use, silent_server, monkeypatch, kind):
    monkeypatch.setattr(celery_broker, "PATIENCE", 0.2)
    use(broker=f"{kind}://{silent_server}//")
    delay_durably("shop.send_receipt", 1)
    drain()
    assert QueuedEvent.objects.get(status="PENDING").errors is None


@pytest.mark.skipif("not celery_app.BROKER.startswith('amqp')", reason="RabbitMQ refuses messages")
def test_a_task_that_rabbitmq_refuses_waits_without_a_charge(use):
    app = use(
        task_queues=[
            kombu.Queue(
                celery_app.QUEUE,
                queue_arguments={"x-max-length": 1, "x-overflow": "reject-publish"},
            )
        ]
    )
    for n in range(2):
        delay_durably(task(app), n)
    drain()
    assert EventLog.objects.count() == 1
    assert QueuedEvent.objects.get(status="PENDING").errors is None
    assert len(messages(app)) == 1
    make_due()
    celery_broker.broker._closed_until = 0.0
    drain()
    assert [args for _, _, args, _ in messages(app)] == [[1]]


@pytest.mark.skipif("not celery_app.BROKER.startswith('amqp')", reason="RabbitMQ drops messages")
def test_a_queue_that_was_deleted_is_declared_again(app):
    delay_durably(task(app), 1)
    drain()
    with app.connection_for_write() as connection:
        connection.default_channel.queue_delete(app.conf.task_default_queue)
    delay_durably(task(app), 2)
    drain()
    assert [args for _, _, args, _ in messages(app)] == [[2]]


@pytest.mark.skipif("not celery_app.BROKER.startswith('amqp')", reason="RabbitMQ refuses messages")
def test_a_task_that_rabbitmq_refuses_does_not_delay_other_tasks(app):
    apply_async_durably(task(app), [1], exchange="amq.direct", routing_key=uuid.uuid4().hex)
    delay_durably(task(app), 2)
    drain()
    assert [args for _, _, args, _ in messages(app)] == [[2]]
    assert QueuedEvent.objects.get(status="PENDING").errors is None


def test_a_queue_that_celery_does_not_know_is_a_failed_attempt(use):
    app = use(task_create_missing_queues=False)
    apply_async_durably(task(app), [1], queue="unknown")
    drain()
    (error,) = QueuedEvent.objects.get().errors
    assert error["type"] == "celery.exceptions.QueueNotFound"


def test_a_result_backend_that_is_down_neither_blocks_nor_fails_a_task(use):
    app = use(result_backend="redis://127.0.0.1:1/0", task_ignore_result=False)
    started = time.monotonic()
    delay_durably("shop.send_receipt", 1)
    drain()
    assert time.monotonic() - started < 10
    assert [args for _, _, args, _ in messages(app)] == [[1]]
    assert EventLog.objects.get().attempts == 1


def test_an_interrupted_call_leaves_no_connection_behind(app, monkeypatch):
    delay_durably(task(app), 1)
    drain()
    producer = celery_broker.broker._producer

    def interrupt(*args, **kwargs):
        raise HandlerTimeout("the deadline of the handler")

    with monkeypatch.context() as patched:
        patched.setattr(producer, "publish", interrupt)
        with pytest.raises(HandlerTimeout):
            celery_broker.broker.send("shop.send_receipt", [2], {}, task_id="2", options={})
    assert celery_broker.broker._producer is None
    assert not producer.connection.connected
    celery_broker.broker.send("shop.send_receipt", [3], {}, task_id="3", options={})
    assert [args for _, _, args, _ in messages(app)] == [[1], [3]]


def test_a_short_handler_timeout_does_not_charge_a_silent_broker(
    use, silent_server, monkeypatch, settings
):
    settings.EVENTBUS = {**getattr(settings, "EVENTBUS", {}), "HANDLER_TIMEOUT": 0.2}
    monkeypatch.setattr(celery_broker, "PATIENCE", 1.0)
    use(broker=f"redis://{silent_server}/0")
    delay_durably("shop.send_receipt", 1)
    drain()
    assert QueuedEvent.objects.get(status="PENDING").errors is None


def test_a_thread_does_not_wait_without_limit_for_the_connection(app, monkeypatch):
    monkeypatch.setattr(celery_broker, "TURN_PATIENCE", 0.1)
    with celery_broker.broker._lock, pytest.raises(BrokerUnavailableError, match="other threads"):
        celery_broker.broker.send("x", [], {}, task_id="1", options={})


def test_a_child_process_does_not_wait_for_a_thread_of_its_parent():
    with celery_broker.broker._lock:
        child = os.fork()
        if child == 0:
            os._exit(int(celery_broker.broker._lock.locked()))
        assert os.waitpid(child, 0)[1] == 0


def test_a_project_without_a_celery_app_is_a_failed_attempt(app, monkeypatch):
    monkeypatch.setattr(_state, "default_app", None)
    monkeypatch.setattr(_state._tls, "current_app", None)
    delay_durably("shop.send_receipt", 1)
    drain()
    (error,) = QueuedEvent.objects.get().errors
    assert "no Celery app is loaded" in error["message"]


def test_a_connection_that_was_lost_while_idle_is_replaced(app):
    delay_durably(task(app), 1)
    drain()
    celery_broker.broker._producer.connection.collect()
    delay_durably(task(app), 2)
    drain()
    assert [args for _, _, args, _ in messages(app)] == [[1], [2]]


def test_each_event_is_forwarded_to_a_task(app):
    forward("order.placed", to=task(app), args=lambda event: [event.payload["id"]])
    publish("order.placed", {"id": 7})
    drain()
    ((name, task_id, args, kwargs),) = messages(app)
    assert (name, args, kwargs) == ("shop.send_receipt", [7], {})
    log = EventLog.objects.get()
    assert task_id == f"{log.event_id}:forward:shop.send_receipt"


def test_a_forwarded_event_that_is_sent_again_has_the_same_task_id(app):
    subscription = forward("order.*", to=task(app), kwargs=lambda event: {"order_id": 1})
    subscription_sends = subscription.func

    @handler("order.placed", name="twice", atomic=False, priority=1)
    def send_and_lose_the_result(event):
        event.handler_name = subscription.name
        subscription_sends(event)

    publish("order.placed", {})
    drain()
    first, second = messages(app)
    assert first == second


def test_a_task_gets_the_payload_if_no_arguments_are_declared(app):
    forward("order.placed", to=task(app))
    publish("order.placed", {"id": 7})
    drain()
    assert [args for _, _, args, _ in messages(app)] == [[{"id": 7}]]


def test_other_handlers_of_the_event_run_while_the_broker_is_down(use):
    use(broker=CLOSED_PORT)
    seen = []
    handler("order.placed", name="h")(lambda event: seen.append(event.payload))
    forward("order.placed", to="shop.send_receipt")
    publish("order.placed", 1)
    drain()
    make_due()
    drain()
    assert seen == [1]
    assert QueuedEvent.objects.get().deliveries.keys() == {"h"}


def test_an_error_of_the_args_function_is_a_failed_attempt(app):
    forward("order.placed", to=task(app), args=lambda event: [event.payload["missing"]])
    publish("order.placed", {})
    drain()
    (error,) = QueuedEvent.objects.get().errors
    assert error["type"] == "KeyError"


def test_an_eager_task_runs_in_the_worker(use):
    app = use(task_always_eager=True)
    celery_app.SENT.clear()
    delay_durably(task(app), 5)
    drain()
    assert celery_app.SENT == [(5, 1)]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: delay_durably(t), InvalidPayloadError, "missing a required argument"),
        (lambda t: delay_durably(t, 1, color=2), InvalidPayloadError, "color"),
        (lambda t: delay_durably(t, object()), InvalidPayloadError, "object"),
        (lambda t: delay_durably(7), EventBusError, "7 is neither a Celery task nor the name"),
        (lambda t: apply_async_durably(t, [1], countdown=5), EventBusError, "use delay="),
        (lambda t: apply_async_durably(t, [1], eta="now"), EventBusError, "use at="),
        (lambda t: apply_async_durably(t, [1], task_id="x"), EventBusError, "id of the event"),
        (lambda t: apply_async_durably(t, [1], prioritty=5), EventBusError, "priority"),
        (lambda t: forward("x", to=t, quue="a"), EventBusError, "queue"),
        (lambda t: forward("x", to=None), EventBusError, "None is neither"),
        (lambda t: forward("x", to=t, args=[1]), EventBusError, "a function of the event"),
        (lambda t: delay_durably(t.s(1)), EventBusError, "is a signature"),
        (lambda t: apply_async_durably(t, "7"), EventBusError, "a list or a tuple, not '7'"),
        (lambda t: apply_async_durably(t, {"order_id": 7}), EventBusError, "a list or a tuple"),
    ],
)
def test_a_wrong_call_is_refused_where_it_is_made(app, call, error, message):
    with pytest.raises(error, match=message):
        call(task(app))
    assert not QueuedEvent.objects.exists()


def test_a_worker_that_dies_after_sending_sends_the_task_again_with_the_same_id(
    use, start_worker, tmp_path
):
    folder = tmp_path / "broker"
    folder.mkdir()
    app = use(**celery_app.in_folder(folder))
    event = delay_durably("shop.send_receipt", 7)
    env = {
        "EVENTBUS_TEST_IMPORT": "tests.celery_app",
        "EVENTBUS_TEST_CELERY": "1",
        "EVENTBUS_TEST_BROKER_FOLDER": str(folder),
        "EVENTBUS_TEST_BROKER_QUEUE": app.conf.task_default_queue,
    }
    dies = failpoints.environment(settle__before_commit={"do": "kill", "nth": 2})
    both = f"{env['EVENTBUS_TEST_IMPORT']},{dies['EVENTBUS_TEST_IMPORT']}"
    doomed = start_worker(*IN_ONE_PROCESS, env={**env, **dies, "EVENTBUS_TEST_IMPORT": both})
    assert doomed.process.wait() == -signal.SIGKILL
    start_worker(*IN_ONE_PROCESS, env=env)
    eventually(EventLog.objects.exists)
    sent = ("shop.send_receipt", str(event.event_id), [7], {})
    assert messages(app) == [sent, sent]
