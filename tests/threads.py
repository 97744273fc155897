"""Something done in another thread, on connections of its own, and who waits for whom."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from django.db import connection, connections

WAITING = {
    "postgresql": "SELECT 1 FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event_type = 'Lock'",
    "mysql": "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
}


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
        cursor.execute(WAITING[connection.vendor])
        return cursor.fetchone()
