"""The storefront and the page of an order. Events are published here."""

from typing import Any

from django.db import transaction
from django.db.models import OuterRef, Subquery
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import NoReverseMatch, reverse
from django.views.decorators.http import require_POST
from django_eventbus import breakers, publish
from django_eventbus.models import DeadEvent, EventWorker, QueuedEvent

from outside.models import PaymentProvider
from shop.forms import OrderForm
from shop.models import Card, DailyReport, Order, PriceChange, Product
from shop.timeline import stories

RECENT = 10


@require_POST
def place_order(request: HttpRequest) -> HttpResponse:
    form = OrderForm(request.POST)
    if not form.is_valid():
        return render(request, "shop/storefront.html", storefront_context(form), status=400)
    with transaction.atomic():
        order = form.save()
        publish("order.placed", {"order_id": order.pk}, key=order.key)
    return redirect(order)


def storefront(request: HttpRequest) -> HttpResponse:
    form = OrderForm(initial={"email": "you@example.com"})
    return render(request, "shop/storefront.html", storefront_context(form))


def now(request: HttpRequest) -> HttpResponse:
    """Return the state of the shop; the storefront fetches it every second."""
    return render(request, "shop/now.html", now_context())


def order_page(request: HttpRequest, pk: int) -> HttpResponse:
    return render(request, "shop/order.html", order_context(pk))


def order_story(request: HttpRequest, pk: int) -> HttpResponse:
    """Return the steps of the events of an order; its page fetches them every second."""
    return render(request, "shop/story.html", order_context(pk))


def storefront_context(form: OrderForm) -> dict[str, Any]:
    last_change = PriceChange.objects.filter(product=OuterRef("pk")).order_by("-pk")
    products = Product.objects.annotate(old_price=Subquery(last_change.values("old")[:1]))
    return {
        "form": form,
        "products": products.order_by("pk"),
        "cards": Card.choices,
        "report": DailyReport.objects.order_by("-day").first(),
        **now_context(),
    }


def now_context() -> dict[str, Any]:
    return {
        "payments_work": PaymentProvider.answers(),
        "breaker": next(each for each in breakers.list() if each.handler == "shop.charge_card"),
        "dead": DeadEvent.objects.count(),
        "dead_letters_url": dead_letters_url(),
        "queued": QueuedEvent.objects.count(),
        "has_worker": EventWorker.objects.filter(expires_at__gt=Now()).exists(),
        "stories": stories(Order.objects.order_by("-pk")[:RECENT]),
    }


def order_context(pk: int) -> dict[str, Any]:
    order = get_object_or_404(Order, pk=pk)
    return {
        "story": stories(Order.objects.filter(pk=order.pk))[0],
        "payments_work": PaymentProvider.answers(),
        "dead_letters_url": dead_letters_url(),
    }


def dead_letters_url() -> str:
    """Return the URL of the list of dead letters, or of the admin's index if there is no list."""
    try:
        return reverse("admin:django_eventbus_deadevent_changelist")
    except NoReverseMatch:
        return reverse("admin:index")
