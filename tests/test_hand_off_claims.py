"""A message claims all of its events, also events that another transaction has just locked."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import publish, publish_many, subscribe
from django_eventbus.errors import failpoints
from django_eventbus.executors import CeleryExecutor
from django_eventbus.models import (
    EventLane,
    EventLog,
    EventWorker,
    MinuteStatistics,
    QueuedEvent,
)
from django_eventbus.pauses import pause
from django_eventbus.store import store_for
from django_eventbus.worker import handed_off, message_claims
from django_eventbus.worker.claiming import Pace
from tests.bus import drain
from tests.shop.models import Effect
from tests.threads import in_thread, while_another_transaction
from tests.workers import abandon

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "celery.effect"
row_locks = pytest.mark.skipif(
    "connection.vendor == 'sqlite'", reason="a transaction locks the whole database, not a row"
)


@pytest.fixture(autouse=True)
def effects():
    def write(event):
        Effect.objects.create(event_id=event.id, handler=NAME, note=str(event.payload))

    return subscribe("order.placed", write, name=NAME, executor=CeleryExecutor(batch=10))


@pytest.fixture
def when_locked(monkeypatch):
    """Set the function that is called each time a process waits for a lock."""

    def call(action):
        def on_reaching(failpoint):
            if failpoint == "handed_off.locked":
                action()

        monkeypatch.setattr(failpoints, "on_reaching", on_reaching)

    return call


def lock_an_event():
    assert QueuedEvent.objects.select_for_update().order_by("id").first()


def lock_a_lane():
    assert EventLane.objects.select_for_update().get()


def route_the_next_event():
    """The lane stays locked until the worker that routes the event has committed its claim."""
    publish("order.placed", "next", key="order:1")
    assert store_for().route("default", 10) == 1


def handled():
    return set(Effect.objects.values_list("note", flat=True))


def stored():
    return [list(model.objects.order_by("id").values()) for model in (QueuedEvent, EventLane)]


@row_locks
@pytest.mark.parametrize(
    ("key", "lock"),
    [(None, lock_an_event), ("order:1", lock_a_lane), ("order:1", route_the_next_event)],
)
def test_a_message_claims_an_event_when_its_lock_is_released(outbox, when_locked, key, lock):
    publish("order.placed", "first", key=key)
    drain()
    with while_another_transaction(lock) as commit:
        when_locked(commit)
        outbox.deliver()
    assert handled() == {"first"}
    assert EventLog.objects.get().attempts == 1
    assert not EventWorker.objects.exists()


@row_locks
def test_the_other_events_of_a_message_do_not_wait_for_a_lock(outbox, when_locked):
    publish_many(("order.placed", n) for n in range(3))
    drain()
    seen = []
    with while_another_transaction(lock_an_event) as commit:
        when_locked(lambda: (seen.append(handled()), commit()))
        outbox.deliver()
    assert seen == [{"1", "2"}]
    assert handled() == {"0", "1", "2"}


@row_locks
@pytest.mark.parametrize("size", [1, 10])
def test_the_other_keys_of_a_message_do_not_wait_for_a_locked_lane(
    outbox, when_locked, paces, size
):
    paces[NAME] = Pace(size)
    for n in range(6):
        publish("order.placed", n, key=f"order:{n}")
    drain()
    # The first messages may have one event each, because the first claim routes few events.
    del outbox.messages[:-1]
    first, *others = QueuedEvent.objects.filter(id__in=outbox.messages[0].rows).order_by("id")
    assert others
    seen = []

    def lock_the_first_lane():
        assert EventLane.objects.select_for_update().get(id=first.lane_id)

    with while_another_transaction(lock_the_first_lane) as commit:
        when_locked(lambda: (seen.append(handled()), commit()))
        outbox.deliver()
    assert seen == [{str(each.payload) for each in others}]
    assert handled() == {str(each.payload) for each in (first, *others)}


@row_locks
@pytest.mark.parametrize(("key", "lock"), [(None, lock_an_event), ("order:1", lock_a_lane)])
def test_a_lock_that_is_not_released_ends_the_message(
    outbox, when_locked, monkeypatch, capture, key, lock
):
    monkeypatch.setattr(message_claims, "LOCK_WAITS", (0.01,) * 3)
    publish("order.placed", 1, key=key)
    drain()
    (message,) = outbox.messages
    waits = []
    with while_another_transaction(lock):
        when_locked(lambda: waits.append(None))
        outbox.deliver()
    assert len(waits) == 3
    assert "1 of 1 events" in capture.text
    assert "was ignored" not in capture.text
    assert not MinuteStatistics.objects.filter(ignored_messages__gt=0).exists()
    event = QueuedEvent.objects.get()
    assert (event.status, event.claim_token, event.attempts) == ("PENDING", message.token, 0)
    outbox.messages = [message]
    outbox.deliver()
    assert handled() == {"1"}


def test_the_waits_for_locks_take_a_few_seconds_at_most():
    assert 2 < sum(message_claims.LOCK_WAITS) < 5


@pytest.mark.parametrize("change", [{"claim_token": "0" * 32}, {"blocked_by": "0" * 32}])
def test_a_message_does_not_wait_for_a_lane_that_is_claimed_or_blocked(outbox, when_locked, change):
    publish("order.placed", 1, key="order:1")
    drain()
    EventLane.objects.update(**change)
    when_locked(lambda: pytest.fail("waits"))
    outbox.deliver()
    assert handled() == set()


def test_a_message_without_locked_events_searches_once(outbox, paces):
    paces[NAME] = Pace(20)
    publish_many(("order.placed", n) for n in range(3))
    drain()
    message, duplicate = outbox.messages * 2
    searches = []
    for each in (message, duplicate):
        with CaptureQueriesContext(connection) as captured:
            handed_off.deliver_message(each, executor="celery")
        columns = [query["sql"].partition(" FROM ")[0] for query in captured]
        searches.append(sum(is_search(each) for each in columns))
    assert searches == [1, 1]
    assert handled() == {"0", "1", "2"}


def is_search(columns):
    return columns.startswith("SELECT") and "claim_token" in columns


def test_a_slow_message_is_claimed_a_few_events_at_a_time(outbox, paces):
    claimed = []

    def slow(event):
        claimed.append(QueuedEvent.objects.filter(status="PROCESSING").count())

    subscribe("slow.order", slow, name="slow", executor="celery")
    paces["slow"] = Pace(2)
    publish_many(("slow.order", n) for n in range(6))
    drain()
    (message,) = outbox.messages
    assert len(message.rows) == 6
    outbox.deliver()
    assert max(claimed) == 2
    assert EventLog.objects.count() == len(claimed) == 6


def test_the_first_claim_of_a_handler_in_a_process_takes_one_event(outbox, monkeypatch):
    publish_many(("order.placed", n) for n in range(10))
    drain()
    claims = []

    def count_claimed(failpoint):
        if failpoint == "handed_off.claimed":
            claims.append(QueuedEvent.objects.filter(status="PROCESSING").count())

    monkeypatch.setattr(failpoints, "on_reaching", count_claimed)
    outbox.deliver()
    assert claims[0] == 1
    assert sum(claims) == EventLog.objects.count() == 10


def test_a_message_is_delivered_completely_in_a_process_with_more_than_max_memory(outbox, settings):
    """Celery has its own option for the memory of its processes."""
    publish_many(("order.placed", n) for n in range(10))
    drain()
    settings.EVENTBUS = {"MAX_MEMORY": 1}
    outbox.deliver()
    assert EventLog.objects.count() == 10


@pytest.mark.parametrize("paused", [{"handler": NAME}, {"type": "order.*"}, {"queue": "default"}])
def test_events_that_a_pause_holds_do_not_make_the_claims_larger(outbox, paces, paused):
    publish_many(("order.placed", n) for n in range(10))
    drain()
    pause(**paused)
    outbox.deliver()
    assert not QueuedEvent.objects.exclude(handed_off_to=None).exists()
    assert paces[NAME].size == 1


def test_a_process_whose_registration_expires_claims_no_more_events_of_its_message(
    outbox, monkeypatch, capture
):
    publish_many(("order.placed", n) for n in range(10))
    drain()
    (message,) = outbox.messages

    def expire(failpoint):
        if failpoint == "handed_off.claimed":
            abandon()

    monkeypatch.setattr(failpoints, "on_reaching", expire)
    outbox.deliver()
    assert handled() == {"0"}
    assert not EventWorker.objects.exists()
    assert set(QueuedEvent.objects.values_list("claim_token", flat=True)) == {message.token}
    assert "the registration of this process has expired" in capture.text


@pytest.mark.skipif(
    "connection.vendor != 'postgresql'", reason="the session is ended by pg_terminate_backend"
)
@pytest.mark.parametrize("moment", ["settle.committed", "handed_off.claimed"])
def test_a_message_goes_on_after_a_lost_session(outbox, monkeypatch, capture, moment):
    publish_many(("order.placed", n) for n in range(10))
    drain()
    ended = []

    def end_the_session(failpoint):
        if failpoint == moment and not ended:
            ended.append(connection.connection.info.backend_pid)
            with in_thread(terminate, ended[0]):
                pass

    monkeypatch.setattr(failpoints, "on_reaching", end_the_session)
    outbox.deliver()
    assert ended
    assert EventLog.objects.count() >= 9
    # The events of the claim were released, so an event worker hands them off again.
    drain()
    outbox.deliver()
    assert handled() == {str(n) for n in range(10)}
    assert Effect.objects.count() == EventLog.objects.count() == 10
    assert {each.interruptions for each in EventLog.objects.all()} == {0}
    assert not EventWorker.objects.exists()
    assert "was ignored" not in capture.text


def terminate(backend):
    with connection.cursor() as cursor:
        # The second argument lets the function wait until the process has ended.
        cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [backend])
        assert cursor.fetchone() == (True,)


def test_interrupted_events_do_not_wait_for_the_end_of_a_slow_message(outbox, paces):
    order = []

    def slow(event):
        order.append(event.payload)
        if event.payload == 1:
            QueuedEvent.objects.filter(type="lost.order").update(interruptions=1)

    subscribe("*.order", slow, name="slow", executor="celery")
    paces["slow"] = Pace(1)
    publish_many(("slow.order", n) for n in range(5))
    drain()
    publish("lost.order", "lost")
    drain()
    del outbox.messages[1:]
    outbox.deliver()
    # It runs alone, after the other events of the same claim.
    assert order == [0, 1, 2, "lost", 3, 4]


def test_interrupted_events_never_displace_the_events_of_the_message(outbox, paces):
    """A claim takes a limited number of interrupted events, in addition to its message."""
    paces[NAME] = Pace(20)
    publish_many(("order.placed", "old") for _ in range(60))
    drain()
    QueuedEvent.objects.update(interruptions=1)
    outbox.messages.clear()
    publish("order.placed", "new")
    drain()
    outbox.deliver()
    assert "new" in handled()
    assert EventLog.objects.count() == 21


def test_a_fast_message_claims_few_interrupted_events_of_a_slow_handler(outbox, paces):
    calls = []
    subscribe("slow.order", calls.append, name="slow", executor=CeleryExecutor(batch=10))
    paces[NAME], paces["slow"] = Pace(1000, first=1000), Pace(1000, first=2)
    publish_many(("slow.order", n) for n in range(10))
    drain()
    QueuedEvent.objects.update(interruptions=1)
    outbox.messages.clear()
    publish("order.placed", "fast")
    drain()
    outbox.deliver()
    assert handled() == {"fast"}
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("executor", "queue"), [(CeleryExecutor(), "default"), (CeleryExecutor(batch=10), "bulk")]
)
def test_a_search_for_interrupted_events_does_not_delay_the_search_of_other_messages(
    outbox, settings, executor, queue
):
    """The messages of two executors or queues arrive in turn in one process."""
    settings.EVENTBUS = {"QUEUES": ["default", "bulk"]}
    calls = []
    subscribe("busy", calls.append, name="busy", executor=executor)
    publish("busy", queue=queue)
    subscribe("other", calls.append, name="other", executor=CeleryExecutor(batch=10))
    publish("other")
    publish("order.placed", "lost")
    drain(queues=("default", "bulk"))
    QueuedEvent.objects.filter(type="order.placed").update(interruptions=1)
    outbox.messages = [each for each in outbox.messages if each.handler != NAME]
    outbox.messages.sort(key=lambda each: each.handler)
    outbox.deliver()
    assert [each.type for each in calls] == ["busy", "other"]
    assert handled() == {"lost"}


def test_a_message_has_no_effect_in_another_namespace(outbox, settings):
    """Two projects share a database and the queue of a broker, and have equal handlers."""
    publish("order.placed", "keyed", key="order:1")
    publish("order.placed", "unkeyed")
    drain()
    messages = list(outbox.messages)
    before = stored()
    ours = settings.EVENTBUS
    settings.EVENTBUS = {**ours, "NAMESPACE": "another"}
    outbox.deliver()
    assert handled() == set()
    assert not EventWorker.objects.exists()
    settings.EVENTBUS = ours
    assert stored() == before
    outbox.messages = messages
    outbox.deliver()
    assert handled() == {"keyed", "unkeyed"}


@pytest.mark.skipif("connection.vendor != 'mysql'", reason="InnoDB locks the rows that it reads")
def test_a_claim_locks_no_events_of_other_messages(outbox, paces):
    paces[NAME] = Pace(20)
    publish_many(("order.placed", n) for n in range(500))
    drain()
    message, *_others = outbox.messages
    with CaptureQueriesContext(connection) as captured:
        handed_off.deliver_message(message, executor="celery")
    sent = [each["sql"] for each in captured]
    (claim,) = (sql for sql in sent if "SKIP LOCKED" in sql and "lane_id" in sql)
    plan = plan_of(claim)
    assert (plan["key"], plan["type"]) == ("PRIMARY", "range")
    assert int(plan["rows"]) <= 2 * len(message.rows)


def plan_of(sql):
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {sql}")
        (plan,) = cursor.fetchall()
        return dict(zip((each[0] for each in cursor.description), plan, strict=True))
