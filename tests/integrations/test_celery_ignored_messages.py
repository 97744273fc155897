"""Messages that are malformed, forged, late or repeated: logged once, counted once, no effect."""

import json
import logging
import os
import pickle
import subprocess
import sys
import uuid

import kombu
import pytest
from django.db import OperationalError, connection
from django.db.models import Sum

from django_eventbus import publish, publish_many, status, subscribe
from django_eventbus.executors import CeleryExecutor
from django_eventbus.integrations import celery_executor
from django_eventbus.models import EventLog, EventWorker, MinuteStatistics, QueuedEvent
from django_eventbus.statistics.recorder import recorder_of_process
from django_eventbus.store import store_for
from django_eventbus.tasks import deliver
from tests.bus import drain, make_due
from tests.celery_workers import Broker
from tests.integrations.test_celery import messages
from tests.shop.models import Effect
from tests.workers import PATIENCE, eventually

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "celery.effect"
LONG = "x" * 10_000 + "\n\x00\ud800"


def write(event):
    Effect.objects.create(event_id=event.id, handler=NAME)


@pytest.fixture
def effects():
    """A handler in Celery that writes a row for each event."""
    return subscribe("order.placed", write, name=NAME, executor="celery")


def sent(app):
    """Take all messages to Celery from the broker."""
    return [kwargs for name, _, _, kwargs in messages(app) if name == celery_executor.DELIVER]


@pytest.fixture
def message(app, effects):
    """The message of an event that is handed off."""
    publish("order.placed")
    drain()
    (message,) = sent(app)
    return message


@pytest.fixture
def logged(caplog):
    """The log lines of the bus, as (level, text)."""
    caplog.set_level(logging.INFO, logger="django_eventbus")

    def lines():
        of_bus = (each for each in caplog.records if each.name.startswith("django_eventbus"))
        return [(each.levelname, each.getMessage()) for each in of_bus]

    return lines


def counted():
    return MinuteStatistics.objects.aggregate(n=Sum("ignored_messages"))["n"] or 0


def ignored_rows():
    """The statistics of ignored messages, as (queue, handler, count)."""
    rows = MinuteStatistics.objects.filter(ignored_messages__gt=0)
    return list(rows.values_list("queue", "handler", "ignored_messages"))


def assert_handed_off():
    """The event still waits for the message that the bus has sent."""
    assert not Effect.objects.exists()
    assert not EventWorker.objects.exists()
    row = QueuedEvent.objects.get()
    assert (row.status, row.handed_off_to, row.attempts) == ("PENDING", NAME, 0)


MALFORMED = [
    *({"missing": name} for name in ("using", "queue", "handler", "token", "rows")),
    {"surprise": 1},
    {LONG: 1},
    *({name: 7} for name in ("using", "queue", "handler", "token", "rows")),
    *({name: None} for name in ("using", "queue", "handler", "token", "rows")),
    *({name: LONG} for name in ("using", "queue", "token", "rows")),
    *({name: {"a": [LONG]}} for name in ("using", "queue", "handler", "token", "rows")),
    {"using": "another"},
    {"using": ""},
    {"queue": "another"},
    {"queue": ""},
    {"token": "no uuid"},
    {"token": ""},
    {"rows": []},
    {"rows": ["1"]},
    {"rows": [True]},
    {"rows": [1.0]},
    {"rows": [[1]]},
    {"rows": [10**30]},
    {"rows": [2**63]},
    {"rows": [-(10**30)]},
    {"rows": list(range(1, 1002))},
]


@pytest.mark.parametrize("change", MALFORMED, ids=lambda change: repr(change)[:40])
def test_a_malformed_message_is_logged_and_counted_once(message, logged, change):
    wrong = {name: value for name, value in message.items() if name != change.get("missing")}
    deliver(**wrong | {name: value for name, value in change.items() if name != "missing"})
    ((level, text),) = logged()
    assert level == "WARNING"
    assert text.startswith("a message to the executor celery was ignored: ")
    assert text.isprintable()
    assert len(text) < 400
    assert ignored_rows() == [("", "", 1)], "no name of the message is stored"
    assert_handed_off()


def test_a_message_with_positional_arguments_is_logged_and_counted_once(message, logged):
    deliver(1, **message)
    ((level, text),) = logged()
    assert (level, "it has the fields args, " in text) == ("WARNING", True)
    assert counted() == 1
    assert_handed_off()


def test_a_message_for_a_database_without_the_bus_is_malformed(message, logged, settings):
    settings.DATABASE_ROUTERS = [NoBus()]
    deliver(**message)
    ((level, text),) = logged()
    assert (level, "'default' is not a database of the bus" in text) == ("WARNING", True)
    assert counted() == 1


class NoBus:
    """A router with a database that has no tables of the bus."""

    def allow_migrate(self, db, app_label, **hints):
        return False


@pytest.mark.parametrize("name", ["unknown", LONG, "", "local"])
def test_a_message_for_a_handler_that_has_no_executor_here_is_logged_and_counted_once(
    message, logged, name
):
    subscribe("order.sent", write, name="local")
    deliver(**message | {"handler": name})
    ((level, text),) = logged()
    assert (level, "a message for the unknown handler" in text) == ("WARNING", True)
    assert text.isprintable()
    assert len(text) < 400
    assert ignored_rows() == [("default", "", 1)]
    assert_handed_off()


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [999_999_999]},
        {"rows": [2**63 - 1]},
        {"rows": [-(2**63)]},
        {"token": "3d3fd9a2-7dcf-4c0b-a9a0-8ddc6a9ae8e1"},
    ],
    ids=str,
)
def test_a_message_for_an_unknown_row_or_token_is_logged_and_counted_once(message, logged, change):
    deliver(**message | change)
    assert logged() == [
        (
            "INFO",
            f"a message for the handler {NAME} was ignored: all its events (1) were already "
            "claimed, handed off again or settled",
        )
    ]
    assert ignored_rows() == [("default", "", 1)]
    assert_handed_off()


def test_a_message_for_a_handler_of_another_executor_does_not_claim_the_event(message, logged):
    subscribe("order.placed", write, name="other", executor=CeleryExecutor(priority=3))
    deliver(**message | {"handler": "other"})
    assert [level for level, _ in logged()] == ["INFO"]
    assert counted() == 1
    assert_handed_off()


def test_a_late_message_is_logged_and_counted_once(message, logged):
    make_due()
    drain()
    deliver(**message)
    assert [level for level, text in logged() if "was ignored" in text] == ["INFO"]
    assert counted() == 1
    assert_handed_off()


def test_each_repetition_of_a_message_is_logged_and_counted_once(message, logged):
    for _ in range(3):
        deliver(**message)
    assert [level for level, text in logged() if "was ignored" in text] == ["INFO"] * 2
    assert counted() == 2
    assert Effect.objects.count() == EventLog.objects.count() == 1


def test_a_message_that_is_in_time_is_neither_logged_nor_counted(app, effects, logged):
    publish_many(("order.placed", n) for n in range(3))
    drain()
    (message,) = sent(app)
    QueuedEvent.objects.filter(id=message["rows"][0]).delete()
    deliver(**message)
    assert Effect.objects.count() == 2
    assert logged() == []
    assert counted() == 0


# -- the count


def test_messages_of_one_minute_share_rows_of_the_statistics(app, effects):
    """A broker with many messages must not fill the table."""
    for _ in range(4):
        publish("order.placed")
        drain()
    for message in sent(app) * 2:
        deliver(**message)
        deliver(**message | {"token": "?"})
    recorder = recorder_of_process("default").worker_id
    rows = MinuteStatistics.objects.filter(worker_id=recorder)
    minutes = rows.values("minute").distinct().count()
    assert minutes <= rows.count() <= 3 * minutes, "malformed, of the queue, of the handler"
    assert rows.aggregate(Sum("ignored_messages"), Sum("done")) == {
        "ignored_messages__sum": 8 + 4,
        "done__sum": 4 * 2,
    }


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_counts_in_rows_of_its_own():
    mine = recorder_of_process("default")
    assert recorder_of_process("default") is mine
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        os.write(writer, str(recorder_of_process("default").worker_id).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert uuid.UUID(os.read(reader, 100).decode()) != mine.worker_id
    os.close(reader)
    os.close(writer)


class Away:
    """A database that does not answer."""

    def __call__(self, execute, sql, params, many, context):
        raise OperationalError("server closed the connection unexpectedly")


def test_a_malformed_message_is_ignored_while_the_database_is_away(logged):
    with connection.execute_wrapper(Away()):
        deliver(handler=NAME)
    (ignored, uncounted) = logged()
    assert "it has the fields handler" in ignored[1]
    assert uncounted[0] == "WARNING"
    assert uncounted[1].startswith("the statistics of this worker could not be written: ")
    deliver(handler=NAME)
    assert counted() >= 1


def test_a_count_that_could_not_be_written_is_written_with_the_next_one(logged):
    class ReadOnly:
        def __call__(self, execute, sql, params, many, context):
            if "INSERT" in sql:
                raise OperationalError("read-only transaction")
            return execute(sql, params, many, context)

    with connection.execute_wrapper(ReadOnly()):
        deliver(handler=NAME)
    assert counted() == 0
    deliver(handler=NAME)
    assert counted() == 2


def test_the_status_counts_ignored_messages_of_the_last_hour(message):
    assert status.look().metrics["ignored_messages"] == 0
    deliver(**message)
    deliver(**message)
    deliver(**message | {"rows": []})
    seen = status.look()
    assert seen.metrics["ignored_messages"] == 2
    assert (seen.recent.total, seen.recent.done) == (1, 1), "they are no events"
    old = store_for().after(-3700.0)
    MinuteStatistics.objects.update(minute=old)
    assert status.look().metrics["ignored_messages"] == 0


# -- pickle


class Exploit:
    """An object whose unpickling creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_messages_are_json_although_the_project_sends_pickle(use, effects):
    app = use(task_serializer="pickle", accept_content=["json", "pickle"])
    publish("order.placed")
    drain()
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[app.conf.task_default_queue].bind(connection.default_channel)
        message = queue.get(no_ack=True)
    assert message.headers["task"] == celery_executor.DELIVER
    assert message.content_type == "application/json"
    (_, content, _) = json.loads(message.body)
    deliver(**content)
    assert Effect.objects.count() == 1


def test_a_celery_worker_does_not_unpickle_a_message(start_celery, tmp_path):
    unpickled, broker = tmp_path / "unpickled", Broker(tmp_path)
    app = broker.app()
    body = pickle.dumps(((), {"using": Exploit(unpickled)}, {}))
    with app.connection_for_write() as connection:
        queue = kombu.Queue(broker.queue)
        producer = kombu.Producer(connection)
        producer.publish(
            body,
            routing_key=broker.queue,
            declare=[queue],
            content_type="application/x-python-serialize",
            content_encoding="binary",
            headers={"task": celery_executor.DELIVER, "id": str(uuid.uuid4()), "lang": "py"},
        )
        app.send_task(celery_executor.DELIVER, kwargs={"handler": NAME})
    celery = start_celery(broker, pool="solo")
    eventually(lambda: counted() == 1, lambda: celery.log)
    assert "ContentDisallowed" in celery.log
    assert "it has the fields handler" in celery.log, "the worker goes on"
    assert not unpickled.exists()
    assert celery.stop() == 0, celery.log


# -- green threads


GREEN = """
import sys, types, os
import django

for name in ("gevent", "gevent.monkey", "eventlet", "eventlet.patcher"):
    sys.modules[name] = types.ModuleType(name)
patched = os.environ["PATCHED"]
sys.modules["gevent.monkey"].is_module_patched = lambda name: (patched, name) == (
    "gevent", "threading")
sys.modules["eventlet.patcher"].is_monkey_patched = lambda name: (patched, name) == (
    "eventlet", "thread")
django.setup()

from django.db import connection
from django_eventbus import tasks
from django_eventbus.exceptions import EventBusError

def touch(*_):
    raise SystemExit("the database was used")

for call in (tasks.deliver, tasks.drain):
    with connection.execute_wrapper(touch):
        try:
            call()
        except EventBusError as error:
            print(error)
"""


@pytest.mark.processes
@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_a_process_with_green_threads_claims_nothing(library):
    done = subprocess.run(
        [sys.executable, "-c", GREEN],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "PATCHED": library},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    error = (
        "The event bus does not handle events in a process with green threads of "
        f"{library}. Start the Celery worker with --pool prefork, threads or solo.\n"
    )
    assert (done.stdout, done.returncode) == (error * 2, 0), done.stderr


def test_a_library_of_green_threads_that_has_patched_nothing_is_accepted(message, monkeypatch):
    class Unpatched:
        @staticmethod
        def is_module_patched(name):
            return False

    monkeypatch.setitem(sys.modules, "gevent.monkey", Unpatched)
    deliver(**message)
    assert Effect.objects.count() == 1
