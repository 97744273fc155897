"""Limits: which limit applies to an event, and what each policy does when it is reached. M16."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_eventbus import (
    BackpressureError,
    DuplicateEventError,
    InvalidPayloadError,
    apublish,
    handler,
    publish,
    publish_many,
    signals,
)
from django_eventbus.models import QueuedEvent
from django_eventbus.publishing import limits
from django_eventbus.publishing.limits import limit_for
from django_eventbus.signals import RateLimitedLog, event_coalesced, event_dropped, event_published
from tests.bus import drain

pytestmark = pytest.mark.django_db

with_real_transactions = pytest.mark.django_db(transaction=True)


def limited(settings, **limits):
    """Set limits by keyword, with ``__`` for a colon."""
    settings.EVENTBUS = {
        "QUEUES": ["default", "ticks", "mail"],
        "LIMITS": {name.replace("__", ":"): options for name, options in limits.items()},
    }


def at_most(size, overflow, **options):
    return {"max_size": size, "overflow": overflow, **options}


def payloads():
    return list(QueuedEvent.objects.order_by("id").values_list("payload", flat=True))


@pytest.fixture
def signals_sent():
    """The signals that were sent, as (signal, payload, limit)."""
    seen = []

    def listen(word):
        def hear(sender, *, event, limit, **kwargs):
            seen.append((word, event.payload, limit))

        return hear

    hear_dropped, hear_coalesced = listen("dropped"), listen("coalesced")
    event_dropped.connect(hear_dropped)
    event_coalesced.connect(hear_coalesced)
    yield seen
    event_dropped.disconnect(hear_dropped)
    event_coalesced.disconnect(hear_coalesced)


# -- which limit


def scope_of(queue="default", key=None, type_name="x"):
    found = limit_for(queue, key, type_name)
    return found and (found.name, found.scope)


def test_a_bare_name_is_a_queue(settings):
    limited(settings, ticks=at_most(500, "coalesce"))
    assert scope_of("ticks") == ("ticks", "queue:ticks")
    assert scope_of("mail", type_name="ticks") is None


def test_a_pattern_limits_each_matching_key_type_or_queue_separately(settings):
    settings.EVENTBUS = {"LIMITS": {"key:order:*": at_most(5, "halt"), "*": at_most(9, "halt")}}
    assert scope_of(key="order:7") == ("key:order:*", "key:order:7")
    assert scope_of(key="order:8") == ("key:order:*", "key:order:8")
    assert scope_of(key="user:8") == ("*", "queue:default")


def test_a_limit_of_a_key_precedes_a_type_and_a_type_precedes_a_queue(settings):
    limited(
        settings,
        queue__mail=at_most(1, "halt"),
        type__mail=at_most(2, "halt"),
        key__mail=at_most(3, "halt"),
    )
    assert scope_of("mail", "mail", "mail") == ("key:mail", "key:mail")
    assert scope_of("mail", "other", "mail") == ("type:mail", "type:mail")
    assert scope_of("mail", None, "other") == ("queue:mail", "queue:mail")
    assert scope_of("default", None, "other") is None


def test_a_name_overrides_a_pattern_and_a_longer_pattern_a_shorter_one(settings):
    names = ("type:*", "type:tick.*", "type:tick.eu.*", "type:tick.eu.dax")
    settings.EVENTBUS = {"LIMITS": {name: at_most(1, "halt") for name in names}}
    for type_name, name in [
        ("tick.eu.dax", "type:tick.eu.dax"),
        ("tick.eu.ftse", "type:tick.eu.*"),
        ("tick.us", "type:tick.*"),
        ("order", "type:*"),
    ]:
        assert scope_of(type_name=type_name)[0] == name


def test_limits_are_read_again_when_settings_change(settings):
    limited(settings, ticks=at_most(1, "halt"))
    assert limit_for("ticks", None, "x").max_size == 1
    limited(settings, ticks=at_most(2, "halt"))
    assert limit_for("ticks", None, "x").max_size == 2
    settings.EVENTBUS = {}
    assert limit_for("ticks", None, "x") is None


def test_the_cache_of_keys_is_bounded(settings, monkeypatch):
    monkeypatch.setattr(limits, "_MAX_CACHED", 3)
    settings.EVENTBUS = {"LIMITS": {"key:*": at_most(1, "halt")}}
    for number in range(10):
        assert scope_of(key=str(number))[1] == f"key:{number}"
    assert len(limits._limits_cache._known) <= 3


def test_the_longest_key_fits_the_column_of_its_limit(settings):
    settings.EVENTBUS = {"LIMITS": {"key:*": at_most(1, "drop"), "type:*": at_most(1, "drop")}}
    assert publish("x", key="é" * 200)
    assert publish("x", key="é" * 200) is None
    assert publish("t" * 200)
    assert publish("t" * 200) is None


# -- what it costs


@pytest.mark.parametrize("limits", [{}, {"ticks": at_most(1, "halt")}])
def test_without_a_matching_limit_publishing_is_one_insert(settings, limits):
    limited(settings, **limits)
    with CaptureQueriesContext(connection) as queries:
        publish("order.placed", {})
        publish_many([("order.placed", {}), ("order.paid", {})])
    assert len(queries) == 2
    assert set(QueuedEvent.objects.values_list("counted_as", flat=True)) == {None}


def test_a_matching_limit_adds_one_statement(settings):
    limited(settings, ticks=at_most(5000, "halt"))
    with CaptureQueriesContext(connection) as queries:
        publish("tick", {}, queue="ticks")
    assert len(queries) == 2
    with CaptureQueriesContext(connection) as queries:
        publish_many((("tick", n) for n in range(5)), queue="ticks")
    assert len(queries) == 2


# -- the policies


@pytest.mark.parametrize("many", [False, True])
def test_publish_returns_none_for_a_dropped_event_and_counts_it(settings, signals_sent, many):
    """M16: drop returns None, logs and counts."""
    limited(settings, ticks=at_most(2, "drop"))
    if many:
        assert publish_many([("tick", 1), ("tick", 2), ("tick", 3)], queue="ticks") == 2
    else:
        assert publish("tick", 1, queue="ticks").payload == 1
        assert publish("tick", 2, queue="ticks").payload == 2
        assert publish("tick", 3, queue="ticks") is None
    assert payloads() == [1, 2]
    assert signals_sent == [("dropped", 3, "ticks")]


@pytest.mark.parametrize(("overflow", "said"), [("drop", "_drops"), ("coalesce", "_merges")])
def test_dropped_and_coalesced_events_are_logged_at_a_limited_rate(
    settings, capture, monkeypatch, overflow, said
):
    sparingly = RateLimitedLog(getattr(signals, said)._write, 3600)
    monkeypatch.setattr(signals, said, sparingly)
    limited(settings, ticks=at_most(1, overflow))
    for number in range(5):
        publish("tick", number, queue="ticks")
    lines = [each.getMessage() for each in capture.records]
    sparingly.flush()
    lines.append(capture.records[-1].getMessage())
    done = {"drop": "dropped", "coalesce": "coalesced"}[overflow]
    assert lines == [
        f"{done} 1 event by the limit ticks, the last of type tick",
        f"{done} 3 events by the limit ticks, the last of type tick",
    ]


def test_the_first_message_is_logged_at_once_and_later_ones_are_combined(clock):
    said, promised = [], []
    sparingly = RateLimitedLog(
        lambda *facts: said.append(facts),
        10,
        clock=lambda: clock.now.timestamp(),
        later=lambda seconds, action: promised.append((seconds, action)),
    )
    for last in "xyz":
        sparingly.add("a", last)
        clock.tick(2)
    sparingly.add("b", "w")
    assert said == [("a", 1, "x"), ("b", 1, "w")]
    ((seconds, action),) = promised
    assert seconds == 8
    action()
    assert said[2:] == [("a", 2, "z")]
    sparingly.add("a", "v")
    assert len(said) == 3
    clock.tick(10)
    sparingly.add("a", "u")  # The timer no longer exists, as after a fork.
    assert said[3:] == [("a", 2, "u")]
    clock.tick(10)
    sparingly.flush()
    assert len(said) == 4


@pytest.mark.processes
def test_a_process_logs_its_pending_messages_before_it_ends():
    code = """
from types import SimpleNamespace
from django.conf import settings
settings.configure()
from django_eventbus.signals import event_dropped
event = SimpleNamespace(type="tick", event_id=1, key=None, queue="ticks", headers={})
for _ in range(5):
    event_dropped.send(None, event=event, limit="ticks")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr.splitlines() == [
        "dropped 1 event by the limit ticks, the last of type tick",
        "dropped 4 events by the limit ticks, the last of type tick",
    ]


def test_a_dropped_event_does_not_send_the_published_signal(settings):
    limited(settings, ticks=at_most(1, "drop"))
    announced = []

    def hear(sender, *, event, **kwargs):
        announced.append(event.payload)

    event_published.connect(hear)
    try:
        publish("tick", 1, queue="ticks")
        publish("tick", 2, queue="ticks")
        publish_many([("tick", 3)], queue="ticks")
    finally:
        event_published.disconnect(hear)
    assert announced == [1]


def test_a_limit_that_halts_raises_and_leaves_the_transaction_usable(settings):
    limited(settings, mail=at_most(2, "halt"))
    with transaction.atomic():
        publish("mail", 1, queue="mail")
        publish("mail", 2, queue="mail")
        with pytest.raises(BackpressureError, match="queue:mail has room for 0 of 1 events"):
            publish("mail", 3, queue="mail")
        publish("other", 4)
    assert payloads() == [1, 2, 4]


def test_publish_many_publishes_nothing_if_a_halt_limit_has_too_little_room(settings):
    limited(settings, mail=at_most(2, "halt"))
    with pytest.raises(BackpressureError, match="room for 2 of 3 events"):
        publish_many([("mail", n) for n in range(3)], queue="mail")
    assert payloads() == []


def test_coalescing_replaces_payload_headers_and_version_of_the_oldest(settings, signals_sent):
    limited(settings, ticks=at_most(2, "coalesce"))
    first = publish("tick", 1, queue="ticks", headers={"n": 1})
    publish("tick", 2, queue="ticks")
    third = publish("tick", 3, queue="ticks", headers={"n": 3})
    assert (third.pk, third.event_id, third.payload) == (first.pk, first.event_id, 3)
    assert payloads() == [3, 2]
    first.refresh_from_db()
    assert first.headers == {"n": 3}
    assert publish("tick", None, queue="ticks").pk == first.pk
    assert payloads() == [None, 2]
    assert signals_sent == [("coalesced", 3, "ticks"), ("coalesced", None, "ticks")]


@with_real_transactions
@pytest.mark.parametrize(
    "publish_one", [publish, lambda *event: publish_many([event])], ids=["one", "many"]
)
def test_coalescing_wakes_the_workers_on_commit(settings, publish_one):
    """A claim passes over the row while the publisher's transaction holds its lock."""
    limited(settings, default=at_most(1, "coalesce"))
    publish_one("tick", 1)
    with transaction.atomic():
        publish_one("tick", 2)
        assert len(connection.run_on_commit) == 1
    assert payloads() == [2]


def test_events_of_another_type_key_or_queue_are_not_coalesced(settings):
    """The latest payload of each is stored beyond the limit."""
    settings.EVENTBUS = {
        "QUEUES": ["default", "ticks"],
        "LIMITS": {"type:*": at_most(1, "coalesce"), "queue:ticks": at_most(1, "halt")},
    }
    first = publish("tick", 1, key="a")
    assert publish("tick", 2, key="b").pk != first.pk
    assert publish("tick", 3).pk != first.pk
    assert publish("tick", 4, key="a", queue="ticks").pk != first.pk
    assert publish("tock", 5, key="a").pk != first.pk
    assert publish("tick", 6, key="a").pk == first.pk
    assert payloads() == [6, 2, 3, 4, 5]


def test_an_event_that_is_being_handled_is_never_changed(settings, store, worker_id):
    settings.EVENTBUS = {"LIMITS": {"default": at_most(1, "coalesce")}}
    publish("tick", 1)
    (claimed,) = store.claim("default", limit=1, worker_id=worker_id)
    second = publish("tick", 2)
    assert second.pk != claimed.row_id
    assert publish("tick", 3).pk == second.pk
    assert payloads() == [1, 3]


def test_an_event_that_one_handler_has_completed_is_never_changed(settings):
    """That handler would never get the new payload."""
    settings.EVENTBUS = {"LIMITS": {"default": at_most(1, "coalesce")}}
    seen = []
    handler("tick", name="works")(lambda event: seen.append(event.payload))

    @handler("tick", name="fails")
    def fails(event):
        raise ValueError

    publish("tick", 1)
    drain()
    publish("tick", 2)
    drain()
    assert seen == [1, 2]
    assert payloads() == [1, 2]


def test_an_event_that_is_due_now_is_not_coalesced_into_a_later_one(settings):
    limited(settings, ticks=at_most(2, "coalesce"))
    later = publish("tick", "later", queue="ticks", delay=3600)
    now = publish("tick", "now", queue="ticks")
    assert publish("tick", "now again", queue="ticks").pk == now.pk
    assert publish("tick", "later again", queue="ticks", delay=60).pk == later.pk
    assert payloads() == ["later again", "now again"]


def test_publish_many_coalesces_to_the_last_event_of_each_type(settings, signals_sent):
    limited(settings, ticks=at_most(2, "coalesce"))
    ticks = [("eu", 1), ("us", 2), ("eu", 3), ("us", 4), ("eu", 5), ("asia", 6), ("asia", 7)]
    assert publish_many(ticks, queue="ticks") == 3
    assert payloads() == [5, 4, 7]
    assert sorted(signals_sent) == [
        ("coalesced", 4, "ticks"),
        ("coalesced", 5, "ticks"),
        ("coalesced", 5, "ticks"),
        ("coalesced", 7, "ticks"),
    ]


def test_a_rollback_undoes_coalescing(settings):
    limited(settings, ticks=at_most(1, "coalesce"))
    publish("tick", 1, queue="ticks")
    with transaction.atomic():
        publish("tick", 2, queue="ticks")
        transaction.set_rollback(True)
    assert payloads() == [1]


def test_a_limit_that_blocks_raises_after_its_timeout(settings):
    limited(settings, mail=at_most(1, "block", timeout=0.01))
    publish("mail", 1, queue="mail")
    with pytest.raises(BackpressureError, match="queue:mail"):
        publish("mail", 2, queue="mail")
    with pytest.raises(BackpressureError):
        publish_many([("mail", 2)], queue="mail")
    publish("other", 3)
    assert payloads() == [1, 3]


def test_how_long_a_limit_blocks_is_a_setting(settings):
    settings.EVENTBUS = {"LIMITS": {"default": at_most(1, "block")}, "BLOCK_TIMEOUT": 0.01}
    assert limit_for("default", None, "x").patience == 0.01
    publish("mail", 1)
    with pytest.raises(BackpressureError):
        publish("mail", 2)


@pytest.mark.skipif("connection.vendor != 'sqlite'", reason="only SQLite locks the whole database")
def test_a_publisher_does_not_wait_if_its_transaction_locks_the_database(settings):
    settings.EVENTBUS = {"LIMITS": {"default": at_most(1, "block", timeout=3600)}}
    publish("mail", 1)
    with transaction.atomic(), pytest.raises(BackpressureError) as refused:
        publish("mail", 2)
    assert "locks the database" in refused.value.__notes__[0]


@with_real_transactions
@pytest.mark.parametrize("many", [False, True])
def test_a_limit_that_blocks_waits_until_there_is_room(settings, many):
    settings.EVENTBUS = {"LIMITS": {"default": at_most(2, "block", timeout=60)}}
    handler("mail", name="send")(lambda event: None)
    publish_many([("mail", 1), ("mail", 2)])
    looked_twice = threading.Barrier(2)
    looks = []

    def look(execute, sql, *args):
        result = execute(sql, *args)
        if "COUNT" in sql:
            looks.append(sql)
            if len(looks) == 2:
                looked_twice.wait(30)
        return result

    def publish_more():
        try:
            with connection.execute_wrapper(look):
                if many:
                    return publish_many([("mail", n) for n in (3, 4, 5)])
                return publish("mail", 3).payload
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(publish_more)
        looked_twice.wait(30)
        while not blocked.done():
            drain()
        assert blocked.result() == 3
    drain()
    assert payloads() == []


def test_publishing_from_async_code_is_limited_too(settings):
    limited(settings, ticks=at_most(1, "drop"), mail=at_most(1, "halt"))

    async def publish_all():
        assert await apublish("tick", 1, queue="ticks")
        assert await apublish("tick", 2, queue="ticks") is None
        await apublish("mail", 1, queue="mail")
        with pytest.raises(BackpressureError):
            await apublish("mail", 2, queue="mail")

    async_to_sync(publish_all)()
    assert QueuedEvent.objects.count() == 2


# -- what counts


def test_many_events_under_several_limits_keep_their_order(settings):
    settings.EVENTBUS = {"LIMITS": {"type:a": at_most(2, "drop"), "type:b": at_most(1, "drop")}}
    items = [("a", 1), ("b", 2), ("c", 3), ("a", 4), ("b", 5), ("a", 6), ("c", 7)]
    assert publish_many(items) == 5
    assert payloads() == [1, 2, 3, 4, 7]


def test_each_key_is_limited_separately(settings):
    settings.EVENTBUS = {"LIMITS": {"key:order:*": at_most(1, "drop")}}
    assert publish("x", 1, key="order:1")
    assert publish("x", 2, key="order:2")
    assert publish("x", 3, key="order:1") is None
    assert publish("x", 4, key="user:1")
    assert publish("x", 5, key="user:1")


@pytest.mark.parametrize(
    ("overflow", "stored", "left"),
    [
        ("drop", 3, [("a", 1), ("b", 2), ("c", 5)]),
        ("coalesce", 3, [("a", 4), ("b", 3), ("c", 5)]),
    ],
)
def test_publish_many_limits_each_key_separately(settings, overflow, stored, left):
    settings.EVENTBUS = {"LIMITS": {"key:*": at_most(1, overflow)}}
    items = [("x", ["a", 1]), ("x", ["b", 2]), ("x", ["b", 3]), ("x", ["a", 4]), ("x", ["c", 5])]
    assert publish_many(items, key=lambda item: item[1][0]) == stored
    rows = QueuedEvent.objects.order_by("id").values_list("key", "payload", "counted_as")
    assert [(key, payload[1]) for key, payload, _ in rows] == left
    assert [scope for *_, scope in rows] == ["key:a", "key:b", "key:c"]


def test_publish_many_in_strict_order_is_limited(settings):
    settings.EVENTBUS = {"LIMITS": {"key:*": at_most(1, "drop")}, "STRICT_ORDER": True}
    assert publish_many([("x", 1), ("x", 2)], key="a") == 1
    assert publish("x", 3, key="a") is None
    assert publish("x", 4, key="b")


def test_delayed_and_running_events_count_and_ended_ones_do_not(settings, store, worker_id):
    settings.EVENTBUS = {"LIMITS": {"default": at_most(2, "drop")}}
    handler("x", name="do")(lambda event: None)
    publish("x", 1)
    assert len(store.claim("default", limit=1, worker_id=worker_id)) == 1
    publish("x", 2, delay=60)
    assert publish("x", 3) is None
    QueuedEvent.objects.update(status="PENDING", claim_token=None, claimed_by=None)
    drain()
    assert publish("x", 4)


def test_another_namespace_is_limited_separately(settings):
    """M8."""
    limits = {"default": at_most(1, "drop")}
    settings.EVENTBUS = {"LIMITS": limits}
    assert publish("x", 1)
    settings.EVENTBUS = {"LIMITS": limits, "NAMESPACE": "other"}
    assert publish("x", 2)
    assert publish("x", 3) is None


@pytest.mark.parametrize("overflow", ["drop", "coalesce", "block", "halt"])
def test_a_duplicate_does_not_count_against_the_limit(settings, overflow):
    settings.EVENTBUS = {"LIMITS": {"default": at_most(1, overflow)}}
    first = publish("x", 1, dedup_key="k")
    assert publish("x", 2, dedup_key="k").pk == first.pk
    assert publish("x", 2, event_id=first.event_id).pk == first.pk
    with pytest.raises(DuplicateEventError):
        publish("x", 2, dedup_key="k", on_duplicate="raise")
    assert payloads() == [1]


def test_a_dropped_event_stores_no_idempotency_key(settings):
    settings.EVENTBUS = {"LIMITS": {"default": at_most(1, "drop")}}
    handler("x", name="do")(lambda event: None)
    window = {"dedup_key": "k", "dedup_for": timedelta(hours=1)}
    publish("x", 1)
    assert publish("x", 2, **window) is None
    drain()
    assert publish("x", 3, **window).payload == 3


# -- bad input


@pytest.mark.parametrize(
    ("limits", "right"),
    [
        ({"default": {"max_size": 0, "overflow": "drop"}}, "whole number from 1 up"),
        ({"default": {"max_size": 1, "overflow": "dorp"}}, "did you mean 'drop'"),
        (["default"], "Use a dict"),
    ],
)
def test_invalid_limits_are_refused_before_any_sql(settings, limits, right):
    settings.EVENTBUS = {"LIMITS": limits}
    with transaction.atomic():
        with CaptureQueriesContext(connection) as queries:
            with pytest.raises(ImproperlyConfigured, match=right):
                publish("x", 1)
            with pytest.raises(ImproperlyConfigured, match=right):
                publish_many([("x", 1)])
        assert len(queries) == 0
        settings.EVENTBUS = {}
        publish("x", 2)


def test_a_key_longer_than_its_column_is_refused_before_its_limit_is_looked_up(settings):
    settings.EVENTBUS = {"LIMITS": {"key:*": at_most(1, "drop")}}
    with pytest.raises(InvalidPayloadError, match="201 characters, 200 are allowed"):
        publish("x", 1, key="k" * 201)
