"""The check of the books finds errors, and the day ends after all planned failures."""

from argparse import Namespace
from datetime import date
from pathlib import Path

from django.test import SimpleTestCase
from django_eventbus import publish
from django_eventbus.testing import drain

from demo.books import Books
from demo.day import Day
from outside.models import Charge, Notice
from shop.models import Card, DailyReport, Order, PriceChange, Product, Shipment
from shop.tests import ShopTestCase


class TheBooks(ShopTestCase):
    def setUp(self):
        super().setUp()
        self.post.side_effect = self.partner
        self.books = Books()
        self.good, self.declined = self.order(), self.order(card=Card.EMPTY)
        drain(raise_errors=False)
        PriceChange.objects.create(product=self.product, old=1, new=2)
        DailyReport.objects.create(day=date(2026, 3, 1), orders=0, takings=0)

    def partner(self, url, message, *, idempotency_key):
        Notice.objects.create(
            idempotency_key=idempotency_key,
            event_type=message["type"],
            order_id=message["order_id"],
        )

    def assert_wrong(self, *mistakes):
        assert self.books.mistakes() == list(mistakes)

    def test_balance_when_all_went_well(self):
        self.assert_wrong()
        assert self.books.figures()["card declined"] == 1

    def test_miss_a_shipment(self):
        Shipment.objects.all().delete()
        self.assert_wrong(f"{self.good.key} has 0 shipments, not 1")

    def test_find_a_card_that_was_charged_twice(self):
        Charge.objects.create(idempotency_key="again", reference=self.good.key, amount=1)
        self.assert_wrong(f"{self.good.key} costs 2469.00, its card was charged 2469.00, 1.00")

    def test_find_a_shipment_of_what_was_declined(self):
        Shipment.objects.create(order=self.declined)
        self.assert_wrong(f"{self.declined.key} has 1 shipments, not 0")

    def test_want_a_dead_letter_for_every_charge_that_failed(self):
        Order.objects.filter(pk=self.good.pk).update(card=Card.EMPTY)
        self.assert_wrong(f"the card of {self.good.key} is empty, but there is no dead letter")

    def test_miss_what_the_partner_was_not_told(self):
        Notice.objects.filter(event_type="order.paid").delete()
        told, owed = ["order.placed"], ["order.placed", "order.paid"]
        self.assert_wrong(f"the partner received {told} for {self.good.key}, not {owed}")

    def test_find_stock_that_was_taken_twice(self):
        Product._base_manager.filter(pk=self.product.pk).update(stock=94)
        self.assert_wrong("Kite: 94 in stock, not 96")

    def test_find_what_is_still_queued(self):
        event = publish("order.placed", {"order_id": self.good.pk})
        self.assert_wrong(f"{event} is still queued")


class RecordedDay(Day):
    """A day that records its failures, with a clock that only orders advance."""

    def __init__(self, *, seconds_per_order):
        options = Namespace(check=True, seconds=30, rate=5, kill_worker=2, celery=None)
        super().__init__(Path("."), options, clock=lambda: self.now)
        self.now = 0.0
        self.seconds_per_order = seconds_per_order
        self.incidents = []
        self.customers = self

    def order(self):
        self.now += self.seconds_per_order

    def break_payments(self):
        self.incidents.append("payments break")

    def repair_payments(self):
        self.incidents.append("payments are repaired")

    def kill_worker(self):
        self.incidents.append("the worker is killed")

    def look(self):
        self.now += 0.1


class TheDay(SimpleTestCase):
    planned = [
        "the worker is killed",
        "payments break",
        "payments are repaired",
        "the worker is killed",
    ]

    def test_has_all_that_was_planned(self):
        day = RecordedDay(seconds_per_order=0.1)
        day.take_orders()
        assert day.incidents == self.planned
        assert 30 <= day.now < 31

    def test_has_all_that_was_planned_even_if_one_order_takes_longer_than_the_day(self):
        day = RecordedDay(seconds_per_order=40)
        day.take_orders()
        assert day.incidents == self.planned
