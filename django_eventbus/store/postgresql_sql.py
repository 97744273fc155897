"""The SQL of the PostgreSQL store: claims, routing and settlements, each as one statement."""

from __future__ import annotations

from django_eventbus.models import EventLane, EventLog, EventWorker, QueuedEvent
from django_eventbus.store.claiming import CLAIM_COLUMNS
from django_eventbus.store.guards import GUARD
from django_eventbus.store.log import MOVED_COLUMNS

NOW = "COALESCE(%(now)s::timestamptz, statement_timestamp())"

QUEUE = f'"{QueuedEvent._meta.db_table}"'
LANE = f'"{EventLane._meta.db_table}"'
LOG = f'"{EventLog._meta.db_table}"'
WORKER = f'"{EventWorker._meta.db_table}"'

# The conditions are those of the index eventbus_ready, plus the status. The status is in no index.
# Each claim changes the status: if this column were indexed, each claim would have to write to
# every index of the table.
READY = """
    SELECT id FROM {queue}
    WHERE namespace = %(namespace)s AND queue = %(queue)s
      AND key IS NULL AND available_at IS NULL AND held_by IS NULL AND status = 'PENDING' {bound}
    ORDER BY namespace, queue, priority DESC, id LIMIT %(limit)s FOR UPDATE SKIP LOCKED"""

EVERYWHERE = READY.format(queue=QUEUE, bound="")

# Deleted rows stay in the index until no snapshot can see them. While another transaction has an
# old snapshot, the number of such rows only grows, and a scan from the start of the index reads all
# of them. So each claim sets a floor: its lowest priority, and its first event of this priority. In
# this priority, the next scan starts at that event. Other priorities are scanned from their start.
# (The priority is given as a range. With an equality condition, the planner may scan the primary
# key, including the events of other queues.)
ABOVE_FLOOR = " UNION ALL ".join(
    f"SELECT id FROM ({READY.format(queue=QUEUE, bound=bound)}) AS {name}"
    for name, bound in (
        ("higher", "AND priority > %(priority)s"),
        ("same", "AND priority BETWEEN %(priority)s AND %(priority)s AND id >= %(floor)s"),
        ("lower", "AND priority < %(priority)s"),
    )
)

# Times are read as numbers: the driver parses numbers in C, but Django parses timestamps in Python.
# date_part returns float8; EXTRACT returns numeric, which is much slower.
COLUMNS = ", ".join(
    f"date_part('epoch', {name})" if name.endswith("_at") else name for name in CLAIM_COLUMNS
)

# The CTE `picked` of CLAIM is evaluated once. A sub-select could be evaluated several times in a
# nested loop, and would then lock more than LIMIT rows. `ANY (ARRAY(...))` makes the update use the
# primary key, even if the statistics of the table are outdated. The lock on the worker's
# registration serializes claim and recovery: a recovery that considers this worker dead waits for
# the claim, or the claim waits for the recovery. In the second case, the claim finds no valid
# registration and claims no event.
UPDATE = f"""
UPDATE {QUEUE} SET status = 'PROCESSING', attempts = attempts + 1, claim_token = %(token)s,
    claimed_by = %(worker_id)s, processing_started_at = {NOW}, handed_off_to = NULL
WHERE id = ANY (ARRAY({{picked}})) RETURNING {COLUMNS}"""

OWN_REGISTRATION = (
    f"SELECT id FROM {WORKER} WHERE id = %(worker_id)s AND expires_at > {NOW} FOR KEY SHARE"
)

CLAIM = f"""
WITH me AS MATERIALIZED ({OWN_REGISTRATION}), picked AS MATERIALIZED (
    SELECT id FROM ({{ready}}) AS ready WHERE EXISTS (SELECT 1 FROM me) LIMIT %(limit)s
)
{UPDATE.format(picked="SELECT id FROM picked")}"""

CLAIM_FROM_START = CLAIM.format(ready=EVERYWHERE)
CLAIM_ABOVE_FLOOR = CLAIM.format(ready=ABOVE_FLOOR)

# The planner's statistics of a queue table are always outdated. Because of this, PostgreSQL has
# sorted the whole table to run a claim. So table scans and sorts are disabled during the
# transaction of a claim. (If PostgreSQL has to sort nevertheless, the estimated cost of the plan is
# so high that PostgreSQL would compile the plan first, so jit is disabled too.) The pages of the
# admin use the same settings.
PLANNER_SETTINGS = ("enable_seqscan", "enable_bitmapscan", "enable_sort", "jit")
ON_INDEXES = "SELECT " + ", ".join(f"set_config('{way}', 'off', true)" for way in PLANNER_SETTINGS)
NO_TABLE_SCAN = "SELECT set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true)"
PLANNER = "SELECT " + ", ".join(f"current_setting('{way}')" for way in PLANNER_SETTINGS)
RESTORE_PLANNER = "SELECT " + ", ".join(
    f"set_config('{way}', (%(before)s::text[])[{place}], true)"
    for place, way in enumerate(PLANNER_SETTINGS, start=1)
)

KEYS_WAIT = f"""
SELECT EXISTS (
    SELECT 1 FROM {QUEUE} WHERE namespace = %(namespace)s AND queue = %(queue)s
    AND key IS NOT NULL AND lane_id IS NULL AND available_at IS NULL
) OR (
    SELECT true FROM {LANE} WHERE namespace = %(namespace)s AND queue = %(queue)s
    AND claim_token IS NULL AND ready_at <= {NOW}
    ORDER BY namespace, queue, ready_at LIMIT 1
)"""

# An advisory lock lets only one worker at a time route the events of a queue. A separate statement
# takes the lock, so that the snapshot of ROUTE is newer than the commit of the previous router.
# With an older snapshot, ROUTE would also lock events that were routed meanwhile, and a settlement
# that has locked a lane may wait for these events.
LOCK_ROUTING = """
SELECT set_config('django_eventbus.has_routing_lock', pg_try_advisory_xact_lock(
    hashtext('django_eventbus.route'), hashtext(%(namespace)s || '/' || %(queue)s))::text, true)"""

# If another transaction has locked an event or a lane, all events of its key are skipped, because a
# later event must not be routed before an earlier event. To find such rows, ROUTE has to lock each
# row, which takes a tenth more time. So ROUTE does this only with `skip_locked`, which is set after
# a lock has delayed a claim, and inside a transaction of the caller.
#
# The map from keys to lanes is a JSON object. With a join, the planner would expect one row and
# choose a nested loop, which compares all events with all lanes. The queue is given as a range.
# With an equality condition, the planner may scan the primary key, including all delayed events.
#
# The update on conflict locks the lane. A transaction that wants to delete the lane waits, then
# sees the new events and keeps the lane. Lanes are locked in the order of their keys, as in
# LOCK_LANES, to avoid deadlocks.
ROUTE = f"""
WITH seen AS MATERIALIZED (
    SELECT id, key FROM {QUEUE}
    WHERE current_setting('django_eventbus.has_routing_lock') = 'true'
      AND namespace = %(namespace)s AND queue BETWEEN %(queue)s AND %(queue)s
      AND key IS NOT NULL AND lane_id IS NULL AND available_at IS NULL AND id > %(above)s
    ORDER BY namespace, queue, id LIMIT %(routed)s
), free AS MATERIALIZED (
    SELECT id FROM {QUEUE}
    WHERE %(skip_locked)s AND id = ANY (ARRAY(SELECT id FROM seen)) AND lane_id IS NULL
    FOR UPDATE SKIP LOCKED
), known AS MATERIALIZED (
    SELECT id, key FROM {LANE}
    WHERE %(skip_locked)s AND namespace = %(namespace)s AND queue = %(queue)s
      AND key = ANY (ARRAY(SELECT DISTINCT key FROM seen))
), free_lane AS MATERIALIZED (
    SELECT id FROM {LANE} WHERE id = ANY (ARRAY(SELECT id FROM known))
    FOR UPDATE SKIP LOCKED
), held AS MATERIALIZED (
    SELECT key FROM seen WHERE %(skip_locked)s AND id NOT IN (SELECT id FROM free)
    UNION SELECT key FROM known WHERE id NOT IN (SELECT id FROM free_lane)
    UNION SELECT unnest(%(held)s::text[])
), new AS MATERIALIZED (
    SELECT id, key FROM seen WHERE key NOT IN (SELECT key FROM held)
), lane AS (
    INSERT INTO {LANE} AS known (namespace, queue, key, ready_at, version)
    SELECT %(namespace)s, %(queue)s, key, {NOW}, 0
    FROM (SELECT DISTINCT key FROM new) AS keys ORDER BY key
    ON CONFLICT (namespace, queue, key) DO UPDATE SET version = known.version + 1
    RETURNING id, key
), routed AS (
    UPDATE {QUEUE} SET lane_id = ((SELECT jsonb_object_agg(key, id) FROM lane) ->> key)::bigint
    WHERE id = ANY (ARRAY(SELECT id FROM new)) AND lane_id IS NULL RETURNING id
)
SELECT (SELECT count(*) FROM routed), (SELECT max(id) FROM seen), ARRAY(SELECT key FROM held)"""

NOTIFY_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '1s'"
SHORT_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '100ms'"

OWN_LANES = f"""
WITH me AS MATERIALIZED ({OWN_REGISTRATION}), ready AS MATERIALIZED (
    SELECT id FROM {LANE} WHERE namespace = %(namespace)s AND queue = %(queue)s
      AND claim_token IS NULL AND ready_at <= {NOW} AND EXISTS (SELECT 1 FROM me)
    ORDER BY namespace, queue, ready_at LIMIT %(lanes)s FOR UPDATE SKIP LOCKED
)
UPDATE {LANE} SET claim_token = %(token)s, claimed_by = %(worker_id)s
WHERE id = ANY (ARRAY(SELECT id FROM ready)) RETURNING id"""

# OWN_LANES runs first, as a separate statement. So the snapshot in which RUNS reads the events is
# newer than the claim of the lanes. Events after a running event must wait. The run ends with an
# event that has already failed. Otherwise, each time this event fails again, the worker would have
# to release the events after it unhandled. The events of a lane are ordered by lane and id. With an
# order by id alone, the planner may scan the primary key of the whole queue.
RUNS = f"""
    SELECT place, id FROM (
        SELECT lane.place, head.id,
            bool_or(head.status <> 'PENDING') OVER (lane ORDER BY head.id)
            OR bool_or(head.deliveries IS NOT NULL) OVER (lane ORDER BY head.id
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) IS TRUE AS waits
        FROM unnest(%(owned)s::bigint[]) WITH ORDINALITY AS lane (id, place)
        CROSS JOIN LATERAL (
            SELECT id, status, deliveries FROM {QUEUE} WHERE lane_id = lane.id
            ORDER BY lane_id, id LIMIT %(run)s
        ) AS head
        WINDOW lane AS (PARTITION BY lane.id)
    ) AS heads
    WHERE NOT waits ORDER BY place, id LIMIT %(limit)s"""

# A run ends before an event that another transaction has locked, for example to coalesce it.
UNLOCKED_RUNS = """
    SELECT id FROM (
        SELECT id, bool_or(%(skip_locked)s AND id NOT IN (SELECT id FROM free))
            OVER (PARTITION BY place ORDER BY id) AS waits FROM run
    ) AS runs WHERE NOT waits"""

CLAIM_RUNS = f"""
WITH run AS MATERIALIZED ({RUNS}), free AS MATERIALIZED (
    SELECT id FROM {QUEUE} WHERE %(skip_locked)s AND id = ANY (ARRAY(SELECT id FROM run))
    FOR UPDATE SKIP LOCKED
)
{UPDATE.format(picked=UNLOCKED_RUNS)}"""

LOCK_LANES = f"""
SELECT id FROM {LANE}
WHERE id = ANY (ARRAY(SELECT unnest(%(owned)s::bigint[]))) AND claim_token = %(token)s
ORDER BY key FOR UPDATE"""

FIRST_OF_LANE = f"(SELECT id FROM {QUEUE} WHERE lane_id = lane.id ORDER BY lane_id, id LIMIT 1)"

FREE_LANES = f"""
WITH emptied AS (
    DELETE FROM {LANE} AS lane WHERE id = ANY (ARRAY(SELECT unnest(%(owned)s::bigint[])))
      AND claim_token = %(token)s AND blocked_by IS NULL AND {FIRST_OF_LANE} IS NULL
)
UPDATE {LANE} AS lane SET claim_token = NULL, claimed_by = NULL,
    ready_at = CASE WHEN blocked_by IS NULL THEN {NOW} + freed.wait * interval '1 second' END,
    held_by = CASE WHEN blocked_by IS NULL THEN freed.held_by END
FROM unnest(%(owned)s::bigint[], %(waits)s::float8[], %(held_by)s::bigint[])
    AS freed (id, wait, held_by)
WHERE lane.id = freed.id AND claim_token = %(token)s
  AND (blocked_by IS NOT NULL OR {FIRST_OF_LANE} IS NOT NULL)"""

MOVED = ", ".join(MOVED_COLUMNS)

SETTLE = f"""
WITH gone AS (
    DELETE FROM {QUEUE}
    WHERE id = ANY (ARRAY(SELECT unnest(%s::bigint[]))) AND claim_token = %s RETURNING id, {MOVED}
)
INSERT INTO {LOG} (id, {MOVED}, status, finished_at, dead_handler, error_type, error_fingerprint)
SELECT id, {MOVED}, %s, COALESCE(%s::timestamptz, statement_timestamp()), %s, %s, %s FROM gone"""

# Row data is passed as one JSON object keyed by row id, because the planner may choose a slow plan
# for a join. A column that is missing in the object is set to NULL. (OFFSET 0 prevents PostgreSQL
# from copying the object for each reference to it.)
WRITE = f"""
UPDATE {QUEUE} SET deliveries = written -> id::text -> 'deliveries',
    errors = written -> id::text -> 'errors'{{changes}}
FROM (SELECT %(written)s::jsonb AS written OFFSET 0) AS given
WHERE id = ANY (ARRAY(SELECT unnest(%(ids)s::bigint[]))) AND claim_token = %(token)s"""

WRITE_DELIVERIES = WRITE.format(changes="")

# For an event in a lane, the wait is stored in the lane, when the worker releases the lane.
WAITS_AGAIN = f""",
    status = 'PENDING', claimed_by = NULL, processing_started_at = NULL,
    claim_token = (written -> id::text ->> 'token')::uuid,
    handed_off_to = written -> id::text ->> 'handler',
    attempts = attempts - (written -> id::text ? 'handler')::int,
    available_at = CASE WHEN lane_id IS NULL THEN
        {NOW} + (written -> id::text ->> 'wait')::float8 * interval '1 second' END,
    held_by = CASE WHEN lane_id IS NULL THEN (written -> id::text ->> 'held_by')::bigint END"""

POSTPONE = WRITE.format(changes=WAITS_AGAIN)

# At SERIALIZABLE, a scan of the table or of its index would conflict with the guards of other
# workers, so the row is deleted by its ctid. The planner would prefer a scan for such a small
# table, so NO_SEQSCAN runs before LOWER_GUARD.
RAISE_GUARD = f"INSERT INTO {GUARD} (id, nowhere_id) VALUES (%s, %s) RETURNING ctid"
NO_SEQSCAN = "SET LOCAL enable_seqscan = off"
LOWER_GUARD = f"DELETE FROM {GUARD} WHERE ctid = %(place)s::tid RETURNING id"

LOCK_NAME = "SELECT pg_advisory_xact_lock(hashtext('django_eventbus.key'), hashtext(%(name)s))"

# A transaction that has written to the log has this lock until it ends. A prepared transaction has
# no process.
LOG_WRITERS = f"""
SELECT virtualtransaction FROM pg_locks
WHERE locktype = 'relation' AND relation = '{LOG}'::regclass AND mode = 'RowExclusiveLock'
  AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND pid IS DISTINCT FROM pg_backend_pid()"""

RENEW = f"""
UPDATE {WORKER} AS worker SET renewed_at = statement_timestamp(),
    expires_at = statement_timestamp() + make_interval(secs => %s),
    busy = coalesce(given.busy, worker.busy)
FROM unnest(%s::uuid[], %s::int[]) AS given (id, busy)
WHERE worker.namespace = %s AND worker.id = given.id RETURNING worker.id"""

INSERT_MANY = f"""
INSERT INTO {QUEUE} (event_id, type, version, payload, key, counted_as, namespace, queue, headers,
    priority, producer, caused_by, available_at, due_at, status, attempts, crashes, interruptions)
SELECT *, %s, %s, %s::jsonb, %s, %s, %s::uuid, {{due_at}}, {{due_at}}, 'PENDING', 0, 0, 0
FROM jsonb_to_recordset(%s::jsonb)
    AS new (event_id uuid, type text, version int, payload jsonb, key text, counted_as text)"""
