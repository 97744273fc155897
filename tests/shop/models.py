import uuid

from django.db import models

from django_eventbus.integrations.django_querysets import BridgedQuerySet


class Effect(models.Model):
    """An effect that a handler writes inside its transaction."""

    event_id = models.UUIDField()
    handler = models.CharField(max_length=100)
    note = models.CharField(max_length=100, default="")

    def __str__(self):
        return f"{self.handler} {self.event_id}"


class Customer(models.Model):
    name = models.CharField(max_length=100)

    def __str__(self):
        return self.name


class Order(models.Model):
    """A model for tests of bridges."""

    status = models.CharField(max_length=20, default="new")
    total = models.DecimalField(max_digits=8, decimal_places=2, default=0)
    customer = models.ForeignKey(Customer, on_delete=models.CASCADE, null=True)
    note = models.TextField(default="")
    details = models.JSONField(default=dict)
    placed_at = models.DateTimeField(null=True)
    took = models.DurationField(null=True)
    receipt = models.FileField(blank=True)

    objects = BridgedQuerySet.as_manager()

    def __str__(self):
        return f"order {self.pk}"


class OrderProxy(Order):
    class Meta:
        proxy = True


class ExpressOrder(Order):
    courier = models.CharField(max_length=20)


class Parcel(models.Model):
    """A model with a default primary key and Django's own manager."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    weight = models.IntegerField(default=0)

    def __str__(self):
        return f"parcel {self.pk}"
