"""The life of an event, from publish() to the log. Start reading here.

A shop places an order. Three handlers run: one reserves stock, one charges the card and fails at
first, one ships after the charge.
"""

import pytest
from django.db import transaction

from django_eventbus import Event, dead_letters, handler, publish
from django_eventbus.models import EventLog, QueuedEvent
from tests.bus import drain, logged, make_due
from tests.shop.models import Effect

pytestmark = pytest.mark.django_db


class OrderPaid(Event, type="order.paid"):
    order_id: int


@pytest.fixture
def card():
    return {"answers": []}


@pytest.fixture
def shop(card):
    @handler("order.placed", name="stock")
    def reserve_stock(event):
        Effect.objects.create(event_id=event.id, handler="stock")

    @handler("order.placed", name="card")
    def charge_card(event):
        publish(OrderPaid(order_id=event.payload["order_id"]), key=event.key)
        Effect.objects.create(event_id=event.id, handler="card")
        if answer := card["answers"] and card["answers"].pop(0):
            raise ConnectionError(answer)

    @handler(OrderPaid, name="shipping")
    def ship(event):
        Effect.objects.create(
            event_id=event.caused_by, handler="shipping", note=event.data.order_id
        )


def effects():
    return sorted(Effect.objects.values_list("handler", flat=True))


def place_order(order_id=7):
    with transaction.atomic():
        return publish("order.placed", {"order_id": order_id}, key=f"order:{order_id}")


def test_an_event_succeeds(shop):
    order = place_order()
    assert QueuedEvent.objects.get().status == "PENDING"

    drain()

    assert effects() == ["card", "shipping", "stock"]
    assert not QueuedEvent.objects.exists()
    assert list(EventLog.objects.order_by("id").values_list("type", "status", "attempts")) == [
        ("order.placed", "COMPLETED", 1),
        ("order.paid", "COMPLETED", 1),
    ]
    assert EventLog.objects.get(type="order.paid").caused_by == order.event_id


def test_an_event_fails_once_and_only_the_failed_handler_is_retried(shop, card):
    card["answers"] = ["timeout"]
    order = place_order()

    drain()

    # The charge is rolled back with the event it published; the stock stays reserved.
    assert effects() == ["stock"]
    waiting = QueuedEvent.objects.get()
    assert waiting.deliveries["stock"]["state"] == "done"
    assert waiting.deliveries["card"]["state"] == "retry"
    assert waiting.errors[0]["message"] == "timeout"

    make_due()
    drain()

    assert effects() == ["card", "shipping", "stock"]
    assert logged(order).status == "COMPLETED"
    assert [error["message"] for error in logged(order).errors] == ["timeout"]


def test_an_event_dies_and_is_retried_by_an_operator(shop, card):
    card["answers"] = ["timeout 1", "timeout 2", "timeout 3", "timeout 4"]
    order = place_order()
    for _ in range(4):
        drain()
        make_due()

    (dead,) = dead_letters.list()
    assert dead.event_id == order.event_id
    assert (dead.status, dead.dead_handler) == ("COMPLETED_WITH_ERRORS", "card")
    assert [error["message"] for error in dead.errors] == [
        "timeout 1",
        "timeout 2",
        "timeout 3",
        "timeout 4",
    ]
    assert effects() == ["stock"]

    assert dead_letters.retry(dead) == 1
    drain()

    # The stock was not reserved a second time.
    assert effects() == ["card", "shipping", "stock"]
    assert logged(order).status == "COMPLETED"
    assert dead_letters.list() == []
