"""Checks of the tables of the bus on PostgreSQL: EB060 to EB069."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
from django_eventbus.status import in_words
from django_eventbus.store import (
    PostgreSQLFacts,
    Table,
    differing_storage,
    missing_in_schema,
    remedies,
)

#: A table with fewer dead rows is never reported.
DEAD_ROWS = 10_000
#: Multiples of the number of dead or changed rows at which autovacuum starts. From the first
#: multiple a check warns, unless the last VACUUM or ANALYZE was recent (VACUUMED_WITHIN). From the
#: second multiple the check of dead rows always fails.
TIMES_THE_THRESHOLD = 5
FAILING_TIMES_THE_THRESHOLD = 50
#: Seconds since the last VACUUM or ANALYZE during which high throughput explains many dead or
#: changed rows: autovacuum processes a busy table this often.
VACUUMED_WITHIN = 300.0
#: Smaller tables are never reported as bloated.
BLOATED_BYTES = 256 * 1024**2
#: The smallest multiple of the needed bytes that is reported as bloated.
BLOATED_TIMES = 20
#: The width of a row if the statistics do not contain it.
GUESSED_WIDTH = 500
#: The estimated size of an index entry.
INDEX_ENTRY_BYTES = 100
#: The bytes that PostgreSQL adds to each row.
ROW_OVERHEAD = 28
#: A table that was never analyzed is reported from this number of live rows.
UNANALYZED_ROWS = 10_000
#: A table with fewer rows that changed since the last ANALYZE is never reported.
CHANGED_ROWS = 100_000
#: The check warns at this multiple of the age at which autovacuum must freeze a table.
LATE_FREEZE = 1.25
#: The check fails at this age, the default of vacuum_failsafe_age: VACUUM then skips all work that
#: is not needed to freeze rows.
EMERGENCY_AGE = 1_600_000_000

_AUTOVACUUM = (
    "autovacuum",
    "track_counts",
    "autovacuum_vacuum_threshold",
    "autovacuum_vacuum_scale_factor",
    "autovacuum_analyze_threshold",
    "autovacuum_analyze_scale_factor",
    "autovacuum_freeze_max_age",
    "autovacuum_multixact_freeze_max_age",
)


@check(
    "EB060",
    title="Dead rows",
    symptom="Claims become slower, although few events wait.",
    cause="VACUUM has not removed the old versions of replaced and deleted rows: autovacuum is "
    "off, blocked by a lock or too slow, or an old snapshot forbids it (EB050, EB051, EB052).",
    fix="Look for the holder of an old snapshot first. Then run VACUUM on the table, and let "
    "autovacuum work faster: autovacuum_max_workers, autovacuum_vacuum_cost_limit.",
    databases=(POSTGRESQL,),
)
def dead_rows(bus: Bus) -> Iterator[Result]:
    facts = PostgreSQLFacts(bus.store)
    server = facts.settings(*_AUTOVACUUM)
    if reason := _no_statistics(facts, server):
        yield skipped(reason)
        return
    tables = facts.tables()
    many = [(each, _threshold("vacuum", each, server)) for each in tables]
    many = [(each, at) for each, at in many if _has_many_dead_rows(each, at)]
    for each, at in many:
        report = fail if each.dead >= FAILING_TIMES_THE_THRESHOLD * at else warn
        yield report(
            f"{each.name} has {each.dead} dead rows and {each.live} live rows; autovacuum should "
            f"start at {at:.0f} dead rows; {_last('VACUUM', each.vacuumed_before)}",
            fix=remedies.vacuum(each.name),
        )
    if not many:
        most = max(tables, key=lambda each: each.dead, default=None)
        yield ok(f"{most.dead if most else 0} dead rows at most ({most.name if most else 'none'})")


def _threshold(kind: str, table: Table, server: Mapping[str, str]) -> float:
    """Return the number of rows at which autovacuum starts to vacuum or analyze a table."""
    names = (f"autovacuum_{kind}_threshold", f"autovacuum_{kind}_scale_factor")
    base, factor = (float(table.options.get(name, server[name])) for name in names)
    return base + factor * max(table.rows_at_analyze, 0)


def _has_many_dead_rows(table: Table, at: float) -> bool:
    if table.dead < max(DEAD_ROWS, TIMES_THE_THRESHOLD * at):
        return False
    was_recent = table.vacuumed_before is not None and table.vacuumed_before < VACUUMED_WITHIN
    return not was_recent or table.dead >= FAILING_TIMES_THE_THRESHOLD * at


@check(
    "EB061",
    title="Bloated tables",
    symptom="The tables of the bus need much more disk than their rows, and physical backups are "
    "large.",
    cause="The queue was long in the past, or VACUUM did not run for some time. VACUUM does not "
    "truncate the queue table (vacuum_truncate = off), because that takes an exclusive lock; new "
    "rows use the free pages. Large indexes with few entries slow down claims.",
    fix="REINDEX TABLE CONCURRENTLY blocks neither publishers nor workers. VACUUM (FULL) returns "
    "the pages of the table, but locks the table until it ends: stop the workers first.",
    databases=(POSTGRESQL,),
)
def bloated_tables(bus: Bus) -> Iterator[Result]:
    facts = PostgreSQLFacts(bus.store)
    if reason := _no_statistics(facts, facts.settings(*_AUTOVACUUM)):
        yield skipped(reason)
        return
    tables = {each.name: each for each in facts.tables()}
    sizes = facts.sizes()
    is_fine = True
    for size in sizes:
        table = tables[size.name]
        width = (size.width or GUESSED_WIDTH) + ROW_OVERHEAD
        fill = float(table.options.get("fillfactor", 100)) / 100
        entries = max(table.live, 1)
        for what, used, needed, fix in (
            ("table", size.heap, entries * width / fill, remedies.rewrite(size.name)),
            (
                "indexes",
                size.indexes,
                entries * size.index_count * INDEX_ENTRY_BYTES,
                remedies.reindex_table(size.name),
            ),
        ):
            if used >= max(BLOATED_BYTES, BLOATED_TIMES * needed):
                is_fine = False
                yield warn(
                    f"the {what} of {size.name} takes {_megabytes(used)} for {table.live} live "
                    f"rows, which need about {_megabytes(needed)}",
                    fix=fix,
                )
    if is_fine:
        total = sum(each.heap + each.indexes for each in sizes)
        yield ok(f"the tables and indexes of the bus take {_megabytes(total)}")


@check(
    "EB062",
    title="Autovacuum is off",
    symptom="Claims become slower all day, and the queue table grows without end.",
    cause="autovacuum = off in the configuration of the server, or autovacuum_enabled = off in the "
    "storage parameters of a table of the bus.",
    fix="Turn autovacuum on; the queue cannot work without it.",
    databases=(POSTGRESQL,),
)
def autovacuum_off(bus: Bus) -> Iterator[Result]:
    facts = PostgreSQLFacts(bus.store)
    server = facts.settings(*_AUTOVACUUM)
    is_on = server["autovacuum"] == "on"
    if not is_on:
        yield fail(
            "autovacuum is off for the whole server",
            fix=remedies.set_on_server("autovacuum", "on"),
        )
    for each in facts.tables():
        for prefix, options in (("", each.options), ("toast.", each.toast_options)):
            if options.get("autovacuum_enabled", "on").lower() in ("off", "false", "no", "0"):
                is_on = False
                yield fail(
                    f"autovacuum is off for {each.name} ({prefix}autovacuum_enabled)",
                    fix=remedies.reset_storage(each.name, [f"{prefix}autovacuum_enabled"]),
                )
    if is_on:
        yield ok("autovacuum is on for the server and for every table of the bus")


@check(
    "EB063",
    title="Changed storage parameters",
    symptom="Claims write more WAL than before, or the queue table grows faster than before.",
    cause="Storage parameters that the migration set are missing, for example after a restore of "
    "single tables or an ALTER TABLE. Without free space in each page (fillfactor), claims write "
    "every index; with the default settings of autovacuum, a large queue is vacuumed too late.",
    fix="Set the parameters again with ALTER TABLE ... SET (...). A new fillfactor applies to "
    "pages that are written from then on.",
    databases=(POSTGRESQL,),
)
def changed_storage(bus: Bus) -> Iterator[Result]:
    tables = PostgreSQLFacts(bus.store).tables()
    changed = [(each, differing_storage(each.name, each.options)) for each in tables]
    for table, expected in changed:
        if expected:
            now = ", ".join(f"{name} = {table.options.get(name, 'unset')}" for name in expected)
            yield warn(
                f"{table.name} has {now}; the migration sets "
                + ", ".join(f"{name} = {value}" for name, value in expected.items()),
                fix=remedies.set_storage(table.name, expected),
            )
    if not any(expected for _, expected in changed):
        yield ok(f"the storage parameters of {len(tables)} tables are those of the migration")


@check(
    "EB064",
    title="Stale planner statistics",
    symptom="The admin, purge_events or the queries of a project on the log are slow.",
    cause="A table was never analyzed, or many rows have changed since the last ANALYZE, so the "
    "planner estimates wrong numbers of rows. Claims do not depend on these statistics.",
    fix="Run ANALYZE on the table, and check that autovacuum runs (EB062).",
    databases=(POSTGRESQL,),
)
def stale_statistics(bus: Bus) -> Iterator[Result]:
    facts = PostgreSQLFacts(bus.store)
    server = facts.settings(*_AUTOVACUUM)
    if reason := _no_statistics(facts, server):
        yield skipped(reason)
        return
    tables = facts.tables()
    stale = [each for each in tables if _has_stale_statistics(each, server)]
    for each in stale:
        yield warn(
            f"{each.changed} rows of {each.name} have changed since the last ANALYZE (it has "
            f"{each.live} live rows); {_last('ANALYZE', each.analyzed_before)}",
            fix=remedies.analyze(each.name),
        )
    if not stale:
        most = max((each.changed for each in tables), default=0)
        yield ok(f"{most} rows of a table at most have changed since its last ANALYZE")


def _has_stale_statistics(table: Table, server: Mapping[str, str]) -> bool:
    if table.analyzed_before is None:
        return table.live >= UNANALYZED_ROWS
    limit = max(CHANGED_ROWS, TIMES_THE_THRESHOLD * _threshold("analyze", table, server))
    return table.changed >= limit and table.analyzed_before >= VACUUMED_WITHIN


@check(
    "EB065",
    title="Missing tables, indexes or constraints",
    symptom="Claims, the admin or purge_events take seconds, or duplicates appear.",
    cause="Someone dropped an index or a constraint that the migrations created, a restore was "
    "incomplete, or a migration is not applied.",
    fix="Create it with the statement that the check prints. CREATE INDEX CONCURRENTLY cannot run "
    "in a transaction, but blocks no writes.",
    databases=(POSTGRESQL,),
)
def missing_indexes(bus: Bus) -> Iterator[Result]:
    facts = PostgreSQLFacts(bus.store)
    existing = len(facts.indexes())
    is_complete = True
    for each in missing_in_schema(facts):
        is_complete = False
        yield fail(f"{each.table} has no {each.what}", fix=each.statement)
    if is_complete:
        yield ok(f"the tables of the bus have all their constraints and {existing} indexes")


@check(
    "EB066",
    title="Invalid indexes",
    symptom="Queries are slow although the index exists, and each write still maintains it.",
    cause="CREATE INDEX CONCURRENTLY or REINDEX CONCURRENTLY was cancelled or failed, and left an "
    "index that PostgreSQL does not use.",
    fix="Build an index of the migrations again with REINDEX INDEX CONCURRENTLY. Drop a leftover "
    "(its name ends with _ccnew or _ccold), or an index that is not of the bus.",
    databases=(POSTGRESQL,),
)
def invalid_indexes(bus: Bus) -> Iterator[Result]:
    indexes = PostgreSQLFacts(bus.store).indexes()
    invalid = [each for each in indexes if not each.is_valid and not each.is_being_built]
    for each in invalid:
        is_leftover = each.name.rstrip("0123456789").endswith(("_ccnew", "_ccold"))
        yield fail(
            f"the index {each.name} on {each.on_table} is invalid, so no query uses it",
            fix=(remedies.drop_index if is_leftover else remedies.reindex)(each.name),
        )
    if not invalid:
        building = sum(not each.is_valid for each in indexes)
        yield ok(f"{len(indexes) - building} indexes are valid, {building} are being built")


@check(
    "EB067",
    title="Transaction ids run out",
    symptom="The server warns that a database must be vacuumed within some million transactions; "
    "finally it refuses every write.",
    cause="Autovacuum could not freeze a table: it is off or too slow, or an old snapshot, a "
    "prepared transaction or a replication slot forbids it (EB050, EB051, EB052).",
    fix="Remove the cause with the fix of EB050, EB051, EB052 or EB062, then run VACUUM (FREEZE) "
    "on the table.",
    databases=(POSTGRESQL,),
)
def transaction_ids(bus: Bus) -> Iterator[Result]:
    facts = PostgreSQLFacts(bus.store)
    server = facts.settings(*_AUTOVACUUM)
    tables = facts.tables()
    is_fine = True
    for each in tables:
        for what, age, setting in (
            ("transactions", each.age, "autovacuum_freeze_max_age"),
            ("multixacts", each.multixact_age, "autovacuum_multixact_freeze_max_age"),
        ):
            limit = int(each.options.get(setting, server[setting]))
            if age < LATE_FREEZE * limit:
                continue
            is_fine = False
            report = fail if age >= EMERGENCY_AGE else warn
            yield report(
                f"{each.name} has rows that were last frozen {age} {what} ago; autovacuum should "
                f"freeze them after {limit}, and PostgreSQL stops at about 2 billion",
                fix=remedies.freeze(each.name),
            )
    if is_fine:
        oldest = max((each.age for each in tables), default=0)
        yield ok(f"the oldest table was frozen {oldest} transactions ago")


@check(
    "EB068",
    title="Disabled triggers",
    symptom="Writes to a bridged table publish no events, or a handler can commit its group early.",
    cause="ALTER TABLE ... DISABLE TRIGGER, for example after a bulk load, or "
    "session_replication_role = replica for the role of the project. The commit guard is a "
    "foreign key, which PostgreSQL checks with a trigger, too.",
    fix="Enable the trigger with the statement that the check prints.",
    databases=(POSTGRESQL,),
)
def disabled_triggers(bus: Bus) -> Iterator[Result]:
    facts = PostgreSQLFacts(bus.store)
    role = facts.settings("session_replication_role").get("session_replication_role")
    if role == "replica":
        yield fail(
            "session_replication_role is 'replica', so triggers do not fire in this session",
            fix=remedies.reset_for_role(facts.server().role, "session_replication_role"),
        )
    silent = facts.silent_triggers()
    for each in silent:
        what = (
            f"a foreign key trigger ({each.name})" if each.is_internal else f"trigger {each.name}"
        )
        name = "ALL" if each.is_internal else each.name
        yield fail(
            f"{what} of {each.on_table} is disabled",
            fix=remedies.enable_trigger(each.on_table, name),
        )
    if not silent and role != "replica":
        yield ok(f"{facts.number_of_bridge_triggers()} triggers of bridges; no trigger is disabled")


def _no_statistics(facts: PostgreSQLFacts, server: Mapping[str, str]) -> str:
    """Return why the statistics of tables cannot be used, or an empty string."""
    if server["track_counts"] != "on":
        return "track_counts is off, so the server counts no rows (see EB074)"
    if facts.server().is_standby:
        return "a standby counts no rows: run event_doctor on the primary"
    return ""


def _last(what: str, seconds: float | None) -> str:
    return f"no {what} so far" if seconds is None else f"last {what} {in_words(seconds)} ago"


def _megabytes(size: float) -> str:
    return f"{size / 1024**2:,.1f} MB"
