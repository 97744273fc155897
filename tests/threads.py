"""Something done in another thread, on connections of its own, and who waits for whom."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from django.db import connection, connections


@contextmanager
def in_thread(function, *args, **kwargs):
    """Runs beside the body; what it raised is raised at its end."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(function, *args, **kwargs)
        try:
            yield running
            running.result()
        finally:
            pool.submit(connections.close_all).result()


def somebody_waits_for_a_lock():
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT 1 FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            return cursor.fetchone()
        # Not from information_schema.innodb_trx: that is a copy, and is not renewed while somebody
        # keeps asking for it.
        cursor.execute("SHOW ENGINE INNODB STATUS")
        _deadlocks_of_the_past, transactions = cursor.fetchone()[2].split("\nTRANSACTIONS\n")
        waiting = set(map(int, re.findall(r"LOCK WAIT.*?thread id (\d+)", transactions, re.DOTALL)))
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = database()")
        return waiting & {session for (session,) in cursor.fetchall()}
