"""What the shop keeps: products, orders, shipments."""

from decimal import Decimal

from django.db import models


class Product(models.Model):
    name = models.CharField(max_length=100)
    icon = models.CharField(max_length=8)
    price = models.DecimalField(max_digits=8, decimal_places=2)
    # May fall below zero: those are promised to customers and on their way from the supplier.
    stock = models.IntegerField()

    def __str__(self) -> str:
        return self.name


class Card(models.TextChoices):
    GOOD = "good", "Visa, ending in 4242"
    EMPTY = "empty", "Visa, ending in 0002 (will be declined)"


class OrderStatus(models.TextChoices):
    PLACED = "placed", "placed"
    PAID = "paid", "paid"
    SHIPPED = "shipped", "shipped"


class Order(models.Model):
    product = models.ForeignKey(Product, on_delete=models.PROTECT)
    quantity = models.PositiveSmallIntegerField(default=1)
    email = models.EmailField()
    card = models.CharField(max_length=16, choices=Card, default=Card.GOOD)
    status = models.CharField(max_length=16, choices=OrderStatus, default=OrderStatus.PLACED)
    placed_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"Order {self.pk}"

    @property
    def key(self) -> str:
        """Events of one order share a key, so they are handled one after the other."""
        return f"order:{self.pk}"

    @property
    def total(self) -> Decimal:
        return self.product.price * self.quantity


class Shipment(models.Model):
    # One to one: a second shipment of an order would be an error, not a surprise at the customer's.
    order = models.OneToOneField(Order, on_delete=models.PROTECT)
    shipped_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"Shipment of order {self.order_id}"
