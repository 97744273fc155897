"""The transaction of a publisher: choose its database, and limit the number of its events."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_eventbus.conf import settings
from django_eventbus.events import current_event_id
from django_eventbus.exceptions import BackpressureError, ForeignTransactionError
from django_eventbus.internals.django import commit_hooks, has_only_test_case_blocks
from django_eventbus.store import default_alias


def choose_database(using: str | None) -> str:
    """Return ``using``, or the database of the caller's transaction, or the default database.

    A transaction that is open on another database causes an error or a warning, as set by
    FOREIGN_TRANSACTION, because its rollback would not remove the event. The nesting order of two
    open transactions makes no difference. There is no error or warning if the caller passes
    ``using`` and has a transaction open on that database.
    """
    alias = using or default_alias()
    opened = _open_transactions()
    if using is None and alias not in opened:
        with_bus = [each for each in opened if each in settings.DATABASES]
        alias = with_bus[0] if len(with_bus) == 1 else alias
    others = [each for each in opened if each != alias]
    is_intended = using is not None and alias in opened
    if others and not is_intended:
        _report_foreign_transaction(alias, others, is_open=alias in opened)
    return alias


def _open_transactions() -> list[str]:
    return [
        each.alias
        for each in connections.all(initialized_only=True)
        if each.in_atomic_block and not _is_of_a_test_case(each)
    ]


def _is_of_a_test_case(connection: Any) -> bool:
    """Return whether only a TestCase has a transaction open on this connection."""
    return has_only_test_case_blocks(connection)


def _report_foreign_transaction(alias: str, others: list[str], *, is_open: bool) -> None:
    names = ", ".join(map(repr, others))
    message = (
        f"publishing to the database {alias!r} while the open transaction is on {names}: "
        "a rollback of that transaction will not remove the event"
    )
    if is_open:
        choices = [alias, *(each for each in others if each in settings.DATABASES)]
        message = (
            f"publishing to the database {alias!r} while a transaction is open on {names} too: "
            "a rollback of that transaction will not remove the event; pass "
            f"{' or '.join(f'using={each!r}' for each in choices)} to choose the database"
        )
    if settings.FOREIGN_TRANSACTION == "error":
        raise ForeignTransactionError(message)
    if settings.FOREIGN_TRANSACTION == "warn":
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def count_published(connection: BaseDatabaseWrapper, many: int) -> None:
    """Count new events; raise BackpressureError if the transaction would publish too many.

    Without this limit, an endless loop that publishes could fill the disk, and other sessions would
    not see its uncommitted events. A worker handles several events in one transaction, so the limit
    applies to each handled event separately.
    """
    if not connection.in_atomic_block:
        return  # In autocommit mode, each statement is a transaction.
    cause = current_event_id()
    published = _published.get(connection)
    if published is None or not published.belongs_to(connection, cause):
        published = _published[connection] = _Published(commit_hooks(connection), cause)
    most = settings.MAX_EVENTS_PER_TRANSACTION
    if published.count + many > most:
        raise BackpressureError(
            f"this transaction has published {published.count:,} events and would publish {many:,} "
            f"more: EVENTBUS['MAX_EVENTS_PER_TRANSACTION'] allows {most:,}; commit earlier, or "
            "increase the setting"
        )
    published.count += many


def uncount_published(connection: BaseDatabaseWrapper, many: int) -> None:
    """Subtract duplicates, which were counted but not inserted.

    For a duplicate, the store may have rolled back a savepoint, and Django has then replaced its
    list of on_commit hooks. So the new list is stored as the identity of the transaction.
    """
    if connection.in_atomic_block:
        published = _published[connection]
        published.count -= many
        published.hooks = commit_hooks(connection)


@dataclass(slots=True)
class _Published:
    """The number of events that a transaction has published.

    The transaction is identified by Django's list of on_commit hooks. Django creates a new list for
    each transaction, and when a savepoint is rolled back. With a new list, counting starts at 0.
    """

    hooks: list[Any]
    cause: UUID | None
    count: int = 0

    def belongs_to(self, connection: BaseDatabaseWrapper, cause: UUID | None) -> bool:
        return self.hooks is commit_hooks(connection) and self.cause == cause


_published: WeakKeyDictionary[BaseDatabaseWrapper, _Published] = WeakKeyDictionary()
