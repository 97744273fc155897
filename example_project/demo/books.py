"""The check of the books: conditions that must be true when all events have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from django.conf import settings
from django.db.models import Sum
from django_eventbus import dead_letters
from django_eventbus.models import DeadEvent, EventLane, EventLog, QueuedEvent

from outside.models import Charge, Notice
from shop.handlers import CHARGE_RETRY
from shop.models import Card, DailyReport, Order, PriceChange, Product, Restock, Shipment

ALL = 1_000_000
CHARGE = "shop.charge_card"
SHIP = "shop.ship"


class Books:
    """The books of the shop. Create them before the first order, because they read the stock."""

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
            **({"shipped by Celery": len(_shipped_by_celery())} if _uses_celery() else {}),
        }

    def mistakes(self) -> list[str]:
        """Return the errors as sentences; an empty list if the books balance."""
        self._orders = {order.key: order for order in Order.objects.all()}
        self._dead = {str(each.key): each for each in dead_letters.list(limit=ALL)}
        return [
            *([] if self._orders else ["there are no orders"]),
            *self._wrong_shipments(),
            *self._wrong_charges(),
            *self._wrong_dead_letters(),
            *self._wrong_notices(),
            *self._wrong_stock(),
            *self._left_over(),
        ]

    def _wrong_shipments(self) -> Iterator[str]:
        """Yield orders that were not shipped exactly once, or that were shipped as dead letters."""
        shipped = Counter(Shipment.objects.values_list("order_id", flat=True))
        for key, order in self._orders.items():
            owed = 0 if key in self._dead else 1
            if shipped[order.pk] != owed:
                yield f"{key} has {shipped[order.pk]} shipments, not {owed}"

        if _uses_celery() and len(_shipped_by_celery()) != shipped.total():
            yield f"Celery shipped {len(_shipped_by_celery())} orders, not {shipped.total()}"

    def _wrong_charges(self) -> Iterator[str]:
        """Yield orders that were not charged once with the total. Dead letters may be uncharged."""
        charged: dict[str, list[Charge]] = {}
        for charge in Charge.objects.all():
            charged.setdefault(charge.reference, []).append(charge)
        for key, order in self._orders.items():
            amounts = [charge.amount for charge in charged.get(key, [])]
            if amounts != [order.total] and not (key in self._dead and len(amounts) < 2):
                charges = ", ".join(map(str, amounts)) or "nothing"
                yield f"{key} costs {order.total}, its card was charged {charges}"

    def _wrong_dead_letters(self) -> Iterator[str]:
        """Yield dead letters that are no failed charge, or that lack errors of their attempts."""
        for key, order in self._orders.items():
            if order.card == Card.EMPTY and key not in self._dead:
                yield f"the card of {key} is empty, but there is no dead letter"
        for key, dead in self._dead.items():
            if key not in self._orders or dead.dead_handler != CHARGE:
                yield f"{key} is a dead letter of {dead.dead_handler}: {dead.errors}"
            elif not _is_declined(dead) and len(_errors(dead)) != CHARGE_RETRY.max_retries + 1:
                yield f"{key} is a dead letter without the errors of all attempts: {dead.errors}"

    def _wrong_notices(self) -> Iterator[str]:
        """Yield orders whose events did not reach the partner completely and in order."""
        received: dict[int, list[str]] = {}
        for notice in Notice.objects.order_by("pk"):
            received.setdefault(notice.order_id, []).append(notice.event_type)
        for key, order in self._orders.items():
            owed = ["order.placed"] if key in self._dead else ["order.placed", "order.paid"]
            if received.get(order.pk) != owed:
                yield f"the partner received {received.get(order.pk)} for {key}, not {owed}"

    def _wrong_stock(self) -> Iterator[str]:
        """Yield products whose stock does not match their orders and supplies."""
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


def _uses_celery() -> bool:
    return settings.SHIPPING_EXECUTOR == "celery"


def _shipped_by_celery() -> list[str]:
    """Return the names of the Celery processes that shipped an order, one for each order."""
    logged = EventLog.objects.filter(type="order.paid", deliveries__isnull=False)
    runs = (states.get(SHIP, {}) for states in logged.values_list("deliveries", flat=True))
    return [run["by"] for run in runs if run.get("by", "").startswith("celery ")]


def _errors(dead: DeadEvent) -> list[str]:
    return [each["message"] for each in dead.errors or [] if each["handler"] == CHARGE]


def _is_declined(dead: DeadEvent) -> bool:
    return any(message.startswith("card declined") for message in _errors(dead)[-1:])
