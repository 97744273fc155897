"""Typed events: a type name, and fields that keep their Python types."""

from decimal import Decimal

from django_eventbus import Event


class OrderPaid(Event, type="order.paid"):
    order_id: int
    total: Decimal
