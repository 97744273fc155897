"""Tests of the shop with ``django_eventbus.testing``: the same handlers, retries and dead letters
as in a worker, in the transaction of the test."""

from datetime import date, timedelta
from decimal import Decimal
from unittest import mock

from django.core import mail
from django.test import LiveServerTestCase, TestCase
from django.urls import reverse
from django_eventbus import breakers, dead_letters, schedules
from django_eventbus.testing import EventBusTestMixin, assert_published, drain

from outside import payments, webhooks
from outside.models import Charge, Notice, PaymentProvider
from shop.handlers import CHARGE_BREAKER, CHARGE_RETRY, LOW_STOCK, SUPPLY
from shop.models import Card, DailyReport, Order, OrderStatus, PriceChange, Product, Shipment


class ShopTestCase(EventBusTestMixin, TestCase):
    """The provider responds at once, unless a test breaks it; the partner records calls."""

    def setUp(self):
        self.replace(payments, "TROUBLE", 0)
        self.replace(payments, "LONGEST_ANSWER", 0)
        self.post = self.replace(webhooks, "post", mock.Mock())
        self.product = Product.objects.create(name="Kite", price=Decimal("1234.50"), stock=100)

    def replace(self, where, name, value):
        patcher = mock.patch.object(where, name, value)
        self.addCleanup(patcher.stop)
        return patcher.start()

    def order(self, **changed):
        fields = {
            "product": self.product.pk,
            "quantity": 2,
            "email": "ada@example.com",
            "card": Card.GOOD,
        }
        self.answer = self.client.post(reverse("place-order"), {**fields, **changed})
        return Order.objects.latest("pk")

    def outcomes(self, order):
        return [(step.name, step.attempt, step.outcome) for step in order.steps.order_by("pk")]


class AnOrder(ShopTestCase):
    def test_is_saved_and_published(self):
        order = self.order()
        self.assertRedirects(self.answer, order.get_absolute_url())
        event = assert_published("order.placed", order_id=order.pk)
        assert event.key == order.key

    def test_is_reserved_charged_shipped_and_told_of(self):
        order = self.order()
        drain()
        order.refresh_from_db()
        self.product.refresh_from_db()
        assert order.status == OrderStatus.SHIPPED
        assert Shipment.objects.filter(order=order).count() == 1
        assert self.product.stock == 98
        assert Charge.objects.get().amount == Decimal("2469.00")
        assert "€2,469.00" in mail.outbox[0].body
        told = [call.args[1]["type"] for call in self.post.call_args_list]
        assert told == ["order.placed", "order.paid"]

    def test_that_was_paid_before_its_worker_died_is_not_charged_again(self):
        order = self.order()
        Order.objects.update(status=OrderStatus.PAID)
        PaymentProvider.switch(is_down=True)
        drain()
        assert not Charge.objects.exists()
        assert ("charge_card", 1, "done") in self.outcomes(order)

    def test_that_is_not_valid_is_refused_in_words(self):
        self.client.post(reverse("place-order"), {"product": self.product.pk, "quantity": 0})
        assert not Order.objects.exists()
        answer = self.client.post(reverse("place-order"), {"email": "<b>nobody"})
        self.assertContains(answer, "Enter a valid email address", status_code=400)
        self.assertNotContains(answer, "<b>nobody", status_code=400)

    def test_with_an_empty_card_waits_among_the_dead_letters_for_another_card(self):
        order = self.order(card=Card.EMPTY)
        drain(raise_errors=False)
        dead = dead_letters.list()[0]
        assert (dead.key, dead.dead_handler) == (order.key, "shop.charge_card")
        page = self.client.get(order.get_absolute_url())
        self.assertContains(page, "card declined: insufficient funds; given up")
        self.assertContains(page, reverse("admin:shop_order_change", args=[order.pk]))

        Order.objects.update(card=Card.GOOD)
        dead_letters.retry(dead)
        drain()
        self.product.refresh_from_db()
        assert self.product.stock == 98  # reserved once
        assert Shipment.objects.filter(order=order).exists()
        self.assertNotContains(self.client.get(order.get_absolute_url()), "needs your attention")


class BrokenPayments(ShopTestCase):
    def setUp(self):
        super().setUp()
        self.client.post(reverse("switch-payments"), {"payments": "break"})

    def test_are_retried_and_then_dead_with_every_error(self):
        order = self.order()
        drain(until=timedelta(minutes=1), raise_errors=False)
        dead = dead_letters.list()[0]
        errors = [each for each in dead.errors if each["handler"] == "shop.charge_card"]
        assert len(errors) == CHARGE_RETRY.max_retries + 1
        charges = [each for each in self.outcomes(order) if each[0] == "charge_card"]
        assert charges == [
            ("charge_card", 1, "retry"),
            ("charge_card", 2, "retry"),
            ("charge_card", 3, "dead"),
        ]
        self.assertContains(self.client.get(reverse("now")), "dead letter")

    def test_that_are_repaired_in_time_harm_nobody(self):
        order = self.order()
        drain(raise_errors=False)
        self.assertContains(self.client.get(reverse("now")), "retrying")
        self.client.post(reverse("switch-payments"), {"payments": "repair"})
        assert PaymentProvider.answers()
        drain(until=timedelta(minutes=1))
        order.refresh_from_db()
        assert order.status == OrderStatus.SHIPPED
        assert Charge.objects.count() == 1

    def test_open_the_breaker_and_orders_wait(self):
        for _ in range(CHARGE_BREAKER.min_calls):
            self.order()
        drain(raise_errors=False)
        assert [each.state for each in breakers.list()] == ["open"]
        page = self.client.get(reverse("now"))
        self.assertContains(page, "no card is charged")
        self.assertContains(page, "waiting")


class AProduct(ShopTestCase):
    def test_with_a_new_price_shows_the_old_one(self):
        self.product.price = Decimal("999")
        self.product.save()
        drain()
        change = PriceChange.objects.get()
        assert (change.old, change.new) == (Decimal("1234.50"), Decimal("999"))
        self.assertContains(self.client.get(reverse("storefront")), "€1,234.50")

    def test_that_runs_low_is_ordered_once(self):
        self.product.stock = LOW_STOCK + 1
        self.product.save()
        self.order()
        self.order()
        drain()
        self.product.refresh_from_db()
        assert self.product.stock == LOW_STOCK + 1 - 4 + SUPPLY


class TheNight(ShopTestCase):
    def test_writes_the_report_of_the_day_before(self):
        self.order()
        Order.objects.update(placed_at="2026-03-01T23:59:00Z")
        event = schedules.run("nightly report")
        type(event).objects.filter(pk=event.pk).update(created_at="2026-03-02T03:00:00Z")
        drain()
        report = DailyReport.objects.get()
        assert report.day == date(2026, 3, 1)
        assert (report.orders, report.takings) == (1, Decimal("2469.00"))
        self.assertContains(self.client.get(reverse("storefront")), "€2,469.00")


class ThePages(ShopTestCase):
    def test_say_so_where_there_is_nothing_to_show(self):
        Product.objects.all().delete()
        page = self.client.get(reverse("storefront"))
        self.assertContains(page, "The shelves are empty")
        self.assertContains(page, "Yours will be the first")
        self.assertContains(page, "No worker is running")

    def test_load_nothing_from_elsewhere_and_nothing_inline(self):
        page = self.client.get(reverse("storefront"))
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        for inline in ("style=", "onclick=", "<style", "http://", "https://"):
            self.assertNotContains(page, inline)

    def test_show_what_customers_wrote_as_text(self):
        self.order(email='"<script>"@example.com')
        page = self.client.get(Order.objects.latest("pk").get_absolute_url())
        self.assertContains(page, "&lt;script&gt;")
        self.assertNotContains(page, '"<script>"')


class ThePartner(LiveServerTestCase):
    def test_hears_of_an_event_once_however_often_it_is_told(self):
        message = {"type": "order.placed", "order_id": 7}
        for _ in range(2):
            webhooks.post(f"{self.live_server_url}/partner/", message, idempotency_key="a")
        notice = Notice.objects.get()
        assert (notice.event_type, notice.order_id) == ("order.placed", 7)

    def test_listens_to_nobody_but_the_shop(self):
        answer = self.client.post("/partner/", {"type": "order.placed"})
        assert answer.status_code == 403
        assert not Notice.objects.exists()
