"""Run code in another thread with its own connections, and detect lock waits."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from django.db import connection, connections, transaction


@contextmanager
def in_thread(function, *args, **kwargs):
    """Run the function in parallel to the body, and raise its exception at the end."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(function, *args, **kwargs)
        try:
            yield running
            running.result()
        finally:
            pool.submit(connections.close_all).result()


@contextmanager
def while_another_transaction(does):
    """Run the body while another connection has called ``does`` in an open transaction.

    The transaction is committed at the end of the body, or earlier by the function that is yielded.
    """
    done, may_commit = threading.Event(), threading.Event()

    def work():
        with transaction.atomic():
            does()
            done.set()
            # No time limit, because the body ends it and the machine may be slow.
            may_commit.wait()

    def commit():
        may_commit.set()
        running.result()

    with in_thread(work) as running:
        try:
            assert done.wait(30)
            yield commit
        finally:
            may_commit.set()


def a_session_waits_for_a_lock():
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT 1 FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            return cursor.fetchone()
        # information_schema.innodb_trx is a cached copy that is not refreshed under frequent reads.
        cursor.execute("SHOW ENGINE INNODB STATUS")
        _deadlocks_of_the_past, transactions = cursor.fetchone()[2].split("\nTRANSACTIONS\n")
        waiting = set(map(int, re.findall(r"LOCK WAIT.*?thread id (\d+)", transactions, re.DOTALL)))
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = database()")
        return waiting & {session for (session,) in cursor.fetchall()}
