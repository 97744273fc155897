"""Real Celery workers handle events that real event workers hand off."""

import os
import signal

import pytest

from django_eventbus import publish, publish_many
from django_eventbus.models import EventLog, QueuedEvent
from tests.celery_workers import Broker
from tests.shop.models import Effect
from tests.workers import IN_ONE_PROCESS, eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes]


@pytest.fixture
def broker(tmp_path):
    return Broker(tmp_path)


def all_have_ended():
    return not QueuedEvent.objects.exists()


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_celery_handles_the_events_that_a_worker_hands_off(
    start_worker,
    start_celery,
    broker,
    pool,
):
    publish_many(("process.celery", n) for n in range(60))
    publish_many((("process.celery", n) for n in range(3)), key="order:1")
    worker = start_worker(*IN_ONE_PROCESS, env=broker.environment)
    celery = start_celery(broker, pool=pool)
    eventually(all_have_ended, lambda: worker.log + celery.log)
    assert EventLog.objects.filter(status="COMPLETED").count() == Effect.objects.count() == 63
    assert celery.stop() == 0, celery.log


def test_the_event_of_a_killed_celery_process_runs_again(
    start_worker,
    start_celery,
    broker,
    tmp_path,
):
    files = {name: str(tmp_path / name) for name in ("started", "go_on")}
    publish("process.celery_signal", files)
    worker = start_worker(*IN_ONE_PROCESS, env=broker.environment)
    celery = start_celery(broker)
    started = tmp_path / "started"
    eventually(lambda: started.exists() and started.read_text(), lambda: worker.log + celery.log)
    os.kill(int(started.read_text()), signal.SIGKILL)
    (tmp_path / "go_on").touch()
    eventually(all_have_ended, lambda: worker.log + celery.log)
    logged = EventLog.objects.get()
    assert (logged.status, logged.crashes, logged.interruptions) == ("COMPLETED", 0, 1)
    assert Effect.objects.count() == 1
