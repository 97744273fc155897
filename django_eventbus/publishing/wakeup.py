"""Wake the workers when a transaction with new work has committed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from django.db import connections, transaction

from django_eventbus.conf import settings
from django_eventbus.internals.django import last_commit_hook
from django_eventbus.store import store_for


def wake_on_commit(alias: str) -> None:
    """Wake the workers once per transaction, after its commit.

    With autocommit off, Django runs no on_commit hooks. No wake-up is sent then, and workers find
    the events by polling.
    """
    connection = connections[alias]
    if not connection.in_atomic_block and not connection.get_autocommit():
        return
    if isinstance(last_commit_hook(connection), _Wake):
        return
    transaction.on_commit(_Wake(alias), using=alias, robust=True)


@dataclass(frozen=True, slots=True)
class _Wake:
    alias: str

    def __call__(self) -> None:
        wake(self.alias)


def wake(alias: str) -> None:
    """Wake the workers of a database now. With CELERY_DRAIN, also ask Celery to handle events."""
    store_for(alias).wake()
    if settings.CELERY_DRAIN:
        _drain_requests().request(alias)


@cache
def _drain_requests() -> Any:
    """Load the module when it is first needed, because Celery may not be installed."""
    return import_module("django_eventbus.integrations.celery_drain")
