"""The health checks of worker processes, by HTTP and for systemd."""

import os
import re
import signal
import socket
import sys

import psutil
import pytest
from django.core.management import CommandError, call_command

from django_eventbus.models import EventLog
from django_eventbus.publishing.publisher import publish
from tests.concurrency.test_session_names import names_seen
from tests.probes import STRICT, addresses, becomes, get, status
from tests.workers import IN_ONE_PROCESS, PATIENT, eventually, on_one_database, suspend

pytestmark = pytest.mark.django_db(transaction=True)

HEALTH = ("--health-port", "0")
FAKE_METRICS = {"EVENTBUS_TEST_IMPORT": "tests.fake_metrics"}
PROMETHEUS = "django_eventbus.integrations.prometheus"
#: Renewals are frequent, and registrations do not expire on a busy machine.
RENEWING = {"ABANDON_AFTER": 20.0}


def health_of(worker):
    return addresses(worker)["/livez"]


def children(worker):
    """The worker processes, without multiprocessing's resource tracker."""
    found = psutil.Process(worker.process.pid).children()
    return [each.pid for each in found if "spawn_main" in " ".join(each.cmdline())]


@pytest.mark.parametrize("options", [("--processes", "2"), IN_ONE_PROCESS], ids=["two", "none"])
def test_a_worker_that_claims_events_is_live_and_ready(start_worker, options):
    worker = start_worker(*HEALTH, *options, eventbus=PATIENT)
    becomes(worker, "/readyz", 200)
    live = get(health_of(worker), "/livez", accept="application/json")
    assert live.headers["Content-Type"] == "application/json"
    assert (live.status, live.json["ok"], live.json["reasons"]) == (200, True, [])
    expected = children(worker) or [worker.process.pid]
    eventually(
        lambda: sorted(each["pid"] for each in processes(worker, "claiming")) == sorted(expected)
    )
    ready = get(health_of(worker), "/readyz")
    assert ready.text.startswith("ready\n")
    assert f"process {expected[0]}: claiming, progress " in ready.text


def processes(worker, state):
    found = get(health_of(worker), "/readyz?format=json").json["processes"]
    return [each for each in found if each["state"] == state]


def test_a_worker_is_not_live_until_its_suspended_process_is_replaced(start_worker):
    worker = start_worker(*HEALTH, "--processes", "2", eventbus=RENEWING, env=STRICT)
    eventually(lambda: len(processes(worker, "claiming")) == 2, lambda: worker.log)
    suspended, other = children(worker)
    suspend(suspended)
    becomes(worker, "/livez", 503)
    answer = get(health_of(worker), "/livez")
    assert f"not live: process {suspended}: a thread should have reported" in answer.text
    assert f"process {suspended}: stuck" in answer.text
    assert f"process {other}: claiming" in answer.text
    becomes(worker, "/readyz", 200)  # The other process claims events.
    os.kill(suspended, signal.SIGKILL)
    becomes(worker, "/livez", 200)


def test_a_worker_is_not_live_while_its_supervisor_is_stuck(start_worker):
    """The main thread of the supervisor sleeps in a signal handler; its other threads run."""
    worker = start_worker(
        *HEALTH,
        eventbus=PATIENT,
        env={"EVENTBUS_TEST_IMPORT": "tests.faults.strict,tests.faults.sleepy"},
    )
    becomes(worker, "/readyz", 200)
    worker.signal(signal.SIGUSR1)
    becomes(worker, "/livez", 503)
    assert (
        "the supervisor has not checked its processes for" in get(health_of(worker), "/livez").text
    )
    assert status(health_of(worker), "/readyz") == 503


@pytest.mark.parametrize("concurrency", ["1", "2"])
def test_a_slow_handler_within_its_deadline_is_live_and_ready(start_worker, tmp_path, concurrency):
    """Its dispatcher may not progress for much longer than LATE_AFTER."""
    started, go_on = tmp_path / "started", tmp_path / "go_on"
    publish("process.signal", {"started": str(started), "go_on": str(go_on)})
    options = (*HEALTH, "--concurrency", concurrency)
    worker = start_worker(*options, eventbus=RENEWING, env=STRICT)
    eventually(started.exists, lambda: worker.log)
    if concurrency == "1":
        eventually(lambda: processes(worker, "claiming")[0]["seconds_since_progress"] > 3)
    becomes(worker, "/livez", 200)
    becomes(worker, "/readyz", 200)
    go_on.touch()
    eventually(EventLog.objects.exists, lambda: worker.log)


def test_a_stopping_worker_is_live_and_not_ready(start_worker, tmp_path):
    started, go_on = tmp_path / "started", tmp_path / "go_on"
    publish("process.signal", {"started": str(started), "go_on": str(go_on)})
    worker = start_worker(*HEALTH, eventbus=PATIENT)
    eventually(started.exists, lambda: worker.log)
    becomes(worker, "/readyz", 200)
    worker.signal(signal.SIGTERM)
    becomes(worker, "/readyz", 503)
    assert "not ready: the worker is stopping" in get(health_of(worker), "/readyz").text
    assert status(health_of(worker), "/livez") == 200
    go_on.touch()
    assert worker.wait() == 0, worker.log


def test_a_handler_that_ignores_its_deadline_makes_a_worker_without_supervisor_not_live(
    start_worker,
):
    publish("process.ignore_deadline")
    worker = start_worker(*HEALTH, *IN_ONE_PROCESS, eventbus=PATIENT)
    becomes(worker, "/livez", 503)
    assert (
        "handler ignore_deadline has ignored its deadline" in get(health_of(worker), "/livez").text
    )


@on_one_database
def test_a_worker_under_the_reloader_serves_its_health(start_worker):
    worker = start_worker(*HEALTH, eventbus=PATIENT, env={"EVENTBUS_TEST_DEBUG": "1"})
    becomes(worker, "/readyz", 200)
    assert worker.log.count("Listening") == 2


@pytest.mark.parametrize("option", ["--health-port", "--metrics-port"])
def test_a_port_in_use_is_refused_before_a_worker_starts(option):
    if option == "--metrics-port":
        pytest.importorskip(PROMETHEUS)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        refusal = (
            f"{option}: cannot listen on 127.0.0.1 port {port}: Address already in use. Choose"
        )
        with pytest.raises(CommandError, match=re.escape(refusal)):
            call_command("run_event_worker", "--drain", option, port)


def test_an_unknown_host_is_refused():
    with pytest.raises(CommandError, match=r"cannot listen on no.such.host.invalid port 0"):
        call_command("run_event_worker", "--drain", *HEALTH, "--http-host", "no.such.host.invalid")


def test_metrics_without_prometheus_client_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, PROMETHEUS, raising=False)
    with pytest.raises(CommandError, match=r"django-durable-events\[prometheus\]"):
        call_command("run_event_worker", "--drain", "--metrics-port", "0")


# -- metrics


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return str(found.getsockname()[1])


def test_one_port_serves_health_and_metrics(start_worker):
    pytest.importorskip("prometheus_client")
    options = ("--health-port", "0", "--metrics-port", "0")
    worker = start_worker(*options, eventbus=PATIENT, env=FAKE_METRICS)
    found = addresses(worker)
    assert list(found) == ["/livez", "/readyz", "/metrics"]
    assert len(set(found.values())) == 1
    assert get(found["/livez"], "/metrics").text.startswith("session ")


def test_each_port_serves_only_its_own_pages(start_worker):
    pytest.importorskip("prometheus_client")
    options = ("--health-port", "0", "--metrics-port", free_port())
    worker = start_worker(*options, eventbus=PATIENT, env=FAKE_METRICS)
    found = addresses(worker)
    assert get(found["/metrics"], "/metrics").status == 200
    assert get(found["/metrics"], "/livez").text == "There is no page '/livez', only /metrics.\n"
    assert get(found["/livez"], "/metrics").status == 404


@on_one_database
def test_the_session_of_a_request_for_metrics_has_a_name_and_is_closed(start_worker):
    pytest.importorskip("prometheus_client")
    worker = start_worker("--metrics-port", "0", eventbus=PATIENT, env=FAKE_METRICS)
    name = f"eventbus worker {os.uname().nodename[:30]}:{worker.process.pid} metrics"
    assert get(addresses(worker)["/metrics"], "/metrics").text == f"session {name}\n"
    eventually(lambda: name not in names_seen(), names_seen)


def test_metrics_are_available_while_a_worker_process_is_suspended(start_worker):
    pytest.importorskip(PROMETHEUS)
    worker = start_worker("--metrics-port", "0", "--processes", "2", eventbus=PATIENT)
    eventually(lambda: len(children(worker)) == 2, lambda: worker.log)
    suspend(children(worker)[0])
    answer = get(addresses(worker)["/metrics"], "/metrics")
    assert answer.status == 200, answer.text
    assert "# TYPE eventbus_" in answer.text


# -- systemd


class Systemd:
    """The end of the notification socket that systemd holds."""

    def __init__(self, address):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(0.01)
        self.received = []

    def has(self, beginning):
        """Return whether a message with this beginning has arrived since ``forget``."""
        try:
            while True:
                self.received.append(self.socket.recv(4096).decode())
        except TimeoutError:
            return any(each.startswith(beginning) for each in self.received)

    def forget(self):
        self.has("")
        self.received.clear()


@pytest.fixture(params=["file", "abstract"])
def systemd(request, tmp_path):
    path = str(tmp_path / "notify")
    made = Systemd(path if request.param == "file" else f"\0{path}")
    made.environment = {
        "NOTIFY_SOCKET": path if request.param == "file" else f"@{path}",
        "WATCHDOG_USEC": "400000",
    }
    yield made
    made.socket.close()


def test_systemd_is_notified_while_the_worker_is_live(start_worker, systemd):
    worker = start_worker(eventbus=RENEWING, env=systemd.environment | STRICT)
    eventually(lambda: systemd.has("READY=1"), lambda: worker.log)
    eventually(lambda: systemd.has("STATUS=1 of 1 worker processes claim"), lambda: worker.log)
    systemd.forget()
    eventually(lambda: systemd.has("WATCHDOG=1"), lambda: worker.log)
    (child,) = children(worker)
    suspend(child)

    def is_silent():
        """The watchdog is due every 0.2 seconds, and the status only when it has changed."""
        systemd.forget()
        return not eventually_has(systemd, "WATCHDOG=1")

    eventually(is_silent, lambda: worker.log)
    os.kill(child, signal.SIGCONT)
    eventually(lambda: systemd.has("WATCHDOG=1"), lambda: worker.log)
    worker.signal(signal.SIGTERM)
    eventually(lambda: systemd.has("STOPPING=1"), lambda: worker.log)
    assert worker.wait() == 0, worker.log


def eventually_has(systemd, beginning):
    """Return whether the message arrives within ten of its intervals."""
    return any(systemd.has(beginning) for _ in range(200))


def test_a_watchdog_for_another_process_is_not_notified(start_worker, tmp_path, systemd):
    env = {**systemd.environment, "WATCHDOG_PID": "1"}
    worker = start_worker(*IN_ONE_PROCESS, eventbus=PATIENT, env=env)
    eventually(lambda: systemd.has("READY=1"), lambda: worker.log)
    worker.signal(signal.SIGTERM)
    eventually(lambda: systemd.has("STOPPING=1"), lambda: worker.log)
    assert worker.wait() == 0, worker.log
    assert not systemd.has("WATCHDOG")


def test_handlers_do_not_inherit_the_variables_of_systemd(start_worker, tmp_path, systemd):
    seen = tmp_path / "seen"
    publish("process.environment", str(seen))
    start_worker("--drain", eventbus=PATIENT, env=systemd.environment)
    eventually(lambda: EventLog.objects.exists())
    assert "PATH=" in seen.read_text()
    assert "NOTIFY_SOCKET" not in seen.read_text()
    assert "WATCHDOG" not in seen.read_text()
