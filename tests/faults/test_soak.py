"""All faults together, for a while: F50."""

import os
import random
import signal
import time
from collections import Counter
from statistics import mean

import psutil
import pytest
from django.db import connection

from django_eventbus.models import EventLog, QueuedEvent
from tests.faults import invariants
from tests.faults.journal import HANDLERS, OK, HandlerJournal
from tests.faults.test_kills import Fleet, children
from tests.shop.models import Effect

pytestmark = pytest.mark.long

SECONDS = float(os.environ.get("EVENTBUS_FAULT_SECONDS", 60))
WORKERS = 4
# The allowed growth of one supervisor between the first and the last third of the soak.
MORE_FILES = 10
MORE_BYTES = 20 << 20


class Nemesis:
    """Injects one fault after the other, in an order given by the seed."""

    def __init__(self, cluster, fleet, rng):
        self.cluster, self.fleet, self.rng = cluster, fleet, rng
        self.done = Counter()
        self.acts = {self.kill: 5, self.pause: 3, self.cut: 3, self.crash: 1}

    def strike(self):
        act = self.rng.choices(list(self.acts), weights=self.acts.values())[0]
        act()
        self.done[act.__name__] += 1

    def kill(self):
        self.fleet.kill_a_process()

    def pause(self):
        """Suspend a worker, sometimes for longer than ABANDON_AFTER."""
        worker = self.rng.choice(self.fleet.workers)
        worker.signal_all(signal.SIGSTOP)
        time.sleep(self.rng.choice((0.1, 0.5, 3.0)))
        worker.signal_all(signal.SIGCONT)

    def cut(self):
        """Terminate some sessions."""
        self.cluster.primary.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND backend_type = 'client backend' AND random() < 0.3"
        )

    def crash(self):
        self.cluster.primary.restart("immediate")


class Sizes:
    """Open files and memory of supervisors over time.

    Supervisors run no handlers, so neither may grow. A restarted supervisor starts small, so each
    process is compared with itself.
    """

    def __init__(self):
        self.seen = {}

    def look(self, workers):
        for worker in workers:
            try:
                process = psutil.Process(worker.process.pid)
                if children(worker):  # It has started.
                    size = (process.num_fds(), process.memory_info().rss)
                    self.seen.setdefault(worker.process.pid, []).append(size)
            except psutil.NoSuchProcess:
                continue

    def growth(self):
        """The largest growth of any supervisor, in files and in bytes."""
        grown = [(0.0, 0.0)]
        for sizes in self.seen.values():
            third = len(sizes) // 3
            if third >= 3:
                early, late = zip(*sizes[:third], strict=True), zip(*sizes[-third:], strict=True)
                grown.append(tuple(mean(b) - mean(a) for a, b in zip(early, late, strict=True)))
        return tuple(max(each) for each in zip(*grown, strict=True))


def test_soak(cluster, in_the_end, tmp_path, seed, figures):
    rng, sizes = random.Random(seed), Sizes()
    journal = HandlerJournal(tmp_path / "handlers")
    env = {HANDLERS: str(journal.path)}
    producers = [
        cluster.start_producer(
            "--seed", f"{seed + n}", "--keys", "25", "--name", name, "--pause", "0.1"
        )
        for n, name in enumerate("ab")
    ]
    as_usual = {"POLL_INTERVAL": 1.0}
    fleet = Fleet(
        lambda *options: cluster.start_worker(*options, eventbus=as_usual, env=env), rng, WORKERS
    )
    nemesis = Nemesis(cluster, fleet, rng)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        sizes.look(fleet.workers)
        time.sleep(rng.uniform(0.5, 3.0))
        nemesis.strike()
    connection.close()
    for each in producers:
        each.stop()
    in_the_end(lambda: not QueuedEvent.objects.exists())
    files, size = sizes.growth()
    acknowledged = sum(len(each.with_outcome(OK)) for each in cluster.journals)
    figures(
        f"{SECONDS:.0f} s, {dict(nemesis.done)}, {acknowledged} events acknowledged, "
        f"{EventLog.objects.count()} handled; supervisors grew by at most {files:.1f} files "
        f"and {size / 1024:.0f} KiB"
    )
    invariants.check(cluster.journals, journal)
    invariants.check_order_of_effects()
    assert not EventLog.objects.exclude(status="COMPLETED").exists()
    assert Effect.objects.count() == EventLog.objects.count() > 0
    assert files < MORE_FILES
    assert size < MORE_BYTES
