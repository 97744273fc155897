"""One line per order, as soon as the last of its events has ended."""

from __future__ import annotations

from collections.abc import Iterator

from django_eventbus.models import EventLog, LogStatus

from demo.books import CHARGE
from shop.models import Order


class Watch:
    """Watch the open orders and the log of ended events."""

    def __init__(self) -> None:
        self._newest = 0
        self._open: dict[str, Order] = {}

    def news(self) -> Iterator[str]:
        for order in Order.objects.select_related("product").filter(pk__gt=self._newest):
            self._open[order.key] = order
            self._newest = max(self._newest, order.pk)
        if not self._open:
            return
        for ended in self._ended():
            order = self._open.pop(str(ended.key))
            yield f"{ended.finished_at:%H:%M:%S}  {_line(order, ended)}"

    def _ended(self) -> list[EventLog]:
        """Return the last events of an order: paid, or a dead letter."""
        since = min(order.placed_at for order in self._open.values())
        log = EventLog.objects.filter(key__in=self._open, finished_at__gte=since)
        paid = log.filter(type="order.paid")
        given_up = log.filter(type="order.placed").exclude(status=LogStatus.COMPLETED)
        return sorted([*paid, *given_up], key=lambda each: each.finished_at)


def _line(order: Order, ended: EventLog) -> str:
    what = f"{order.quantity} x {order.product.name}"
    seconds = (ended.finished_at - order.placed_at).total_seconds()
    return f"order {order.pk:<5} {what:<20} {_story(order, ended):<50} {seconds:6.2f} s"


def _story(order: Order, ended: EventLog) -> str:
    if ended.status != LogStatus.COMPLETED:
        return f"reserved, {_last_error(ended)}: dead letter"
    log = EventLog.objects.filter(finished_at__gte=order.placed_at, key=order.key)
    placed = log.filter(type="order.placed").first()
    failures = sum(each["handler"] == CHARGE for each in placed.errors or ()) if placed else 0
    tries = f" at attempt {failures + 1}" if failures else ""
    return f"reserved, paid{tries}, shipped, receipt sent"


def _last_error(ended: EventLog) -> str:
    return str(ended.errors[-1]["message"]).split(":")[0] if ended.errors else ended.status
