"""Publishing is part of the caller's transaction and never breaks it."""

import inspect
import os
import socket
import threading
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, connections, transaction
from django.db.backends.sqlite3.base import DatabaseWrapper
from django.db.models import F
from django.db.models.functions import Now
from django.http import HttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import path

from django_eventbus import (
    DuplicateEventError,
    Event,
    EventBusError,
    EventBusShutdownError,
    InvalidPayloadError,
    UnknownEventError,
    UnknownQueueError,
    apublish,
    bridge_model,
    handler,
    publish,
    publish_many,
    shutdown,
)
from django_eventbus.exceptions import ForeignTransactionError
from django_eventbus.models import EventLog, IdempotencyKey, QueuedEvent
from django_eventbus.publishing.publisher import reopen
from django_eventbus.signals import event_published
from django_eventbus.store.idempotency_keys import PUBLISHED
from tests.bus import drain
from tests.shop.models import Customer, Effect

pytestmark = pytest.mark.django_db

with_real_transactions = pytest.mark.django_db(transaction=True)


class Booked(Event):
    """Abstract base."""

    number: int


class RoomBooked(Booked, type="test-publishing.room.booked", version=3):
    price: Decimal


class Refusal(Exception):
    """Raised by a test to roll back."""


@contextmanager
def rolled_back(using="default"):
    with suppress(Refusal), transaction.atomic(using=using):
        yield
        raise Refusal


def queued():
    return list(QueuedEvent.objects.order_by("id").values_list("type", flat=True))


@pytest.fixture
def handled():
    """The payloads that a handler of all types got."""
    seen = []
    handler("*", name="see")(lambda event: seen.append(event.payload))
    return seen


# -- part of the caller's transaction


@with_real_transactions
def test_a_committed_event_is_handled(handled):
    """M1."""
    with transaction.atomic():
        publish("order.placed", {"order": 7})
        Effect.objects.create(event_id=uuid.uuid4(), handler="view")
    drain()
    assert handled == [{"order": 7}]


@with_real_transactions
def test_a_rolled_back_event_is_never_handled(handled):
    """M1, F40."""
    with rolled_back():
        publish("order.placed", {"order": 7})
        publish_many([("order.placed", {"order": 8})])
    drain()
    assert handled == []
    assert not QueuedEvent.objects.exists()


@with_real_transactions
def test_an_inner_savepoint_rolls_back_only_its_own_events(handled):
    """M1, F40."""
    with transaction.atomic():
        publish("order.placed", {"order": 1})
        with rolled_back():
            publish("order.placed", {"order": 2})
        with transaction.atomic():
            publish("order.placed", {"order": 3})
    drain()
    assert handled == [{"order": 1}, {"order": 3}]


@with_real_transactions
def test_an_uncommitted_event_is_invisible_to_other_connections():
    """M1."""

    def count_elsewhere():
        try:
            return QueuedEvent.objects.count()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            publish("order.placed", {})
            assert pool.submit(count_elsewhere).result(30) == 0
        assert pool.submit(count_elsewhere).result(30) == 1


@with_real_transactions
def test_without_a_transaction_an_event_is_committed_at_once(handled):
    """M1."""
    publish("order.placed", {"order": 7})
    assert not connection.in_atomic_block
    drain()
    assert handled == [{"order": 7}]


def place_order(request, then):
    publish("order.placed", {"order": 7})
    if then == "raise":
        raise Refusal
    return HttpResponse(status=200)


urlpatterns = [path("order/<then>/", place_order)]


@with_real_transactions
@pytest.mark.urls(__name__)
@pytest.mark.parametrize(("then", "events"), [("return", [{"order": 7}]), ("raise", [])])
def test_a_view_with_atomic_requests_publishes_only_if_it_returns(
    monkeypatch, handled, then, events
):
    """M1, F40."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    response = Client(raise_request_exception=False).get(f"/order/{then}/")
    assert response.status_code == (500 if then == "raise" else 200)
    drain()
    assert handled == events


def test_publish_is_exactly_one_insert():
    with CaptureQueriesContext(connection) as queries:
        publish("order.placed", {"order": 7}, key="k", headers={"a": 1}, delay=5)
    assert len(queries) == 1
    assert queries[0]["sql"].startswith("INSERT INTO")


def test_workers_are_woken_once_per_transaction(django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks() as callbacks:
        publish("order.placed", {})
        publish_many([("order.placed", {})] * 3)
        publish("order.placed", {})
    assert len(callbacks) == 1


@with_real_transactions
def test_a_rolled_back_savepoint_does_not_cancel_the_wake_up_of_other_events():
    with transaction.atomic():
        with rolled_back():
            publish("order.placed", {"order": 1})
        publish("order.placed", {"order": 2})
        assert len(connection.run_on_commit) == 1
        with rolled_back():
            publish("order.placed", {"order": 3})
        assert len(connection.run_on_commit) == 1


# -- what is stored


@with_real_transactions
def test_publishing_works_with_autocommit_off(handled):
    """With autocommit off there are no on_commit callbacks, so workers find events by polling."""
    transaction.set_autocommit(False)
    try:
        publish("x", 1)
        transaction.rollback()
        publish("x", 2)
        transaction.commit()
    finally:
        transaction.set_autocommit(True)
    drain()
    assert handled == [2]


@with_real_transactions
def test_a_duplicate_in_strict_order_needs_no_transaction_around_it(settings):
    settings.EVENTBUS = {"STRICT_ORDER": True}
    first = publish("x", 1, key="k", dedup_key="d")
    assert publish("x", 2, key="k", dedup_key="d") == first


def test_every_argument_of_publish_is_stored():
    """M8, M23."""
    event_id = uuid.uuid4()
    returned = publish(
        "order.placed",
        {"order": 7},
        key="order:7",
        priority=-5,
        headers={"trace": "abc"},
        dedup_key="once",
        event_id=event_id,
    )
    event = QueuedEvent.objects.get()
    assert returned.pk == event.pk
    assert returned.event_id == event.event_id == event_id
    assert event.type == "order.placed"
    assert event.payload == {"order": 7}
    assert event.key == "order:7"
    assert event.priority == -5
    assert event.headers == {"trace": "abc"}
    assert event.dedup_key == "once"
    assert event.queue == "default"
    assert event.namespace == "default"
    assert event.status == "PENDING"
    assert event.attempts == 0
    assert event.caused_by is None
    assert event.available_at is None


@pytest.mark.parametrize("once", [{}, {"event_id": uuid.uuid4()}, {"dedup_key": "order:7"}])
def test_the_returned_event_has_its_ids_and_the_database_time(once):
    """M23."""
    event = publish("order.placed", {}, **once)
    stored = QueuedEvent.objects.get()
    assert event.pk == stored.pk
    assert event.event_id == stored.event_id == once.get("event_id", stored.event_id)
    assert event.created_at == stored.created_at


def test_a_generated_event_id_sorts_by_time():
    assert publish("order.placed", {}).event_id.version == 7


def test_the_producer_is_host_and_process():
    """M8."""
    event = publish("order.placed", {})
    assert event.producer == f"{socket.gethostname()[:50]}:{os.getpid()}"


def test_producer_namespace_and_default_queue_are_settings(settings):
    """M8."""
    settings.EVENTBUS = {
        "PRODUCER": "web-1",
        "NAMESPACE": "shop",
        "QUEUE": "orders",
        "QUEUES": ("orders", "mail"),
    }
    publish("order.placed", {})
    publish("order.placed", {}, queue="mail")
    rows = QueuedEvent.objects.order_by("id").values_list("producer", "namespace", "queue")
    assert list(rows) == [("web-1", "shop", "orders"), ("web-1", "shop", "mail")]


PAYLOADS = [
    {},
    [],
    "",
    0,
    False,
    None,
    "text",
    "né 🔑 \u2028 \x1f \\ \" '",
    [None, True, {"a": [1, {"b": "c"}]}],
    1.5,
    -1e-7,
    2**53 + 1,
    -(2**1000),
    {"": "empty key", "a b": 1, "é": 2, "%s": "%(x)s", "?": "{}"},
    "x" * 100_000,
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
@pytest.mark.parametrize("many", [False, True], ids=["publish", "publish_many"])
def test_a_handler_gets_the_payload_that_was_published(handled, payload, many):
    if many:
        publish_many([("order.placed", payload)])
    else:
        publish("order.placed", payload)
    drain()
    assert handled == [payload]


@pytest.mark.parametrize("many", [False, True], ids=["publish", "publish_many"])
def test_a_pattern_is_refused_as_a_type(many):
    with pytest.raises(InvalidPayloadError, match="is a pattern"):
        publish_many([("order.*", {})]) if many else publish("order.*", {})
    assert queued() == []


def test_a_payload_is_optional(handled):
    publish("server.started")
    drain()
    assert handled == [None]


def test_a_typed_event_is_stored_by_its_type_name_and_version():
    """M19."""
    event = publish(RoomBooked(number=7, price=Decimal("9.90")))
    assert event.type == "test-publishing.room.booked"
    assert event.version == 3
    event.refresh_from_db()
    assert event.payload == {"number": 7, "price": "9.90"}


def test_a_typed_event_reaches_its_handler_as_an_instance():
    """M19."""
    seen = []
    handler(Booked, name="see")(lambda event: seen.append(event.data))
    publish(RoomBooked(number=7, price=Decimal("9.90")))
    drain()
    assert seen == [RoomBooked(number=7, price=Decimal("9.90"))]


def test_an_event_published_by_the_name_of_a_class_has_the_version_of_the_class():
    assert publish("test-publishing.room.booked", {"number": 1, "price": "2"}).version == 3
    assert publish("test-publishing.nobody.declared.this", {}).version == 1


def test_an_event_published_by_a_handler_names_its_cause():
    @handler("order.placed", name="first")
    def first(event):
        publish("order.confirmed", {})
        publish_many([("mail.sent", {})])

    parent = publish("order.placed", {})
    drain(max_events=1)
    causes = QueuedEvent.objects.order_by("id").values_list("type", "caused_by")
    assert list(causes) == [
        ("order.confirmed", parent.event_id),
        ("mail.sent", parent.event_id),
    ]
    assert publish("order.placed", {}).caused_by is None


def test_publishing_from_async_code_works():
    event = async_to_sync(apublish)("order.placed", {"order": 7}, key="k")
    assert QueuedEvent.objects.get() == event
    assert event.key == "k"


# -- many


def test_many_events_of_both_kinds_may_come_from_a_generator():
    def items():
        yield RoomBooked(number=7, price=Decimal("9.90"))
        yield "order.placed", {"order": 8}
        yield ["order.placed", [9]]

    assert publish_many(items(), key="k", priority=3, headers={"a": 1}) == 3
    rows = QueuedEvent.objects.order_by("id").values_list(
        "type", "version", "payload", "key", "priority", "headers"
    )
    assert list(rows) == [
        ("test-publishing.room.booked", 3, {"number": 7, "price": "9.90"}, "k", 3, {"a": 1}),
        ("order.placed", 1, {"order": 8}, "k", 3, {"a": 1}),
        ("order.placed", 1, [9], "k", 3, {"a": 1}),
    ]
    assert len(set(QueuedEvent.objects.values_list("event_id", flat=True))) == 3


def test_each_of_many_events_can_have_its_own_key():
    class Moved(Event, type="publishing.moved"):
        order: int

    def key_of(item):
        return f"order:{item.order}" if isinstance(item, Event) else None

    publish_many([Moved(order=1), Moved(order=2), ("order.placed", {})], key=key_of)
    stored = QueuedEvent.objects.order_by("id").values_list("key", flat=True)
    assert list(stored) == ["order:1", "order:2", None]
    with pytest.raises(InvalidPayloadError, match="the key must be a non-empty string"):
        publish_many([("order.placed", {})], key=lambda item: "")


def test_many_events_have_the_same_defaults_as_a_single_event():
    publish("order.placed", {})
    publish_many([("order.placed", {})])
    alike = ("namespace", "queue", "version", "headers", "key", "priority", "producer", "caused_by")
    alike += ("attempts", "crashes", "status", "available_at", "claim_token", "dedup_key")
    one, many = QueuedEvent.objects.order_by("id").values(*alike)
    assert one == many
    assert one["priority"] == 0


def test_publish_many_sends_one_statement_per_thousand_events():
    if connection.vendor != "postgresql":
        pytest.skip("the portable store is bound by the number of parameters of a statement")
    with CaptureQueriesContext(connection) as queries:
        assert publish_many(("order.placed", {"n": n}) for n in range(2001)) == 2001
    assert [each["sql"].split()[0] for each in queries] == ["INSERT"] * 3


def test_a_generator_is_read_in_chunks():
    """M22."""
    ahead = []

    def items():
        for number in range(3000):
            ahead.append(number - QueuedEvent.objects.count() if number % 1000 == 0 else 0)
            yield "order.placed", number

    publish_many(items())
    assert max(ahead) <= 1000


def test_publishing_no_events_sends_no_statement():
    with CaptureQueriesContext(connection) as queries:
        assert publish_many([]) == 0
    assert len(queries) == 0


@pytest.mark.parametrize("how", [{"delay": 3600}, {"delay": timedelta(hours=1)}])
def test_many_events_may_be_delayed_together(how, handled):
    publish_many([("order.placed", 1), ("order.placed", 2)], **how)
    hour = QueuedEvent.objects.filter(
        available_at__gt=Now() + timedelta(minutes=59),
        available_at__lte=Now() + timedelta(minutes=60),
    )
    assert hour.count() == 2
    drain()
    assert handled == []


def test_many_events_may_be_published_for_a_time(handled):
    at = datetime(2040, 1, 1, 12, tzinfo=UTC)
    publish_many([("order.placed", 1), ("order.placed", 2)], at=at)
    assert set(QueuedEvent.objects.values_list("available_at", flat=True)) == {at}
    drain()
    assert handled == []


@pytest.mark.parametrize("item", ["order.placed", 7, None, ("a", 1, 2), ("order.placed",)])
def test_an_item_that_is_neither_an_event_nor_a_pair_is_refused(item):
    with pytest.raises(InvalidPayloadError):
        publish_many([item])
    assert queued() == []


def test_an_invalid_item_rejects_its_chunk_and_the_transaction_stays_usable():
    """M25, F43."""
    with transaction.atomic():
        with pytest.raises(InvalidPayloadError, match="contains a NUL"):
            publish_many([("order.placed", 1), ("order.placed", "a\x00")])
        publish("still.usable", {})
    assert queued() == ["still.usable"]


# -- later


def test_a_delay_is_counted_by_the_clock_of_the_database(monkeypatch):
    """M7: a wrong clock of this machine has no effect."""
    monkeypatch.setattr("django.utils.timezone.now", lambda: datetime(2001, 1, 1, tzinfo=UTC))
    monkeypatch.setattr("time.time", lambda: 0.0)
    publish("order.placed", {}, delay=3600)
    hour = QueuedEvent.objects.filter(
        available_at__gt=Now() + timedelta(minutes=59),
        available_at__lte=Now() + timedelta(minutes=60),
    )
    assert hour.exists()


def test_a_delayed_event_is_not_handled_yet(handled):
    publish("order.placed", 1, delay=timedelta(seconds=60))
    publish("order.placed", 2, at=datetime(2040, 1, 1, tzinfo=UTC))
    drain()
    assert handled == []


def test_an_event_for_a_past_time_is_handled_now(handled):
    publish("order.placed", 1, at=datetime(2001, 1, 1, tzinfo=UTC))
    publish("order.placed", 2, delay=0)
    drain()
    assert sorted(handled) == [1, 2]


def test_a_time_in_any_time_zone_is_stored_exactly():
    zone = timezone(timedelta(hours=5, minutes=30))
    publish("order.placed", {}, at=datetime(2040, 1, 1, 12, 30, 15, 123456, tzinfo=zone))
    (at,) = QueuedEvent.objects.values_list("available_at", flat=True)
    assert at == datetime(2040, 1, 1, 7, 0, 15, 123456, tzinfo=UTC)


# -- refusals


def deep():
    value = []
    for _ in range(10_000):
        value = [value]
    return value


NAIVE = datetime(2040, 1, 1)
REFUSALS = {
    "payload nan": (InvalidPayloadError, {"payload": {"a": float("nan")}}),
    "payload infinite": (InvalidPayloadError, {"payload": [1e400]}),
    "payload nul": (InvalidPayloadError, {"payload": {"a": ["\x00"]}}),
    "payload surrogate": (InvalidPayloadError, {"payload": "\ud800"}),
    "payload bytes": (InvalidPayloadError, {"payload": b"x"}),
    "payload depth": (InvalidPayloadError, {"payload": deep()}),
    "payload size": (InvalidPayloadError, {"payload": "x" * 300_000}),
    "payload of 10 MB": (InvalidPayloadError, {"payload": {"a": "x" * 10_000_000}}),
    "payload keys": (InvalidPayloadError, {"payload": {7: 1}}),
    "type empty": (InvalidPayloadError, {"event": ""}),
    "type long": (InvalidPayloadError, {"event": "x" * 201}),
    "type control": (InvalidPayloadError, {"event": "a\nb"}),
    "type nul": (InvalidPayloadError, {"event": "a\x00b"}),
    "type none": (InvalidPayloadError, {"event": None}),
    "type number": (InvalidPayloadError, {"event": 7}),
    "key empty": (InvalidPayloadError, {"key": ""}),
    "key long": (InvalidPayloadError, {"key": "x" * 201}),
    "key number": (InvalidPayloadError, {"key": 7}),
    "key nul": (InvalidPayloadError, {"key": "a\x00"}),
    "dedup key empty": (InvalidPayloadError, {"dedup_key": ""}),
    "dedup key long": (InvalidPayloadError, {"dedup_key": "x" * 201}),
    "dedup for number": (InvalidPayloadError, {"dedup_key": "k", "dedup_for": 60}),
    "dedup for nothing": (InvalidPayloadError, {"dedup_key": "k", "dedup_for": timedelta(0)}),
    "dedup for negative": (
        InvalidPayloadError,
        {"dedup_key": "k", "dedup_for": timedelta(hours=-1)},
    ),
    "dedup for ever": (InvalidPayloadError, {"dedup_key": "k", "dedup_for": timedelta.max}),
    "dedup for no key": (InvalidPayloadError, {"dedup_for": timedelta(hours=1)}),
    "dedup for an id": (
        InvalidPayloadError,
        {"dedup_for": timedelta(hours=1), "event_id": uuid.uuid4()},
    ),
    "on duplicate unknown": (InvalidPayloadError, {"dedup_key": "k", "on_duplicate": "rais"}),
    "on duplicate of nothing": (InvalidPayloadError, {"on_duplicate": "raise"}),
    "on duplicate none": (InvalidPayloadError, {"dedup_key": "k", "on_duplicate": None}),
    "queue unknown": (UnknownQueueError, {"queue": "defualt"}),
    "queue number": (UnknownQueueError, {"queue": 7}),
    "queue empty": (UnknownQueueError, {"queue": ""}),
    "priority high": (InvalidPayloadError, {"priority": 32_768}),
    "priority low": (InvalidPayloadError, {"priority": -32_769}),
    "priority text": (InvalidPayloadError, {"priority": "high"}),
    "priority fraction": (InvalidPayloadError, {"priority": 1.5}),
    "priority yes or no": (InvalidPayloadError, {"priority": True}),
    "delay negative": (InvalidPayloadError, {"delay": -1}),
    "delay negative time": (InvalidPayloadError, {"delay": timedelta(seconds=-1)}),
    "delay long": (InvalidPayloadError, {"delay": timedelta(days=40_000)}),
    "delay endless": (InvalidPayloadError, {"delay": float("inf")}),
    "delay huge": (InvalidPayloadError, {"delay": 1e300}),
    "delay nan": (InvalidPayloadError, {"delay": float("nan")}),
    "delay text": (InvalidPayloadError, {"delay": "soon"}),
    "at naive": (InvalidPayloadError, {"at": NAIVE}),
    "at date": (InvalidPayloadError, {"at": date(2040, 1, 1)}),
    "at text": (InvalidPayloadError, {"at": "2040-01-01T00:00:00Z"}),
    "at far": (InvalidPayloadError, {"at": datetime(9999, 12, 31, tzinfo=UTC)}),
    "at and delay": (InvalidPayloadError, {"at": NAIVE.replace(tzinfo=UTC), "delay": 1}),
    "headers list": (InvalidPayloadError, {"headers": [1]}),
    "headers bytes": (InvalidPayloadError, {"headers": {"a": b"x"}}),
    "headers nul": (InvalidPayloadError, {"headers": {"a": "\x00"}}),
    "headers size": (InvalidPayloadError, {"headers": {"a": "x" * 300_000}}),
    "event id text": (InvalidPayloadError, {"event_id": "7"}),
    "abstract event": (UnknownEventError, {"event": Booked(number=1), "payload": None}),
    "typed and payload": (
        InvalidPayloadError,
        {"event": RoomBooked(number=1, price=Decimal(1)), "payload": {}},
    ),
}


@pytest.mark.parametrize(("error", "options"), REFUSALS.values(), ids=REFUSALS.keys())
def test_bad_input_is_refused_before_any_sql_and_the_transaction_stays_usable(error, options):
    """M25."""
    with transaction.atomic():
        with CaptureQueriesContext(connection) as queries, pytest.raises(error) as refused:
            publish(**{"event": "order.placed", "payload": {}} | options)
        assert len(queries) == 0
        assert isinstance(refused.value, EventBusError)
        Effect.objects.create(event_id=uuid.uuid4(), handler="view")
        publish("still.usable", {})
    assert queued() == ["still.usable"]
    assert Effect.objects.count() == 1


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("many", [False, True], ids=["publish", "publish_many"])
def test_a_payload_may_be_as_deep_as_the_database_can_read(handled, store, many):
    """M25, F43: what is accepted can be handled, what cannot be is refused before any SQL."""
    deepest = min(64, store.deepest_json)

    def send(payload):
        return publish_many([("x", payload)]) if many else publish("x", payload)

    with transaction.atomic():
        with pytest.raises(InvalidPayloadError, match=f"nested more than {deepest} levels deep"):
            send(nested(deepest + 1))
        send(nested(deepest))
    drain()
    assert handled == [nested(deepest)]


@pytest.mark.parametrize("priority", [32_767, -32_767])
def test_the_highest_and_lowest_priority_fit_their_column(priority):
    publish("order.placed", {}, priority=priority)
    assert QueuedEvent.objects.get().priority == priority


def test_the_longest_names_fit_their_columns():
    publish("t" * 200, {}, key="🔑" * 200, dedup_key="é" * 200)
    event = QueuedEvent.objects.get()
    assert (len(event.type), event.key, event.dedup_key) == (200, "🔑" * 200, "é" * 200)


def test_an_unknown_queue_is_refused_with_a_hint():
    with pytest.raises(
        UnknownQueueError, match=r"'defualt' is not in .*; did you mean 'default'\?"
    ):
        publish("order.placed", {}, queue="defualt")


# -- once


def test_publishing_an_event_id_twice_adds_one_event():
    event_id = uuid.uuid4()
    first = publish("order.placed", {"n": 1}, event_id=event_id)
    second = publish("order.placed", {"n": 2}, event_id=event_id)
    assert second.pk == first.pk
    assert second.payload == {"n": 1}
    assert QueuedEvent.objects.count() == 1


def test_an_event_id_that_was_handled_and_logged_is_not_handled_again(handled):
    event_id = uuid.uuid4()
    publish("order.placed", {"n": 1}, event_id=event_id)
    drain()
    again = publish("order.placed", {"n": 2}, event_id=event_id)
    drain()
    assert again.event_id == event_id
    assert handled == [{"n": 1}]
    assert EventLog.objects.count() == 1
    assert not QueuedEvent.objects.exists()


@with_real_transactions
def test_an_event_that_ended_is_never_seen_in_the_queue_while_it_is_published_again(handled):
    """Otherwise a worker could claim it in between and handle it twice."""
    event_id = uuid.uuid4()
    publish("order.placed", {}, event_id=event_id)
    drain()
    seen = []

    def look_from_outside():
        try:
            seen.append(QueuedEvent.objects.filter(event_id=event_id).exists())
        finally:
            connection.close()

    def look_after_each_statement(execute, *args):
        result = execute(*args)
        pool.submit(look_from_outside).result(30)
        return result

    with (
        ThreadPoolExecutor(1) as pool,
        connection.execute_wrapper(look_after_each_statement),
    ):
        publish("order.placed", {}, event_id=event_id)
    assert len(seen) > 1
    assert not any(seen)


def test_publishing_a_queued_dedup_key_adds_nothing_and_returns_the_queued_event():
    first = publish("order.placed", {"n": 1}, dedup_key="order:7")
    second = publish("order.changed", {"n": 2}, dedup_key="order:7")
    other = publish("order.placed", {"n": 3}, dedup_key="order:8")
    assert second.pk == first.pk
    assert second.event_id == first.event_id
    assert second.type == "order.placed"
    assert other.pk != first.pk
    assert QueuedEvent.objects.count() == 2


def test_a_dedup_key_can_be_reused_when_its_event_has_ended(handled):
    publish("order.placed", 1, dedup_key="order:7")
    drain()
    publish("order.placed", 2, dedup_key="order:7")
    drain()
    assert handled == [1, 2]


def test_a_dedup_key_is_in_use_while_its_event_is_being_handled():
    seen = []

    @handler("order.placed", name="again")
    def again(event):
        seen.append(publish("order.placed", {}, dedup_key="order:7").event_id)

    first = publish("order.placed", {}, dedup_key="order:7")
    drain()
    assert seen == [first.event_id]
    assert not QueuedEvent.objects.exists()


@pytest.mark.parametrize(("one", "other"), [("a", "A"), ("e", "é"), ("ss", "ß"), ("ﬁ", "fi")])
def test_dedup_keys_that_look_alike_are_different(one, other):
    publish("order.placed", {}, dedup_key=one)
    publish("order.placed", {}, dedup_key=other)
    assert QueuedEvent.objects.count() == 2


def test_a_dedup_key_applies_to_its_own_namespace(settings):
    """M8."""
    publish("order.placed", {}, dedup_key="order:7")
    settings.EVENTBUS = {"NAMESPACE": "other"}
    publish("order.placed", {}, dedup_key="order:7")
    assert QueuedEvent.objects.count() == 2


HOUR = timedelta(hours=1)


def test_a_window_still_applies_when_its_event_has_ended(handled):
    first = publish("order.placed", 1, dedup_key="order:7", dedup_for=HOUR)
    drain()
    again = publish("order.placed", 2, dedup_key="order:7", dedup_for=HOUR)
    drain()
    assert handled == [1]
    assert (again.pk, again.event_id) == (None, first.event_id)
    publish("order.placed", 3, dedup_key="order:8", dedup_for=HOUR)
    drain()
    assert handled == [1, 3]


def test_a_window_starts_at_publishing_by_the_database_clock():
    publish("order.placed", 1, dedup_key="order:7", dedup_for=HOUR)
    mark = IdempotencyKey.objects.annotate(left=F("expires_at") - Now()).get(scope=PUBLISHED)
    assert timedelta(minutes=59) < mark.left <= HOUR


def test_a_dedup_key_can_be_reused_after_its_window(handled):
    publish("order.placed", 1, dedup_key="order:7", dedup_for=HOUR)
    drain()
    IdempotencyKey.objects.update(expires_at=datetime(2020, 1, 1, tzinfo=UTC))
    second = publish("order.placed", 2, dedup_key="order:7", dedup_for=HOUR)
    drain()
    assert handled == [1, 2]
    assert IdempotencyKey.objects.get(scope=PUBLISHED).event_id == second.event_id


def test_a_queued_event_keeps_its_dedup_key_beyond_its_window():
    first = publish("order.placed", 1, dedup_key="order:7", dedup_for=HOUR)
    past = datetime(2020, 1, 1, tzinfo=UTC)
    IdempotencyKey.objects.update(expires_at=past)
    again = publish("order.placed", 2, dedup_key="order:7", dedup_for=HOUR)
    assert again.pk == first.pk
    # A duplicate does not start a new window.
    assert IdempotencyKey.objects.get(scope=PUBLISHED).expires_at == past


def test_publishing_the_same_event_again_in_its_window_adds_nothing(handled):
    """F21: the answer to a COMMIT was lost, and the event has been handled in the meantime."""
    once = {"dedup_key": "order:7", "dedup_for": HOUR, "event_id": uuid.uuid4()}
    publish("order.placed", 1, **once)
    assert publish("order.placed", 1, **once).event_id == once["event_id"]
    drain()
    assert publish("order.placed", 1, **once).event_id == once["event_id"]
    drain()
    assert handled == [1]


def test_a_rolled_back_window_does_not_exist(handled):
    with rolled_back():
        publish("order.placed", 1, dedup_key="order:7", dedup_for=HOUR)
    publish("order.placed", 2, dedup_key="order:7", dedup_for=HOUR)
    drain()
    assert handled == [2]


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("window", [{}, {"dedup_for": HOUR}])
def test_on_duplicate_raise_leaves_the_transaction_usable(handled, window, ended):
    publish("order.placed", 1, dedup_key="order:7", **window)
    if ended:
        drain()
        if not window:
            return
    with transaction.atomic():
        with pytest.raises(DuplicateEventError, match="'order:7' exists already"):
            publish("order.placed", 2, dedup_key="order:7", on_duplicate="raise", **window)
        publish("order.noticed", 3)
    drain()
    assert handled == [1, 3]


def test_on_duplicate_raise_applies_to_an_existing_event_id():
    first = publish("order.placed", 1, event_id=uuid.uuid4())
    with pytest.raises(DuplicateEventError, match=str(first.event_id)):
        publish("order.placed", 1, event_id=first.event_id, on_duplicate="raise")


def test_a_worker_deletes_expired_windows(handled):
    publish("order.placed", 1, dedup_key="order:7", dedup_for=HOUR)
    IdempotencyKey.objects.update(expires_at=datetime(2020, 1, 1, tzinfo=UTC))
    drain()
    assert not IdempotencyKey.objects.exists()


def test_events_without_a_dedup_key_are_never_duplicates():
    for _ in range(3):
        publish("order.placed", {})
    assert QueuedEvent.objects.count() == 3


def test_a_duplicate_does_not_send_the_signal(announced):
    event_id = uuid.uuid4()
    publish("order.placed", {}, event_id=event_id)
    publish("order.placed", {}, event_id=event_id)
    publish("order.placed", {}, dedup_key="order:7")
    publish("order.placed", {}, dedup_key="order:7")
    assert len(announced) == 2


def in_threads(*actions):
    """Run the actions at the same time, each on a connection of its own."""
    start = threading.Barrier(len(actions))

    def run(action):
        start.wait(30)
        try:
            return action()
        finally:
            connection.close()

    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(60) for future in [pool.submit(run, each) for each in actions]]


@with_real_transactions
@pytest.mark.parametrize("in_transaction", [False, True])
def test_two_threads_with_one_dedup_key_leave_one_event(in_transaction):
    def publish_once(key):
        if not in_transaction:
            return publish("order.placed", {}, dedup_key=key)
        with transaction.atomic():
            return publish("order.placed", {}, dedup_key=key)

    for key in map(str, range(10)):
        first, second = in_threads(partial(publish_once, key), partial(publish_once, key))
        assert first.event_id == second.event_id
        assert QueuedEvent.objects.filter(dedup_key=key).count() == 1


@with_real_transactions
@pytest.mark.parametrize(
    "identity",
    [
        {"dedup_key": "k"},
        {"dedup_key": "k", "dedup_for": timedelta(hours=1)},
        {"event_id": uuid.UUID(int=7)},
    ],
    ids=["dedup key", "window", "event id"],
)
def test_two_threads_that_reuse_an_event_id_or_dedup_key_do_not_deadlock(identity):
    """InnoDB keeps deleted rows in its indexes for a while and locks them."""

    def publish_once():
        with transaction.atomic():
            return publish("order.placed", {}, **identity)

    for _ in range(20):
        first, second = in_threads(publish_once, publish_once)
        assert first.event_id == second.event_id
        assert QueuedEvent.objects.count() == 1
        QueuedEvent.objects.all().delete()
        IdempotencyKey.objects.filter(scope=PUBLISHED).delete()


@with_real_transactions
@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="SQLite has one writer")
def test_duplicates_of_a_queued_event_do_not_wait_for_each_other():
    publish("order.placed", {}, dedup_key="k")
    published, may_end = threading.Event(), threading.Event()

    def publish_and_stay():
        with transaction.atomic():
            publish("order.placed", {}, dedup_key="k")
            published.set()
            assert may_end.wait(30)

    def publish_beside():
        assert published.wait(30)
        with transaction.atomic():
            publish("order.placed", {}, dedup_key="k")
            may_end.set()

    in_threads(publish_and_stay, publish_beside)
    assert QueuedEvent.objects.count() == 1


@with_real_transactions
def test_the_second_publisher_gets_a_dedup_key_if_the_first_rolls_back():
    published, may_roll_back = threading.Event(), threading.Event()

    def roll_back():
        with rolled_back():
            publish("order.placed", "first", dedup_key="order:7")
            published.set()
            assert may_roll_back.wait(30)

    def publish_second():
        assert published.wait(30)
        may_roll_back.set()
        return publish("order.placed", "second", dedup_key="order:7")

    _, second = in_threads(roll_back, publish_second)
    assert QueuedEvent.objects.get().event_id == second.event_id
    assert QueuedEvent.objects.get().payload == "second"


# -- shut down


def test_after_shutdown_nothing_can_be_published():
    """M27."""
    shutdown()
    with CaptureQueriesContext(connection) as queries:
        with pytest.raises(EventBusShutdownError):
            publish("order.placed", {})
        with pytest.raises(EventBusShutdownError):
            publish_many([("order.placed", {})])
        with pytest.raises(EventBusShutdownError):
            async_to_sync(apublish)("order.placed", {})
    assert len(queries) == 0
    reopen()
    publish("order.placed", {})
    assert queued() == ["order.placed"]


def test_apublish_has_the_same_parameters_as_publish():
    here, there = inspect.signature(publish), inspect.signature(apublish)
    assert here.parameters == there.parameters


# -- transactions of other databases


@pytest.fixture
def elsewhere(transactional_db, tmp_path):
    """The alias of a second database that has only the queue table."""
    wanted = {"ENGINE": "django.db.backends.sqlite3", "NAME": tmp_path / "elsewhere.sqlite3"}
    known = connections.configure_settings({"default": {}, "elsewhere": wanted})["elsewhere"]
    made = DatabaseWrapper(known, "elsewhere")
    # Connected before it is listed: Django forbids a test to open databases it did not declare.
    made.ensure_connection()
    connections["elsewhere"], connections.settings["elsewhere"] = made, known
    with made.schema_editor() as editor:
        editor.create_model(QueuedEvent)
    yield "elsewhere"
    made.close()
    del connections["elsewhere"], connections.settings["elsewhere"]


def test_an_event_outside_of_the_open_transaction_causes_a_warning(elsewhere):
    message = (
        r"publishing to the database 'default' while the open transaction is on 'elsewhere': "
        r"a rollback of that transaction will not remove the event"
    )
    with transaction.atomic(using=elsewhere):
        with pytest.warns(RuntimeWarning, match=message) as caught:
            publish("order.placed", {})
        with pytest.warns(RuntimeWarning, match=message) as caught_many:
            publish_many([("order.placed", {})])
    assert queued() == ["order.placed"] * 2
    assert {each.filename for each in [*caught, *caught_many]} == {__file__}


def test_an_event_outside_of_the_open_transaction_may_be_refused(elsewhere, settings):
    """F40."""
    settings.EVENTBUS = {"FOREIGN_TRANSACTION": "error"}
    with transaction.atomic(using=elsewhere), pytest.raises(ForeignTransactionError):
        publish("order.placed", {})
    assert queued() == []


def test_an_event_outside_of_the_open_transaction_may_be_allowed(elsewhere, settings):
    settings.EVENTBUS = {"FOREIGN_TRANSACTION": "allow"}
    with warnings.catch_warnings(), transaction.atomic(using=elsewhere):
        warnings.simplefilter("error")
        publish("order.placed", {})
    assert queued() == ["order.placed"]


@pytest.mark.parametrize("inner", ["default", "elsewhere"])
def test_a_second_open_transaction_is_noticed_whichever_was_opened_first(
    elsewhere, settings, inner
):
    """A rollback of the other one would not remove the event, so publish() cannot choose."""
    settings.EVENTBUS = {"FOREIGN_TRANSACTION": "error"}
    outer = "elsewhere" if inner == "default" else "default"
    message = (
        r"publishing to the database 'default' while a transaction is open on 'elsewhere' too: "
        r"a rollback of that transaction will not remove the event; "
        r"pass using='default' to choose the database"
    )
    with transaction.atomic(using=outer), transaction.atomic(using=inner):
        with pytest.raises(ForeignTransactionError, match=message):
            publish("order.placed", {})
        with pytest.raises(ForeignTransactionError, match=message):
            publish_many([("order.placed", {})])
    assert queued() == []


def test_a_second_open_transaction_causes_a_warning_unless_it_is_allowed(elsewhere, settings):
    with transaction.atomic(), transaction.atomic(using=elsewhere):
        with pytest.warns(RuntimeWarning, match="on 'elsewhere' too") as caught:
            publish("order.placed", {})
        assert caught[0].filename == __file__
        settings.EVENTBUS = {"FOREIGN_TRANSACTION": "allow"}
        publish("order.placed", {})
    assert queued() == ["order.placed"] * 2


def test_with_two_open_transactions_using_chooses_one(elsewhere, settings):
    settings.EVENTBUS = {"FOREIGN_TRANSACTION": "error", "DATABASES": ["default", elsewhere]}
    with transaction.atomic(), transaction.atomic(using=elsewhere):
        with pytest.raises(ForeignTransactionError, match="'default' or using='elsewhere'"):
            publish("order.placed", 1)
        publish("order.placed", 2, using="default")
        publish("order.placed", 3, using=elsewhere)
    here = QueuedEvent.objects.values_list("payload", flat=True)
    there = QueuedEvent.objects.using(elsewhere).values_list("payload", flat=True)
    assert (list(here), list(there)) == ([2], [3])


def test_a_bridged_row_and_its_event_share_the_database_whatever_else_is_open(elsewhere, settings):
    settings.EVENTBUS = {"FOREIGN_TRANSACTION": "error"}
    bridge = bridge_model(Customer, created="customer.created", fields=[])
    try:
        with transaction.atomic(), transaction.atomic(using=elsewhere):
            Customer.objects.create()
    finally:
        bridge.disconnect()
    assert queued() == ["customer.created"]


def test_the_transaction_that_a_test_case_opens_does_not_count(elsewhere, settings):
    settings.EVENTBUS = {"FOREIGN_TRANSACTION": "error", "DATABASES": ["default", elsewhere]}
    with of_a_test_case("default"), of_a_test_case(elsewhere):
        publish("order.placed", 1)
        with transaction.atomic(using=elsewhere):
            publish("order.placed", 2)
        refused = pytest.raises(ForeignTransactionError, match="using='default' or")
        with transaction.atomic(), transaction.atomic(using=elsewhere), refused:
            publish("order.placed", 3)
    there = QueuedEvent.objects.using(elsewhere).values_list("payload", flat=True)
    assert (queued(), list(there)) == (["order.placed"], [2])


def of_a_test_case(alias):
    block = transaction.atomic(using=alias)
    block._from_testcase = True
    return block


def test_without_an_open_transaction_there_is_no_warning(elsewhere, settings):
    settings.EVENTBUS = {"FOREIGN_TRANSACTION": "error"}
    publish("order.placed", {})
    assert queued() == ["order.placed"]


def test_the_database_of_the_open_transaction_is_chosen_if_it_has_the_event_tables(
    elsewhere, settings
):
    """M1, on any database."""
    settings.EVENTBUS = {
        "FOREIGN_TRANSACTION": "error",
        "DATABASES": ("default", elsewhere),
    }
    with transaction.atomic(using=elsewhere):
        publish("order.placed", 1)
    with rolled_back(using=elsewhere):
        publish("order.placed", 2)
    assert queued() == []
    there = QueuedEvent.objects.using(elsewhere).values_list("payload", flat=True)
    assert list(there) == [1]


def test_a_database_that_is_named_is_used_and_checked(elsewhere, settings):
    settings.EVENTBUS = {
        "FOREIGN_TRANSACTION": "error",
        "DATABASES": ("default", elsewhere),
    }
    publish("order.placed", {}, using=elsewhere)
    with transaction.atomic(), pytest.raises(ForeignTransactionError, match="'elsewhere'"):
        publish("order.placed", {}, using=elsewhere)
    settings.EVENTBUS = {"FOREIGN_TRANSACTION": "allow"}
    with transaction.atomic():
        publish("order.placed", {}, using=elsewhere)
    assert queued() == []
    assert QueuedEvent.objects.using(elsewhere).count() == 2


# -- signals


@pytest.fixture
def announced():
    """The events for which the published signal was sent."""
    seen = []

    def receive(sender, event, **kwargs):
        seen.append(event)

    event_published.connect(receive)
    yield seen
    event_published.disconnect(receive)


def test_every_published_event_sends_the_signal(announced):
    event = publish("order.placed", {"order": 7})
    publish_many([("mail.sent", 1), ("mail.sent", 2)])
    assert announced[0] == event
    assert [each.type for each in announced] == ["order.placed", "mail.sent", "mail.sent"]
    assert [each.payload for each in announced] == [{"order": 7}, 1, 2]


def test_the_signal_is_sent_inside_the_transaction_of_the_publisher():
    seen = []

    def receive(sender, event, **kwargs):
        seen.append(QueuedEvent.objects.filter(event_id=event.event_id).exists())

    event_published.connect(receive)
    try:
        publish("order.placed", {})
    finally:
        event_published.disconnect(receive)
    assert seen == [True]


def test_a_failing_receiver_does_not_affect_publishing(announced, caplog):
    def fail(sender, event, **kwargs):
        raise Refusal("not my day")

    event_published.connect(fail)
    try:
        with transaction.atomic():
            publish("order.placed", {})
            publish_many([("order.placed", {})])
    finally:
        event_published.disconnect(fail)
    assert len(announced) == 2
    assert queued() == ["order.placed"] * 2
    assert "not my day" in caplog.text
