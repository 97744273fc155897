"""Gates between real processes: all of them obey, and what one takes into its grave is free."""

import signal
from functools import partial

import pytest

from django_eventbus import CircuitBreaker, breakers, gates, handler, publish, publish_many
from django_eventbus.models import EventGate, EventLog, EventWorker, QueuedEvent
from django_eventbus.store import store_for
from django_eventbus.store.rows import PARKED
from tests import workers
from tests.shop.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


LONG_AGO = "2000-01-01T00:00:00Z"

#: Four processes and a commit for every delivery: on a busy machine that takes its time.
eventually = partial(workers.eventually, patience=120)


#: Nor shall anybody be taken for dead who only has to wait.
PATIENT = {"ABANDON_AFTER": 60}


@pytest.fixture
def start_four(start_worker):
    worker = start_worker("--processes", "4", eventbus=PATIENT)
    eventually(lambda: workers_of(worker) == 4, lambda: worker.log)
    return worker


def workers_of(supervisor):
    return EventWorker.objects.exclude(pid=supervisor.process.pid).count()


def parked(**filters):
    return QueuedEvent.objects.filter(available_at__gte=PARKED, **filters)


def test_a_pause_is_obeyed_by_all_workers_and_burns_nothing(start_four):
    """Within about a second, told by the work that is still done: a busy machine does less."""
    in_a_second = 50
    handler("process.slow_effect", name="slow_effect")(print)  # what is paused here is known here
    publish_many(("process.slow_effect", 1 / in_a_second) for _ in range(600))
    eventually(Effect.objects.exists, lambda: start_four.log)
    gates.pause(handler="slow_effect", reason="a test")
    paused_at = Effect.objects.count()
    eventually(
        lambda: parked().exists() and not QueuedEvent.objects.filter(available_at=None).exists(),
        lambda: start_four.log,
    )
    publish_many(("process.slow_effect", 1 / in_a_second) for _ in range(50))
    eventually(
        lambda: parked(attempts=0).count() + Effect.objects.count() == 650, lambda: start_four.log
    )
    assert Effect.objects.count() - paused_at <= 4 * in_a_second
    gates.resume(handler="slow_effect")
    eventually(lambda: EventLog.objects.count() == 650, lambda: start_four.log)
    assert Effect.objects.count() == 650
    assert set(EventLog.objects.values_list("status", "attempts")) == {("COMPLETED", 1)}
    assert not EventLog.objects.filter(errors__isnull=False).exists()


def test_m30_one_probe_among_many_workers(start_worker, tmp_path):
    service = tmp_path / "is_up"
    store_for().make_gates("handler", ["down"])
    gate = EventGate.objects.filter(name="down")
    gate.update(opened_at=LONG_AGO, probe_at="2999-01-01T00:00:00Z")
    worker = start_worker("--processes", "4", eventbus=PATIENT)
    eventually(lambda: workers_of(worker) == 4, lambda: worker.log)
    publish_many(("process.down", str(service)) for _ in range(100))
    eventually(lambda: parked().count() == 100, lambda: worker.log)
    for calls in range(1, 6):
        gate.update(probe_at=LONG_AGO)
        # Tried, failed, and open for as long again.
        eventually(lambda: gate.exclude(probe_at=LONG_AGO).filter(probe_by="").exists())
        eventually(lambda: parked().count() == 100, lambda: worker.log)
        assert Effect.objects.count() == calls
    service.touch()
    gate.update(probe_at=LONG_AGO)
    eventually(lambda: not QueuedEvent.objects.exists(), lambda: worker.log)
    assert gate.get().opened_at is None
    assert Effect.objects.count() == 105


def test_m30_failures_of_several_workers_together_open_a_breaker(start_worker, settings):
    """Ten must fail, and neither of the two sees more than six. All of them obey then."""
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

    def parks_more_of(queue):
        publish("process.broken", "more", queue=queue)
        return parked(queue=queue, payload="more").exists()

    for queue in "ab":
        eventually(lambda queue=queue: parks_more_of(queue), logs)
    assert not QueuedEvent.objects.filter(attempts__gt=1).exists()


def test_no_more_run_at_a_time_than_may_in_all_processes_together(start_four, tmp_path):
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
    eventually(lambda: parked().count() == 5, lambda: second.log)
    first.signal_all(signal.SIGKILL)
    (tmp_path / "go_on").touch()
    eventually(lambda: EventLog.objects.count() == 6, lambda: second.log)
    assert Effect.objects.count() == 6
    eventually(lambda: EventGate.objects.get(name="alone").running == {}, lambda: second.log)


def test_a_rate_holds_for_all_processes_together(start_four):
    """A bucket of 21 and 20 more each second: 60 cannot be done in one."""
    publish_many(("process.rated", {}) for _ in range(60))
    eventually(lambda: EventLog.objects.count() == 60, lambda: start_four.log)
    moments = [float(note) for note in Effect.objects.values_list("note", flat=True)]
    assert max(moments) - min(moments) > 1.0
    assert set(EventLog.objects.values_list("status", "attempts")) == {("COMPLETED", 1)}
