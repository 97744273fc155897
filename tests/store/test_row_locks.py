"""MariaDB: the index of a statement decides which rows it locks and waits for."""

import re
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import dead_letters, handler, lanes, publish, publish_many, queued
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.store import SetAside, set_aside, store_for
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.bus import drain
from tests.threads import while_another_transaction

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif("connection.vendor != 'mysql'", reason="InnoDB's locks"),
]

TABLES = "django_eventbus_(?:queuedevent|eventlane)"
LOCKS = re.compile(
    rf"(?:UPDATE|DELETE|INSERT INTO .* SELECT|SELECT .* FOR UPDATE$).*{TABLES}"
    rf"|SELECT .* FROM `{TABLES}` .* FOR UPDATE",
    re.DOTALL,
)
#: The store's own SQL names no column but the id that begins an index.
NO_CHOICE = re.compile(
    r"UPDATE django_eventbus_queuedevent SET .* WHERE id = \d+ AND claim_token = '\w+'", re.DOTALL
)
ERROR = {"handler": "", "type": "E", "message": "", "traceback": ""}


def coalesce_an_event():
    first = publish("ok", 1, key="full")
    assert publish("ok", 2, key="full").pk == first.pk


def deliver_events():
    publish("ok", 1)
    publish("retried", 1)
    for key in ("a", "b"):
        publish("bad", 1, key=key)
        publish("ok", 2, key=key)
    drain()
    assert EventLog.objects.filter(status="FAILED").count() == 2


def unblock_lanes():
    deliver_events()
    first, _second = EventLog.objects.filter(status="FAILED").order_by("id")
    assert dead_letters.retry(first)
    assert lanes.release("b")
    assert dead_letters.purge(timedelta(0))


def change_waiting_events():
    later = publish("ok", 1, delay=60)
    assert queued.run_now([later.event_id]) == 1
    assert queued.cancel([later.event_id]) == 1
    publish("ok", 2, key="k")
    with store_for().atomic():
        store_for().route("default", 10)
    assert lanes.skip("k")


def set_events_aside():
    for event in claim(3):
        verdict = {"error": ERROR, "delay": 1.0, "verdict": None}
        became = set_aside(store_for(), event.claim.token, event.row_id, **verdict)
        assert became is SetAside.WAITING


def release_and_recover():
    first, second, _third = claim(3)
    store = store_for()
    assert store.still_held(first.claim.token, [first.row_id])
    assert store.release(first.claim.token, [first.row_id]) == 1
    assert store.recover_worker(first.claim.worker_id, blamed=[second.row_id], error=ERROR) == 2


def claim(count):
    publish_many(("ok", n) for n in range(count))
    store, registration = (
        store_for(),
        new_registration(WorkerOptions(using="default", queues=("default",))),
    )
    store.register(registration)
    return store.claim("default", limit=count, worker_id=registration.pk)


@pytest.mark.parametrize(
    "work",
    [
        coalesce_an_event,
        deliver_events,
        unblock_lanes,
        change_waiting_events,
        set_events_aside,
        release_and_recover,
    ],
)
def test_statements_that_wait_for_row_locks_name_the_primary_key(settings, work):
    """The index that the optimizer prefers depends on the current rows."""
    limit = {"max_size": 1, "overflow": "coalesce"}
    settings.EVENTBUS = {"LIMITS": {"key:full": limit}, "DEAD_HEAD": "block"}
    handler("ok", name="ok")(lambda event: None)
    handler("bad", name="bad", retry={"max_retries": 0})(fail)
    handler("retried", name="retried")(fail)
    with CaptureQueriesContext(connection) as captured:
        work()
    sent = [each["sql"] for each in captured]
    locking = [sql for sql in sent if LOCKS.match(sql) and not sql.endswith("SKIP LOCKED")]
    assert locking
    chosen = [sql for sql in locking if not NO_CHOICE.fullmatch(sql)]
    assert [sql for sql in chosen if "FORCE INDEX (PRIMARY)" not in sql] == []


def fail(event):
    raise ValueError("fails")


@pytest.fixture(params=["read committed", "repeatable read"])
def impatient(request, monkeypatch):
    """New sessions have the isolation level of the project and a short lock timeout."""
    options = {
        "isolation_level": request.param,
        "init_command": "SET SESSION innodb_lock_wait_timeout = 1",
    }
    for name, value in options.items():
        monkeypatch.setitem(connection.settings_dict["OPTIONS"], name, value)
    connection.close()
    yield
    connection.close()


def test_an_open_transaction_that_coalesced_locks_no_other_event(settings, impatient):
    """At REPEATABLE READ a locking read of an index also locks the gaps between its entries."""
    settings.EVENTBUS = {"LIMITS": {"key:slow": {"max_size": 1, "overflow": "coalesce"}}}
    handler("ok", name="ok")(lambda event: None)
    publish_many((("ok", n) for n in range(5)), key=lambda item: f"before:{item[1]}")
    slow = publish("ok", 1, key="slow")
    with while_another_transaction(lambda: publish("ok", 2, key="slow")):
        publish_many((("ok", n) for n in range(5)), key=lambda item: f"after:{item[1]}")
        publish("ok", 3)
        drain()
        assert list(QueuedEvent.objects.values_list("id", flat=True)) == [slow.pk]


def test_an_open_transaction_that_released_a_lane_locks_no_other_lane(impatient):
    handler("ok", name="ok")(lambda event: None)
    keys = [f"before:{n}" for n in range(5)]
    publish_many((("ok", key) for key in [*keys, "slow"]), key=lambda item: item[1])
    with store_for().atomic():
        store_for().route("default", 10)
    with while_another_transaction(lambda: lanes.release("slow")):
        publish_many((("ok", n) for n in range(5)), key=lambda item: f"after:{item[1]}")
        drain()
        assert list(QueuedEvent.objects.values_list("key", flat=True)) == ["slow"]
