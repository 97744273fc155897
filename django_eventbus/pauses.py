"""Pause and resume a queue, an event type or a handler.

All workers apply a pause within a second. Paused events wait: no attempt and no failure is counted,
and the order per key is kept. ``publish()`` is not affected.
"""

from __future__ import annotations

import builtins
from functools import partial

from django.db import transaction

from django_eventbus.conf import settings
from django_eventbus.errors.suggestions import check_queue, did_you_mean
from django_eventbus.exceptions import EventBusError
from django_eventbus.models import FlowControl, FlowControlKind
from django_eventbus.publishing.wakeup import wake_on_commit
from django_eventbus.registry import registry
from django_eventbus.schema.names import check_name
from django_eventbus.signals import flow_paused, flow_resumed
from django_eventbus.store import store_for

MOST_LETTERS = {"by": 200, "reason": 500}
#: The kinds of flow controls that can be paused.
KINDS = (FlowControlKind.QUEUE.value, FlowControlKind.TYPE.value, FlowControlKind.HANDLER.value)


def pause(
    *,
    queue: str | None = None,
    type: str | None = None,
    handler: str | None = None,
    reason: str = "",
    by: str | None = None,
    using: str | None = None,
) -> bool:
    """Pause a queue, all event types that match a pattern, or a handler.

    Returns False, and changes nothing, if this pause already exists. ``by`` is the name of the
    operator (default: host name and process id). The pause is part of the caller's transaction, if
    one is open.
    """
    kind, name = _chosen(queue, type, handler)
    _check_is_known(kind, name)
    who = _one_line("by", settings.producer() if by is None else by)
    why = _one_line("reason", reason)
    store = store_for(using)
    if not store.pause(kind, name, by=who, reason=why):
        return False
    facts = {"kind": str(kind), "name": name, "by": who, "reason": why}
    transaction.on_commit(partial(flow_paused.send_robust, FlowControl, **facts), using=store.using)
    return True


def resume(
    *,
    queue: str | None = None,
    type: str | None = None,
    handler: str | None = None,
    by: str | None = None,
    using: str | None = None,
) -> bool:
    """End the pause of this queue, pattern or handler. Returns False if there is no such pause."""
    kind, name = _chosen(queue, type, handler)
    store = store_for(using)
    if not store.resume(kind, name):
        return False
    who = _one_line("by", settings.producer() if by is None else by)
    facts = {"kind": str(kind), "name": name, "by": who}
    send = partial(flow_resumed.send_robust, FlowControl, **facts)
    transaction.on_commit(send, using=store.using)
    wake_on_commit(store.using)
    return True


def list(*, using: str | None = None) -> builtins.list[FlowControl]:
    """Return one row per pause, latest first, with kind, name, paused_at, paused_by and reason."""
    paused = store_for(using).flow_controls.filter(paused_at__isnull=False)
    return builtins.list(paused.order_by("-paused_at", "-id"))


def _chosen(
    queue: str | None, type: str | None, handler: str | None
) -> tuple[FlowControlKind, str]:
    given = {
        FlowControlKind.QUEUE: queue,
        FlowControlKind.TYPE: type,
        FlowControlKind.HANDLER: handler,
    }
    chosen = [(kind, name) for kind, name in given.items() if name is not None]
    if len(chosen) != 1:
        raise EventBusError("pass exactly one of queue=, type= and handler=")
    return chosen[0]


def _check_is_known(kind: FlowControlKind, name: str) -> None:
    """Raise an error for an unknown queue or handler, or for an invalid pattern.

    A pause with such a name would have no effect.
    """
    if kind == FlowControlKind.QUEUE:
        check_queue(name)
    if kind == FlowControlKind.TYPE:
        check_name(name, "the pattern")
    if kind == FlowControlKind.HANDLER and registry.get(name) is None:
        hint = did_you_mean(str(name), [each.name for each in registry.all()])
        raise EventBusError(f"there is no handler {name!r}{hint}")


def _one_line(what: str, text: str) -> str:
    if not isinstance(text, str) or not text.isprintable():
        raise EventBusError(f"{what} must be one line of printable text, not {text!r}")
    if len(text) > MOST_LETTERS[what]:
        raise EventBusError(
            f"{what} may have at most {MOST_LETTERS[what]} characters, not {len(text)}"
        )
    return text
