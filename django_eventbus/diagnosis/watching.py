"""The failing checks that the overview shows.

Checks that read only the status run at each load, because the overview has read the status already.
The other checks run at most once a minute in each process, and only when the script of the overview
refreshes the page: the first load stays fast, even if the database is slow.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import datetime

from django_eventbus.diagnosis.catalogue import CHECKS
from django_eventbus.diagnosis.examination import Bus, Check, Diagnosis, examine

#: Seconds for which the results of an examination are shown.
KEPT = 60.0
#: Seconds after which a statement is cancelled, except on SQLite. A web request waits for the
#: examination.
STATEMENT_SECONDS = 1.0
#: Seconds after which the remaining checks are skipped.
ALL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Examined:
    """The results of the last examination in this process."""

    diagnoses: tuple[Diagnosis, ...]
    at: datetime
    expires_at: float


_last: dict[str, Examined] = {}
_examining = threading.Lock()


def failing(bus: Bus, *, may_examine: bool) -> list[Diagnosis]:
    """Return the failing checks, except those whose fact is a problem of the overview."""
    shown = [each for each in _applicable(bus) if not each.is_a_problem]
    last = examined(bus) if may_examine else _last.get(bus.store.using)
    known = {each.check.id: each for each in last.diagnoses} if last else {}
    fresh = examine(bus, [each for each in shown if each.reads_status_only])
    known |= {each.check.id: each for each in fresh}
    found = [known[each.id] for each in shown if each.id in known]
    return [each for each in found if each.is_wrong]


def examined(bus: Bus) -> Examined | None:
    """Return the results of all checks, at most ``KEPT`` seconds old.

    While another thread examines the database, return the previous results; None if there are none.
    """
    alias = bus.store.using
    if _is_current(alias) or not _examining.acquire(blocking=False):
        return _last.get(alias)
    try:
        checks = _applicable(bus)
        found = examine(bus, checks, seconds=STATEMENT_SECONDS, all_seconds=ALL_SECONDS)
        # Not bus.now, which reads the tables without a timeout and would wait for their locks.
        moment = bus.store.read_clock()
        _last[alias] = Examined(tuple(found), moment, time.monotonic() + KEPT)
    finally:
        _examining.release()
    return _last[alias]


def _is_current(alias: str) -> bool:
    return alias in _last and time.monotonic() < _last[alias].expires_at


def _applicable(bus: Bus) -> list[Check]:
    return [each for each in CHECKS if bus.store.database_name in each.databases]
