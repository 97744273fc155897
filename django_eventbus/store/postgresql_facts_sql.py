"""The statements of ``postgresql_facts``.

They read only catalogs and statistics, so their run time does not depend on the number of events.
They see only the current database, except where its tables depend on the whole server.
"""

#: The parameter ``tables`` has the quoted names of the tables of the bus.
_OURS = "SELECT to_regclass(t)::oid FROM unnest(%(tables)s::text[]) t"

#: Seconds since a time of another session. The time is NULL if this role may not see it.
_XACT_SECONDS = "extract(epoch FROM clock_timestamp() - a.xact_start)::float8"

# pg_settings shows the timeouts of this check as the current values, so the values at the start of
# the session are read.
SETTINGS = """
SELECT name, CASE WHEN name IN ('statement_timeout', 'lock_timeout') THEN reset_val ELSE setting END
       AS value
FROM pg_settings WHERE name = ANY(%(names)s)
"""

SERVER = """
SELECT current_setting('server_version_num')::int AS version_number,
       current_setting('server_version') AS version,
       pg_is_in_recovery() AS is_standby,
       current_setting('transaction_isolation') AS isolation,
       pg_notification_queue_usage()::float8 AS notify_usage,
       quote_ident(session_user) AS role,
       quote_ident(current_database()) AS database
"""

# VACUUM is omitted, because other vacuums ignore its snapshot. A transaction without a snapshot and
# without an id keeps no row versions.
SNAPSHOTS = f"""
SELECT a.pid, a.usename AS role, a.application_name AS application, a.state,
       {_XACT_SECONDS} AS seconds,
       extract(epoch FROM clock_timestamp() - a.state_change)::float8 AS in_state,
       greatest(age(a.backend_xmin), age(a.backend_xid)) AS transactions
FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
  AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
  AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum v WHERE v.pid = a.pid)
ORDER BY a.xact_start, a.pid
"""

SESSIONS = f"""
SELECT a.pid, a.usename AS role, a.application_name AS application, a.state,
       {_XACT_SECONDS} AS seconds
FROM pg_stat_activity a WHERE a.pid = ANY(%(pids)s) ORDER BY a.xact_start, a.pid
"""

PREPARED = """
SELECT gid, owner AS role,
       extract(epoch FROM clock_timestamp() - prepared)::float8 AS seconds,
       age(transaction) AS transactions
FROM pg_prepared_xacts WHERE database = current_database() ORDER BY prepared
"""

# A logical slot keeps only rows of the catalogs of its own database.
HELD_BY_REPLICATION = """
SELECT 'slot' AS kind, slot_name::text AS name, active AS is_active,
       greatest(age(xmin), age(catalog_xmin)) AS transactions
FROM pg_replication_slots
WHERE (xmin IS NOT NULL OR catalog_xmin IS NOT NULL)
  AND (slot_type = 'physical' OR database = current_database())
UNION ALL
SELECT 'standby', application_name, true, age(backend_xmin)
FROM pg_stat_replication WHERE backend_xmin IS NOT NULL
"""

# A partitioned table has no statistics and no age; its partitions are not read.
TABLES = """
SELECT c.relname AS name, c.relpersistence = 'p' AS is_logged,
       c.reltuples::float8 AS rows_at_analyze, c.reloptions AS options,
       toast.reloptions AS toast_options,
       CASE c.relkind WHEN 'r' THEN greatest(age(c.relfrozenxid), age(toast.relfrozenxid))
            ELSE 0 END AS age,
       CASE c.relkind WHEN 'r' THEN greatest(mxid_age(c.relminmxid), mxid_age(toast.relminmxid))
            ELSE 0 END AS multixact_age,
       coalesce(s.n_live_tup, 0) AS live, coalesce(s.n_dead_tup, 0) AS dead,
       coalesce(s.n_mod_since_analyze, 0) AS changed,
       extract(epoch FROM clock_timestamp() - greatest(s.last_analyze, s.last_autoanalyze))::float8
           AS analyzed_before,
       extract(epoch FROM clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum))::float8
           AS vacuumed_before
FROM unnest(%(tables)s::text[]) t
JOIN pg_class c ON c.oid = to_regclass(t)
LEFT JOIN pg_class toast ON toast.oid = c.reltoastrelid
LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
ORDER BY c.relname
"""

# The functions of sizes wait for a transaction that holds ACCESS EXCLUSIVE on the table. Without
# statistics of the columns, the width is unknown (NULL).
SIZES = """
SELECT c.relname AS name, pg_relation_size(c.oid) AS heap, pg_indexes_size(c.oid) AS indexes,
       (SELECT count(*) FROM pg_index i WHERE i.indrelid = c.oid) AS index_count,
       (SELECT sum((1 - w.null_frac) * w.avg_width)::float8 FROM pg_stats w
        WHERE w.schemaname = n.nspname AND w.tablename = c.relname) AS width
FROM unnest(%(tables)s::text[]) t
JOIN pg_class c ON c.oid = to_regclass(t)
JOIN pg_namespace n ON n.oid = c.relnamespace
ORDER BY c.relname
"""

INDEXES = """
SELECT c.relname AS on_table, i.relname AS name, x.indisvalid AND x.indisready AS is_valid,
       x.indisunique AS is_unique, x.indpred IS NOT NULL AS is_partial,
       (SELECT array_agg(a.attname::text ORDER BY k.place)
        FROM unnest(x.indkey::int2[]) WITH ORDINALITY k(number, place)
        JOIN pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = k.number) AS columns,
       EXISTS (SELECT FROM pg_stat_progress_create_index p WHERE p.datname = current_database()
               AND coalesce(p.index_relid, i.oid) = i.oid) AS is_being_built
FROM unnest(%(tables)s::text[]) t
JOIN pg_class c ON c.oid = to_regclass(t)
JOIN pg_index x ON x.indrelid = c.oid
JOIN pg_class i ON i.oid = x.indexrelid
ORDER BY c.relname, i.relname
"""

CONSTRAINTS = """
SELECT c.relname AS on_table, k.conname AS name, k.contype::text AS kind,
       k.condeferred AS is_deferred,
       (SELECT array_agg(a.attname::text) FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum = ANY(k.conkey)) AS columns
FROM unnest(%(tables)s::text[]) t
JOIN pg_class c ON c.oid = to_regclass(t)
JOIN pg_constraint k ON k.conrelid = c.oid
"""

# A session that waits for a row lock waits for a transaction id, and that wait names no table. But
# the session then holds a lock on the row (locktype tuple), and that lock names the table.
LOCK_WAITS = f"""
WITH ours AS (
    SELECT oid FROM pg_class WHERE oid IN ({_OURS})
    UNION ALL SELECT indexrelid FROM pg_index WHERE indrelid IN ({_OURS})
), locks AS MATERIALIZED (
    SELECT pid, locktype, relation, mode, granted, waitstart FROM pg_locks
    WHERE pid <> pg_backend_pid()
      AND (database = (SELECT oid FROM pg_database WHERE datname = current_database())
           OR locktype = 'transactionid')
), waiting AS (
    SELECT w.pid, w.mode, w.waitstart, coalesce(w.relation, held.relation) AS relation
    FROM locks w
    LEFT JOIN locks held ON held.pid = w.pid AND held.granted AND held.locktype = 'tuple'
         AND w.locktype = 'transactionid'
    WHERE NOT w.granted AND coalesce(w.relation, held.relation) IN (SELECT oid FROM ours)
    ORDER BY w.waitstart LIMIT 20
)
SELECT w.pid, a.usename AS role, a.application_name AS application, w.mode,
       c.relname AS relation, pg_blocking_pids(w.pid) AS blockers,
       extract(epoch FROM clock_timestamp() - w.waitstart)::float8 AS seconds
FROM waiting w
JOIN pg_class c ON c.oid = w.relation
LEFT JOIN pg_stat_activity a ON a.pid = w.pid
ORDER BY w.waitstart, w.pid
"""

# ROW EXCLUSIVE and weaker modes block no publisher and no worker; autovacuum and CREATE INDEX
# CONCURRENTLY take SHARE UPDATE EXCLUSIVE, which also blocks neither.
STRONG_LOCKS = f"""
SELECT l.pid, min(a.usename) AS role, min(a.application_name) AS application,
       min(a.state) AS state,
       extract(epoch FROM clock_timestamp() - min(a.xact_start))::float8 AS seconds,
       min(c.relname) AS relation, min(l.mode) AS mode
FROM pg_locks l
JOIN pg_class c ON c.oid = l.relation
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.granted AND l.locktype = 'relation' AND l.pid IS DISTINCT FROM pg_backend_pid()
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
  AND l.relation IN ({_OURS})
GROUP BY l.pid
ORDER BY min(a.xact_start), l.pid
"""

# Triggers of foreign keys on the tables of the bus are included: the commit guard is one.
SILENT_TRIGGERS = f"""
SELECT c.oid::regclass::text AS on_table, quote_ident(t.tgname) AS name,
       t.tgisinternal AS is_internal
FROM pg_trigger t
JOIN pg_class c ON c.oid = t.tgrelid
JOIN pg_proc p ON p.oid = t.tgfoid
WHERE t.tgenabled NOT IN ('O', 'A')
  AND (t.tgrelid IN ({_OURS}) OR (t.tgname IN ('eventbus_insert', 'eventbus_update',
       'eventbus_delete') AND p.proname LIKE 'eventbus\\_%%'))
ORDER BY 1, 2
"""

BRIDGE_TRIGGERS = """
SELECT count(*) AS number FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
WHERE t.tgname IN ('eventbus_insert', 'eventbus_update', 'eventbus_delete')
  AND p.proname LIKE 'eventbus\\_%%'
"""

# Each row is a limit: of the server, of the database, of the role of this session.
CONNECTIONS = """
WITH sessions AS (
    SELECT datname, usename FROM pg_stat_activity
    WHERE datid IS NOT NULL AND usesysid IS NOT NULL
)
SELECT 'max_connections' AS name, count(*) AS used,
       current_setting('max_connections')::int
       - current_setting('superuser_reserved_connections')::int
       - coalesce(current_setting('reserved_connections', true)::int, 0) AS allowed
FROM sessions
UNION ALL
SELECT 'database', (SELECT count(*) FROM sessions s WHERE s.datname = d.datname), d.datconnlimit
FROM pg_database d WHERE d.datname = current_database() AND d.datconnlimit >= 0
UNION ALL
SELECT 'role', (SELECT count(*) FROM sessions s WHERE s.usename = r.rolname), r.rolconnlimit
FROM pg_roles r WHERE r.rolname = session_user AND r.rolconnlimit >= 0
"""
