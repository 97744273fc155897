"""once_per: an effect happens once per key, also for replayed, retried and duplicate events."""

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction

from django_eventbus import (
    Event,
    EventBusError,
    InvalidPayloadError,
    dead_letters,
    handler,
    once_per,
    publish,
)
from django_eventbus.models import EventLog, IdempotencyKey, QueuedEvent
from django_eventbus.registry import registry
from tests.bus import drain, drain_with_retries, logged
from tests.shop.models import Effect

pytestmark = pytest.mark.django_db

with_real_transactions = pytest.mark.django_db(transaction=True)

PAYMENT = {"payment_id": 7}


class Paid(Event, type="test-inbox.paid"):
    payment_id: uuid.UUID


def book_each(key="payload.payment_id", *, fails=0, once=None, **options):
    """Register a handler that writes an effect after ``fails`` failures; return its calls."""
    calls = []

    def book(event):
        calls.append(event.id)
        Effect.objects.create(event_id=event.id, handler="book")
        if len(calls) <= fails:
            raise ValueError("not yet")

    handler("*", name="book", **options)(once_per(key, **(once or {}))(book))
    return calls


def replay(event):
    """Publish a copy of a logged event."""
    old = logged(event)
    return publish(old.type, old.payload, headers={"replay": True})


@pytest.mark.parametrize("atomic", [True, False])
def test_two_events_with_one_key_have_one_effect(atomic):
    calls = book_each(atomic=atomic)
    publish("payment", PAYMENT)
    publish("payment", PAYMENT)
    publish("payment", {"payment_id": 8})
    drain()
    assert len(calls) == 2
    assert Effect.objects.count() == 2
    assert set(EventLog.objects.values_list("status", flat=True)) == {"COMPLETED"}


@pytest.mark.parametrize("atomic", [True, False])
def test_a_replay_has_no_second_effect(atomic):
    book_each(atomic=atomic)
    event = publish("payment", PAYMENT)
    drain()
    replay(event)
    drain()
    assert Effect.objects.count() == 1


@pytest.mark.parametrize("atomic", [True, False])
def test_an_event_that_failed_after_its_effect_is_retried_without_a_second_effect(atomic):
    """The effect exists and another handler is dead; all handlers run again."""
    book_each(atomic=atomic)
    handler("*", name="dies", retry={"max_retries": 0})(lambda event: 1 / 0)
    event = publish("payment", PAYMENT)
    drain()
    EventLog.objects.update(deliveries=None)
    assert dead_letters.retry(event.event_id) == 1
    drain()
    assert Effect.objects.count() == 1


@with_real_transactions
@pytest.mark.parametrize("atomic", [True, False])
def test_a_failed_handler_is_retried_in_spite_of_its_key(atomic):
    calls = book_each(fails=2, atomic=atomic)
    publish("payment", PAYMENT)
    drain_with_retries()
    assert len(calls) == 3
    # The writes of a plain handler are not rolled back.
    assert Effect.objects.count() == (1 if atomic else 3)
    assert IdempotencyKey.objects.count() == 1


def test_the_effect_and_its_key_are_in_one_transaction():
    book_each(fails=99, retry={"max_retries": 0})
    publish("payment", PAYMENT)
    drain()
    assert not Effect.objects.exists()
    assert not IdempotencyKey.objects.exists()


def test_handlers_of_one_event_have_their_own_keys():
    seen = []

    @once_per("payload.payment_id")
    def see(event):
        seen.append(event.handler_name)

    handler("payment", name="one")(see)
    handler("payment", name="other")(see)
    publish("payment", PAYMENT)
    publish("payment", PAYMENT)
    drain()
    assert seen == ["one", "other"]


def test_a_key_stores_the_event_that_created_it():
    book_each()
    event = publish("payment", PAYMENT)
    drain()
    mark = IdempotencyKey.objects.get()
    assert (mark.scope, mark.key, mark.event_id) == ("book", "7", event.event_id)
    assert mark.expires_at is None
    assert str(mark) == "book: 7"


def test_a_key_may_expire():
    calls = book_each(once={"keep": timedelta(days=30)})
    publish("payment", PAYMENT)
    publish("payment", PAYMENT)
    drain()
    assert len(calls) == 1
    IdempotencyKey.objects.update(expires_at=datetime(2020, 1, 1, tzinfo=UTC))
    publish("payment", PAYMENT)
    drain()
    assert len(calls) == 2


@with_real_transactions
def test_an_async_handler_is_called_once_per_key():
    calls = []

    @handler("payment", name="notify")
    @once_per("payload.payment_id")
    async def notify(event):
        calls.append(event.payload)
        if len(calls) == 1:
            raise ValueError("not yet")

    publish("payment", PAYMENT)
    drain_with_retries()
    publish("payment", PAYMENT)
    drain()
    assert len(calls) == 2
    assert registry.get("notify").is_async


def test_the_keys_of_an_atomic_event_are_rolled_back_together(settings):
    settings.EVENTBUS = {"ATOMIC": "event"}
    calls = book_each()
    handler("payment", name="dies", priority=-1, retry={"max_retries": 0})(lambda event: 1 / 0)
    publish("payment", PAYMENT)
    drain()
    assert len(calls) == 1
    assert not IdempotencyKey.objects.exists()


# -- keys


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("key", "order:7"),
        ("type", "payment"),
        ("payload.payment_id", "7"),
        ("payload.lines.1.sku", "B"),
        ("headers.request", "r1"),
        (lambda event: f"{event.type}/{event.payload['payment_id']}", "payment/7"),
        (lambda event: uuid.UUID(int=7), str(uuid.UUID(int=7))),
    ],
)
def test_a_key_is_a_path_into_the_event_or_a_function_of_it(key, found):
    book_each(key)
    payload = {**PAYMENT, "lines": [{"sku": "A"}, {"sku": "B"}]}
    publish("payment", payload, key="order:7", headers={"request": "r1"})
    drain()
    assert IdempotencyKey.objects.get().key == found


def test_a_key_may_be_a_field_of_a_typed_event():
    book_each("data.payment_id")
    publish(Paid(payment_id=uuid.UUID(int=7)))
    drain()
    assert IdempotencyKey.objects.get().key == str(uuid.UUID(int=7))


@pytest.mark.parametrize(
    ("key", "payload", "message"),
    [
        ("payload.payment_id", {}, "found no key with 'payload.payment_id': KeyError"),
        ("payload.payment_id", None, "found no key with"),
        ("payload.payment_id", [1], "found no key with"),
        ("payload.0", [], "found no key with"),
        ("payload.payment_id", {"payment_id": None}, "needs a string, an integer or a UUID"),
        ("payload.payment_id", {"payment_id": True}, "but 'payload.payment_id' returned True"),
        ("payload.payment_id", {"payment_id": 1.5}, "returned 1.5"),
        ("payload.payment_id", {"payment_id": ""}, "must be a non-empty string"),
        ("payload.payment_id", {"payment_id": "k" * 201}, "201 characters, 200 are allowed"),
        (lambda event: event.payload["id"], {}, "no key with the key function: KeyError('id')"),
    ],
)
def test_an_event_without_a_valid_key_fails_with_a_reason(key, payload, message):
    calls = book_each(key, retry={"max_retries": 0})
    event = publish("payment", payload)
    drain()
    assert calls == []
    assert message in logged(event).errors[0]["message"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("paylaod.id", "an event has no 'paylaod'; did you mean 'payload'?"),
        ("", "must be a non-empty string"),
        (7, "must be a non-empty string"),
        (None, "must be a non-empty string"),
    ],
)
def test_an_impossible_key_is_refused_when_it_is_declared(key, message):
    with pytest.raises((EventBusError, InvalidPayloadError), match=message.replace("?", r"\?")):
        once_per(key)


@pytest.mark.parametrize("keep", [30, timedelta(0), timedelta(days=-1), "1d"])
def test_a_key_can_expire_after_a_timedelta(keep):
    with pytest.raises(EventBusError, match="a timedelta of more than 0"):
        once_per("id", keep=keep)


def test_decorators_in_the_wrong_order_are_refused():
    """Otherwise the handler would be called without its idempotency key."""

    @handler("payment", name="book")
    def book(event): ...

    with pytest.raises(EventBusError, match="put @once_per below @handler"):
        once_per("id")(book)


def test_the_name_of_a_handler_is_that_of_its_function():
    @handler("payment")
    @once_per("id")
    def book(event): ...

    assert any(name.endswith("book") for name in registry._handlers)


def test_an_effect_is_rolled_back_with_the_transaction_of_the_caller():
    book_each()
    with transaction.atomic():
        publish("payment", PAYMENT)
        drain()
        transaction.set_rollback(True)
    assert not IdempotencyKey.objects.exists()
    assert not QueuedEvent.objects.exists()
