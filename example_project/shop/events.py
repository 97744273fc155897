"""Typed events: a type name, and fields that come back as what they were."""

from decimal import Decimal

from django_eventbus import Event


class OrderPaid(Event, type="order.paid"):
    order_id: int
    total: Decimal
