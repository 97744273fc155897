import gc
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import hypothesis
import pytest
from django.db import connection

from django_eventbus import schedules
from django_eventbus.counters import process
from django_eventbus.publishing import publisher
from django_eventbus.statistics import recorder
from django_eventbus.store import store_for
from django_eventbus.testing import isolated_handlers
from django_eventbus.worker import message_claims
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.hand_offs import outbox  # noqa: F401 - a fixture
from tests.workers import start_worker  # noqa: F401 - a fixture

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A run in the background ignores SIGINT, and so would all processes that tests start. Tests
    # send SIGINT to them.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# How long an example takes depends on the machine.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

#: Fixtures that start processes.
STARTERS = {"start_celery", "start_worker", "checked_server", "cluster", "mariadb"}


@pytest.hookimpl(tryfirst=True)  # Runs before -m deselects tests.
def pytest_collection_modifyitems(items):
    for item in items:
        if STARTERS.intersection(item.fixturenames):
            item.add_marker(pytest.mark.processes)


def pytest_collection_finish():
    """Exclude the objects of the import phase from garbage collection: a tenth less run time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings, tmp_path_factory):
    """Put the SQLite file where pytest deletes it together with its journal files."""
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
    """Remove the handlers of a test when it ends."""
    with isolated_handlers():
        yield
    publisher.reopen()


@pytest.fixture(autouse=True)
def own_schedules(monkeypatch):
    """Remove the schedules of a test when it ends."""
    monkeypatch.setattr(schedules, "_declared", {})


@pytest.fixture(autouse=True)
def own_statistics():
    """Let no test write the statistics and the counters of an earlier test."""
    recorder._recorder.cache_clear()
    process._counters.cache_clear()
    process._known.clear()


@pytest.fixture(autouse=True)
def paces(monkeypatch):
    """The pace of each handler in messages, without the paces and searches of earlier tests."""
    monkeypatch.setattr(message_claims, "_paces", {})
    monkeypatch.setattr(message_claims, "_searched_at", {})
    return message_claims._paces


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
