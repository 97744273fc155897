"""NOTIFY fails or hangs (F29). It is only a hint, sent after the commit."""

import threading
import time
import uuid
from contextlib import contextmanager

import psycopg
import pytest
from django.db import connection, transaction

from django_eventbus import handler
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing.publisher import publish
from django_eventbus.store import store_for
from django_eventbus.worker.wakeup import FALSE_ALARM_PAUSE, FALSE_ALARMS
from tests.bus import drain
from tests.faults import invariants
from tests.faults.journal import OK, ProducerJournal
from tests.faults.proxy import AFTER, BEFORE, HELD, says, through
from tests.shop.models import Effect
from tests.threads import in_thread
from tests.workers import PATIENCE, eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]

#: The most statements of one look for events, including due events and flow controls.
STATEMENTS_OF_A_LOOK = 12


@pytest.fixture
def publish_one(tmp_path):
    """Publish and record success if ``publish`` returns; all recorded events must be handled."""
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
def test_a_notification_lost_with_its_connection_raises_no_error(proxy, publish_one, capture, when):
    cut = proxy.cut(says("NOTIFY"), when)
    with through(proxy):
        publish_one()
        assert cut.happened.is_set()
        assert QueuedEvent.objects.count() == 1, "on a connection that works"
        publish_one()
    assert "could not send NOTIFY" in capture.text


def test_a_notification_that_hangs_delays_the_caller_but_not_the_commit(proxy, publish_one):
    held = proxy.cut(says("NOTIFY"), HELD)
    with through(proxy), in_thread(publish_one) as publishing:
        try:
            assert held.happened.wait(PATIENCE)
            assert QueuedEvent.objects.count() == 1, "others see it while the caller waits"
            assert not publishing.done()
        finally:
            proxy.heal()
    publish_one()


def test_a_notification_that_the_server_refuses_raises_no_error(cluster, capture):
    """The notification queue is full, because a listener does not read it."""
    cluster.primary.configure(max_notify_queue_pages=64)
    cluster.primary.restart()
    target = {"host": str(cluster.address), "user": "postgres", "dbname": "eventbus"}
    with psycopg.connect(**target) as sleeper, psycopg.connect(**target, autocommit=True) as other:
        sleeper.execute("LISTEN anything")
        sleeper.commit()
        sleeper.execute("SELECT 1")  # The open transaction keeps the queue from being truncated.
        fill = "SELECT pg_notify('anything', rpad(n::text, 7900)) FROM generate_series(1, 1000) n"
        with pytest.raises(psycopg.OperationalError, match="too many notifications"):
            other.execute(fill)
        handler("notified", name="notified")(lambda event: None)
        with transaction.atomic():
            publish("notified", "in a transaction")
            Effect.objects.create(event_id=uuid.uuid4(), handler="caller")
        publish("notified", "alone")
    logged_times = capture.text.count("could not send NOTIFY")
    assert logged_times == capture.text.count("too many notifications") == 2
    assert Effect.objects.count() == 1
    assert QueuedEvent.objects.count() == 2
    drain()
    assert EventLog.objects.filter(status="COMPLETED").count() == 2


def test_a_flood_of_spoofed_notifications_causes_a_bounded_number_of_claims(
    proxy, start_worker, figures
):
    """S16: any role may send NOTIFY. Looks that find nothing are rate-limited."""
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
def commits_wait_for_a_missing_standby():
    """Make synchronous commits wait for a standby that does not exist."""

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
    """Another NOTIFY waits for a standby at its commit and holds the lock of all NOTIFYs."""
    with connection.cursor() as cursor:
        cursor.execute("SHOW data_directory")
        if "eventbus-pg-" not in cursor.fetchone()[0]:
            pytest.skip("this server is not ours to configure")
    known = connection.settings_dict
    target = {"host": known["HOST"], "user": known["USER"], "dbname": known["NAME"]}
    with psycopg.connect(**target, autocommit=True) as other, commits_wait_for_a_missing_standby():
        other.execute("SET synchronous_commit = on")
        enough = threading.Event()

        def notify():
            # A transaction without a write does not wait for a standby. The server reads its
            # configuration asynchronously.
            write = f"INSERT INTO {Effect._meta.db_table} (event_id, handler, note)"
            values = "VALUES (gen_random_uuid(), 'other', '')"
            while not enough.is_set():
                other.execute(f"{write} {values}; NOTIFY something")

        with in_thread(notify):
            try:
                eventually(a_session_waits_for_a_standby)
                publish_one()
            finally:
                enough.set()
                other.cancel()
    assert "lock timeout" in capture.text


def a_session_waits_for_a_standby():
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        return cursor.fetchone()
