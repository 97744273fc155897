"""The timeline of each order, recorded from the signals of the bus.

Workers send these signals after the commit. If a worker is killed between the commit and the
signal, a step is missing in the timeline. No event and no handler is affected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db.models import Prefetch, QuerySet
from django.dispatch import receiver
from django_eventbus import breakers
from django_eventbus.models import DeadEvent
from django_eventbus.signals import delivery_failed, delivery_succeeded

from shop.models import Order, OrderStatus, Step


@receiver(delivery_succeeded)
def note_success(sender: Any, *, event: Any, handler: str, attempt: int, **_: Any) -> None:
    _note(event, handler=handler, attempt=attempt, outcome=Step.Outcome.DONE)


@receiver(delivery_failed)
def note_failure(
    sender: Any,
    *,
    event: Any,
    handler: str,
    attempt: int,
    error: dict[str, Any],
    retry_in: float | None,
    **_: Any,
) -> None:
    _note(
        event,
        handler=handler,
        attempt=attempt,
        outcome=Step.Outcome.DEAD if retry_in is None else Step.Outcome.RETRY,
        error=error["message"],
        retry_in=retry_in,
    )


def _note(event: Any, **step: Any) -> None:
    kind, _, order_id = (event.key or "").partition(":")
    if kind == "order":
        Step.objects.create(order_id=order_id, event_type=event.type, **step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The state of an order, and the steps of its events so far."""

    order: Order
    state: str
    # The error of its dead letter; empty if there is none.
    reason: str
    steps: list[Step]

    @property
    def by_event(self) -> dict[str, list[Step]]:
        """Return the last step of each handler of each event."""
        events: dict[str, dict[str, Step]] = {}
        for step in self.steps:
            events.setdefault(step.event_type, {})[step.handler] = step
        return {event_type: list(latest.values()) for event_type, latest in events.items()}

    @property
    def was_declined(self) -> bool:
        return self.reason.startswith("card declined")


def stories(orders: QuerySet[Order]) -> list[Story]:
    steps = Prefetch("steps", Step.objects.order_by("pk"))
    told = list(orders.select_related("product").prefetch_related(steps))
    dead = DeadEvent.objects.filter(key__in=[order.key for order in told])
    reasons = {
        each.key: each.errors[-1]["message"] if each.errors else each.status for each in dead
    }
    breaker_is_open = any(each.state != "closed" for each in breakers.list())
    return [_story(order, reasons.get(order.key, ""), breaker_is_open) for order in told]


def _story(order: Order, reason: str, breaker_is_open: bool) -> Story:
    steps = list(order.steps.all())
    state = "dead letter" if reason else _state(order, steps, breaker_is_open)
    return Story(order=order, state=state, reason=reason, steps=steps)


def _state(order: Order, steps: list[Step], breaker_is_open: bool) -> str:
    if order.status != OrderStatus.PLACED:
        return order.status
    if breaker_is_open:
        return "waiting"
    failed = any(step.outcome == Step.Outcome.RETRY for step in steps)
    return "retrying" if failed else "placed"
