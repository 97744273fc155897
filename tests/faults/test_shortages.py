"""A full disk, and a server clock that jumps: F34, F36."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from tests.faults import invariants
from tests.faults.journal import OK
from tests.shop.models import Effect

pytestmark = pytest.mark.long


def drained():
    return not QueuedEvent.objects.exists()


@pytest.fixture
def small_disk(cluster):
    """A small tablespace that the test can fill. The WAL stays on the large disk, because without
    room for it the server stops."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    disk = cluster.root / "small"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("no file system may be mounted here")
    try:
        shutil.chown(disk, cluster.primary.user)
        cluster.primary.sql(f"CREATE TABLESPACE small LOCATION '{disk}'")
        yield disk
    finally:
        cluster.end()
        subprocess.run(["umount", disk], check=True)


def fill(disk):
    with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass


@pytest.mark.parametrize("full", [EventLog, QueuedEvent], ids=["log", "queue"])
def test_workers_continue_after_a_full_disk(cluster, small_disk, in_the_end, full, figures):
    """F34: publishing raises, settlements are retried, and both work again when there is room."""
    cluster.primary.sql(f"ALTER TABLE {full._meta.db_table} SET TABLESPACE small")
    producer = cluster.start_producer("--keys", "5", "--pause", "0.02")
    workers = [cluster.start_worker() for _ in range(2)]
    in_the_end(lambda: EventLog.objects.count() > 50)
    fill(small_disk)
    who = [producer] if full is QueuedEvent else workers
    in_the_end(lambda: all(each.log.count("No space left") >= 5 for each in who))
    (small_disk / "ballast").unlink()
    before = EventLog.objects.count()
    in_the_end(lambda: EventLog.objects.count() > before + 50)
    producer.stop()
    in_the_end(drained)
    figures(f"{len(producer.journal.with_outcome(OK))} events acknowledged")
    invariants.check(cluster.journals)
    invariants.check_order_of_effects()
    assert not EventLog.objects.exclude(errors=None).exists(), "a handler was charged"
    assert Effect.objects.count() == EventLog.objects.count()
    assert [each.process.poll() for each in workers] == [None, None]


@pytest.fixture
def set_clock(cluster, tmp_path):
    """Shift the clock of the server, for example by ``+10m``."""
    libraries = sorted(Path("/usr/lib").glob("**/faketime/libfaketime.so.1"))
    if not libraries:
        pytest.skip("libfaketime is not installed (Debian: apt-get install libfaketime)")
    offset = cluster.root / "offset"
    offset.write_text("+0")
    offset.chmod(0o644)
    cluster.primary.stop()
    cluster.primary.start(
        env={
            "LD_PRELOAD": str(libraries[0]),
            "FAKETIME_TIMESTAMP_FILE": str(offset),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
    )
    return offset.write_text


@pytest.mark.parametrize("jump", ["+10m", "-10m"])
def test_events_are_handled_although_the_clock_of_the_server_jumps(
    cluster, set_clock, in_the_end, tmp_path, jump, figures
):
    """F36: after a jump forward every worker looks abandoned, after a jump back none does.

    Keys that were ready before a jump back are ready again when the clock has caught up.
    """
    workers = [cluster.start_worker("--processes", "2") for _ in range(2)]
    producer = cluster.start_producer("--keys", "5", "--pause", "0.02")
    in_the_end(lambda: EventLog.objects.count() > 50)
    files = {"started": str(tmp_path / "started"), "go_on": str(tmp_path / "go_on")}
    publish("process.signal", files)
    in_the_end((tmp_path / "started").exists)
    time_before = cluster.primary.sql("SELECT clock_timestamp()")[0][0]
    set_clock(jump)
    assert (
        abs((cluster.primary.sql("SELECT clock_timestamp()")[0][0] - time_before).total_seconds())
        > 500
    )
    before = EventLog.objects.count()
    in_the_end(lambda: EventLog.objects.count() > before + 100)
    (tmp_path / "go_on").touch()
    publish_many((("fault.effect", n) for n in range(10)), delay=0.2)
    producer.stop()
    in_the_end(lambda: not QueuedEvent.objects.filter(key=None).exists())
    if jump.startswith("-"):
        set_clock("+0")
    in_the_end(drained)
    taken = sum(each.log.count("another worker has removed the registration") for each in workers)
    figures(f"{EventLog.objects.count()} events handled, {taken} workers taken for dead")
    invariants.check(cluster.journals)
    invariants.check_order_of_effects()
    assert not EventLog.objects.exclude(status="COMPLETED").exists()
    assert Effect.objects.count() == EventLog.objects.count()
    assert [each.process.poll() for each in workers] == [None, None]
