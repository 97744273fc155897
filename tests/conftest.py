import gc
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from django.db import connection

from django_eventbus import publishing, schedules
from django_eventbus.store import store_for
from django_eventbus.testing import isolated_handlers
from django_eventbus.worker import WorkerOptions, new_registration
from tests.workers import start_worker  # noqa: F401 - a fixture

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So it is in a run in the background, and in all processes that tests start: none of them
    # would hear of a Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """What is there by now stays to the end: not to look through it again takes a tenth off."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings, tmp_path_factory):
    """Let pytest clear away a SQLite file, and what SQLite keeps beside it."""
    if connection.vendor == "sqlite":
        test_settings = connection.settings_dict["TEST"]
        name = Path(test_settings["NAME"]).name
        test_settings["NAME"] = tmp_path_factory.mktemp("sqlite") / name


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup):
    """Let the processes that tests start find the test database."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENTBUS_TEST_DB_NAME", str(connection.settings_dict["NAME"]))
        yield


@pytest.fixture(autouse=True)
def own_handlers():
    """A test's handlers are its own: they are forgotten when it ends."""
    with isolated_handlers():
        yield
    publishing.reopen()


@pytest.fixture(autouse=True)
def own_schedules(monkeypatch):
    """A test's schedules are its own, too."""
    monkeypatch.setattr(schedules, "_declared", {})


@pytest.fixture
def store(db):
    return store_for()


@pytest.fixture
def worker_id(store):
    """The id of a registered worker."""
    registration = new_registration(WorkerOptions(using="default", queues=("default",)))
    store.register(registration)
    return registration.pk


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)

    def __call__(self):
        return self.now

    def tick(self, seconds):
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def capture(caplog):
    caplog.set_level("INFO", logger="django_eventbus")
    return caplog
