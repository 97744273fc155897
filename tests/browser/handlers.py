"""Handlers of a shop. The payload decides whether they fail."""

from django_eventbus import handler, publish

AT_ONCE = {"max_retries": 2, "base_delay": 0}


class CardDeclined(Exception):
    __module__ = "payments"  # The module that it would have in a project.


@handler("order.placed", name="stock.reserve")
def reserve(event):
    publish("stock.reserved", {"order": event.payload["order"]})


@handler("order.placed", name="billing.charge", retry=AT_ONCE)
def charge(event):
    card = event.payload["card"]
    if card != "valid":
        raise CardDeclined(f"the bank says: card {card}")


@handler("mail.receipt", name="mail.send", retry={"max_retries": 0})
def send(event):
    raise TimeoutError("smtp.example.com did not answer")


@handler("stock.reserved", name="stock.pack")
def pack(event):
    pass
