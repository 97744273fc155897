"""Real Celery workers on the test database, with a broker that the tests share."""

import json
import signal
import uuid

import pytest

from tests import celery_app
from tests.workers import Process, Starter


class Broker:
    """A queue of its own on the broker of the tests: a server, or a folder without one."""

    def __init__(self, tmp_path, url=celery_app.BROKER, conf=None):
        self.queue = f"eventbus-{uuid.uuid4().hex}"
        self.url = url
        self.conf = conf or {}
        self.folder = None
        if url == "memory://":  # Processes cannot share it.
            self.folder = tmp_path / "broker"
            self.folder.mkdir(exist_ok=True)

    @property
    def environment(self):
        """The environment of processes that use the broker."""
        return {
            "EVENTBUS_TEST_IMPORT": "tests.celery_app",
            "EVENTBUS_TEST_CELERY": "1",
            "EVENTBUS_TEST_CELERY_CONF": json.dumps(self.conf),
            "EVENTBUS_TEST_BROKER": self.url,
            "EVENTBUS_TEST_BROKER_FOLDER": str(self.folder or ""),
            "EVENTBUS_TEST_BROKER_QUEUE": self.queue,
        }

    def app(self):
        options = celery_app.in_folder(self.folder) if self.folder else {"broker": self.url}
        return celery_app.new_app(**options, **self.conf, task_default_queue=self.queue)

    def purge(self):
        """Delete all messages."""
        with self.app().connection_for_write() as connection:
            return connection.default_channel.queue_purge(self.queue) or 0


class CeleryProcess(Process):
    """A process of ``celery worker``."""

    name = "celery"

    def __init__(self, tmp_path, broker, *options, pool="prefork", eventbus=None, env=None):
        worker = ["celery", "-A", "tests.celery_app", "worker"]
        chosen = ["--pool", pool, "--concurrency", "2", "--hostname", f"{uuid.uuid4().hex}@test"]
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "info"]
        super().__init__(
            tmp_path,
            [*worker, *chosen, *quiet, *options],
            eventbus=eventbus,
            env={"C_FORCE_ROOT": "1", **broker.environment, **(env or {})},
        )

    def stop(self):
        """Stop it as a deployment does, and return its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()


@pytest.fixture
def start_celery(start_worker, tmp_path):
    """Start Celery workers that are killed when the test ends."""
    start = Starter(CeleryProcess, tmp_path)
    yield start
    start.end()
