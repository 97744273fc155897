"""M30: a circuit breaker opens, holds events without using attempts, probes, and closes."""

import pytest

from django_eventbus import (
    CircuitBreaker,
    Discard,
    EventBusError,
    breakers,
    handler,
    pauses,
    publish,
    publish_many,
)
from django_eventbus.models import EventLog, FlowControl, QueuedEvent
from django_eventbus.signals import breaker_closed, breaker_opened
from tests.bus import drain, make_due
from tests.shop.models import Effect

pytestmark = pytest.mark.django_db

#: Long enough for a busy machine: only ``probe_is_due()`` and ``make_due()`` make time pass.
BREAKER = CircuitBreaker(failure_rate=0.5, window=3600, min_calls=4, open_for=3600)
RETRY = {"base_delay": 3600, "max_delay": 3600, "jitter": 0}


class Service:
    """An external service that a handler calls and that may be down."""

    def __init__(self):
        self.is_down = True
        self.called = []

    def __call__(self, event):
        self.called.append(event.payload)
        if self.is_down:
            raise ConnectionError("no route")


@pytest.fixture
def service():
    return Service()


def declare(service, name="pays", subject="x", *, breaker=BREAKER, **options):
    handler(subject, name=name, breaker=breaker, **{"retry": RETRY} | options)(
        lambda event: service(event)
    )


def open_breaker(calls=4):
    publish_many(("x", n) for n in range(calls))
    drain()
    (status,) = breakers.list()
    assert status.state == "open"


def probe_is_due():
    """``open_for`` seconds pass."""
    FlowControl.objects.update(probe_at="2000-01-01T00:00:00Z")


@pytest.mark.parametrize("atomic", [True, False])
def test_m30_an_open_breaker_holds_events_without_using_attempts(service, atomic):
    declare(service, atomic=atomic)
    open_breaker()
    publish_many(("x", n) for n in range(10, 15))
    make_due()
    drain()
    assert service.called == [0, 1, 2, 3]
    assert (
        QueuedEvent.objects.filter(attempts=0, deliveries__isnull=True, errors__isnull=True).count()
        == 5
    )
    failed = QueuedEvent.objects.exclude(deliveries__isnull=True)
    assert [row.deliveries["pays"]["failures"] for row in failed] == [1] * 4
    assert set(failed.values_list("attempts", flat=True)) == {1}


@pytest.mark.parametrize("atomic", [True, False])
def test_m30_one_successful_probe_closes_the_breaker_and_releases_all_events(service, atomic):
    declare(service, atomic=atomic)
    open_breaker()
    publish_many(("x", n) for n in range(10, 15))
    make_due()
    drain()
    service.is_down = False
    probe_is_due()
    drain()
    drain()
    assert sorted(service.called) == [0, 0, 1, 1, 2, 2, 3, 3, 10, 11, 12, 13, 14]
    assert EventLog.objects.filter(status="COMPLETED").count() == 9
    assert breakers.list()[0].state == "closed"


def test_m30_one_failed_probe_opens_the_breaker_again(service):
    declare(service)
    open_breaker()
    publish_many(("x", n) for n in range(10, 15))
    make_due()
    drain()
    probe_is_due()
    drain()
    drain()
    assert len(service.called) == 5, "exactly one probe"
    (status,) = breakers.list()
    assert (status.state, status.opened_at is not None) == ("open", True)


def test_an_event_with_a_key_can_be_a_probe(service):
    declare(service)
    open_breaker()
    for n in range(10, 13):
        publish("x", n, key="k")
    drain()
    assert len(service.called) == 4
    service.is_down = False
    QueuedEvent.objects.filter(key=None).delete()
    probe_is_due()
    drain()
    drain()
    assert service.called[4:] == [10, 11, 12]


def test_two_open_breakers_of_one_event_each_get_a_probe(service):
    declare(service, "one")
    declare(service, "two")
    publish_many(("x", n) for n in range(4))
    drain()
    make_due()
    drain()
    assert [each.state for each in breakers.list()] == ["open", "open"]
    drain()
    service.is_down = False
    probe_is_due()
    drain()
    drain()
    assert EventLog.objects.filter(status="COMPLETED").count() == 4


def test_other_handlers_of_the_event_are_not_held(service):
    declare(service)
    handler("x", name="writes")(
        lambda event: Effect.objects.create(event_id=event.id, handler=event.handler_name)
    )
    open_breaker()
    publish("x", 10)
    drain()
    assert Effect.objects.count() == 5
    assert list(QueuedEvent.objects.get(payload=10).deliveries) == ["writes"]


def test_successes_keep_a_breaker_closed(service):
    service.is_down = False
    declare(service)
    publish_many(("x", n) for n in range(20))
    drain()
    service.is_down = True
    publish_many(("x", n) for n in range(4))
    drain()
    (status,) = breakers.list()
    assert (status.state, status.calls, status.failures) == ("closed", 24, 4)


def test_a_discarded_event_is_not_counted_by_the_breaker():
    @handler("x", name="pays", breaker=BREAKER)
    def refuse(event):
        raise Discard("card declined")

    publish_many(("x", n) for n in range(10))
    drain()
    assert breakers.list()[0].state == "closed"


def test_a_breaker_that_is_no_longer_declared_holds_no_events(service):
    declare(service)
    open_breaker()
    publish("x", 10)
    drain()
    handler_of_next_deploy = Service()
    handler_of_next_deploy.is_down = False
    from django_eventbus.registry import registry, unsubscribe

    unsubscribe(registry.get("pays"))
    declare(handler_of_next_deploy, breaker=None)
    drain()
    assert handler_of_next_deploy.called == [10]


def test_a_setting_adds_a_breaker_to_every_handler(settings, service):
    settings.EVENTBUS = {"BREAKER": {"min_calls": 4}}
    declare(service, breaker=None)
    open_breaker()


def test_an_operator_can_reset_a_breaker(service):
    declare(service)
    open_breaker()
    publish("x", 10)
    drain()
    service.is_down = False
    assert breakers.reset("pays")
    assert not breakers.reset("pays")
    drain()
    assert service.called[4:] == [10]


def test_a_paused_handler_with_an_open_breaker_gets_no_probe(service):
    declare(service)
    open_breaker()
    publish("x", 10)
    pauses.pause(handler="pays")
    probe_is_due()
    drain()
    assert len(service.called) == 4
    assert breakers.list()[0].state == "open"
    pauses.resume(handler="pays")
    service.is_down = False
    drain()
    assert service.called[4:] == [10]


def test_a_handler_that_is_unknown_or_has_no_breaker_cannot_be_reset(service):
    declare(service)
    handler("x", name="plain")(lambda event: None)
    for name in ("payz", "plain"):
        with pytest.raises(EventBusError, match="with a circuit breaker; "):
            breakers.reset(name)


def test_opening_and_closing_send_signals_and_are_logged(
    service, capture, django_capture_on_commit_callbacks
):
    sent = []

    def opened(sender, **facts):
        sent.append(("opened", facts["handler"], facts["calls"], facts["failures"]))

    def closed(sender, **facts):
        sent.append(("closed", facts["handler"], facts["by"]))

    breaker_opened.connect(opened)
    breaker_closed.connect(closed)
    declare(service)
    open_breaker()
    with django_capture_on_commit_callbacks(execute=True):
        breakers.reset("pays", by="ann")
    publish_many(("x", n) for n in range(4))
    drain()
    service.is_down = False
    probe_is_due()
    make_due()
    drain()
    assert sent == [
        ("opened", "pays", 4, 4),
        ("closed", "pays", "ann"),
        ("opened", "pays", 4, 4),
        ("closed", "pays", ""),
    ]
    assert "the circuit breaker of pays is open: 4 of 4 calls failed" in capture.text
    assert "the circuit breaker of pays is closed: reset by ann" in capture.text
    assert "the circuit breaker of pays is closed: its probe succeeded" in capture.text


def test_an_unused_breaker_is_listed(service):
    declare(service)
    (status,) = breakers.list()
    assert (status.handler, status.state, status.calls) == ("pays", "closed", 0)
