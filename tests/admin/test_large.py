"""Pages over many dead letters stay on indexes: the number of rows they read does not grow."""

import re

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus.models import DeadEvent
from tests.admin.conftest import url

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="PostgreSQL's planner"),
]

LOG = "django_eventbus_eventlog"
MANY = 20_000
FINGERPRINTS = 30
BURY = f"""
INSERT INTO {LOG} (id, event_id, namespace, queue, type, version, payload, priority, producer,
    attempts, crashes, created_at, deliveries, errors, status, finished_at, dead_handler,
    error_type, error_fingerprint, key)
SELECT n, gen_random_uuid(), 'default', 'default', 'order.placed', 1, '{{}}', 0, '', 1, 0, now(),
    '{{}}', '[]', 'FAILED', now() - n * interval '1 second', 'shop.ship', 'ValueError',
    lpad(to_hex(n %% %s), 16, 'a'), 'order:' || n
FROM generate_series(1, %s) AS n"""


@pytest.fixture
def many_dead():
    with connection.cursor() as cursor:
        cursor.execute(BURY, [FINGERPRINTS, MANY])
        cursor.execute(f"ANALYZE {LOG}")


def plans_of(queries):
    """How PostgreSQL reads the log for each of them. Counting ends at its limit, and walks in the
    order of the list."""
    said = [query["sql"] for query in queries if LOG in query["sql"]]
    counted = [sql for sql in said if sql.startswith("SELECT COUNT(*) FROM (")]
    assert all("ORDER BY" in sql and "LIMIT 10001" in sql for sql in counted)
    return {sql: plan_of(sql) for sql in set(said) - set(counted)}


def plan_of(sql):
    with connection.cursor() as cursor:
        cursor.execute("EXPLAIN " + sql.replace("%", "%%"), [])
        return "\n".join(row[0] for row in cursor.fetchall())


@pytest.mark.parametrize(
    "address",
    [
        lambda: url("deadevent_changelist"),
        lambda: url("deadevent_changelist", query="?p=20"),
        lambda: url("deadevent_changelist", query=f"?group={'a' * 15}7"),
        lambda: url("deadevent_groups"),
        lambda: url("deadevent_change", DeadEvent.objects.earliest("pk").pk),
        lambda: url("eventlog_changelist"),
    ],
    ids=["list", "page 20", "group", "groups", "story", "log"],
)
def test_a_page_reads_no_more_than_it_shows(chief, many_dead, address):
    place = address()
    with CaptureQueriesContext(connection) as queries:
        assert chief.get(place).status_code == 200
    assert len(queries) < 15
    for sql, plan in plans_of(queries).items():
        assert f"Seq Scan on {LOG}" not in plan, f"{sql}\n{plan}"


@pytest.mark.parametrize(
    ("query", "indexes"),
    [
        ("?handler=nobody", {"eventbus_log_handler"}),
        ("?q=order:7", {"eventbus_log_dead_key", "eventbus_log_dead_type"}),
        ("?q=nothing.of", {"eventbus_log_dead_key", "eventbus_log_dead_type"}),
    ],
)
def test_what_few_dead_letters_fit_is_found_without_reading_all(chief, many_dead, query, indexes):
    with CaptureQueriesContext(connection) as queries:
        assert chief.get(url("deadevent_changelist", query=query)).status_code == 200
    asked = [each["sql"] for each in queries if LOG in each["sql"]]
    assert asked
    for plan in map(plan_of, asked):
        assert indexes <= set(re.findall(r"eventbus_log_\w+", plan)), plan


def test_many_groups_are_steps_of_an_index(chief, many_dead):
    page = chief.get(url("deadevent_groups"))
    assert len(page.context["groups"]) == 20
    assert page.context["next"] == 2
    rest = chief.get(url("deadevent_groups", query="?p=2")).context["groups"]
    assert len(rest) == FINGERPRINTS - 20
    found = {group["list_url"] for group in [*page.context["groups"], *rest]}
    assert len(found) == FINGERPRINTS
