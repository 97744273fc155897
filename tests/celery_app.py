"""A Celery project, for tests and for the processes that they start.

EVENTBUS_TEST_BROKER is the URL of its broker; ``memory://`` by default, which needs no server.
"""

import json
import os

import kombu
from celery import Celery

BROKER = os.environ.get("EVENTBUS_TEST_BROKER", "memory://")
QUEUE = os.environ.get("EVENTBUS_TEST_BROKER_QUEUE", "eventbus-tests")

#: The calls of the task in this process.
SENT = []


def send_receipt(order_id, *, copies=1):
    SENT.append((order_id, copies))


def new_app(broker=BROKER, queue_arguments=None, deliveries=1, **conf):
    """Return an app, which sends each message as often as ``deliveries`` says."""
    app = Celery("tests", broker=broker, set_as_current=False)
    app.conf.update({"task_default_queue": QUEUE, "task_ignore_result": True, **conf})
    if queue_arguments:
        name = app.conf.task_default_queue
        app.conf.task_queues = [kombu.Queue(name, queue_arguments=queue_arguments)]
    app.task(name="shop.send_receipt", shared=False)(send_receipt)
    if deliveries > 1:
        _repeat_messages(app, deliveries)
    return app


def _repeat_messages(app, deliveries):
    send_once = app.amqp.send_task_message

    def send(*args, **options):
        for _ in range(deliveries):
            sent = send_once(*args, **options)
        return sent

    app.amqp.send_task_message = send


def in_folder(folder):
    """Return the options of an app whose broker is a folder that processes share."""
    folders = dict.fromkeys(("data_folder_in", "data_folder_out"), str(folder))
    return {
        "broker": "filesystem://",
        "broker_transport_options": {**folders, "control_folder": str(folder)},
    }


if os.environ.get("EVENTBUS_TEST_CELERY"):  # a process that a test started
    folder = os.environ.get("EVENTBUS_TEST_BROKER_FOLDER")
    options = in_folder(folder) if folder else {}
    app = new_app(**options, **json.loads(os.environ.get("EVENTBUS_TEST_CELERY_CONF", "{}")))
    app.set_default()
    app.set_current()
    app.autodiscover_tasks()
