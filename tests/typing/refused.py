"""User code that mypy --strict and pyright refuse, in exactly the lines marked ``# refused``.

Checked, never run: see __main__.py.
"""

from decimal import Decimal

import django_eventbus
from django_eventbus import (
    CeleryExecutor,
    Envelope,
    Event,
    RetryPolicy,
    apublish,
    dead_letters,
    handler,
    once_per,
    publish,
    subscribe,
)


class OrderPaid(Event, type="order.paid"):
    order_id: int


class OrderSent(Event, type="order.sent"):
    order_id: int


@handler(OrderPaid)  # refused
def wrong_event(event: Envelope[OrderSent]) -> None: ...


@handler(OrderPaid, OrderSent)  # refused
def one_of_two(event: Envelope[OrderPaid]) -> None: ...


@handler(OrderPaid)
def wrong_field(event: Envelope[OrderPaid]) -> None:
    print(event.data.total)  # refused
    print(event.atempt)  # refused
    event.data.order_id = 8  # refused


@handler("order.*")  # refused
def no_event() -> None: ...


@handler("order.*")  # refused
def two_arguments(event: Envelope, other: int) -> None: ...


@handler()  # refused
def nothing(event: Envelope) -> None: ...


@once_per("payload.order_id")  # refused
def once_per_nothing() -> None: ...


def options_of_handlers() -> None:
    handler("order.*", timout=3)  # refused
    handler("order.*", retry=3)  # refused
    handler(OrderPaid, priority="high")  # refused
    handler(7)  # refused
    handler("order.*", executor=7)  # refused
    CeleryExecutor(queues="mail")  # refused
    CeleryExecutor(batch="20")  # refused
    subscribe("order.*", print, atomc=False)  # refused
    subscribe(OrderPaid, wrong_event_to_subscribe)  # refused
    RetryPolicy(max_retry=3)  # refused


def wrong_event_to_subscribe(event: Envelope[OrderSent]) -> None: ...


def publishing() -> None:
    OrderPaid(order_id="7")  # refused
    OrderPaid(7)  # refused
    OrderPaid()  # refused
    publish("order.paid", kye="order:7")  # refused
    publish("order.paid", on_duplicate="ignore")  # refused
    publish(Decimal(7))  # refused
    django_eventbus.publsh("order.paid")  # refused


async def publishing_asynchronously() -> None:
    await apublish("order.paid", kye="order:7")  # refused
    await apublish("order.paid", priority="high")  # refused


def operating() -> None:
    dead_letters.list(typ="order.*")  # refused
    dead_letters.retry(handlr="shop.book")  # refused
    dead_letters.purge(older="3d")  # refused
