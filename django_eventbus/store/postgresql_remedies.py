"""Statements that fix what the checks of PostgreSQL find.

They are shown to an operator and never executed, so the names need no protection against injection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: Finds the transaction that has been open for longest, in any database of the server.
OLDEST_TRANSACTION = (
    "SELECT pid, datname, usename, state, xact_start FROM pg_stat_activity "
    "WHERE xact_start IS NOT NULL ORDER BY xact_start LIMIT 1; -- then pg_terminate_backend(pid)"
)


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def terminate(pid: int) -> str:
    return f"SELECT pg_terminate_backend({pid});"


def roll_back_prepared(gid: str) -> str:
    return f"ROLLBACK PREPARED {literal(gid)};"


def drop_slot(name: str) -> str:
    return f"SELECT pg_drop_replication_slot({literal(name)});"


def grant_statistics(role: str) -> str:
    """Return the statement that lets a role see the sessions of other roles."""
    return f"GRANT pg_read_all_stats TO {role};"


def vacuum(table: str) -> str:
    return f"VACUUM (ANALYZE, VERBOSE) {quoted(table)};"


def freeze(table: str) -> str:
    return f"VACUUM (FREEZE, VERBOSE) {quoted(table)};"


def rewrite(table: str) -> str:
    return f"VACUUM (FULL, ANALYZE) {quoted(table)};"


def reindex_table(table: str) -> str:
    return f"REINDEX TABLE CONCURRENTLY {quoted(table)};"


def analyze(table: str) -> str:
    return f"ANALYZE {quoted(table)};"


def set_storage(table: str, options: Mapping[str, str]) -> str:
    pairs = ", ".join(f"{name} = {value}" for name, value in options.items())
    return f"ALTER TABLE {quoted(table)} SET ({pairs});"


def reset_storage(table: str, names: Iterable[str]) -> str:
    return f"ALTER TABLE {quoted(table)} RESET ({', '.join(names)});"


def set_logged(table: str) -> str:
    return f"ALTER TABLE {quoted(table)} SET LOGGED;"


def set_on_server(name: str, value: str) -> str:
    return f"ALTER SYSTEM SET {name} = {value}; SELECT pg_reload_conf();"


def set_for_role(role: str, name: str, value: str) -> str:
    return f"ALTER ROLE {role} SET {name} = {literal(value)};"


def reset_for_role(role: str, name: str) -> str:
    return f"ALTER ROLE {role} RESET {name};"


def limit_of_database(database: str) -> str:
    return f"ALTER DATABASE {database} CONNECTION LIMIT -1;"


def limit_of_role(role: str) -> str:
    return f"ALTER ROLE {role} CONNECTION LIMIT -1;"


def create_index(table: str, name: str, definition: str) -> str:
    named = f"{quoted(name)} " if name else ""
    return f"CREATE INDEX CONCURRENTLY {named}ON {quoted(table)} {definition};"


def add_unique(table: str, column: str, what: str) -> str:
    kind = "PRIMARY KEY" if what == "primary key" else "UNIQUE"
    return f"ALTER TABLE {quoted(table)} ADD {kind} ({quoted(column)});"


def add_foreign_key(table: str, column: str, target: str, target_column: str) -> str:
    return (
        f"ALTER TABLE {quoted(table)} ADD FOREIGN KEY ({quoted(column)}) "
        f"REFERENCES {quoted(target)} ({quoted(target_column)}) DEFERRABLE INITIALLY DEFERRED;"
    )


def reindex(index: str) -> str:
    return f"REINDEX INDEX CONCURRENTLY {quoted(index)};"


def drop_index(index: str) -> str:
    return f"DROP INDEX CONCURRENTLY {quoted(index)};"


def enable_trigger(table: str, trigger: str) -> str:
    """Both names are quoted already, or ``trigger`` is ALL."""
    return f"ALTER TABLE {table} ENABLE TRIGGER {trigger};"
