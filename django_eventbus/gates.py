"""Pause and resume a queue, an event type or a handler, in all workers within a second.

What is paused waits and burns nothing: no attempt is charged, no failure counted, order per key is
kept. ``publish()`` goes on as ever.
"""

from __future__ import annotations

import builtins
from functools import partial

from django.db import transaction

from django_eventbus.conf import settings
from django_eventbus.events import check_name
from django_eventbus.exceptions import EventBusError, UnknownQueueError
from django_eventbus.models import EventGate, GateKind
from django_eventbus.publishing import wake_on_commit
from django_eventbus.registry import did_you_mean, registry
from django_eventbus.signals import gate_paused, gate_resumed
from django_eventbus.store import store_for

MOST_LETTERS = {"by": 200, "reason": 500}


def pause(
    *,
    queue: str | None = None,
    type: str | None = None,
    handler: str | None = None,
    reason: str = "",
    by: str | None = None,
    using: str | None = None,
) -> bool:
    """Pause a queue, all events whose type fits a pattern, or one handler, by its name.

    Returns False, and changes nothing, if it is paused already. ``by`` says who did it (default:
    host name and process id). Part of the caller's transaction, if one is open.
    """
    kind, name = _chosen(queue, type, handler)
    _check_is_known(kind, name)
    who = _short("by", settings.producer() if by is None else by)
    why = _short("reason", reason)
    store = store_for(using)
    if not store.pause(kind, name, by=who, reason=why):
        return False
    told = {"kind": str(kind), "name": name, "by": who, "reason": why}
    transaction.on_commit(partial(gate_paused.send_robust, EventGate, **told), using=store.using)
    return True


def resume(
    *,
    queue: str | None = None,
    type: str | None = None,
    handler: str | None = None,
    by: str | None = None,
    using: str | None = None,
) -> bool:
    """Undo ``pause``, given the same name or pattern. Returns False if it was not paused."""
    kind, name = _chosen(queue, type, handler)
    store = store_for(using)
    if not store.resume(kind, name):
        return False
    who = _short("by", settings.producer() if by is None else by)
    told = {"kind": str(kind), "name": name, "by": who}
    transaction.on_commit(partial(gate_resumed.send_robust, EventGate, **told), using=store.using)
    wake_on_commit(store.using)
    return True


def list(*, using: str | None = None) -> builtins.list[EventGate]:
    """What is paused, latest first: rows with kind, name, paused_at, paused_by and reason."""
    paused = store_for(using).gates.filter(paused_at__isnull=False)
    return builtins.list(paused.order_by("-paused_at", "-id"))


def _chosen(queue: str | None, type: str | None, handler: str | None) -> tuple[GateKind, str]:
    given = {GateKind.QUEUE: queue, GateKind.TYPE: type, GateKind.HANDLER: handler}
    chosen = [(kind, name) for kind, name in given.items() if name is not None]
    if len(chosen) != 1:
        raise EventBusError("name one thing: queue=, type= or handler=")
    return chosen[0]


def _check_is_known(kind: GateKind, name: str) -> None:
    """A typo that pauses nothing would only show when it is too late."""
    if kind == GateKind.QUEUE and name not in settings.QUEUES:
        hint = did_you_mean(str(name), settings.QUEUES)
        raise UnknownQueueError(f"{name!r} is not in EVENTBUS['QUEUES']{hint}")
    if kind == GateKind.TYPE:
        check_name(name, "the pattern")
    if kind == GateKind.HANDLER and registry.get(name) is None:
        hint = did_you_mean(str(name), [each.name for each in registry.all()])
        raise EventBusError(f"there is no handler {name!r}{hint}")


def _short(what: str, text: str) -> str:
    if not isinstance(text, str) or not text.isprintable():
        raise EventBusError(f"{what} must be one line of printable text, not {text!r}")
    if len(text) > MOST_LETTERS[what]:
        raise EventBusError(f"{what} may have {MOST_LETTERS[what]} characters, not {len(text)}")
    return text
