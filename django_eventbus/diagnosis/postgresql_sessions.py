"""Checks of PostgreSQL sessions: EB050 to EB059."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db import Error

from django_eventbus.conf import settings
from django_eventbus.diagnosis.examination import (
    POSTGRESQL,
    Bus,
    Result,
    check,
    fail,
    ok,
    skipped,
    warn,
)
from django_eventbus.errors import failures
from django_eventbus.status import in_words
from django_eventbus.store import PostgreSQLFacts, Snapshot, remedies

#: A check warns if a session is idle in a transaction, or a transaction is prepared, for this many
#: seconds.
IDLE_SECONDS = 60.0
#: A check warns if any transaction is open for this many seconds.
SNAPSHOT_SECONDS = 300.0
#: A check fails if it reports a transaction that is open for this many seconds.
FAILING_SECONDS = 3600.0
#: Transactions that began since a slot or a standby last advanced. In a measurement, claims took
#: three times as long after a snapshot had been held for 100,000 events.
HELD_TRANSACTIONS = 100_000
#: A check warns if a session waits this many seconds for a lock on a table of the bus.
WAIT_SECONDS = 1.0
#: The check fails if the session waits this many seconds.
FAILING_WAIT_SECONDS = 30.0
#: Seconds for which a transaction may hold a lock that blocks publishers or workers.
STRONG_LOCK_SECONDS = 10.0
#: A check warns if this part of a connection limit is in use.
NEARLY_ALL = 0.8
#: The check fails if this part of a connection limit is in use.
ALMOST_NONE_LEFT = 0.95
#: A check warns if this part of the NOTIFY queue is in use. Normally it is close to 0.
NOTIFY_USAGE = 0.01
#: The check fails if this part of the NOTIFY queue is in use.
FAILING_NOTIFY_USAGE = 0.5
#: At most this many sessions are reported by each check.
MOST = 5


@check(
    "EB050",
    title="Old snapshots",
    symptom="Claims become slower all day, and the queue table grows although few events wait.",
    cause="A transaction has been open for a long time: a report, a dump, or a session that is "
    "idle in a transaction. VACUUM cannot remove row versions that the snapshot of this "
    "transaction may still need, and the queue replaces rows all day.",
    fix="End the session with pg_terminate_backend(pid). Set idle_in_transaction_session_timeout "
    "for the role that leaves transactions open, and run long reports on a standby without "
    "hot_standby_feedback.",
    databases=(POSTGRESQL,),
)
def old_snapshots(bus: Bus) -> Iterator[Result]:
    facts = PostgreSQLFacts(bus.store)
    found = facts.snapshots()
    hidden = [each for each in found if each.seconds is None]
    old = [each for each in found if _is_old(each)]
    for each in old[:MOST]:
        report = fail if (each.seconds or 0) >= FAILING_SECONDS else warn
        yield report(_snapshot_in_words(each), fix=remedies.terminate(each.pid))
    if hidden:
        yield skipped(
            f"{_named(hidden[0])} is one of {len(hidden)} sessions that hold a snapshot, but this "
            f"role may not see for how long. {_grant(facts)}"
        )
    if not old and not hidden:
        oldest = max((each.seconds or 0 for each in found), default=0)
        yield ok(
            f"the oldest of {len(found)} open snapshots is {in_words(oldest)} old"
            if found
            else "no other session holds a snapshot"
        )


def _is_old(each: Snapshot) -> bool:
    if each.seconds is None:
        return False
    if (each.state or "").startswith("idle in transaction"):
        return (each.in_state or 0) >= IDLE_SECONDS or each.seconds >= SNAPSHOT_SECONDS
    return each.seconds >= SNAPSHOT_SECONDS


def _snapshot_in_words(each: Snapshot) -> str:
    return (
        f"{_named(each)} has had a transaction open for {in_words(each.seconds or 0)} (state: "
        f"{each.state}); {each.transactions} transactions began since then, and VACUUM keeps every "
        "row version that they replaced"
    )


@check(
    "EB051",
    title="Forgotten prepared transactions",
    symptom="Claims become slower all day, or a table stays locked, but no session is the cause.",
    cause="A transaction manager prepared a transaction (PREPARE TRANSACTION) and never finished "
    "it. The transaction keeps its locks and its row versions, even after a restart of the server.",
    fix="Finish it with COMMIT PREPARED or ROLLBACK PREPARED. Set max_prepared_transactions = 0 if "
    "no transaction manager is in use.",
    databases=(POSTGRESQL,),
)
def forgotten_prepared_transactions(bus: Bus) -> Iterator[Result]:
    found = PostgreSQLFacts(bus.store).prepared_transactions()
    for each in [each for each in found if each.seconds >= IDLE_SECONDS][:MOST]:
        report = fail if each.seconds >= FAILING_SECONDS else warn
        yield report(
            f"the transaction {each.gid!r} of {each.role} was prepared {in_words(each.seconds)} "
            f"ago and is still open; {each.transactions} transactions began since then",
            fix=remedies.roll_back_prepared(each.gid),
        )
    if all(each.seconds < IDLE_SECONDS for each in found):
        yield ok(f"{len(found)} prepared transactions, none open for {in_words(IDLE_SECONDS)}")


@check(
    "EB052",
    title="Replication that holds old rows",
    symptom="Claims become slower all day, and the disk of the server fills with WAL.",
    cause="A replication slot has no consumer, or a standby with hot_standby_feedback runs a long "
    "query. VACUUM keeps all row versions that the consumer or the standby may still need.",
    fix="Start the consumer of the slot, or drop the slot with pg_drop_replication_slot(name). On "
    "the standby, end the query, or set hot_standby_feedback = off.",
    databases=(POSTGRESQL,),
)
def replication_that_holds_rows(bus: Bus) -> Iterator[Result]:
    found = PostgreSQLFacts(bus.store).held_by_replication()
    late = [each for each in found if not each.is_active or each.transactions >= HELD_TRANSACTIONS]
    for each in late[:MOST]:
        is_far_behind = each.transactions >= 10 * HELD_TRANSACTIONS
        since = f"holds row versions of the last {each.transactions} transactions"
        if not each.is_active:
            summary = f"the replication slot {each.name!r} has no consumer and {since}"
            fix = remedies.drop_slot(each.name)
        else:
            summary = f"the {each.kind} {each.name!r} is connected, but {since}"
            fix = "End the long query on the standby, or set hot_standby_feedback = off there."
        yield fail(summary, fix=fix) if is_far_behind else warn(summary, fix=fix)
    if not late:
        most = max((each.transactions for each in found), default=0)
        yield ok(
            f"{len(found)} slots and standbys hold row versions of {most} transactions at most"
            if found
            else "no replication slot and no standby holds row versions"
        )


@check(
    "EB053",
    title="Sessions that wait for a lock",
    symptom='publish() or a worker hangs, or is cancelled with "canceling statement due to lock '
    'timeout".',
    cause="Another transaction holds a lock on a table, an index or a row of the bus: a migration, "
    "VACUUM FULL, LOCK TABLE, or an operator's open transaction.",
    fix="Wait for the transaction that holds the lock, or end its session with "
    "pg_terminate_backend(pid). Run migrations with a lock_timeout.",
    databases=(POSTGRESQL,),
)
def lock_waits(bus: Bus) -> Iterator[Result]:
    facts = PostgreSQLFacts(bus.store)
    found = facts.lock_waits()
    long = [each for each in found if (each.seconds or 0) >= WAIT_SECONDS]
    for each in long[:MOST]:
        blockers = facts.sessions(each.blockers)
        names = "; ".join(map(_blocker_in_words, blockers)) or "a prepared transaction"
        summary = (
            f"{_named(each)} has waited for {in_words(each.seconds or 0)} for {each.mode} on "
            f"{each.relation}, which is blocked by {names}"
        )
        fix = "\n".join(remedies.terminate(one.pid) for one in blockers) or "See EB051."
        is_long = (each.seconds or 0) >= FAILING_WAIT_SECONDS
        yield fail(summary, fix=fix) if is_long else warn(summary, fix=fix)
    if not long:
        yield ok(
            f"{len(found)} sessions wait for a lock on a table of the bus, none for longer than "
            f"{in_words(WAIT_SECONDS)}"
        )


def _blocker_in_words(session: Any) -> str:
    if session.seconds is None:
        return _named(session)
    return f"{_named(session)} ({session.state}, transaction open for {in_words(session.seconds)})"


@check(
    "EB054",
    title="Strong locks held for long",
    symptom="All publishers and workers stop at once.",
    cause="A transaction has locked a whole table of the bus in a mode that blocks writes (SHARE "
    "or stronger): a migration in a long transaction, CREATE INDEX without CONCURRENTLY, LOCK "
    "TABLE or VACUUM FULL.",
    fix="Commit the transaction, or end its session with pg_terminate_backend(pid).",
    databases=(POSTGRESQL,),
)
def strong_locks(bus: Bus) -> Iterator[Result]:
    facts = PostgreSQLFacts(bus.store)
    found = facts.strong_locks()
    hidden = [each for each in found if each.pid is not None and each.seconds is None]
    long = [each for each in found if (each.seconds or 0) >= STRONG_LOCK_SECONDS]
    forgotten = [each for each in found if each.pid is None]
    for each in long[:MOST]:
        yield fail(
            f"{_named(each)} holds {each.mode} on {each.relation}, and its transaction has been "
            f"open for {in_words(each.seconds or 0)} (state: {each.state})",
            fix=remedies.terminate(each.pid or 0),
        )
    for each in forgotten[:MOST]:
        yield fail(
            f"a prepared transaction holds {each.mode} on {each.relation}",
            fix="Find it with SELECT * FROM pg_prepared_xacts, and finish it (see EB051).",
        )
    if hidden:
        yield skipped(
            f"{_named(hidden[0])} holds {hidden[0].mode} on {hidden[0].relation}, but this role "
            f"may not see for how long. {_grant(facts)}"
        )
    elif not long and not forgotten:
        yield ok(f"{len(found)} strong locks on tables of the bus, none held for long")


@check(
    "EB055",
    title="Connection limit nearly reached",
    symptom='Workers or web servers cannot connect: "too many clients already", "too many '
    'connections for role".',
    cause="The number of sessions is close to max_connections, or to the connection limit of the "
    "database or the role. A worker process needs concurrency + 2 connections.",
    fix="Start fewer worker processes or threads, put a pooler before the web servers, or raise "
    "the limit.",
    databases=(POSTGRESQL,),
)
def connection_limits(bus: Bus) -> Iterator[Result]:
    facts = PostgreSQLFacts(bus.store)
    server = facts.server()
    names = {"database": f"the database {server.database}", "role": f"the role {server.role}"}
    fixes = {
        "database": remedies.limit_of_database(server.database),
        "role": remedies.limit_of_role(server.role),
    }
    for each in facts.connection_limits():
        part = each.used / each.allowed if each.allowed else 1.0
        name = names.get(each.name, "the server")
        summary = f"{each.used} of {each.allowed} connections of {name} are in use"
        fix = fixes.get(each.name, "Raise max_connections and restart the server, or use a pooler.")
        if part < NEARLY_ALL:
            yield ok(summary)
        else:
            report = fail if part >= ALMOST_NONE_LEFT else warn
            yield report(summary, fix=fix)


@check(
    "EB056",
    title="Pooler in front of LISTEN",
    symptom="An event that is published into an idle queue waits for POLL_INTERVAL, and the log "
    "of the workers has errors about listening.",
    cause="A pooler in transaction mode, such as PgBouncer, gives each transaction another "
    "session. LISTEN applies to one session, so no worker receives a notification.",
    fix='Set EVENTBUS["NOTIFY"] = False, or connect the workers directly to PostgreSQL (see "Use '
    'PgBouncer" in the documentation).',
    databases=(POSTGRESQL,),
)
def pooler_in_front_of_listen(bus: Bus) -> Iterator[Result]:
    if not settings.NOTIFY:
        yield ok('EVENTBUS["NOTIFY"] is off, so workers need no session of their own to listen')
        return
    try:
        is_shared = PostgreSQLFacts(bus.store).sessions_are_shared()
    except (Error, bus.store.connection.Database.Error) as error:
        yield skipped(
            "the test needs two more connections, but one of them failed or got no answer: "
            f"{failures.in_a_line(error)}"
        )
        return
    if is_shared:
        yield warn(
            "two connections that were open at the same time used the same server process: a "
            "pooler in transaction mode is between this process and PostgreSQL",
            fix='EVENTBUS["NOTIFY"] = False',
        )
    else:
        yield ok("each of two connections kept its own server process")


@check(
    "EB057",
    title="NOTIFY queue fills up",
    symptom="The log of the server warns that the NOTIFY queue is full; later every NOTIFY fails, "
    "and workers find new events only by polling.",
    cause="A session of any database of the server has executed LISTEN and keeps a transaction "
    "open. The server keeps all notifications until that transaction ends.",
    fix="End the session that the server's log names, or the oldest transaction (see EB050).",
    databases=(POSTGRESQL,),
)
def notify_queue(bus: Bus) -> Iterator[Result]:
    usage = PostgreSQLFacts(bus.store).server().notify_usage
    summary = f"{usage:.1%} of the NOTIFY queue of the server is in use"
    if usage < NOTIFY_USAGE:
        yield ok(summary)
        return
    report = fail if usage >= FAILING_NOTIFY_USAGE else warn
    yield report(summary, fix=remedies.OLDEST_TRANSACTION)


def _named(session: Any) -> str:
    """Name a session by what an operator finds in pg_stat_activity."""
    application = f" ({session.application})" if session.application else ""
    return f"session {session.pid} of {session.role}{application}"


def _grant(facts: PostgreSQLFacts) -> str:
    return f"To let it see this: {remedies.grant_statistics(facts.server().role)}"
