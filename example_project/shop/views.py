"""The storefront: a page, its list of recent orders, and the place where events begin."""

from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST
from django_eventbus import dead_letters, publish

from shop.forms import OrderForm
from shop.models import Card, Order, Product

RECENT = 12


@require_POST
def place_order(request: HttpRequest) -> HttpResponse:
    form = OrderForm(request.POST)
    if not form.is_valid():
        return render(request, "shop/storefront.html", storefront_context(form), status=400)
    with transaction.atomic():
        order = form.save()
        publish("order.placed", {"order_id": order.pk}, key=f"order:{order.pk}")
    return redirect("storefront")


def storefront(request: HttpRequest) -> HttpResponse:
    return render(request, "shop/storefront.html", storefront_context(OrderForm()))


def recent_orders(request: HttpRequest) -> HttpResponse:
    """The list alone; the page fetches it every second."""
    return render(request, "shop/orders.html", {"orders": orders_with_state()})


def storefront_context(form: OrderForm) -> dict[str, Any]:
    return {
        "form": form,
        "products": Product.objects.order_by("pk"),
        "cards": Card.choices,
        "orders": orders_with_state(),
    }


def orders_with_state() -> list[tuple[Order, str]]:
    """A declined order is one whose event ended among the dead letters."""
    orders = Order.objects.select_related("product").order_by("-pk")[:RECENT]
    declined = {dead.key for dead in dead_letters.list(type="order.placed")}
    return [(order, "declined" if order.key in declined else order.status) for order in orders]
