"""attention: one statement returns everything that an idle worker needs to know."""

import uuid
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_eventbus import handler, pauses, publish, schedules
from django_eventbus.exceptions import WorkerEvictedError
from django_eventbus.models import EventLane, EventWorker, IdempotencyKey, QueuedEvent
from django_eventbus.store import Attention, AttentionQuery, store_for
from django_eventbus.worker.firing import Scheduler
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.bus import drain
from tests.workers import LONG_AGO

pytestmark = pytest.mark.django_db


@pytest.fixture
def ask(store, worker_id):
    def ask(*queues, **others):
        asked = AttentionQuery(worker_id=worker_id, queues=queues or ("default",), **others)
        return store.attention(asked)

    return ask


def test_an_empty_bus_needs_no_attention(ask):
    assert ask(schedules=()) == Attention()


def test_attention_is_one_statement(ask):
    publish("x", 1)
    publish("x", 1, key="k")
    publish("x", 1, delay=60)
    with CaptureQueriesContext(connection) as queries:
        ask("default", "mail", schedules=("a", "b"), excluded_schedules=frozenset({1}))
    assert len(queries) == 1


@pytest.mark.parametrize("key", [None, "k"])
def test_a_queue_with_an_event_is_ready(ask, key, settings):
    settings.EVENTBUS = {"QUEUES": ["default", "mail"]}
    publish("x", 1, key=key, queue="mail")
    assert ask("default", "mail").ready == {"mail"}
    assert ask("default").ready == frozenset()


def test_a_queue_with_a_ready_lane_is_ready(ask, store):
    publish("x", 1, key="k")
    store.route("default", 10)
    assert ask().ready == {"default"}


def test_a_claimed_event_is_not_ready(ask, store, worker_id):
    publish("x", 1)
    publish("x", 1, key="k")
    store.claim("default", limit=2, worker_id=worker_id)
    assert ask() == Attention()


def test_a_waiting_lane_is_due_at_its_ready_time(ask, store):
    publish("x", 1, key="k")
    store.route("default", 10)
    EventLane.objects.update(ready_at=timezone.now() + timedelta(seconds=100))
    found = ask()
    assert found.ready == frozenset()
    assert 50 < found.wait <= 101


def test_a_delayed_event_is_awaited_and_then_promoted(ask):
    publish("x", 1, delay=100)
    found = ask()
    assert (found.promotes, found.ready) == (False, frozenset())
    assert 50 < found.wait <= 101
    QueuedEvent.objects.update(available_at=LONG_AGO)
    found = ask()
    assert (found.promotes, found.wait) == (True, 0.0)


def test_the_injected_clock_decides(clock, worker_id):
    clock.now = timezone.now()
    publish("x", 1, delay=100)
    store, asked = store_for(clock=clock), AttentionQuery(worker_id=worker_id, queues=("default",))
    assert not store.attention(asked).promotes
    clock.tick(200)
    assert store.attention(asked).promotes


def test_a_dead_worker_is_to_be_recovered(ask, store, worker_id):
    dead = new_registration(WorkerOptions(using="default", queues=("default",)))
    store.register(dead)
    assert not ask().recovers
    EventWorker.objects.filter(pk=dead.pk).update(expires_at=LONG_AGO)
    assert ask().recovers
    store.recover()
    assert not ask().recovers


def test_an_expired_key_is_to_be_deleted(ask, store):
    store.add_key("scope", "key", event_id=uuid.uuid4(), keep=timedelta(hours=1))
    assert not ask().forgets
    IdempotencyKey.objects.update(expires_at=LONG_AGO)
    assert ask().forgets


def test_a_pause_and_its_held_events_need_attention(ask):
    handler("x", name="h")(lambda event: None)
    publish("x", 1)
    pauses.pause(type="x")
    assert ask().holds
    drain()
    pauses.resume(type="x")
    assert ask().holds, "the event waits to be released"
    drain()
    assert not ask().holds


def test_handlers_of_another_worker_need_attention(ask, store, worker_id):
    assert not ask(digest="ours").differs
    other = EventWorker.objects.get(pk=worker_id)
    other.pk, other.handlers_digest = uuid.uuid4(), "theirs"
    other.save(force_insert=True)
    assert ask(digest="ours").differs
    assert not ask(digest="theirs").differs
    other.expires_at = LONG_AGO
    other.save()
    assert not ask(digest="ours").differs


def test_a_schedule_is_awaited_and_then_due(ask, store):
    schedules.schedule("report", cron="0 6 * * *")
    schedules.synchronize(store)
    declared = {"schedules": ("report",)}
    assert ask(**declared).fires, "it has no next run yet"
    Scheduler(store).fire_some()
    found = ask(**declared)
    assert not found.fires
    assert 0 <= found.tick <= 24 * 3600
    assert ask(schedules=()).tick is None
    row = store.schedules.get()
    row.next_at = LONG_AGO
    row.save()
    assert ask(**declared).fires
    assert not ask(**declared, excluded_schedules=frozenset({row.pk})).fires


def test_attention_reports_that_the_worker_is_not_registered(ask, worker_id):
    EventWorker.objects.all().delete()
    with pytest.raises(WorkerEvictedError):
        ask()
