"""Flow controls between real processes, including the slots of a dead process."""

import signal
from functools import partial

import pytest

from django_eventbus import CircuitBreaker, breakers, handler, pauses, publish, publish_many
from django_eventbus.models import EventLog, EventWorker, FlowControl, QueuedEvent
from django_eventbus.store import store_for
from tests import workers
from tests.shop.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


LONG_AGO = "2000-01-01T00:00:00Z"

#: Four processes commit every delivery, which is slow on a busy machine.
eventually = partial(workers.eventually, patience=120)


#: A worker that only waits must not be recovered as abandoned.
PATIENT = {"ABANDON_AFTER": 60}


@pytest.fixture
def start_four(start_worker):
    worker = start_worker("--processes", "4", eventbus=PATIENT)
    eventually(lambda: workers_of(worker) == 4, lambda: worker.log)
    return worker


def workers_of(supervisor):
    return EventWorker.objects.exclude(pid=supervisor.process.pid).count()


def held(**filters):
    return QueuedEvent.objects.filter(held_by__isnull=False, **filters)


def test_all_workers_obey_a_pause_and_no_event_loses_an_attempt(start_four):
    """The pause takes about a second. The number of later calls measures it on any machine."""
    in_a_second = 50
    # pause() refuses a handler that this process does not know.
    handler("process.slow_effect", name="slow_effect")(print)
    publish_many(("process.slow_effect", 1 / in_a_second) for _ in range(600))
    eventually(Effect.objects.exists, lambda: start_four.log)
    pauses.pause(handler="slow_effect", reason="a test")
    paused_at = Effect.objects.count()
    eventually(
        lambda: held().exists() and not QueuedEvent.objects.filter(held_by=None).exists(),
        lambda: start_four.log,
    )
    publish_many(("process.slow_effect", 1 / in_a_second) for _ in range(50))
    eventually(
        lambda: held(attempts=0).count() + Effect.objects.count() == 650, lambda: start_four.log
    )
    assert Effect.objects.count() - paused_at <= 4 * in_a_second
    pauses.resume(handler="slow_effect")
    eventually(lambda: EventLog.objects.count() == 650, lambda: start_four.log)
    assert Effect.objects.count() == 650
    assert set(EventLog.objects.values_list("status", "attempts")) == {("COMPLETED", 1)}
    assert not EventLog.objects.filter(errors__isnull=False).exists()


def test_m30_many_workers_make_one_probe_together(start_worker, tmp_path):
    service = tmp_path / "is_up"
    store_for().make_flow_controls("handler", ["down"])
    gate = FlowControl.objects.filter(name="down")
    gate.update(opened_at=LONG_AGO, probe_at="2999-01-01T00:00:00Z")
    worker = start_worker("--processes", "4", eventbus=PATIENT)
    eventually(lambda: workers_of(worker) == 4, lambda: worker.log)
    publish_many(("process.down", str(service)) for _ in range(100))
    eventually(lambda: held().count() == 100, lambda: worker.log)
    for calls in range(1, 6):
        gate.update(probe_at=LONG_AGO)
        # The probe failed, so the breaker is open for the same time again.
        eventually(lambda: gate.exclude(probe_at=LONG_AGO).filter(probe_by="").exists())
        eventually(lambda: held().count() == 100, lambda: worker.log)
        assert Effect.objects.count() == calls
    service.touch()
    gate.update(probe_at=LONG_AGO)
    eventually(lambda: not QueuedEvent.objects.exists(), lambda: worker.log)
    assert gate.get().opened_at is None
    assert Effect.objects.count() == 105


def test_m30_failures_of_several_workers_together_open_a_breaker(start_worker, settings):
    """The breaker needs ten failures and neither worker sees more than six."""
    queues = {"QUEUES": ["default", "a", "b"]}
    settings.EVENTBUS = queues
    handler("process.broken", name="broken", breaker=CircuitBreaker())(print)
    for queue in "ab":
        publish_many((("process.broken", n) for n in range(6)), queue=queue)
    pair = [start_worker("--queues", queue, eventbus={**PATIENT, **queues}) for queue in "ab"]

    def logs():
        return "\n".join(worker.log for worker in pair)

    eventually(lambda: breakers.list()[0].state == "open", logs)
    assert 10 <= Effect.objects.count() <= 12

    def holds_more_of(queue):
        publish("process.broken", "more", queue=queue)
        return held(queue=queue, payload="more").exists()

    for queue in "ab":
        eventually(lambda queue=queue: holds_more_of(queue), logs)
    assert not QueuedEvent.objects.filter(attempts__gt=1).exists()


def test_the_limit_on_concurrency_applies_to_all_processes_together(start_four, tmp_path):
    running = tmp_path / "running"
    running.mkdir()
    publish_many(("process.limited", str(running)) for _ in range(60))
    eventually(lambda: EventLog.objects.count() == 60, lambda: start_four.log)
    assert set(Effect.objects.values_list("note", flat=True)) <= {"1", "2"}
    assert Effect.objects.filter(note="2").exists(), "two did overlap"
    assert set(EventLog.objects.values_list("status", "attempts")) == {("COMPLETED", 1)}


def test_the_slot_of_a_killed_worker_is_free(start_worker, tmp_path):
    files = {"started": str(tmp_path / "started"), "go_on": str(tmp_path / "go_on")}
    first = start_worker(eventbus={"ABANDON_AFTER": 10})
    publish("process.alone", files)
    eventually((tmp_path / "started").exists, lambda: first.log)
    second = start_worker(eventbus=PATIENT)
    publish_many(("process.alone", files) for _ in range(5))
    eventually(lambda: held().count() == 5, lambda: second.log)
    first.signal_all(signal.SIGKILL)
    (tmp_path / "go_on").touch()
    eventually(lambda: EventLog.objects.count() == 6, lambda: second.log)
    assert Effect.objects.count() == 6
    eventually(lambda: FlowControl.objects.get(name="alone").running == {}, lambda: second.log)


def test_a_rate_applies_to_all_processes_together(start_four):
    """The bucket holds 21 tokens and gets 20 per second, so 60 calls take over one second."""
    publish_many(("process.rated", {}) for _ in range(60))
    eventually(lambda: EventLog.objects.count() == 60, lambda: start_four.log)
    moments = [float(note) for note in Effect.objects.values_list("note", flat=True)]
    assert max(moments) - min(moments) > 1.0
    assert set(EventLog.objects.values_list("status", "attempts")) == {("COMPLETED", 1)}
