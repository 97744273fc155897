"""Systems outside of the shop: a payment provider and a partner, each with its own records.

A real shop would reach them over the network, so no transaction of the shop ever includes these
tables.
"""

from django.db import models


class PaymentProvider(models.Model):
    """The state of the payment provider. The table has one row."""

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
    """A charge of a card: one per idempotency key, however often it was requested."""

    idempotency_key = models.CharField(max_length=300, unique=True)
    reference = models.CharField(max_length=100)
    amount = models.DecimalField(max_digits=8, decimal_places=2)
    charged_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.amount} for {self.reference}"


class Notice(models.Model):
    """A call that the partner received: one row, however often it was sent."""

    idempotency_key = models.CharField(max_length=300, unique=True)
    event_type = models.CharField(max_length=200)
    order_id = models.BigIntegerField()
    received_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.event_type}, order {self.order_id}"
