"""Do the books balance? What must be true of the shop when all events have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from django.db.models import Sum
from django_eventbus import dead_letters
from django_eventbus.models import DeadEvent, EventLane, EventLog, QueuedEvent

from outside.models import Charge, Notice
from shop.handlers import CHARGE_RETRY
from shop.models import Card, DailyReport, Order, PriceChange, Product, Restock, Shipment

ALL = 1_000_000
CHARGE = "shop.charge_card"


class Books:
    """Opened before the first order, so that what was sold can be told from what was there."""

    def __init__(self) -> None:
        self._stock = dict(Product.objects.values_list("pk", "stock"))

    def figures(self) -> dict[str, int]:
        dead = dead_letters.list(limit=ALL)
        declined = sum(_is_declined(each) for each in dead)
        logged = EventLog.objects.filter(errors__isnull=False).values_list("errors", flat=True)
        return {
            "orders": Order.objects.count(),
            "paid and shipped": Shipment.objects.count(),
            "card declined": declined,
            "charge given up": len(dead) - declined,
            "events handled": EventLog.objects.count(),
            "failed attempts": sum(len(errors) for errors in logged),
            "still queued": QueuedEvent.objects.count(),
        }

    def mistakes(self) -> list[str]:
        """What is wrong, in sentences; empty if the books balance."""
        self._orders = {order.key: order for order in Order.objects.all()}
        self._dead = {str(each.key): each for each in dead_letters.list(limit=ALL)}
        return [
            *([] if self._orders else ["nobody ordered anything"]),
            *self._wrong_shipments(),
            *self._wrong_charges(),
            *self._wrong_dead_letters(),
            *self._wrong_notices(),
            *self._wrong_stock(),
            *self._left_over(),
        ]

    def _wrong_shipments(self) -> Iterator[str]:
        """An order is shipped once, or it is a dead letter."""
        shipped = Counter(Shipment.objects.values_list("order_id", flat=True))
        for key, order in self._orders.items():
            owed = 0 if key in self._dead else 1
            if shipped[order.pk] != owed:
                yield f"{key} has {shipped[order.pk]} shipments, not {owed}"

    def _wrong_charges(self) -> Iterator[str]:
        """No card is charged twice, and nothing is shipped that was not paid for."""
        charged: dict[str, list[Charge]] = {}
        for charge in Charge.objects.all():
            charged.setdefault(charge.reference, []).append(charge)
        for key, order in self._orders.items():
            amounts = [charge.amount for charge in charged.get(key, [])]
            if amounts != [order.total] and not (key in self._dead and len(amounts) < 2):
                charges = ", ".join(map(str, amounts)) or "nothing"
                yield f"{key} costs {order.total}, its card was charged {charges}"

    def _wrong_dead_letters(self) -> Iterator[str]:
        """They are the charges that failed, each with all its errors."""
        for key, order in self._orders.items():
            if order.card == Card.EMPTY and key not in self._dead:
                yield f"the card of {key} is empty, but there is no dead letter"
        for key, dead in self._dead.items():
            if key not in self._orders or dead.dead_handler != CHARGE:
                yield f"{key} is a dead letter of {dead.dead_handler}: {dead.errors}"
            elif not _is_declined(dead) and len(_errors(dead)) != CHARGE_RETRY.max_retries + 1:
                yield f"{key} was given up, but its errors are {dead.errors}"

    def _wrong_notices(self) -> Iterator[str]:
        """The partner heard of each order, and in order."""
        heard: dict[int, list[str]] = {}
        for notice in Notice.objects.order_by("pk"):
            heard.setdefault(notice.order_id, []).append(notice.event_type)
        for key, order in self._orders.items():
            told = ["order.placed"] if key in self._dead else ["order.placed", "order.paid"]
            if heard.get(order.pk) != told:
                yield f"the partner heard {heard.get(order.pk)} of {key}, not {told}"

    def _wrong_stock(self) -> Iterator[str]:
        """Each order took its share, each supply arrived, exactly once, whatever died between."""
        sold = dict(Order.objects.values_list("product").annotate(Sum("quantity")))
        arrived = dict(Restock.objects.values_list("product").annotate(Sum("quantity")))
        for product in Product.objects.all():
            expected = (
                self._stock[product.pk] - sold.get(product.pk, 0) + arrived.get(product.pk, 0)
            )
            if product.stock != expected:
                yield f"{product}: {product.stock} in stock, not {expected}"

    def _left_over(self) -> Iterator[str]:
        for event in QueuedEvent.objects.all():
            yield f"{event} is still queued"
        for lane in EventLane.objects.all():
            yield f"the lane {lane} is still there"
        for what, model in {"price change": PriceChange, "nightly report": DailyReport}.items():
            if model.objects.count() != 1:
                yield f"there are {model.objects.count()} {what}s, not 1"


def _errors(dead: DeadEvent) -> list[str]:
    return [each["message"] for each in dead.errors or [] if each["handler"] == CHARGE]


def _is_declined(dead: DeadEvent) -> bool:
    return any(message.startswith("card declined") for message in _errors(dead)[-1:])
