"""Crashes, failovers and lost transactions of the server: F19, F24, F25."""

import os

import pytest
from django.db import connection

from django_eventbus.models import EventLog, QueuedEvent
from tests.faults import invariants
from tests.faults.journal import OK
from tests.shop.models import Effect

pytestmark = pytest.mark.long

CRASHES = int(os.environ.get("EVENTBUS_FAULT_CRASHES", 10))


def drained():
    return not QueuedEvent.objects.exists()


def handled():
    return EventLog.objects.count()


def check(cluster):
    invariants.check(cluster.journals)
    invariants.check_order_of_effects()
    assert not EventLog.objects.exclude(status="COMPLETED").exists()
    assert Effect.objects.count() == EventLog.objects.count() > 0


def test_events_survive_repeated_crashes_of_the_server_under_load(
    cluster, in_the_end, seed, figures
):
    """F19: committed events survive, and workers reconnect."""
    producers = [
        cluster.start_producer("--seed", f"{seed + n}", "--keys", "5", "--name", name)
        for n, name in enumerate("ab")
    ]
    workers = [cluster.start_worker("--processes", "2") for _ in range(2)]
    for _ in range(CRASHES):
        before = in_the_end(handled)
        in_the_end(lambda before=before: handled() > before + 50)
        cluster.primary.restart("immediate")
        connection.close()
    for each in producers:
        each.stop()
    in_the_end(drained)
    acknowledged = sum(len(each.with_outcome(OK)) for each in cluster.journals)
    figures(f"{CRASHES} crashes, {acknowledged} events acknowledged, {handled()} handled")
    check(cluster)
    assert [each.process.poll() for each in workers] == [None, None]


def test_a_synchronous_standby_takes_over_without_loss(cluster, in_the_end, figures):
    """F24: workers wait while the new server is read-only."""
    standby = cluster.add_standby()
    cluster.primary.configure(synchronous_standby_names="*")
    in_the_end(
        lambda: cluster.primary.sql("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'")
    )
    producer = cluster.start_producer("--keys", "5")
    workers = [cluster.start_worker("--processes", "2") for _ in range(2)]
    in_the_end(lambda: handled() > 500)
    cluster.primary.stop("immediate")
    cluster.point_to(standby)
    connection.close()
    in_the_end(lambda: all("read-only" in each.log for each in workers))
    standby.promote()
    before = in_the_end(handled)
    in_the_end(lambda: handled() > before + 100)
    producer.stop()
    in_the_end(drained)
    figures(f"{len(producer.journal.with_outcome(OK))} events acknowledged, {handled()} handled")
    check(cluster)
    assert [each.process.poll() for each in workers] == [None, None]


def test_a_transaction_missing_on_an_asynchronous_standby_is_lost_as_a_whole(
    cluster, in_the_end, figures
):
    """F25: no effect without its settlement and no settlement without its effect."""
    standby = cluster.add_standby()
    producer = cluster.start_producer("--keys", "5", "--size", "3")
    workers = [cluster.start_worker("--processes", "2") for _ in range(2)]
    in_the_end(lambda: handled() > 200)
    standby.sql("SELECT pg_wal_replay_pause()")
    before = handled()
    in_the_end(lambda: handled() > before + 200)
    standby.cut_off()
    in_the_end(lambda: not standby.sql("SELECT 1 FROM pg_stat_wal_receiver"))
    in_the_end(lambda: handled() > before + 400)
    cluster.primary.stop("immediate")
    cluster.point_to(standby)
    standby.promote()
    connection.close()
    survived = in_the_end(handled)
    in_the_end(lambda: handled() > survived + 100)
    producer.stop()
    in_the_end(drained)
    lost = producer.journal.with_outcome(OK) - ended()
    figures(f"{len(lost)} acknowledged events lost with the tail, {handled()} handled")
    invariants.check()
    invariants.check_order_of_effects()
    assert lost, "the standby missed nothing, so the test proves nothing"
    assert not EventLog.objects.exclude(status="COMPLETED").exists()
    assert {len(each & lost) for each in producer.journal.transactions()} == {0, 3}
    assert [each.process.poll() for each in workers] == [None, None]


def ended():
    return set(map(str, EventLog.objects.values_list("event_id", flat=True)))
