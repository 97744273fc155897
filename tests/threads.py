"""Something done in another thread, on connections of its own."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from django.db import connections


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
