"""F49: deadlocks and timeouts of InnoDB under load, and killed MariaDB servers."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import OperationalError, connection, connections, transaction

from django_eventbus import handler
from django_eventbus.delivery import grouped
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from tests.bus import drain, drain_with_retries, logged
from tests.faults import invariants
from tests.faults.conflicts import STUBBORN, errors_they_got, publish_conflicting_updates, some_rows
from tests.faults.journal import OK
from tests.shop.models import Effect
from tests.threads import in_thread
from tests.workers import eventually

pytestmark = pytest.mark.long

CRASHES = int(os.environ.get("EVENTBUS_FAULT_CRASHES", 10)) // 3


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_handlers_that_deadlock_are_retried(start_worker, isolation, tmp_path, figures):
    """1213: the victim of a deadlock is rolled back completely and retried until it succeeds."""
    if connection.vendor != "mysql":
        pytest.skip("MariaDB's locks")
    rows = some_rows(2)
    publish_conflicting_updates(tmp_path, some_rows(2), apart=9)
    publish_many(("fault.update", rows if n % 2 else rows[::-1]) for n in range(60))
    publish_many((("fault.effect", n) for n in range(60)), key="k")
    publish_many(("fault.effect", n) for n in range(60))
    workers = [
        start_worker(
            *("--concurrency", "2", "--batch-size", "10"),
            eventbus=STUBBORN,
            env={"EVENTBUS_TEST_ISOLATION": isolation},
        )
        for _ in range(2)
    ]
    eventually(
        lambda: not QueuedEvent.objects.exists(), lambda: workers[0].log[-3000:], patience=120
    )
    invariants.check()
    invariants.check_order_of_effects()
    assert set(EventLog.objects.values_list("status", flat=True)) == {"COMPLETED"}
    assert Effect.objects.exclude(handler="row").count() == 191
    assert "1213" in errors_they_got(tmp_path), "there was no deadlock"
    unlucky = EventLog.objects.exclude(errors=None)
    figures(f"{unlucky.count()} of 62 events failed at least once")
    assert set(unlucky.values_list("type", flat=True)) <= {"fault.update", "fault.meet"}


@pytest.fixture
def session_setting(monkeypatch):
    """Set a variable for every new session of this process."""
    if connection.vendor != "mysql":
        pytest.skip("MariaDB's locks")

    def choose(setting, *, isolation="read committed"):
        options = {"init_command": f"SET SESSION {setting}", "isolation_level": isolation}
        for name, value in options.items():
            monkeypatch.setitem(connection.settings_dict["OPTIONS"], name, value)
        connection.close()

    yield choose
    connection.close()


class Rival:
    """A concurrent transaction on its own connection."""

    def __init__(self, pool):
        self.pool = pool

    def update(self, row):
        """Lock the rows until ``commit()``."""
        self.pool.submit(transaction.set_autocommit, False).result()
        self.pool.submit(Effect.objects.filter(pk=row).update, note="rival").result()

    def lock(self, event_id):
        self.pool.submit(transaction.set_autocommit, False).result()
        rows = QueuedEvent.objects.filter(event_id=event_id).select_for_update()
        assert self.pool.submit(rows.exists).result()

    def commit(self):
        self.pool.submit(transaction.commit).result()


@pytest.fixture
def rival(transactional_db):
    with ThreadPoolExecutor(1) as pool:
        yield Rival(pool)
        pool.submit(connections.close_all).result()


@pytest.mark.django_db(transaction=True)
def test_a_handler_that_exceeds_the_lock_timeout_is_rolled_back_and_retried(session_setting, rival):
    """1205: InnoDB rolls back only the last statement; the bus rolls back the whole handler."""
    session_setting("innodb_lock_wait_timeout = 1")
    (row,) = some_rows(1)
    rival.update(row)
    notes = []

    @handler("x", name="h")
    def write_twice(event):
        Effect.objects.create(event_id=event.id, handler="h")
        try:
            Effect.objects.filter(pk=row).update(note="h")
        except OperationalError as error:
            notes.append(error.args[0])
            rival.commit()
            raise

    event = publish("x", {})
    drain()
    assert notes == [1205]
    assert not Effect.objects.filter(handler="h").exists()
    drain_with_retries()
    assert logged(event).status == "COMPLETED"
    assert "1205" in logged(event).errors[0]["message"]
    assert Effect.objects.filter(handler="h").count() == 1
    assert Effect.objects.get(pk=row).note == "h"


@pytest.mark.django_db(transaction=True)
def test_a_settlement_that_exceeds_the_lock_timeout_charges_no_handler(
    session_setting, rival, capture, monkeypatch
):
    """1205: the whole group is rolled back, and its events run again one by one."""
    session_setting("innodb_lock_wait_timeout = 1")
    # A slow machine must not split the group.
    monkeypatch.setattr(grouped, "GROUP_SECONDS", float("inf"))
    calls = []

    @handler("x", name="h")
    def block_the_settlement(event):
        calls.append(event.payload)
        Effect.objects.create(event_id=event.id, handler="h")
        if len(calls) == 2:
            rival.lock(event.id)

    def let_go_after_the_first_timeout():
        eventually(lambda: "(1205, " in capture.text)
        rival.commit()

    publish_many(("x", n) for n in range(2))
    with in_thread(let_go_after_the_first_timeout):
        drain()
    assert calls == [0, 1, 0, 1]
    assert set(EventLog.objects.values_list("status", "attempts")) == {("COMPLETED", 1)}
    assert not EventLog.objects.exclude(errors=None).exists()
    assert Effect.objects.count() == 2


@pytest.mark.django_db(transaction=True)
def test_a_handler_with_an_outdated_snapshot_is_rolled_back_and_retried(session_setting, rival):
    """1020: the row it read has changed since."""
    with connection.cursor() as cursor:
        cursor.execute("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'")
        if not cursor.fetchone():
            pytest.skip("this server has no innodb_snapshot_isolation")
    session_setting("innodb_snapshot_isolation = ON", isolation="repeatable read")
    (row,) = some_rows(1)
    seen = []

    @handler("x", name="h")
    def change_what_it_read(event):
        Effect.objects.create(event_id=event.id, handler="h")
        Effect.objects.get(pk=row)
        if not seen:
            rival.update(row)
            rival.commit()
        try:
            Effect.objects.filter(pk=row).update(note="h")
        except OperationalError as error:
            seen.append(error.args[0])
            raise

    event = publish("x", {})
    drain()
    drain_with_retries()
    assert seen == [1020]
    assert logged(event).status == "COMPLETED"
    assert Effect.objects.filter(handler="h").count() == 1
    assert Effect.objects.get(pk=row).note == "h"


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_events_survive_repeated_kills_of_the_server_under_load(mariadb, seed, isolation, figures):
    """Committed events survive, and workers reconnect."""
    here = {"EVENTBUS_TEST_ISOLATION": isolation}
    producer = mariadb.start_producer("--seed", f"{seed}", "--keys", "5", "--pause", "0.02")
    workers = [mariadb.start_worker("--processes", "2", env=here) for _ in range(2)]
    for _ in range(CRASHES):
        before = mariadb.in_the_end(lambda: EventLog.objects.count() + 1)
        mariadb.in_the_end(lambda before=before: EventLog.objects.count() > before + 50)
        mariadb.crash()
        mariadb.start()
        connection.close()
    producer.stop()
    mariadb.in_the_end(lambda: not QueuedEvent.objects.exists())
    acknowledged = len(producer.journal.with_outcome(OK))
    handled = EventLog.objects.count()
    figures(f"{CRASHES} kills, {acknowledged} events acknowledged, {handled} handled")
    invariants.check(mariadb.journals)
    invariants.check_order_of_effects()
    assert not EventLog.objects.exclude(status="COMPLETED").exists()
    assert Effect.objects.count() == handled > 0
    assert [each.process.poll() for each in workers] == [None, None]
