"""Checks of SQLite: EB030 to EB033."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django_eventbus.diagnosis.examination import SQLITE, Bus, Result, check, fail, ok, warn

#: Seconds that a connection should wait for the write lock. In a measurement with several writers
#: on a busy machine, publish() waited up to 9 seconds.
LEAST_TIMEOUT = 10.0
OFF, NORMAL = 0, 1


@check(
    "EB030",
    title="SQLite without WAL",
    symptom='"database is locked" appears in web requests or workers, and readers wait for '
    "writers.",
    cause="The journal mode is not WAL, so a writer needs an exclusive lock on the file to commit, "
    "and readers and writers block each other.",
    fix='Set the init_command in OPTIONS of the database to "PRAGMA journal_mode=WAL;".',
    databases=(SQLITE,),
)
def without_wal(bus: Bus) -> Iterator[Result]:
    mode = str(_session(bus)["journal_mode"]).lower()
    if mode == "memory":
        yield ok("the database is in memory")
    elif mode == "wal":
        yield ok("the journal mode is WAL")
    else:
        yield fail(f"the journal mode is {mode.upper()}", fix="PRAGMA journal_mode=WAL;")


@check(
    "EB031",
    title="SQLite that may lose commits",
    symptom="After a power failure, events and other rows that were committed are missing.",
    cause="synchronous is NORMAL or OFF. With NORMAL in WAL mode, SQLite does not write the file "
    "to disk at each commit, so a power failure may undo the last commits. With OFF it may also "
    "corrupt the file.",
    fix='Set "PRAGMA synchronous=FULL;" in the init_command of the database, or remove the PRAGMA '
    "that lowers it. If your project accepts the loss, ignore this check.",
    databases=(SQLITE,),
)
def lossy_commits(bus: Bus) -> Iterator[Result]:
    session = _session(bus)
    level = int(session["synchronous"])
    if session["journal_mode"] == "memory" or level > NORMAL:
        yield ok(f"synchronous is {level} (2 is FULL)")
    elif level == NORMAL:
        yield warn(
            "synchronous is NORMAL: a power failure may undo the last commits",
            fix="PRAGMA synchronous=FULL;",
        )
    else:
        yield fail(
            "synchronous is OFF: a power failure may corrupt the file",
            fix="PRAGMA synchronous=FULL;",
        )


@check(
    "EB032",
    title="SQLite with a short busy timeout",
    symptom='"database is locked" appears under load.',
    cause="A connection waits only a few seconds for the write lock, which other connections may "
    "hold for longer on a busy machine.",
    fix='Set OPTIONS["timeout"] of the database to 20.',
    databases=(SQLITE,),
)
def short_busy_timeout(bus: Bus) -> Iterator[Result]:
    seconds = _session(bus)["busy_timeout"] / 1000
    text = f"a connection waits {seconds:g} seconds for the write lock"
    if seconds >= LEAST_TIMEOUT:
        yield ok(text)
    else:
        yield warn(text, fix=f'DATABASES["{bus.store.using}"]["OPTIONS"]["timeout"] = 20')


@check(
    "EB033",
    title="SQLite with deferred transactions",
    symptom='"database is locked" appears at once, without any wait, in transactions that read '
    "before they write.",
    cause="A deferred transaction takes the write lock at its first write. If another connection "
    "has written since the first read, SQLite cannot wait and raises the error at once.",
    fix='Set OPTIONS["transaction_mode"] of the database to "IMMEDIATE".',
    databases=(SQLITE,),
)
def deferred_transactions(bus: Bus) -> Iterator[Result]:
    mode = str(_session(bus)["transaction_mode"] or "DEFERRED").upper()
    if mode in ("IMMEDIATE", "EXCLUSIVE"):
        yield ok(f"transactions are {mode}")
    else:
        yield warn(
            f"transactions are {mode}",
            fix=f'DATABASES["{bus.store.using}"]["OPTIONS"]["transaction_mode"] = "IMMEDIATE"',
        )


def _session(bus: Bus) -> dict[str, Any]:
    return bus.store.session_settings()
