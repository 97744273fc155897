"""The test helpers for projects."""

import signal
import subprocess
import sys
import threading
import uuid
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import TestCase
from django.utils import timezone

from django_eventbus import (
    Discard,
    Event,
    EventBusError,
    Retry,
    dead_letters,
    handler,
    poll,
    publish,
    publish_many,
    schedule,
    schedules,
)
from django_eventbus.models import EventLog, EventSchedule, EventWorker, QueuedEvent
from django_eventbus.registry import registry
from django_eventbus.store import store_for
from django_eventbus.testing import (
    EventBusTestMixin,
    assert_not_published,
    assert_published,
    capture_events,
    drain,
    isolated_handlers,
    published,
)
from django_eventbus.worker.firing import Scheduler
from tests.shop.models import Effect, Order

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)


class OrderEvent(Event):
    order_id: int


class OrderPaid(OrderEvent, type="testing.order.paid"):
    total: Decimal
    paid_at: datetime


def effect(event):
    Effect.objects.create(event_id=event.id, handler=event.handler_name)


def test_drain_handles_ready_events_and_returns_their_results():
    @handler("x", name="h")
    def write(event):
        effect(event)

    publish_many(("x", n) for n in range(3))
    tally = drain()
    assert (tally.handled, tally.failed, tally.dead, tally.postponed) == (3, 0, 0, 0)
    assert Effect.objects.count() == 3
    assert not QueuedEvent.objects.exists()


def test_drain_handles_events_that_handlers_publish():
    handler("x", name="first")(lambda event: publish("y"))
    handler("y", name="second")(effect)
    publish("x")
    assert drain().handled == 2
    assert Effect.objects.get().handler == "second"


def test_drain_raises_the_error_of_a_handler_after_the_rest_is_done():
    @handler("x", name="h")
    def sometimes(event):
        effect(event)
        if event.payload == 1:
            raise ValueError("one")

    publish_many(("x", n) for n in range(3))
    with pytest.raises(ValueError, match="one") as raised:
        drain()
    assert raised.traceback[-1].name == "sometimes"
    assert raised.value.__notes__[0].startswith("h, attempt 1 at x ")
    assert Effect.objects.count() == 2
    assert QueuedEvent.objects.get().errors[0]["message"] == "one"


def test_drain_can_leave_errors_to_the_retries():
    handler("x", name="h", retry={"max_retries": 0})(lambda event: 1 / 0)
    publish("x")
    tally = drain(raise_errors=False)
    assert (tally.handled, tally.failed, tally.dead) == (1, 1, 1)
    assert dead_letters.list()[0].error_type == "ZeroDivisionError"


@pytest.mark.parametrize("wish", [Retry(delay=60), Discard("spam")])
def test_drain_does_not_raise_retry_or_discard(wish):
    @handler("x", name="h")
    def wishful(event):
        raise wish

    publish("x")
    assert drain().failed == 1


def test_drain_raises_for_an_unhandled_event():
    publish("x")
    with pytest.raises(EventBusError, match="no handler is registered for 'x'"):
        drain()


def test_a_delayed_event_waits_for_its_time():
    handler("x", name="h")(effect)
    publish("x", delay=3600)
    assert drain().handled == 0
    assert drain(until=timedelta(minutes=59)).handled == 0
    assert drain(until=HOUR).handled == 1


def test_drain_moves_the_time_up_to_the_given_moment():
    handler("x", name="h")(effect)
    moment = datetime(2999, 1, 1, tzinfo=UTC)
    publish("x", at=moment)
    assert drain(until=moment - HOUR).handled == 0
    assert drain(until=moment).handled == 1


@pytest.mark.parametrize("key", [None, "k"])
def test_retries_run_when_they_are_due(key):
    attempts = []

    @handler("x", name="h", retry={"base_delay": 60, "max_delay": 600, "jitter": 0})
    def third_time(event):
        attempts.append(event.attempt)
        if event.attempt < 3:
            raise ValueError("not yet")

    publish("x", key=key)
    tally = drain(until=timedelta(seconds=100), raise_errors=False)
    assert (attempts, tally.failed, tally.handled) == ([1, 2], 2, 0)
    assert tally.postponed >= 2
    tally = drain(until=timedelta(seconds=300))
    assert (attempts, tally.handled) == ([1, 2, 3], 1)


def test_events_that_become_due_are_handled_in_order():
    seen = []
    handler("*", name="h")(lambda event: seen.append(event.type))
    publish("late", delay=50)
    publish("early", delay=10)
    publish("now")
    drain(until=HOUR)
    assert seen == ["now", "early", "late"]


@pytest.mark.parametrize("until", [None, timedelta(days=3)])
def test_schedules_do_not_fire(until):
    """A count must not depend on the time of day at which a test runs."""
    pytest.importorskip("cronsim")
    seen = []
    handler("*", name="h")(lambda event: seen.append(event.type))
    EventSchedule.objects.create(name="often", type="tick", cron="* * * * * *", tz="UTC")
    schedule("report.daily", cron="0 3 * * *")
    Scheduler(store_for()).fire_some()
    EventSchedule.objects.update(next_at=store_for().read_clock())
    publish("x", delay=timedelta(days=2))
    assert drain(until=until).handled == (0 if until is None else 1)
    assert seen == ([] if until is None else ["x"])


def test_events_published_by_a_schedule_can_be_tested():
    pytest.importorskip("cronsim")
    seen = []
    handler("report.daily", name="h")(lambda event: seen.append(event.payload))
    schedule("report.daily", cron="0 3 * * *", payload={"pages": 2})
    schedules.run("report.daily")
    assert drain().handled == 1
    assert seen == [{"pages": 2}]


def test_simulated_time_ends_a_lease():
    """A project can test that its own loop gets an abandoned event again."""
    publish("x")
    handler("x", name="h")(effect)
    assert poll() is not None
    assert drain().handled == 0
    assert drain(until=HOUR).handled == 0, "nothing is due, so no time has to pass"
    publish("y", delay=600)
    handler("y", name="y")(effect)
    assert drain(until=HOUR).handled == 2


@pytest.mark.parametrize("until", [None, HOUR])
def test_drain_stops_on_events_that_publish_each_other(until):
    handler("x", name="h")(lambda event: publish("x", delay=1 if until else None))
    publish("x")
    with pytest.raises(EventBusError, match=r"more than 30 events \('x' .* times\)"):
        drain(max_events=30, until=until)


def test_drain_stops_on_an_event_that_is_retried_without_end():
    @handler("x", name="h", retry={"max_retries": 10**6})
    def again(event):
        raise Retry(delay=0)

    publish("x")
    with pytest.raises(EventBusError, match="more than 30 events"):
        drain(max_events=30, until=HOUR)


def test_drain_accepts_exactly_the_allowed_number_of_events():
    handler("x", name="h")(effect)
    publish_many(("x", n) for n in range(30))
    assert drain(max_events=30).handled == 30


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("in_transaction", [True, False])
def test_a_handler_may_be_slow_in_the_transaction_of_a_test(in_transaction):
    """A heartbeat could not see the registration in that transaction and would stop the worker."""
    threads, lasts = [], []

    @handler("x")
    def look(event):
        threads.extend(each.name for each in threading.enumerate())
        lasts.append(EventWorker.objects.get().expires_at - timezone.now())

    with transaction.atomic() if in_transaction else nullcontext():
        publish("x")
        drain()
    assert ("eventbus-heartbeat" in threads) is not in_transaction
    assert (lasts[0] > timedelta(days=365)) is in_transaction


def test_drain_restores_the_alarm_signal_handler():
    def ring(signum, frame):
        """The handler of a test runner that stops hanging tests."""

    before = signal.signal(signal.SIGALRM, ring)
    try:
        drain()
        assert signal.getsignal(signal.SIGALRM) is ring
    finally:
        signal.signal(signal.SIGALRM, before)


def test_drain_serves_the_queues_it_is_given(settings):
    settings.EVENTBUS = {"QUEUES": ["default", "mail"]}
    handler("x", name="h")(effect)
    publish("x")
    publish("x", queue="mail")
    assert drain(queues=("mail",)).handled == 1
    assert QueuedEvent.objects.get().queue == "default"


def test_published_events_are_found_by_type_pattern_and_class():
    publish("order.placed", {"n": 1})
    publish(OrderPaid(order_id=1, total=Decimal("9.90"), paid_at=datetime(2026, 1, 1, tzinfo=UTC)))
    assert [each.type for each in published()] == ["order.placed", "testing.order.paid"]
    assert len(published("order.placed")) == 1
    assert len(published("*order.*")) == 1
    assert len(published(OrderPaid)) == 1
    assert len(published(OrderEvent)) == 1
    assert published("order.paid") == []


def test_published_events_are_found_after_they_were_handled():
    handler("x", name="h")(effect)
    event = publish("x", {"n": 1})
    drain()
    assert isinstance(assert_published("x", n=1), EventLog)
    assert assert_published("x").event_id == event.event_id


def test_values_are_compared_as_they_are_stored():
    moment = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
    number = uuid.uuid4()
    publish("x", {"total": Decimal("9.90"), "at": moment, "id": number, "tags": ["a"]})
    assert_published("x", total=Decimal("9.90"), at=moment, id=number, tags=("a",))
    assert_not_published("x", total=Decimal("9.9"))
    publish(OrderPaid(order_id=1, total=Decimal(5), paid_at=moment))
    assert_published(OrderPaid, paid_at=moment)
    assert_not_published(OrderPaid, paid_at=moment + timedelta(microseconds=1))


def test_a_missing_payload_field_is_not_equal_to_none():
    publish("x", {"n": None})
    assert_published("x", n=None)
    assert_not_published("x", m=None)
    publish("y", [1])
    assert_not_published("y", n=1)


def test_the_latest_of_several_is_returned():
    publish_many(("x", {"n": n}) for n in range(3))
    assert assert_published("x").payload == {"n": 2}


def test_a_failed_assertion_shows_the_published_events():
    publish("order.placed", {"order_id": 8}, key="order:8")
    publish("order.paid", {"note": "x" * 1000})
    with pytest.raises(AssertionError) as failure:
        assert_published("order.placed", order_id=7)
    first, *rest = str(failure.value).splitlines()
    assert first == "'order.placed' with order_id=7 was not published. Published events:"
    assert rest[0] == """  order.placed {"order_id": 8} key='order:8'"""
    assert rest[1].startswith('  order.paid {"note": "xxx')
    assert len(rest[1]) < 300


def test_a_failed_assertion_shows_the_latest_of_many_events():
    publish_many(("x", n) for n in range(50))
    with pytest.raises(AssertionError) as failure:
        assert_published(OrderPaid)
    lines = str(failure.value).splitlines()
    assert lines[0].startswith("OrderPaid was not published.")
    assert lines[1].strip() == "(30 earlier events)"
    assert lines[-1].strip() == "x 49"


def test_a_failed_assertion_says_that_nothing_was_published():
    with pytest.raises(AssertionError, match=r"'x' was not published\. No events were published\."):
        assert_published("x")


def test_an_unexpected_event_is_shown():
    publish("x", {"n": 1})
    with pytest.raises(AssertionError, match=r"(?s)'x' with n=1 was published\..*x \{\"n\": 1\}"):
        assert_not_published("x", n=1)


def test_a_rolled_back_event_does_not_count_as_published():
    with capture_events() as events:
        publish("kept")
        with transaction.atomic():
            publish("lost")
            transaction.set_rollback(True)
    assert [each.type for each in events] == ["kept"]
    assert_not_published("lost")


def test_capture_events_returns_the_events_of_the_block():
    publish("before")
    handler("*", name="h")(effect)
    with capture_events() as events:
        publish("x", {"n": 1}, key="k")
        drain()
        publish("y")
    publish("after")
    assert [(each.type, each.payload, each.key) for each in events] == [
        ("x", {"n": 1}, "k"),
        ("y", None, None),
    ]


def test_events_of_other_namespaces_are_not_seen(settings):
    settings.EVENTBUS = {"NAMESPACE": "other"}
    publish("x")
    settings.EVENTBUS = {}
    assert_not_published("x")


def test_handlers_can_be_tested_one_by_one():
    ran = []

    @handler("x", name="first")
    def first(event):
        ran.append("first")

    handler("x", name="second")(lambda event: ran.append("second"))
    handler("x", name="third")(lambda event: ran.append("third"))
    with isolated_handlers(first, "third"):
        handler("x", name="guest")(lambda event: ran.append("guest"))
        publish("x")
        drain()
    assert ran == ["first", "third", "guest"]
    ran.clear()
    publish("x")
    drain()
    assert ran == ["first", "second", "third"]


class TestMixin(EventBusTestMixin, TestCase):
    def test_the_helpers_are_methods(self):
        handler("x", name="h")(effect)
        with self.captureEvents() as events:
            publish("x", {"n": 1})
        assert len(events) == 1
        self.assertEventPublished("x", n=1)
        self.assertEventNotPublished("x", n=2)
        assert self.drain().handled == 1

    def test_handlers_of_a_test_are_forgotten(self):
        handler("x", name="h")(effect)
        self.doCleanups()
        assert registry.get("h") is None


def test_the_fixture_needs_no_import(eventbus):
    handler("x", name="h")(effect)
    publish("x", {"n": 1})
    eventbus.assert_published("x", n=1)
    assert eventbus.drain().handled == 1


def test_the_fixture_removes_the_handlers_of_the_project(request):
    handler("x", name="h")(effect)
    request.getfixturevalue("isolated_event_handlers")
    assert registry.all() == []


@pytest.mark.processes
def test_the_plugin_leaves_projects_without_django_alone(tmp_path):
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n"
        "def test_nothing():\n"
        "    assert 'django' not in sys.modules\n"
        "    assert 'django_eventbus.testing' not in sys.modules\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "django_eventbus.integrations.pytest"],
        cwd=tmp_path,
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in run.stdout, run.stdout + run.stderr


@pytest.mark.django_db
def test_a_deferred_constraint_fails_in_a_test_that_never_commits():
    if not connection.features.can_defer_constraint_checks:
        pytest.skip("this database checks constraints at once")

    @handler("x", name="h", retry={"max_retries": 0})
    def refer_to_a_missing_row(event):
        Order.objects.create(customer_id=99)

    publish("x", {})
    with pytest.raises(IntegrityError):
        drain()
    (letter,) = dead_letters.list()
    assert letter.dead_handler == "h"
    assert not Order.objects.exists()


def test_isolated_handlers_refuses_to_keep_an_unknown_handler():
    handler("x", name="shop.count_sale")(lambda event: None)
    with (
        pytest.raises(EventBusError, match=r"no handler 'shop.count_sael'.*'shop.count_sale'"),
        isolated_handlers("shop.count_sael"),
    ):
        pass
