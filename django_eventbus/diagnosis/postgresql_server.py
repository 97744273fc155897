"""Checks of the settings of a PostgreSQL server: EB070 to EB079."""

from __future__ import annotations

from collections.abc import Iterator

from django_eventbus.conf import settings
from django_eventbus.diagnosis.examination import (
    POSTGRESQL,
    Bus,
    Result,
    check,
    fail,
    ok,
    warn,
)
from django_eventbus.registry import registry
from django_eventbus.status import in_words
from django_eventbus.store import PostgreSQLFacts, remedies

#: The safe values of each setting, and the danger of other values. The fix sets the first value.
DURABILITY = {
    "fsync": (("on",), "a crash of the machine can destroy the whole database"),
    "full_page_writes": (("on",), "a crash of the machine can destroy pages of any table"),
    "synchronous_commit": (
        ("on", "remote_apply", "remote_write", "local"),
        "a crash can lose events of the last moments although publish() was committed",
    ),
}
#: Seconds that a statement of the bus may take on a busy server.
STATEMENT_SECONDS = 5.0
#: Seconds between two statements of an idle session of a worker, with a margin: a listening session
#: checks its connection every 10 seconds.
IDLE_SESSION_SECONDS = 20.0
OLDEST_VERSION = 140000
#: In these versions CREATE INDEX CONCURRENTLY and REINDEX CONCURRENTLY can corrupt an index.
CORRUPTING_VERSIONS = range(140000, 140004)


@check(
    "EB070",
    title="Commits are not durable",
    symptom="After a crash of the server, events are missing that were published and committed.",
    cause="fsync, full_page_writes or synchronous_commit is off, so a commit is confirmed before "
    "it is on disk, or the data files can be damaged. Or a table is UNLOGGED: PostgreSQL empties "
    "such a table after a crash.",
    fix="Turn the setting on: fsync and full_page_writes in the configuration of the server, "
    "synchronous_commit for the role that publishes. Set the table to LOGGED.",
    databases=(POSTGRESQL,),
)
def not_durable(bus: Bus) -> Iterator[Result]:
    facts = PostgreSQLFacts(bus.store)
    found = facts.settings(*DURABILITY)
    is_safe = True
    for name, (safe, danger) in DURABILITY.items():
        if found[name] in safe:
            continue
        is_safe = False
        if name == "synchronous_commit":
            fix = remedies.set_for_role(facts.server().role, name, safe[0])
        else:
            fix = remedies.set_on_server(name, safe[0])
        yield fail(f"{name} is {found[name]!r}: {danger}", fix=fix)
    for each in facts.tables():
        if not each.is_logged:
            is_safe = False
            yield fail(
                f"{each.name} is UNLOGGED: it is empty after a crash of the server",
                fix=remedies.set_logged(each.name),
            )
    if is_safe:
        yield ok(", ".join(f"{name} is {value}" for name, value in found.items()))


@check(
    "EB071",
    title="Strict isolation level",
    symptom='Many handlers are retried with "could not serialize access due to concurrent update", '
    "and throughput is low.",
    cause="The isolation level of the project is REPEATABLE READ or SERIALIZABLE. The bus is "
    "correct at every level, but only in READ COMMITTED do its transactions not fail when others "
    "change the same rows.",
    fix="Use READ COMMITTED for the workers: remove isolation_level from OPTIONS of the database, "
    "and reset default_transaction_isolation.",
    databases=(POSTGRESQL,),
)
def strict_isolation(bus: Bus) -> Iterator[Result]:
    server = PostgreSQLFacts(bus.store).server()
    if server.isolation == "read committed":
        yield ok("transactions are READ COMMITTED")
        return
    fix = remedies.set_for_role(server.role, "default_transaction_isolation", "read committed")
    if "isolation_level" in bus.store.connection.settings_dict["OPTIONS"]:
        fix = f"Remove isolation_level from OPTIONS of DATABASES[{bus.store.using!r}]."
    yield warn(f"the transactions of this project are {server.isolation.upper()}", fix=fix)


@check(
    "EB072",
    title="Timeouts that end workers",
    symptom='Handlers fail with "terminating connection due to idle-in-transaction timeout" or '
    '"canceling statement due to statement timeout", although they are within their own timeout.',
    cause="A timeout of the server, the database or the role is shorter than the handlers may run. "
    "A handler runs in a transaction, which is idle while the handler computes or waits.",
    fix="Give the role of the workers a longer timeout, shorten the timeout of the handlers, or "
    "declare slow handlers with atomic=False.",
    databases=(POSTGRESQL,),
)
def short_timeouts(bus: Bus) -> Iterator[Result]:
    facts = PostgreSQLFacts(bus.store)
    longest = _longest_atomic_handler()
    least = {
        "idle_in_transaction_session_timeout": (longest, "an atomic handler may run for"),
        "transaction_timeout": (longest, "an atomic handler may run for"),
        "statement_timeout": (STATEMENT_SECONDS, "a statement of the bus may take"),
        "idle_session_timeout": (IDLE_SESSION_SECONDS, "an idle worker may be silent for"),
    }
    found = {name: int(value) / 1000 for name, value in facts.settings(*least).items()}
    is_fine = True
    for name, seconds in found.items():
        needed, what = least[name]
        if seconds and seconds < needed:
            is_fine = False
            yield warn(
                f"{name} is {in_words(seconds)}, but {what} {in_words(needed)}",
                fix=remedies.set_for_role(facts.server().role, name, f"{needed + 5:.0f}s"),
            )
    if is_fine:
        words = (
            f"{name} is {in_words(value) if value else 'off'}" for name, value in found.items()
        )
        yield ok(", ".join(words))


def _longest_atomic_handler() -> float:
    deadlines = [each.deadline for each in registry.all() if each.atomic]
    return max(deadlines, default=settings.HANDLER_TIMEOUT)


@check(
    "EB073",
    title="Unsupported or defective PostgreSQL version",
    symptom="Statements fail with syntax errors, or an index returns wrong results.",
    cause="PostgreSQL is older than 14, or is 14.0 to 14.3, in which CREATE INDEX CONCURRENTLY and "
    "REINDEX CONCURRENTLY can corrupt an index.",
    fix="Update PostgreSQL. After an update from 14.0 to 14.3, run REINDEX TABLE CONCURRENTLY on "
    "the tables of the bus.",
    databases=(POSTGRESQL,),
)
def version(bus: Bus) -> Iterator[Result]:
    server = PostgreSQLFacts(bus.store).server()
    yield version_result(server.version_number, server.version)


def version_result(number: int, name: str) -> Result:
    if number < OLDEST_VERSION:
        return fail(f"the server is PostgreSQL {name}", fix="Update to PostgreSQL 14 or later.")
    if number in CORRUPTING_VERSIONS:
        return fail(
            f"the server is PostgreSQL {name}, in which concurrent index builds corrupt indexes",
            fix="Update to PostgreSQL 14.4 or later, then REINDEX TABLE CONCURRENTLY each table.",
        )
    return ok(f"the server is PostgreSQL {name}")


@check(
    "EB074",
    title="Statistics are off",
    symptom="Tables grow without end, although autovacuum is on.",
    cause="track_counts is off, so the server does not count changed rows, and autovacuum "
    "cannot find the tables that need it. Other checks cannot run.",
    fix="Set track_counts = on in the configuration of the server, and for every role and database "
    "that overrides it.",
    databases=(POSTGRESQL,),
)
def statistics_off(bus: Bus) -> Iterator[Result]:
    value = PostgreSQLFacts(bus.store).settings("track_counts")["track_counts"]
    if value == "on":
        yield ok("track_counts is on")
    else:
        yield fail("track_counts is off", fix=remedies.set_on_server("track_counts", "on"))


@check(
    "EB075",
    title="Read-only server",
    symptom='publish() and every worker fail with "cannot execute INSERT in a read-only '
    'transaction".',
    cause="The project is connected to a standby, for example after a failover, or "
    "default_transaction_read_only is on.",
    fix="Connect to the primary: use target_session_attrs=read-write in OPTIONS with several "
    "hosts, or the address that follows the primary.",
    databases=(POSTGRESQL,),
)
def read_only(bus: Bus) -> Iterator[Result]:
    facts = PostgreSQLFacts(bus.store)
    server = facts.server()
    is_read_only = facts.settings("default_transaction_read_only")
    if server.is_standby:
        yield fail(
            "this server is a standby, which accepts no writes",
            fix="Set HOST of the database to the primary, or promote this server: "
            "SELECT pg_promote();",
        )
    elif is_read_only["default_transaction_read_only"] == "on":
        yield fail(
            "default_transaction_read_only is on for this project",
            fix=remedies.set_for_role(server.role, "default_transaction_read_only", "off"),
        )
    else:
        yield ok("the server accepts writes")
