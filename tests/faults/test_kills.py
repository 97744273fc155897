"""Workers killed at random moments, on every database."""

import os
import random
import signal
import time

import psutil
import pytest

from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing.publisher import publish_many
from tests.faults import invariants
from tests.shop.models import Effect
from tests.workers import eventually

pytestmark = [pytest.mark.long, pytest.mark.django_db(transaction=True)]

KILLS = int(os.environ.get("EVENTBUS_FAULT_KILLS", 10))
EVENTS = int(os.environ.get("EVENTBUS_FAULT_EVENTS", 2000))
PATIENCE = 300


class Fleet:
    """Supervisors with their worker processes. A killed one is restarted, as systemd would do."""

    def __init__(self, start, rng, size):
        self.start, self.rng = start, rng
        self.workers = [start("--processes", "2") for _ in range(size)]

    def kill_a_process(self):
        worker = self.rng.choice(self.workers)
        how = self.rng.choices(("child", "supervisor", "both"), weights=(60, 25, 15))[0]
        if how == "child":
            # A supervisor has no worker processes right after its start.
            child = self.rng.choice(eventually(lambda: children(worker), lambda: worker.log))
            child.kill()
            return how
        if how == "both":
            worker.signal_all(signal.SIGKILL)
        else:
            worker.signal(signal.SIGKILL)
        self.workers.remove(worker)
        self.workers.append(self.start("--processes", "2"))
        return how

    def logs(self):
        return "\n".join(each.log[-2000:] for each in self.workers)


def children(worker):
    """The worker processes, without the resource tracker of multiprocessing."""
    found = []
    for each in psutil.Process(worker.process.pid).children():
        try:
            if "spawn_main" in " ".join(each.cmdline()):
                found.append(each)
        except psutil.NoSuchProcess:
            continue
    return found


def test_kill_random_workers_at_random_moments(start_worker, seed, figures):
    """Each event has one effect and one log row, and there are no dead letters."""
    rng, started = random.Random(seed), time.monotonic()
    publish_many(("fault.effect", n) for n in range(EVENTS * 8 // 10))
    for key in range(20):
        publish_many((("fault.effect", n) for n in range(EVENTS // 100)), key=f"k{key}")
    fleet = Fleet(start_worker, rng, 3)
    kills = []
    for moment in sorted(rng.sample(range(EVENTS * 95 // 100), KILLS)):
        eventually(
            lambda moment=moment: EventLog.objects.count() >= moment, fleet.logs, patience=PATIENCE
        )
        # Random delays, so that kills do not always follow a commit.
        time.sleep(rng.uniform(0, 0.02))
        kills.append(fleet.kill_a_process())
    eventually(lambda: not QueuedEvent.objects.exists(), fleet.logs, patience=PATIENCE)
    charged = [EventLog.objects.filter(crashes=n).count() for n in (1, 2, 3)]
    figures(
        f"{len(kills)} kills ({kills.count('child')} children, {kills.count('supervisor')} "
        f"supervisors, {kills.count('both')} both), {EVENTS} events, "
        f"{time.monotonic() - started:.0f} s; charged once, twice, three times: {charged}"
    )
    invariants.check()
    invariants.check_order_of_effects()
    assert Effect.objects.count() == EVENTS
    assert EventLog.objects.filter(status="COMPLETED").count() == EVENTS
    assert EventLog.objects.count() == EVENTS
