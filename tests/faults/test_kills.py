"""Workers killed at random moments, on whatever database the tests run."""

import os
import random
import signal
import time

import psutil
import pytest

from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing import publish_many
from tests.faults import invariants
from tests.shop.models import Effect
from tests.workers import eventually

pytestmark = [pytest.mark.long, pytest.mark.django_db(transaction=True)]

KILLS = int(os.environ.get("EVENTBUS_FAULT_KILLS", 10))
EVENTS = int(os.environ.get("EVENTBUS_FAULT_EVENTS", 2000))
PATIENCE = 300


class Fleet:
    """Supervisors with their children; one that is killed is started again, as systemd would."""

    def __init__(self, start, rng, size):
        self.start, self.rng = start, rng
        self.workers = [start("--processes", "2") for _ in range(size)]

    def kill_somebody(self):
        worker = self.rng.choice(self.workers)
        how = self.rng.choices(("child", "supervisor", "both"), weights=(60, 25, 15))[0]
        if how == "child":
            # Right after its start a supervisor has none.
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
    """Without the helper that Python's multiprocessing keeps."""
    found = []
    for each in psutil.Process(worker.process.pid).children():
        try:
            if "spawn_main" in " ".join(each.cmdline()):
                found.append(each)
        except psutil.NoSuchProcess:
            continue
    return found


def test_kill_random_workers_at_random_moments(start_worker, seed, figures):
    """Exactly one effect and one log row for each event, nothing dead, nobody had to help."""
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
        time.sleep(rng.uniform(0, 0.02))  # not always right after a commit
        kills.append(fleet.kill_somebody())
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
