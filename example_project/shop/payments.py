"""Stands in for a payment provider: takes its time, declines one card, is sometimes not there."""

import random
import time
from decimal import Decimal

from shop.models import Card

TROUBLE = 0.2
LONGEST_ANSWER = 0.1


class CardDeclinedError(Exception):
    """The bank said no. Asking again will not help."""


class GatewayDownError(Exception):
    """The provider did not answer. Asking again will help."""


def charge(card: str, amount: Decimal, *, idempotency_key: str) -> None:
    """Charge the card. A real provider charges once per idempotency key, however often asked."""
    time.sleep(random.uniform(0, LONGEST_ANSWER))
    if card == Card.EMPTY:
        raise CardDeclinedError(f"insufficient funds for {amount}")
    if random.random() < TROUBLE:
        raise GatewayDownError("the payment provider did not answer")
