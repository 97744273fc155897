"""The models of the shop: products, orders, and their shipments."""

from django.db import models
from django.urls import reverse
from django_eventbus.integrations.django_querysets import BridgedQuerySet


class Product(models.Model):
    name = models.CharField(max_length=100)
    picture = models.CharField(
        max_length=100, default="shop/products/parcel.svg", help_text="A static file."
    )
    price = models.DecimalField(max_digits=8, decimal_places=2)
    # A negative number means that sold pieces have to be ordered from the supplier.
    stock = models.IntegerField()

    # The bridge in apps.py publishes changes; with this queryset, update() publishes them too.
    objects = BridgedQuerySet.as_manager()

    def __str__(self) -> str:
        return self.name


class PriceChange(models.Model):
    product = models.ForeignKey(Product, on_delete=models.CASCADE, related_name="price_changes")
    old = models.DecimalField(max_digits=8, decimal_places=2)
    new = models.DecimalField(max_digits=8, decimal_places=2)
    changed_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.product}: {self.old} to {self.new}"


class Restock(models.Model):
    """A delivery of the supplier."""

    product = models.ForeignKey(Product, on_delete=models.CASCADE, related_name="restocks")
    quantity = models.PositiveSmallIntegerField()
    arrived_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.quantity} more of {self.product}"


class Card(models.TextChoices):
    GOOD = "4242 4242 4242 4242", "Visa ending in 4242"
    EMPTY = "4000 0000 0000 0002", "Visa ending in 0002 (will be declined)"


class OrderStatus(models.TextChoices):
    PLACED = "placed", "placed"
    PAID = "paid", "paid"
    SHIPPED = "shipped", "shipped"


class Order(models.Model):
    product = models.ForeignKey(Product, on_delete=models.PROTECT)
    quantity = models.PositiveSmallIntegerField(default=1)
    # The price at the time of the order.
    total = models.DecimalField(max_digits=8, decimal_places=2)
    email = models.EmailField()
    card = models.CharField(max_length=32, choices=Card, default=Card.GOOD)
    status = models.CharField(max_length=16, choices=OrderStatus, default=OrderStatus.PLACED)
    placed_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"Order {self.pk}"

    def save(self, *args, **kwargs) -> None:
        if self.total is None:
            self.total = self.product.price * self.quantity
        super().save(*args, **kwargs)

    def get_absolute_url(self) -> str:
        return reverse("order", args=[self.pk])

    @property
    def key(self) -> str:
        """Events of one order share a key, so they are handled one after the other."""
        return f"order:{self.pk}"


class Shipment(models.Model):
    # One to one: the database refuses a second shipment of an order.
    order = models.OneToOneField(Order, on_delete=models.PROTECT)
    shipped_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"Shipment of order {self.order_id}"


class DailyReport(models.Model):
    day = models.DateField(unique=True)
    orders = models.PositiveIntegerField()
    takings = models.DecimalField(max_digits=12, decimal_places=2)

    def __str__(self) -> str:
        return f"Report of {self.day}"


class Step(models.Model):
    """One attempt of a handler to handle an event of an order, shown in the timeline."""

    class Outcome(models.TextChoices):
        DONE = "done", "done"
        RETRY = "retry", "failed, will be tried again"
        DEAD = "dead", "given up"

    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="steps")
    event_type = models.CharField(max_length=200)
    handler = models.CharField(max_length=200)
    attempt = models.PositiveIntegerField()
    outcome = models.CharField(max_length=8, choices=Outcome)
    error = models.TextField(blank=True)
    retry_in = models.FloatField(null=True)
    at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.event_type} {self.handler}: {self.outcome}"

    @property
    def name(self) -> str:
        """Return the name of the handler without its app."""
        return self.handler.rpartition(".")[2]

    @property
    def after(self) -> str:
        """Return the time since the order."""
        seconds = (self.at - self.order.placed_at).total_seconds()
        return f"{seconds:.2f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
