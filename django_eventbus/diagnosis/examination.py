"""Checks, their results, and the examination that runs checks one after the other.

A check reads only. Its statements wait for at most a second for a lock of another transaction, and
are cancelled after a timeout if the database supports this. An error in a check does not stop the
checks after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property

from django_eventbus.errors import failures
from django_eventbus.errors.text import one_line
from django_eventbus.flow.fleet import Patterns, known_here
from django_eventbus.models import EventSchedule, QueuedEvent
from django_eventbus.registry import registry
from django_eventbus.schema.patterns import matches
from django_eventbus.status import Status
from django_eventbus.store import Store

#: Seconds after which the database cancels a statement of a check. SQLite has no such timeout.
STATEMENT_SECONDS = 5.0
#: The largest number of queued events that checks read.
OLDEST_QUEUED = 5000

#: The databases of ``Check.databases``: values of ``Store.database_name``.
POSTGRESQL = "PostgreSQL"
SQLITE = "SQLite"
MARIADB = "MariaDB"
EVERY_DATABASE = (POSTGRESQL, SQLITE, MARIADB)


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    #: The check did not run. The summary has the reason. This is never the same as ok.
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a check: a verdict, a summary and a fix."""

    verdict: Verdict
    #: One sentence with the measured value. It contains no newline.
    summary: str
    #: The statement, setting or command that corrects the fault; empty if there is no fault.
    fix: str = ""


def ok(summary: str) -> Result:
    return Result(Verdict.OK, one_line(summary))


def warn(summary: str, *, fix: str) -> Result:
    return Result(Verdict.WARN, one_line(summary), fix)


def fail(summary: str, *, fix: str) -> Result:
    return Result(Verdict.FAIL, one_line(summary), fix)


def skipped(reason: str) -> Result:
    return Result(Verdict.SKIPPED, one_line(reason))


def listed(names: Iterable[str], *, separator: str = ", ", at_most: int = 5) -> str:
    """Return the first names as text: ``a, b, c and 4 more``."""
    found = sorted(names)
    more = f" and {len(found) - at_most} more" if len(found) > at_most else ""
    return one_line(separator.join(found[:at_most])) + more


class Bus:
    """The bus that is examined: its store, and the reads that several checks share."""

    def __init__(self, store: Store, status: Status | None = None) -> None:
        self.store = store
        self._status = status

    @property
    def status(self) -> Status:
        """The status of the bus. It is read once for all checks."""
        if self._status is None:
            self._status = Status(self.store)
        return self._status

    @property
    def has_read_status(self) -> bool:
        return self._status is not None

    @cached_property
    def oldest_queued(self) -> list[QueuedEvent]:
        """The oldest queued events, without payloads. A longer queue is not read completely."""
        wanted = ("type", "queue", "deliveries", "handed_off_to", "interruptions", "created_at")
        rows = self.store.queued.only("id", *wanted).order_by("id")
        return list(rows[:OLDEST_QUEUED])

    @cached_property
    def schedules(self) -> list[EventSchedule]:
        return list(self.store.schedules.order_by("name"))

    @cached_property
    def known_handlers(self) -> Patterns:
        """The handlers of this process and of all live workers, with their patterns."""
        known = known_here()
        for worker in self.status.living:
            for name, patterns in (worker.handlers or {}).items():
                known[name] = [*known.get(name, []), *patterns]
        return known

    def has_handler(self, type_name: str) -> bool:
        """Return whether this process or a live worker has a handler for an event type."""
        if registry.handlers_for(type_name).names:
            return True
        patterns = self.known_handlers.values()
        return any(matches(each, type_name) for several in patterns for each in several)

    @cached_property
    def now(self) -> datetime:
        """The time of the database, from the status."""
        return self.status.at


Examine = Callable[[Bus], Iterable[Result]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of ``event_doctor``. Its texts are also the troubleshooting page."""

    #: Never changes, because projects ignore checks by id: EB014.
    id: str
    #: A noun phrase that names the fault: "Blocked lanes".
    title: str
    #: The effect that a user of the bus notices.
    symptom: str
    cause: str
    fix: str
    #: Yields at least one result.
    examine: Examine
    databases: Sequence[str] = EVERY_DATABASE
    #: The check reads nothing but ``Bus.status``, so the overview can run it at each load.
    reads_status_only: bool = False
    #: ``statistics.problems`` reports the same fact, so the overview omits this check.
    is_a_problem: bool = False


def check(
    check_id: str,
    *,
    title: str,
    symptom: str,
    cause: str,
    fix: str,
    databases: Sequence[str] = EVERY_DATABASE,
    reads_status_only: bool = False,
    is_a_problem: bool = False,
) -> Callable[[Examine], Check]:
    """Turn a function that yields results into a check."""

    def decorate(examine: Examine) -> Check:
        return Check(
            id=check_id,
            title=title,
            symptom=symptom,
            cause=cause,
            fix=fix,
            examine=examine,
            databases=databases,
            reads_status_only=reads_status_only,
            is_a_problem=is_a_problem,
        )

    return decorate


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A check and its results."""

    check: Check
    results: tuple[Result, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the results; skipped only if every result is skipped."""
        order = (Verdict.FAIL, Verdict.WARN, Verdict.OK, Verdict.SKIPPED)
        return min((each.verdict for each in self.results), key=order.index)

    @property
    def is_wrong(self) -> bool:
        return self.verdict in (Verdict.WARN, Verdict.FAIL)


def examine(
    bus: Bus,
    checks: Iterable[Check],
    *,
    seconds: float = STATEMENT_SECONDS,
    all_seconds: float = math.inf,
) -> Iterator[Diagnosis]:
    """Run the checks in their order, and yield each diagnosis as soon as its check has run.

    Statements of a check are cancelled after ``seconds``, except on SQLite. After ``all_seconds``,
    the remaining checks are skipped. Raises no error of a check.
    """
    ends_at = time.monotonic() + all_seconds
    for each in checks:
        if time.monotonic() < ends_at:
            yield Diagnosis(each, tuple(_results(bus, each, seconds)))
        else:
            late = skipped(f"the earlier checks took more than {all_seconds:g} seconds")
            yield Diagnosis(each, (late,))


def _results(bus: Bus, check: Check, seconds: float) -> list[Result]:
    store = bus.store
    if store.database_name not in check.databases:
        return [skipped(f"only for {' and '.join(check.databases)}, not for {store.database_name}")]
    try:
        with _reading(bus, check, seconds):
            found = list(check.examine(bus))
    except Exception as error:
        return [_failure(store, error)]
    return found or [fail("the check returned no result", fix="Report this defect.")]


def _reading(bus: Bus, check: Check, seconds: float) -> AbstractContextManager[None]:
    """Return the context of a check: read-only, unless the check needs no statement."""
    needs_no_statement = check.reads_status_only and bus.has_read_status
    return nullcontext() if needs_no_statement else bus.store.examining(seconds)


def _failure(store: Store, error: Exception) -> Result:
    reason = store.refusal(error)
    if reason is not None:
        return skipped(reason)
    if not store.connection.in_atomic_block:
        # The session may be broken. The next check opens a new connection.
        store.connection.close()
    return fail(
        f"the check raised {failures.in_a_line(error)}",
        fix="Check that the database is available and migrated; otherwise report this defect.",
    )
