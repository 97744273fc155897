"""What happens after an order: each handler succeeds, is retried, or gives up, on its own."""

from django.core.mail import EmailMessage
from django.db import transaction
from django.db.models import F
from django_eventbus import Discard, handler, publish

from shop import payments
from shop.events import OrderPaid
from shop.models import Order, OrderStatus, Product, Shipment


@handler("order.placed", priority=10)
def reserve_stock(event):
    """Runs once, even if ``charge_card`` needs many attempts at the same event."""
    order = Order.objects.get(pk=event.payload["order_id"])
    Product.objects.filter(pk=order.product_id).update(stock=F("stock") - order.quantity)


@handler("order.placed", atomic=False)
def charge_card(event):
    """Any exception means: again later. ``Discard`` means: never, leave it to a human.

    Not atomic: no transaction is held open while the payment provider thinks. The price is that
    it may run again after a crash, so both of its effects can be repeated without harm: the
    provider knows the idempotency key, and only the first run finds the order unpaid.
    """
    order = Order.objects.select_related("product").get(pk=event.payload["order_id"])
    try:
        payments.charge(order.card, order.total, idempotency_key=event.idempotency_key)
    except payments.CardDeclinedError as error:
        raise Discard(f"card declined: {error}") from error
    with transaction.atomic():
        unpaid = Order.objects.filter(pk=order.pk, status=OrderStatus.PLACED)
        if unpaid.update(status=OrderStatus.PAID):
            publish(OrderPaid(order_id=order.pk, total=order.total), key=order.key)


@handler(OrderPaid)
def ship(event):
    """The shipment and the record that this ran are one transaction: no crash ships it twice."""
    order_id = event.data.order_id
    Shipment.objects.create(order_id=order_id)
    Order.objects.filter(pk=order_id).update(status=OrderStatus.SHIPPED)


@handler(OrderPaid, atomic=False)
def send_receipt(event):
    paid = event.data
    order = Order.objects.get(pk=paid.order_id)
    EmailMessage(
        subject=f"Receipt for order {order.pk}",
        body=f"We received {paid.total} EUR. Thank you!",
        to=[order.email],
        # Sent again after a crash, it is the same message to the customer's mail program.
        headers={"Message-ID": f"<{event.id}@shop.example>"},
    ).send()
