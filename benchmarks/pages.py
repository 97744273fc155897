"""The response times of the admin's pages with many dead letters."""

from __future__ import annotations

import argparse
import re
import statistics
import time

from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from benchmarks.figures import Figure, milliseconds, statements
from django_eventbus.models import EventLog, QueuedEvent

DEAD = 1_000_000
KINDS_OF_ERROR = 10
VISITS = 7
PAGES = {
    "overview": "admin:django_eventbus_minutestatistics_changelist",
    "dead letters": "admin:django_eventbus_deadevent_changelist",
    "dead letters by error": "admin:django_eventbus_deadevent_groups",
}
#: One kind of error: a tenth of them.
CHOSEN = f"?group={'0' * 15}1"
HIDDEN = re.compile(r'name="run" value="([^"]*)"')

_BURY = f"""
INSERT INTO {EventLog._meta.db_table} (id, event_id, namespace, queue, type, version, payload,
    priority, producer, attempts, crashes, interruptions, created_at, deliveries, errors, status,
    finished_at, dead_handler, error_type, error_fingerprint)
SELECT n, gen_random_uuid(), 'default', 'default', 'order.placed', 1, '{{"order": 7}}', 0, 'bench',
    4, 0, 0, now(), '{{}}', '[]', 'FAILED', now() - n * interval '1 second', 'shop.ship',
    'ValueError', lpad(to_hex(1 + n %% {KINDS_OF_ERROR}), 16, '0')
FROM generate_series(1, %s) AS n"""


def measure(options: argparse.Namespace) -> list[Figure]:
    if connection.vendor != "postgresql":
        return []  # other databases take too long to fill a table of this size
    call_command("flush", interactive=False, verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute(_BURY, [DEAD])
        cursor.execute(f"VACUUM ANALYZE {EventLog._meta.db_table}")
    visitor = Client()
    visitor.force_login(User.objects.create_superuser("visitor"))
    seen = [figure for name, page in PAGES.items() for figure in visits(visitor, name, page)]
    return [*seen, retry_by_filter(visitor)]


def retry_by_filter(visitor: Client) -> Figure:
    """Retry all events of one error. Like the progress page, send requests until all are done."""
    address = reverse("admin:django_eventbus_deadevent_bulk", args=["retry"]) + CHOSEN
    began = time.perf_counter()
    page = visitor.get(address)
    while found := HIDDEN.search(page.content.decode()):
        page = visitor.post(address, {"run": found[1]})
    took = time.perf_counter() - began
    assert QueuedEvent.objects.count() == DEAD // KINDS_OF_ERROR
    what = f"admin, retry of {DEAD // KINDS_OF_ERROR:,} by filter, all requests"
    return milliseconds(what, took)


def visits(visitor: Client, name: str, page: str) -> list[Figure]:
    address = reverse(page)
    took = []
    for _ in range(VISITS):
        began = time.perf_counter()
        with CaptureQueriesContext(connection) as queries:
            response = visitor.get(address)
        took.append(time.perf_counter() - began)
        assert response.status_code == 200
    what = f"admin, {name}, {DEAD:,} dead"
    return [milliseconds(what, statistics.median(took)), statements(what, len(queries))]
