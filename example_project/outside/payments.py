"""A fake payment provider: it is slow, declines one card, and can be down."""

import random
import time
from decimal import Decimal

from outside.models import Charge, PaymentProvider

EMPTY_CARD = "4000 0000 0000 0002"
TROUBLE = 0.15
LONGEST_ANSWER = 0.1


class CardDeclinedError(Exception):
    """The bank declined the card. A retry does not help."""


class ProviderDownError(Exception):
    """The provider did not respond. A retry helps."""


def charge(card: str, amount: Decimal, *, reference: str, idempotency_key: str) -> None:
    """Charge the card once per idempotency key; a repeated call succeeds and charges nothing."""
    time.sleep(random.uniform(0, LONGEST_ANSWER))
    if not PaymentProvider.answers() or random.random() < TROUBLE:
        raise ProviderDownError("the payment provider did not respond")
    if card == EMPTY_CARD:
        raise CardDeclinedError("insufficient funds")
    Charge.objects.get_or_create(
        idempotency_key=idempotency_key, defaults={"reference": reference, "amount": amount}
    )
