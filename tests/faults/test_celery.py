"""Celery workers, event workers and the broker die at random while they handle events."""

import os
import random
import signal
import socket
import subprocess
import time
from contextlib import closing, suppress

import psutil
import pytest

from django_eventbus import publish, publish_many
from django_eventbus.models import EventLog, FlowControl, QueuedEvent
from tests import server_answers
from tests.celery_workers import Broker, start_celery  # noqa: F401 - a fixture
from tests.shop.models import Effect
from tests.workers import IN_ONE_PROCESS, eventually

pytestmark = [pytest.mark.long, pytest.mark.django_db(transaction=True)]

EVENTS = int(os.environ.get("EVENTBUS_FAULT_EVENTS", 2000))
KILLS = int(os.environ.get("EVENTBUS_FAULT_KILLS", 10))
PATIENCE = 600
#: Seconds without a broker.
DOWN_FOR = 30 if KILLS >= 100 else 5
#: A claim may be lost at each kill. Only the number of losses that make a dead letter is raised.
SETTINGS = {"ABANDON_AFTER": 3.0, "HANDOFF_DEADLINE": 10.0, "MAX_CRASHES": 50}


class RedisServer:
    """A server that keeps its messages only in memory, so a kill loses them all."""

    def __init__(self):
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = None

    def start(self):
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self.process = subprocess.Popen(
            ["redis-server", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        eventually(lambda: server_answers.answers(("127.0.0.1", self.port)))

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def redis_server():
    server = RedisServer()
    try:
        server.start()
    except FileNotFoundError:
        pytest.skip("redis-server is not installed")
    yield server
    server.kill()


@pytest.fixture
def rabbitmq():
    if not server_answers.answers(server_answers.address_of("rabbitmq")):
        pytest.skip("no RabbitMQ answers")
    return server_answers.url_of("rabbitmq")


class Fleet:
    """Event workers and Celery workers. A killed one is restarted, as systemd would do."""

    def __init__(self, broker, start_worker, start_celery, rng, server=None):  # noqa: F811
        self.rng, self.server = rng, server
        self.start_worker = lambda: start_worker(
            "--processes", "1", env=broker.environment, eventbus=SETTINGS
        )
        self.start_celery = lambda pool: start_celery(broker, pool=pool, eventbus=SETTINGS)
        self.workers = [self.start_worker() for _ in range(2)]
        self.celeries = {pool: self.start_celery(pool) for pool in ("prefork", "solo")}

    def kill(self):
        kinds = ["worker", "child", "prefork", "solo", *(["server"] if self.server else [])]
        how = self.rng.choice(kinds)
        if how == "worker":
            doomed = self.workers.pop(self.rng.randrange(2))
            doomed.signal_all(signal.SIGKILL)
            self.workers.append(self.start_worker())
        elif how == "child":
            self._kill_a_child()
        elif how == "server":
            self.server.kill()
            time.sleep(self.rng.uniform(0, 1))
            self.server.start()
        else:
            self.celeries[how].end()
            self.celeries[how] = self.start_celery(how)
        return how

    def _kill_a_child(self):
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.celeries["prefork"].process.pid)
            if children := parent.children():
                self.rng.choice(children).kill()

    def logs(self):
        return "\n".join(each.log[-2000:] for each in (*self.workers, *self.celeries.values()))


def survive(fleet, rng, figures, name):
    """Kill processes while the events are handled, then check that each had one effect."""
    started, kills = time.monotonic(), []
    for moment in sorted(rng.sample(range(EVENTS * 95 // 100), KILLS)):
        eventually(
            lambda moment=moment: EventLog.objects.count() >= moment, fleet.logs, patience=PATIENCE
        )
        time.sleep(rng.uniform(0, 0.02))
        kills.append(fleet.kill())
    eventually(lambda: not QueuedEvent.objects.exists(), fleet.logs, patience=PATIENCE)
    lost = EventLog.objects.filter(interruptions__gt=0).count()
    figures(
        f"{name}: {EVENTS} events, kills {sorted(kills)}, {lost} events lost a claim, "
        f"{time.monotonic() - started:.0f} s"
    )
    assert EventLog.objects.filter(status="COMPLETED").count() == EventLog.objects.count() == EVENTS
    assert Effect.objects.count() == EVENTS
    assert Effect.objects.values("event_id").distinct().count() == EVENTS


def publish_events():
    publish_many(("process.celery", n) for n in range(EVENTS * 9 // 10))
    for key in range(20):
        publish_many((("process.celery", n) for n in range(EVENTS // 200)), key=f"k{key}")


def test_redis_dies_and_so_do_its_clients(
    redis_server,
    start_worker,
    start_celery,  # noqa: F811
    tmp_path,
    seed,
    figures,
):
    rng = random.Random(seed)
    conf = {"broker_transport_options": {"visibility_timeout": 5}, "task_acks_late": True}
    broker = Broker(tmp_path, f"redis://127.0.0.1:{redis_server.port}/0", conf)
    publish_events()
    survive(Fleet(broker, start_worker, start_celery, rng, redis_server), rng, figures, "Redis")


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_clients_of_rabbitmq_die(
    rabbitmq,
    start_worker,
    start_celery,  # noqa: F811
    tmp_path,
    seed,
    figures,
    kind,
):
    rng = random.Random(seed)
    limits = {"x-delivery-limit": 2} if kind == "quorum" else {}
    conf = {"queue_arguments": {"x-queue-type": kind, **limits}, "task_acks_late": True}
    broker = Broker(tmp_path, rabbitmq, conf)
    publish_events()
    try:
        survive(Fleet(broker, start_worker, start_celery, rng), rng, figures, f"RabbitMQ {kind}")
    finally:
        with broker.app().connection_for_write() as connection:
            connection.default_channel.queue_delete(broker.queue)


@pytest.mark.parametrize("deliveries", [1, 3])
def test_messages_are_repeated_and_purged_while_events_are_handled(
    redis_server,
    start_worker,
    start_celery,  # noqa: F811
    tmp_path,
    seed,
    figures,
    deliveries,
):
    rng = random.Random(seed)
    conf = {"deliveries": deliveries}
    broker = Broker(tmp_path, f"redis://127.0.0.1:{redis_server.port}/0", conf)
    publish_events()
    fleet = Fleet(broker, start_worker, start_celery, rng)
    purged = 0
    for moment in sorted(rng.sample(range(EVENTS * 9 // 10), 5)):
        eventually(
            lambda moment=moment: EventLog.objects.count() >= moment, fleet.logs, patience=PATIENCE
        )
        purged += broker.purge()
    eventually(lambda: not QueuedEvent.objects.exists(), fleet.logs, patience=PATIENCE)
    figures(f"{EVENTS} events, each message sent {deliveries} times, {purged} purged")
    assert EventLog.objects.filter(status="COMPLETED").count() == EVENTS
    assert Effect.objects.count() == EVENTS


def test_events_wait_uncharged_while_redis_is_down(
    redis_server,
    start_worker,
    start_celery,  # noqa: F811
    tmp_path,
    seed,
    figures,
):
    broker = Broker(tmp_path, f"redis://127.0.0.1:{redis_server.port}/0")
    publish_events()
    fleet = Fleet(broker, start_worker, start_celery, random.Random(seed))
    eventually(lambda: EventLog.objects.count() >= EVENTS // 10, fleet.logs, patience=PATIENCE)
    redis_server.kill()
    down = FlowControl.objects.filter(kind="executor", opened_at__isnull=False)
    eventually(down.exists, fleet.logs, patience=PATIENCE)
    started = time.monotonic()
    publish_many(("process.celery", n) for n in range(100))
    published = time.monotonic() - started
    time.sleep(DOWN_FOR)
    redis_server.start()
    eventually(lambda: not QueuedEvent.objects.exists(), fleet.logs, patience=PATIENCE)
    figures(f"down for {DOWN_FOR} s, 100 events published in {published:.2f} s meanwhile")
    ended = EventLog.objects.filter(status="COMPLETED", attempts=1, crashes=0, interruptions=0)
    assert ended.count() == Effect.objects.count() == EVENTS + 100
    assert not down.exists()


def test_the_event_of_a_killed_child_does_not_wait_behind_a_backlog(
    redis_server,
    start_worker,
    start_celery,  # noqa: F811
    tmp_path,
    figures,
):
    """The backlog takes the two children ten minutes."""
    files = {name: str(tmp_path / name) for name in ("started", "go_on")}
    started = tmp_path / "started"
    settings = {"ABANDON_AFTER": 3.0}
    broker = Broker(tmp_path, f"redis://127.0.0.1:{redis_server.port}/0")
    publish("process.celery_signal", files)
    worker = start_worker(*IN_ONE_PROCESS, env=broker.environment, eventbus=settings)
    celery = start_celery(broker, eventbus=settings)
    eventually(lambda: started.exists() and started.read_text(), lambda: worker.log + celery.log)
    publish_many(("process.celery_slow", n) for n in range(1000))
    slow = Effect.objects.filter(handler="celery_slow")
    eventually(slow.exists, lambda: worker.log + celery.log)
    eventually(
        lambda: QueuedEvent.objects.filter(handed_off_to="celery_slow").count() > 900,
        lambda: worker.log + celery.log,
    )
    before, killed_at = slow.count(), time.monotonic()
    os.kill(int(started.read_text()), signal.SIGKILL)
    (tmp_path / "go_on").touch()
    runs_again = EventLog.objects.filter(type="process.celery_signal", status="COMPLETED")
    eventually(runs_again.exists, lambda: worker.log + celery.log, patience=PATIENCE)
    overtaken_by = slow.count() - before
    figures(
        f"ran again after {time.monotonic() - killed_at:.1f} s with ABANDON_AFTER=3, "
        f"{overtaken_by} of 1,000 waiting events ran before"
    )
    assert overtaken_by < 100
