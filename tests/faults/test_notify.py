"""NOTIFY fails or hangs (F29): a hint that may be lost, after a commit that may not."""

import threading
import time
import uuid
from contextlib import contextmanager

import psycopg
import pytest
from django.db import connection, transaction

from django_eventbus import handler
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing import publish
from django_eventbus.store import store_for
from django_eventbus.worker import FALSE_ALARM_PAUSE, FALSE_ALARMS
from tests.bus import drain
from tests.faults import invariants
from tests.faults.journal import OK, ProducerJournal
from tests.faults.proxy import AFTER, BEFORE, HELD, says, through
from tests.shop.models import Effect
from tests.threads import in_thread
from tests.workers import PATIENCE, eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]

#: At the most: what is claimed, what is due, when, in which gates.
STATEMENTS_OF_A_LOOK = 12


@pytest.fixture
def publish_one(tmp_path):
    """As a producer that believes what ``publish`` says; in the end its events are handled."""
    handler("notified", name="notified")(lambda event: None)
    journal = ProducerJournal(tmp_path / "producer")

    def publish_and_note():
        event = publish("notified", {})
        journal.intend(event.event_id)
        journal.outcome(event.event_id, OK)

    yield publish_and_note
    drain()
    invariants.check([journal])
    assert EventLog.objects.filter(status="COMPLETED").count() == len(journal.outcomes())


@pytest.mark.parametrize("when", [BEFORE, AFTER])
def test_a_notification_lost_with_its_connection_is_nobodys_error(
    proxy, publish_one, capture, when
):
    cut = proxy.cut(says("NOTIFY"), when)
    with through(proxy):
        publish_one()
        assert cut.happened.is_set()
        assert QueuedEvent.objects.count() == 1, "on a connection that works"
        publish_one()
    assert "workers could not be notified" in capture.text


def test_a_notification_that_hangs_holds_up_the_caller_and_not_the_commit(proxy, publish_one):
    held = proxy.cut(says("NOTIFY"), HELD)
    with through(proxy), in_thread(publish_one) as publishing:
        try:
            assert held.happened.wait(PATIENCE)
            assert QueuedEvent.objects.count() == 1, "others see it while the caller waits"
            assert not publishing.done()
        finally:
            proxy.heal()
    publish_one()


def test_a_notification_that_the_server_refuses_is_nobodys_error(cluster, capture):
    """Its queue is full, because somebody who listens has not come to read it."""
    cluster.primary.configure(max_notify_queue_pages=64)
    cluster.primary.restart()
    target = {"host": str(cluster.address), "user": "postgres", "dbname": "eventbus"}
    with psycopg.connect(**target) as sleeper, psycopg.connect(**target, autocommit=True) as other:
        sleeper.execute("LISTEN anything")
        sleeper.commit()
        sleeper.execute("SELECT 1")  # in a transaction, and stays there
        fill = "SELECT pg_notify('anything', rpad(n::text, 7900)) FROM generate_series(1, 1000) n"
        with pytest.raises(psycopg.OperationalError, match="too many notifications"):
            other.execute(fill)
        handler("notified", name="notified")(lambda event: None)
        with transaction.atomic():
            publish("notified", "in a transaction")
            Effect.objects.create(event_id=uuid.uuid4(), handler="caller")
        publish("notified", "alone")
    told = capture.text.count("workers could not be notified")
    assert told == capture.text.count("too many notifications") == 2
    assert Effect.objects.count() == 1
    assert QueuedEvent.objects.count() == 2
    drain()
    assert EventLog.objects.filter(status="COMPLETED").count() == 2


def test_a_flood_of_spoofed_notifications_makes_a_worker_look_so_often_and_no_more(
    proxy, start_worker, figures
):
    """S16: anybody may ring. Between two looks in vain there is a pause, however many ring."""
    worker = start_worker("--poll-interval", "600", env=proxy.environment)
    worker.wait_until_registered()
    eventually(lambda: any(link.has_said("LISTEN") for link in list(proxy.links)))
    channel, before, began = store_for().channel, proxy.statements, time.monotonic()
    with connection.cursor() as cursor:
        for _ in range(10_000):
            cursor.execute("SELECT pg_notify(%s, '')", [channel])
    looks = FALSE_ALARMS + (time.monotonic() - began) / FALSE_ALARM_PAUSE
    carried = proxy.statements - before
    figures(f"10,000 rang, {carried} statements where {looks:.0f} looks were allowed")
    assert 0 < carried < looks * STATEMENTS_OF_A_LOOK
    publish("process.effect", "after the flood")
    eventually(Effect.objects.exists, lambda: worker.log)


@contextmanager
def nobody_confirms_commits():
    """Those who ask for it wait for a standby that does not exist."""

    def configure(*changes):
        with connection.cursor() as cursor:
            for change in changes:
                cursor.execute(f"ALTER SYSTEM {change}")
            cursor.execute("SELECT pg_reload_conf()")

    configure("SET synchronous_commit = local", "SET synchronous_standby_names = 'nobody'")
    connection.close()
    try:
        yield
    finally:
        configure("RESET synchronous_standby_names", "RESET synchronous_commit")


def test_a_notification_does_not_wait_for_the_lock_of_another(on_postgresql, publish_one, capture):
    """Another NOTIFY commits, and holds the lock that all of them need until a standby answers."""
    with connection.cursor() as cursor:
        cursor.execute("SHOW data_directory")
        if "eventbus-pg-" not in cursor.fetchone()[0]:
            pytest.skip("this server is not ours to configure")
    known = connection.settings_dict
    target = {"host": known["HOST"], "user": known["USER"], "dbname": known["NAME"]}
    with psycopg.connect(**target, autocommit=True) as other, nobody_confirms_commits():
        other.execute("SET synchronous_commit = on")
        enough = threading.Event()

        def notify():
            # Without a write there would be nothing to confirm; and the server learns of its
            # configuration in its own time.
            write = f"INSERT INTO {Effect._meta.db_table} (event_id, handler, note)"
            values = "VALUES (gen_random_uuid(), 'other', '')"
            while not enough.is_set():
                other.execute(f"{write} {values}; NOTIFY something")

        with in_thread(notify):
            try:
                eventually(somebody_waits_for_a_standby)
                publish_one()
            finally:
                enough.set()
                other.cancel()
    assert "lock timeout" in capture.text


def somebody_waits_for_a_standby():
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        return cursor.fetchone()
