"""The handlers of an order: each succeeds, is retried or gives up independently."""

from datetime import timedelta

from django.conf import settings
from django.core.mail import EmailMessage
from django.db import transaction
from django.db.models import Count, F, Sum
from django.template.loader import render_to_string
from django.utils import timezone
from django_eventbus import CircuitBreaker, Discard, RetryPolicy, handler, publish, schedule

from outside import payments, webhooks
from shop.events import OrderPaid
from shop.models import (
    DailyReport,
    Order,
    OrderStatus,
    PriceChange,
    Product,
    Restock,
    Shipment,
    Step,
)

LOW_STOCK = 20
SUPPLY = 50

# Short delays, so that a visitor of the demo sees all states within a minute.
CHARGE_RETRY = RetryPolicy(max_retries=2, base_delay=0.5)
CHARGE_BREAKER = CircuitBreaker(failure_rate=0.6, window=20, min_calls=8, open_for=5)


@handler("order.placed", name="shop.reserve_stock", priority=10)
def reserve_stock(event):
    """Reserve the stock once, even if ``charge_card`` needs many attempts at the same event."""
    order = Order.objects.get(pk=event.payload["order_id"])
    Product.objects.filter(pk=order.product_id).update(stock=F("stock") - order.quantity)


@handler(
    "order.placed",
    name="shop.charge_card",
    atomic=False,
    retry=CHARGE_RETRY,
    breaker=CHARGE_BREAKER,
)
def charge_card(event):
    """Charge the card. Any exception causes a retry; ``Discard`` makes a dead letter at once.

    The handler is not atomic, so no transaction is open while it waits for the payment provider.
    Therefore it may run again after a crash, and both of its effects must be repeatable: the
    provider recognises the idempotency key, and only the first run finds the order unpaid.
    """
    order = Order.objects.get(pk=event.payload["order_id"])
    if order.status != OrderStatus.PLACED:
        return  # An earlier run charged the card, but its worker died before it was recorded.
    try:
        payments.charge(
            order.card,
            order.total,
            reference=order.key,
            idempotency_key=event.idempotency_key,
        )
    except payments.CardDeclinedError as error:
        raise Discard(f"card declined: {error}") from error
    with transaction.atomic():
        unpaid = Order.objects.filter(pk=order.pk, status=OrderStatus.PLACED)
        if unpaid.update(status=OrderStatus.PAID):
            publish(OrderPaid(order_id=order.pk, total=order.total), key=order.key)


@handler(OrderPaid, name="shop.ship", priority=10, executor=settings.SHIPPING_EXECUTOR)
def ship(event):
    """Ship the order exactly once: the shipment commits with the record that this handler ran.

    With ``make demo CELERY=…``, Celery workers run this handler, with the same guarantees.
    """
    order_id = event.data.order_id
    Shipment.objects.create(order_id=order_id)
    Order.objects.filter(pk=order_id).update(status=OrderStatus.SHIPPED)


@handler(OrderPaid, name="shop.send_receipt", atomic=False)
def send_receipt(event):
    order = Order.objects.select_related("product").get(pk=event.data.order_id)
    EmailMessage(
        subject=f"Receipt for order {order.pk}",
        body=render_to_string("shop/receipt.txt", {"order": order}),
        to=[order.email],
        # If it is sent again after a crash, mail programs recognise the message by its id.
        headers={"Message-ID": f"<{event.id}@shop.example>"},
    ).send()


@handler("order.*", name="shop.tell_partner", atomic=False)
def tell_partner(event):
    """Call the partner's webhook. It recognises a repeated call by its idempotency key."""
    message = {"type": event.type, "order_id": event.payload["order_id"]}
    webhooks.post(settings.PARTNER_URL, message, idempotency_key=event.idempotency_key)


@handler("product.changed", name="shop.note_price")
def note_price(event):
    if price := event.payload["changed"].get("price"):
        PriceChange.objects.create(product_id=event.payload["pk"], **price)


@handler("product.changed", name="shop.restock")
def restock(event):
    """Order more if the row shows low stock. Of several events, only the first one orders."""
    low = Product.objects.filter(pk=event.payload["pk"], stock__lt=LOW_STOCK)
    if low.update(stock=F("stock") + SUPPLY):
        Restock.objects.create(product_id=event.payload["pk"], quantity=SUPPLY)


schedule("shop.closed", name="nightly report", cron="0 3 * * *")


@handler("shop.closed", name="shop.close_the_day")
def close_the_day(event):
    """Write the report of yesterday. A second run writes the same report again."""
    yesterday = timezone.localdate(event.created_at) - timedelta(days=1)
    figures = Order.objects.filter(placed_at__date=yesterday).aggregate(
        orders=Count("pk"), takings=Sum("total", default=0)
    )
    DailyReport.objects.update_or_create(day=yesterday, defaults=figures)
    Step.objects.filter(at__date__lt=yesterday).delete()
