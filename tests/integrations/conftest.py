import uuid

import pytest
from celery import current_app

from django_eventbus.integrations import celery as integration
from django_eventbus.integrations import celery_broker
from tests import celery_app
from tests.celery_messages import celery  # noqa: F401 - a fixture
from tests.celery_workers import start_celery  # noqa: F401 - a fixture
from tests.traces import exported  # noqa: F401 - a fixture


@pytest.fixture
def bridge():
    """Build bridges that are disconnected when the test ends."""
    built = []

    def build(make, *args, **options):
        built.append(make(*args, **options))
        return built[-1]

    yield build
    for each in built:
        each.disconnect()


@pytest.fixture
def use(monkeypatch):
    """Make a Celery app the current one, with a queue and a connection of its own."""
    before = current_app._get_current_object()
    monkeypatch.setattr(celery_app, "QUEUE", f"eventbus-{uuid.uuid4().hex}")
    used = []

    def use(**options):
        app = celery_app.new_app(**options)
        app.set_current()
        app.set_default()  # for other threads
        celery_broker.broker.close()
        monkeypatch.setattr(celery_broker, "broker", celery_broker.Broker())
        used.append(app)
        return app

    integration.register()
    yield use
    celery_broker.broker.close()
    for app in used:
        if app.conf.broker_url.startswith(celery_app.BROKER):
            with app.connection_for_write() as connection:
                connection.default_channel.queue_delete(app.conf.task_default_queue)
    before.set_current()
    before.set_default()


@pytest.fixture
def app(use):
    return use()
