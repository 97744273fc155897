"""Wake the workers, and count published events, when a transaction with new work has committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from django.db import connections, transaction

from django_eventbus.conf import settings
from django_eventbus.counters.process import count_publishing, write_if_due
from django_eventbus.internals.django import (
    last_commit_hook,
    last_commit_hook_is_of_same_savepoints,
)
from django_eventbus.store import store_for

#: The queue, the type, and the column of ``EventCounter``: "published" or "coalesced".
Counted = tuple[str, str, str]


def wake_on_commit(alias: str, counted: Mapping[Counted, int] | None = None) -> None:
    """Wake the workers once per transaction, after its commit, and count what was published.

    With autocommit off, Django runs no on_commit hooks. No wake-up is sent then, and workers find
    the events by polling. Nothing is counted either.
    """
    connection = connections[alias]
    if not connection.in_atomic_block and not connection.get_autocommit():
        return
    last = last_commit_hook(connection)
    if not isinstance(last, _Committed):
        hook = _Committed(alias, wakes=True, counted=dict(counted or {}))
    elif not counted:
        return
    elif last_commit_hook_is_of_same_savepoints(connection):
        last.add(counted)
        return
    else:
        # A rollback to a savepoint drops only one of the two hooks, so they count separately.
        hook = _Committed(alias, wakes=False, counted=dict(counted))
    transaction.on_commit(hook, using=alias, robust=True)


@dataclass(slots=True)
class _Committed:
    alias: str
    wakes: bool
    counted: dict[Counted, int]

    def add(self, counted: Mapping[Counted, int]) -> None:
        for each, number in counted.items():
            self.counted[each] = self.counted.get(each, 0) + number

    def __call__(self) -> None:
        if self.wakes:
            wake(self.alias)
        for (queue, type_name, column), number in self.counted.items():
            count_publishing(self.alias, queue, type_name, column, number)
        if self.counted:
            write_if_due(self.alias)


def wake(alias: str) -> None:
    """Wake the workers of a database now. With CELERY_DRAIN, also ask Celery to handle events."""
    store_for(alias).wake()
    if settings.CELERY_DRAIN:
        _drain_requests().request(alias)


@cache
def _drain_requests() -> Any:
    """Load the module when it is first needed, because Celery may not be installed."""
    return import_module("django_eventbus.integrations.celery_drain")
