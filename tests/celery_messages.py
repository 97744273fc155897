"""The messages on the broker of the tests, and their delivery as Celery workers would do it."""

import json

import pytest

from django_eventbus.integrations import celery_executor
from django_eventbus.tasks import deliver

#: No server listens there.
CLOSED_PORT = "redis://127.0.0.1:1/0"


def messages(app):
    """Take all messages from the broker, as (task, task id, args, kwargs)."""
    taken = []
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[app.conf.task_default_queue].bind(connection.default_channel)
        queue.declare()
        while message := queue.get(no_ack=True):
            args, kwargs, _embedded = message.payload
            taken.append((message.headers["task"], message.headers["id"], args, kwargs))
    return taken


def sent(app):
    """Take all messages of hand-offs from the broker."""
    return [kwargs for name, _, _, kwargs in messages(app) if name == celery_executor.DELIVER]


@pytest.fixture
def celery(app):
    """A function that delivers all messages of hand-offs."""

    def run(*, times=1):
        taken = sent(app)
        for content in taken * times:
            deliver(**json.loads(json.dumps(content)))
        return taken

    return run
