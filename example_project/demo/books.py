"""Do the books balance? What must be true of the shop when all events have ended."""

from __future__ import annotations

from django.db.models import Sum
from django_eventbus import dead_letters
from django_eventbus.models import EventLog, QueuedEvent

from shop.models import Card, Order, OrderStatus, Product, Shipment


class Books:
    """Opened before the first order, so that what was sold can be told from what was there."""

    def __init__(self) -> None:
        self._stock = dict(Product.objects.values_list("pk", "stock"))

    def figures(self) -> dict[str, int]:
        return {
            "orders": Order.objects.count(),
            "paid and shipped": Order.objects.filter(status=OrderStatus.SHIPPED).count(),
            "declined": Order.objects.filter(card=Card.EMPTY).count(),
            "events handled": EventLog.objects.count(),
            "failed attempts": sum(
                len(errors)
                for errors in EventLog.objects.values_list("errors", flat=True)
                if errors
            ),
            "dead letters": len(_dead()),
            "still queued": QueuedEvent.objects.count(),
        }

    def mistakes(self) -> list[str]:
        """What is wrong, in sentences; empty if the books balance."""
        return [
            *([] if Order.objects.exists() else ["nobody ordered anything"]),
            *self._wrong_shipments(),
            *self._wrong_dead_letters(),
            *self._wrong_stock(),
            *(f"{event} is still queued" for event in QueuedEvent.objects.all()),
        ]

    def _wrong_shipments(self) -> list[str]:
        paid = set(Order.objects.filter(card=Card.GOOD).values_list("pk", flat=True))
        shipped = list(Shipment.objects.values_list("order_id", flat=True))
        return [
            *(f"order {pk} was not shipped" for pk in sorted(paid - set(shipped))),
            *(f"order {pk} was shipped unpaid" for pk in sorted(set(shipped) - paid)),
            *(
                f"order {pk} was shipped twice"
                for pk in sorted(set(shipped))
                if shipped.count(pk) > 1
            ),
        ]

    def _wrong_dead_letters(self) -> list[str]:
        dead = {each.key: each for each in _dead()}
        declined = {order.key for order in Order.objects.filter(card=Card.EMPTY)}
        return [
            *(f"{key} was declined but is no dead letter" for key in declined - dead.keys()),
            *(f"{key} is a dead letter: {dead[key].errors}" for key in dead.keys() - declined),
            *(
                f"the dead letter of {key} does not say why: {each.errors}"
                for key, each in dead.items()
                if "card declined" not in str(each.errors)
            ),
        ]

    def _wrong_stock(self) -> list[str]:
        """Stock went down by each order exactly once, whatever died in between."""
        sold = dict(Order.objects.values_list("product").annotate(Sum("quantity")))
        return [
            f"{product}: {sold.get(product.pk, 0)} ordered, but stock fell by {fell}"
            for product in Product.objects.all()
            if (fell := self._stock[product.pk] - product.stock) != sold.get(product.pk, 0)
        ]


def _dead() -> list[EventLog]:
    return list(dead_letters.list(limit=1_000_000))
