"""All checks, sorted by id, and the selection of checks by id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from django_eventbus.diagnosis import (
    flow,
    handlers,
    log,
    mariadb,
    postgresql_server,
    postgresql_sessions,
    postgresql_tables,
    schedules,
    setup,
    sqlite,
    workers,
)
from django_eventbus.diagnosis.examination import Check
from django_eventbus.errors.suggestions import did_you_mean

#: The modules that define checks. EB0xx up to EB029: the bus and its workers; EB03x: SQLite;
#: EB04x: MariaDB; EB05x to EB07x: PostgreSQL.
_MODULES = (
    *(workers, handlers, flow, log, schedules, setup, sqlite, mariadb),
    *(postgresql_sessions, postgresql_tables, postgresql_server),
)

CHECKS: Sequence[Check] = sorted(
    (each for module in _MODULES for each in vars(module).values() if isinstance(each, Check)),
    key=lambda each: each.id,
)


class UnknownCheckError(ValueError):
    """No check has this id, or an id that starts with this text."""


def selected(
    only: Iterable[str] = (), ignored: Iterable[str] = (), *, checks: Sequence[Check] = CHECKS
) -> list[Check]:
    """Return the checks of ``only``, or all checks, without those of ``ignored``.

    An item is an id, or the beginning of an id: ``EB02`` selects EB020 to EB029. Raises
    UnknownCheckError for an item that selects no check.
    """
    wanted, unwanted = _ids(only, checks), _ids(ignored, checks)
    return [each for each in checks if each.id in (wanted or {each.id}) - unwanted]


def _ids(items: Iterable[str], checks: Sequence[Check]) -> set[str]:
    found: set[str] = set()
    for item in items:
        start = item.strip().upper()
        matching = {each.id for each in checks if each.id.startswith(start)} if start else set()
        if not matching:
            hint = did_you_mean(start, [each.id for each in checks])
            raise UnknownCheckError(f"there is no check {item.strip()!r}{hint}")
        found |= matching
    return found
