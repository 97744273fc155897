"""F42: many workers and one tick, with workers dying and stopping around it."""

import signal
from collections import Counter
from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from django.db import connection

from django_eventbus.models import EventLog, EventSchedule, QueuedEvent
from django_eventbus.store import store_for
from django_eventbus.worker.firing import Scheduler
from tests.faults import failpoints, invariants
from tests.workers import IN_ONE_PROCESS, eventually

pytestmark = pytest.mark.django_db(transaction=True)


def every_second():
    """A schedule that fires all missed ticks, so that missing and repeated ticks can be counted."""
    return EventSchedule.objects.create(
        name="beat", type="fault.effect", cron="* * * * * *", tz="UTC", misfire="fire_all"
    )


def due_tick(name="beat"):
    """A schedule with one tick that is due now; the next one is far in the future."""
    row = EventSchedule.objects.create(name=name, type="fault.effect", cron="0 0 1 1 *", tz="UTC")
    scheduler = Scheduler(store_for())
    scheduler.fire_some()
    EventSchedule.objects.filter(id=row.pk).update(next_at=store_for().read_clock())
    return scheduler


def origins():
    """The schedule headers of all events, queued or ended."""
    return [
        headers["scheduler"]
        for model in (QueuedEvent, EventLog)
        for headers in model.objects.values_list("headers", flat=True)
    ]


def ticks_fired():
    return Counter(datetime.fromisoformat(each["tick"]) for each in origins())


def assert_every_tick_fired_once(ticks):
    assert max(ticks.values()) == 1
    gaps = {later - earlier for earlier, later in pairwise(sorted(ticks))}
    assert gaps <= {timedelta(seconds=1)}


def stop(*workers):
    """Count while no worker runs, because workers move events between the tables."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    for worker in workers:
        worker.wait()


def test_three_workers_fire_every_tick_once(start_worker):
    every_second()
    workers = [start_worker(*IN_ONE_PROCESS) for _ in range(3)]
    eventually(lambda: len(ticks_fired()) >= 4, lambda: workers[0].log)
    stop(*workers)
    assert_every_tick_fired_once(ticks_fired())
    invariants.check()


@pytest.mark.parametrize("place", ["schedule.due", "schedule.published", "schedule.committed"])
def test_a_worker_that_dies_around_a_tick_neither_loses_nor_repeats_it(
    start_worker, tmp_path, place
):
    due_tick()
    died = tmp_path / "died"
    plan = {place.replace(".", "__"): {"do": "kill", "once": str(died)}}
    workers = [start_worker(*IN_ONE_PROCESS, env=failpoints.environment(**plan)) for _ in range(3)]
    eventually(died.exists, lambda: workers[0].log)
    eventually(EventLog.objects.exists, lambda: workers[0].log)
    stop(*workers)
    assert sorted(ticks_fired().values()) == [1]
    invariants.check()


def test_workers_that_die_constantly_fire_every_tick_once(start_worker):
    every_second()
    dying = [
        start_worker(env=failpoints.environment(**{place: {"do": "kill", "nth": 2}}))
        for place in ("schedule__published", "schedule__committed")
    ]
    steady = start_worker(*IN_ONE_PROCESS)
    eventually(lambda: len(ticks_fired()) >= 5, lambda: steady.log)
    stop(steady, *dying)
    assert_every_tick_fired_once(ticks_fired())
    invariants.check()


def test_a_worker_suspended_across_a_tick_does_not_fire_it_on_waking(start_worker, tmp_path):
    """It has read that the tick is due and is suspended before it locks the row."""
    due_tick()
    seen, until = tmp_path / "seen", tmp_path / "until"
    pause = {"do": "wait", "seen": str(seen), "until": str(until)}
    stale = start_worker(env=failpoints.environment(schedule__due=pause))
    eventually(seen.exists, lambda: stale.log)
    stale.suspend_all()
    other = start_worker(*IN_ONE_PROCESS)
    eventually(EventLog.objects.exists, lambda: other.log)
    until.touch()
    stale.signal_all(signal.SIGCONT)
    stale.signal(signal.SIGTERM)
    stale.wait()
    assert sorted(ticks_fired().values()) == [1]


def test_a_worker_suspended_while_it_fires_does_not_delay_other_schedules(start_worker, tmp_path):
    """It holds the row lock of its tick until it wakes, so the tick is not fired twice."""
    if connection.vendor == "sqlite":
        pytest.skip("an open transaction holds the only write lock")
    due_tick("first")
    seen, until = tmp_path / "seen", tmp_path / "until"
    pause = {"do": "wait", "seen": str(seen), "until": str(until)}
    stale = start_worker(env=failpoints.environment(schedule__published=pause))
    eventually(seen.exists, lambda: stale.log)
    stale.suspend_all()
    due_tick("second").fire_some()
    assert [each["name"] for each in origins()] == ["second"]
    until.touch()
    stale.signal_all(signal.SIGCONT)
    eventually(lambda: len(origins()) > 1, lambda: stale.log)
    stop(stale)
    assert sorted(each["name"] for each in origins()) == ["first", "second"]


def test_an_idle_worker_wakes_up_for_a_tick(start_worker, settings):
    """Its poll interval is an hour, and the events are not in its queues."""
    settings.EVENTBUS = {"QUEUES": ["default", "other"]}
    every_second()
    EventSchedule.objects.update(queue="other")
    worker = start_worker(
        *IN_ONE_PROCESS,
        "--queues",
        "default",
        "--poll-interval",
        "3600",
        eventbus=settings.EVENTBUS,
    )
    eventually(lambda: len(ticks_fired()) >= 3, lambda: worker.log)
    stop(worker)
    assert_every_tick_fired_once(ticks_fired())
