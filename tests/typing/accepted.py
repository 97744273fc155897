# pyright: strict
"""User code that mypy --strict and pyright accept. Checked, never run: see __main__.py."""

import uuid
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, assert_type

from django.dispatch import Signal

import django_eventbus
from django_eventbus import (
    CeleryExecutor,
    CircuitBreaker,
    Discard,
    Envelope,
    Event,
    Retry,
    RetryPolicy,
    TaskExecutor,
    apublish,
    bridge_signal,
    dead_letters,
    finalize,
    handler,
    once_per,
    poll,
    publish,
    publish_many,
    schedule,
    subscribe,
    unsubscribe,
)
from django_eventbus.models import DeadEvent, QueuedEvent
from django_eventbus.testing import assert_published, drain


class OrderEvent(Event):
    order_id: int


class OrderPaid(OrderEvent, type="order.paid"):
    total: Decimal


class OrderSent(OrderEvent, type="order.sent", version=2):
    courier: str = ""


@handler(OrderPaid, name="shop.book", priority=3, retry=RetryPolicy(max_retries=5), timeout=10)
def book(event: Envelope[OrderPaid]) -> None:
    assert_type(event.data, OrderPaid)
    assert_type(event.data.total, Decimal)
    assert_type(event.id, uuid.UUID)
    assert_type(event.created_at, datetime)


@handler(OrderPaid, OrderSent, atomic=False, breaker=CircuitBreaker(), max_running=2, rate="9/s")
def tell_customer(event: Envelope[OrderPaid | OrderSent]) -> None:
    assert_type(event.data, OrderPaid | OrderSent)
    assert_type(event.data.order_id, int)


@handler(OrderEvent)
def count(event: Envelope[OrderEvent]) -> int:
    return event.data.order_id


@handler(OrderPaid)
def count_any(event: Envelope[OrderEvent]) -> None:
    """A handler of the base class can take any of its subclasses."""


@handler("order.*", retry={"max_retries": 1}, breaker=False)
def log(event: Envelope) -> None:
    assert_type(event.payload, Any)
    assert_type(event.data, Any)


@handler(OrderPaid, "order.*", OrderSent)
def log_all(event: Envelope[Any]) -> None:
    log(event)


@handler(OrderPaid)
@once_per("payload.order_id", keep=timedelta(days=1))
def pay_out(event: Envelope[OrderPaid]) -> None:
    if event.attempt > 3:
        raise Discard("too late")
    raise Retry("not yet", delay=5)


@handler(OrderPaid, executor=CeleryExecutor(queue="mail", priority=3, batch=20))
def send_receipt(event: Envelope[OrderPaid]) -> None: ...


@handler("order.*", executor="celery")
def draw_invoice(event: Envelope) -> None: ...


@handler(OrderPaid)
async def call(event: Envelope[OrderPaid]) -> None:
    assert_type(await apublish("call.made", {"order_id": event.data.order_id}), QueuedEvent | None)


def subscribe_all() -> None:
    subscription = subscribe(OrderPaid, book, name="again", priority=1)
    subscribe("order.paid", log, timeout=2.5)
    subscribe((OrderPaid, "order.*"), log_all, atomic=False)
    subscribe(OrderPaid, book, name="task", executor=TaskExecutor(queue_name="mail"))
    unsubscribe(subscription)
    unsubscribe(subscription.id)


def publish_all() -> None:
    paid = OrderPaid(order_id=7, total=Decimal(9))
    assert_type(publish(paid, key="order:7"), QueuedEvent | None)
    publish("order.paid", {"order_id": 7}, delay=timedelta(seconds=3), headers={"a": 1})
    publish("order.paid", dedup_key="7", dedup_for=timedelta(hours=1), on_duplicate="raise")
    assert_type(publish_many([paid, ("order.paid", None)], key=lambda item: "k"), int)
    schedule("report.daily", cron="0 6 * * *", tz="Europe/Berlin", misfire="skip")


def work() -> None:
    event = poll("mail")
    if event is not None:
        finalize(event, [ValueError("no")], failed=True)


def serialize(*, number: int, **kwargs: Any) -> dict[str, Any]:
    return {"y": number}


def operate() -> None:
    assert_type(dead_letters.list(10, type="order.*", handler="shop.book"), list[DeadEvent])
    dead_letters.retry(type="order.paid", per_minute=60, older_than=timedelta(days=1))
    dead_letters.purge(timedelta(days=30), queue="mail")
    bridge_signal(Signal(), "x", serialize=serialize, key="x:{y}").disconnect()
    assert_type(django_eventbus.__version__, str)


def test_it() -> None:
    drain(until=timedelta(hours=1))
    assert_published(OrderPaid, order_id=7)
