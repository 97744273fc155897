"""The session names of a worker in pg_stat_activity contain its process and role."""

import json
import os
import re
import signal

import pytest
from django.db import connection

from django_eventbus.publishing.publisher import publish, publish_many
from django_eventbus.store import sessions
from tests import databases
from tests.workers import IN_ONE_PROCESS, PATIENT, eventually

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="only PostgreSQL has names"),
]


def names_seen():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT application_name FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND datname = current_database() "
            "AND backend_type = 'client backend'"
        )
        return {name for (name,) in cursor.fetchall()}


def eventually_seen(worker, roles):
    """Wait until there are sessions of these roles; return the process ids in their names."""
    pids = {}

    def all_seen():
        for name in names_seen():
            found = re.fullmatch(r"eventbus worker (.+):(\d+) (\w+)", name)
            if found:
                assert found[1] == os.uname().nodename[:30]
                pids[found[3]] = int(found[2])
        return pids.keys() >= roles

    eventually(all_seen, lambda: f"{pids} {names_seen()} {worker.log}")
    return pids


def test_a_worker_names_its_sessions_by_process_and_role(start_worker, tmp_path):
    """The session that claims ahead also releases events that wait behind a slow handler."""
    go_on = tmp_path / "go_on"
    publish("process.signal", {"started": str(tmp_path / "started"), "go_on": str(go_on)})
    publish_many(("process.effect", n) for n in range(5))
    worker = start_worker(eventbus=PATIENT)
    pids = eventually_seen(worker, {"supervisor", "listener", "deliver", "claim"})
    assert pids.pop("supervisor") == worker.process.pid
    assert len(set(pids.values())) == 1
    assert worker.process.pid not in pids.values()
    go_on.touch()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.log


def test_a_worker_in_one_process_names_its_sessions_too(start_worker):
    worker = start_worker(*IN_ONE_PROCESS)
    pids = eventually_seen(worker, {"listener", "deliver", "heartbeat"})
    assert set(pids.values()) == {worker.process.pid}


@pytest.mark.parametrize(
    "chosen",
    [{databases.OPTIONS: json.dumps({"application_name": "shop"})}, {"PGAPPNAME": "shop"}],
    ids=["OPTIONS", "PGAPPNAME"],
)
def test_a_session_name_set_by_the_project_is_kept(start_worker, chosen):
    worker = start_worker(env=chosen)
    worker.wait_until_registered()
    eventually(lambda: names_seen() == {"shop"}, names_seen)


def test_a_name_fits_into_63_bytes(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "größer-" * 20)
    name = sessions.session_name("supervisor")
    assert len(name.encode()) == 63
    assert name.startswith("eventbus worker gr??er-")
    assert name.endswith(f":{os.getpid()} supervisor")
