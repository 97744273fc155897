"""The world outside of the shop: a payment provider and a partner, each with books of its own.

A real shop would reach them over the network, so no transaction of the shop ever includes these
tables.
"""

from django.db import models


class PaymentProvider(models.Model):
    """The one there is. Down, it answers nobody."""

    is_down = models.BooleanField(default=False)

    def __str__(self) -> str:
        return "The payment provider"

    @classmethod
    def answers(cls) -> bool:
        return not cls.objects.filter(is_down=True).exists()

    @classmethod
    def switch(cls, *, is_down: bool) -> None:
        cls.objects.update_or_create(pk=1, defaults={"is_down": is_down})


class Charge(models.Model):
    """What the provider took from a card: once per idempotency key, however often it was asked."""

    idempotency_key = models.CharField(max_length=300, unique=True)
    reference = models.CharField(max_length=100)
    amount = models.DecimalField(max_digits=8, decimal_places=2)
    charged_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.amount} for {self.reference}"


class Notice(models.Model):
    """What the partner heard from the shop, once however often it was told."""

    idempotency_key = models.CharField(max_length=300, unique=True)
    event_type = models.CharField(max_length=200)
    order_id = models.BigIntegerField()
    received_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.event_type}, order {self.order_id}"
