"""Handlers that run in tasks of Django's Tasks framework."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec

import pytest

from django_eventbus import publish, publish_many, subscribe
from django_eventbus.exceptions import EventBusError
from django_eventbus.executors import TaskExecutor
from django_eventbus.models import EventLog, FlowControl, QueuedEvent
from tests.bus import drain
from tests.shop.models import Effect
from tests.workers import PATIENCE, on_one_database

pytestmark = pytest.mark.django_db(transaction=True)

PACKAGE = "django.tasks" if find_spec("django.tasks") else "django_tasks"
IMMEDIATE = f"{PACKAGE}.backends.immediate.ImmediateBackend"


@pytest.fixture
def immediate(settings):
    """A backend that runs a task when it is enqueued."""
    settings.TASKS = {"default": {"BACKEND": IMMEDIATE, "QUEUES": ["default", "mail"]}}


def write(event):
    Effect.objects.create(event_id=event.id, handler="task.effect")


def test_an_event_is_handed_off_to_a_task(immediate):
    subscribe("order.placed", write, name="task.effect", executor="task")
    publish_many(("order.placed", n) for n in range(3))
    publish("order.placed", key="order:1")
    drain()
    assert Effect.objects.count() == EventLog.objects.filter(status="COMPLETED").count() == 4
    state = EventLog.objects.first().deliveries["task.effect"]
    assert state["by"].startswith("task ")


def test_events_for_a_queue_that_the_backend_does_not_have_wait_uncharged(immediate, caplog):
    executor = TaskExecutor(queue_name="unknown")
    subscribe("order.placed", write, name="task.effect", executor=executor)
    publish("order.placed")
    drain()
    queued = QueuedEvent.objects.get()
    assert (queued.attempts, queued.handed_off_to) == (0, None)
    assert queued.available_at is not None
    assert FlowControl.objects.get(kind="executor").opened_at is None
    assert "could not be handed off to task" in caplog.text


@pytest.mark.parametrize(
    "options",
    [{"backend": ""}, {"queue_name": 7}, {"priority": 101}, {"priority": None}, {"batch": 0}],
    ids=str,
)
def test_a_wrong_option_of_an_executor_is_refused(options):
    with pytest.raises(ValueError, match=f"TaskExecutor.{next(iter(options))}"):
        TaskExecutor(**options)


def test_an_unknown_executor_is_refused_with_the_possible_ones():
    with pytest.raises(EventBusError, match="'worker', 'celery', 'task'"):
        subscribe("x", write, name="x", executor="thread")


@on_one_database
@pytest.mark.processes
def test_a_real_backend_delivers_events_in_its_worker_process(tmp_path):
    """The event worker and the worker of the backend are processes of one project."""
    pytest.importorskip("django_tasks_db")

    def manage(*arguments):
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.tasks_project",
            "EVENTBUS_TEST_TASKS_DB": str(tmp_path / "tasks.sqlite3"),
        }
        done = subprocess.run(
            [sys.executable, "-m", "django", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE * 2,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    manage("migrate", "--run-syncdb", "--verbosity", "0")
    for n in range(3):
        manage("publish_event", "process.task", str(n))
    manage("run_event_worker", "--drain", "--processes", "0")
    manage("db_worker", "--batch", "--queue-name", "*")
    manage("run_event_worker", "--drain", "--processes", "0")
    with closing(sqlite3.connect(tmp_path / "tasks.sqlite3")) as database:
        queue = database.execute("SELECT count(*) FROM django_eventbus_queuedevent").fetchone()
        effects = database.execute("SELECT handler, note FROM shop_effect ORDER BY id").fetchall()
    assert queue == (0,)
    assert effects == [("task_effect", str(n)) for n in range(3)]
