"""The log records of real worker processes."""

import json
import re

import pytest

from django_eventbus import publish
from django_eventbus.models import QueuedEvent
from tests.workers import IN_ONE_PROCESS, PATIENT, eventually

#: One line per record, with the keys of EventContextFilter.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"event": {"()": "django_eventbus.logs.EventContextFilter"}},
    "formatters": {
        "keys": {
            "style": "{",
            "format": "{levelname} {name} worker={worker_id} event={event_id} "
            "handler={handler} attempt={attempt} {message}",
        }
    },
    "handlers": {
        "console": {"class": "logging.StreamHandler", "filters": ["event"], "formatter": "keys"}
    },
    "root": {"handlers": ["console"], "level": "INFO"},
}
WITH_KEYS = {"EVENTBUS_TEST_LOGGING": json.dumps(LOGGING)}


def lines_of(worker, name):
    """The lines of a logger, as (level, keys and message)."""
    return re.findall(rf"^(\w+) {re.escape(name)} (.*)$", worker.log, flags=re.MULTILINE)


@pytest.mark.parametrize("options", [(), IN_ONE_PROCESS], ids=["supervised", "in one process"])
def test_warnings_and_errors_are_visible_without_configuration(start_worker, options):
    poison = publish("process.effect", {})
    QueuedEvent.objects.update(crashes=3)
    failing = publish("process.broken", {})
    worker = start_worker("--drain", *options, eventbus=PATIENT)
    assert worker.wait() == 0, worker.log
    lines = worker.log.splitlines()
    assert any(
        line.startswith(f"broken failed on process.broken {failing.event_id}, attempt 1: ")
        for line in lines
    )
    dead = f"process.effect {poison.event_id} is a dead letter: FAILED after 1 attempts"
    assert dead in lines


def test_a_crashed_process_is_logged_with_its_worker_and_its_process_id(start_worker):
    event = publish("process.exit", {})
    worker = start_worker(eventbus=PATIENT, env=WITH_KEYS)
    name = "django_eventbus.worker.supervisor"
    found = re.compile(
        r"worker=([0-9a-f-]{36}) event= handler=exit attempt= "
        r"worker process (\d+) ended with exit code 7; released 1 events"
    )
    eventually(lambda: len(lines_of(worker, name)) >= 3, lambda: worker.log)
    crashes = [found.fullmatch(text) for _, text in lines_of(worker, name)[:3]]
    assert all(crashes), worker.log
    workers, pids = (len({crash[n] for crash in crashes}) for n in (1, 2))
    assert (workers, pids) == (3, 3)  # Each new process is another worker.
    ((_, dead),) = eventually(lambda: lines_of(worker, "django_eventbus"), lambda: worker.log)
    assert f"event={event.event_id}" in dead
