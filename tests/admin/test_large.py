"""Pages over many rows use indexes with any statistics of PostgreSQL."""

import re
import uuid

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_eventbus import dead_letters
from django_eventbus.models import DeadEvent, EventReplay
from tests.admin.conftest import url
from tests.plans import TABLES, explaining, make_tables_as_new

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.skipif("connection.vendor != 'postgresql'", reason="PostgreSQL's planner"),
]

QUEUE, LANES, LOG = TABLES
MANY = 10_000
PAGE = 100
FINGERPRINTS = 30
CAUSE = uuid.UUID(int=7)
EVENT = """event_id, namespace, queue, type, version, payload, priority, producer, attempts,
    crashes, interruptions, created_at, caused_by"""
OF_EVENT = """gen_random_uuid(), 'default', 'default', 'order.placed', 1, '{}', 0, '', 1, 0, 0,
    now(), lpad(to_hex(n), 32, '0')::uuid"""
# Every second event of the log is a dead letter.
FILL_LOG = f"""
INSERT INTO {LOG} (id, {EVENT}, deliveries, errors, status, finished_at, dead_handler, error_type,
    error_fingerprint, key)
SELECT n, {OF_EVENT}, '{{}}', '[]', CASE WHEN dead THEN 'FAILED' ELSE 'COMPLETED' END,
    now() - n * interval '1 second', CASE WHEN dead THEN 'shop.ship' ELSE '' END, 'ValueError',
    CASE WHEN dead THEN lpad(to_hex(n / 2 %% %s), 16, 'a') ELSE '' END, 'order:' || n
FROM (SELECT n, n %% 2 = 0 AS dead FROM generate_series(1, %s) AS n) AS numbers"""
# A third is ready, a third delayed, a third in lanes.
FILL_QUEUE = f"""
INSERT INTO {QUEUE} (id, {EVENT}, status, key, lane_id, available_at)
SELECT n, {OF_EVENT}, 'PENDING', CASE WHEN n %% 3 = 0 THEN 'order:' || n END,
    CASE WHEN n %% 3 = 0 THEN n END, CASE WHEN n %% 3 = 1 THEN now() + n * interval '1 second' END
FROM generate_series(1, %s) AS n"""
FILL_LANES = f"""
INSERT INTO {LANES} (id, namespace, queue, key, ready_at, version)
SELECT n, 'default', 'default', 'order:' || n, now() - n * interval '1 second', 0
FROM generate_series(1, %s) AS n"""


def run(sql, params=None):
    with connection.cursor() as cursor:
        cursor.execute(sql, params)


def fill():
    run(FILL_LOG, [FINGERPRINTS, MANY])
    run(FILL_QUEUE, [MANY])
    run(FILL_LANES, [MANY])


@pytest.fixture
def many_rows():
    make_tables_as_new()
    fill()
    run(f"ANALYZE {', '.join(TABLES)}")


@pytest.fixture(params=["analyzed", "never analyzed", "analyzed when empty"])
def statistics(request):
    """Insert many rows and set their statistics."""
    make_tables_as_new()
    for table in TABLES:
        run(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    if request.param == "analyzed when empty":
        run(f"ANALYZE {', '.join(TABLES)}")
    fill()
    if request.param == "analyzed":
        run(f"ANALYZE {', '.join(TABLES)}")


def assert_no_table_is_read(plans):
    assert plans
    for sql, plan in plans:
        assert not re.search(r"Seq Scan on django_eventbus", plan), f"{sql}\n{plan}"


#: A sort, and the rows that the node below it returned.
SORT = r"(?<!Incremental )Sort  \(.*?->.*?actual rows=([\d.]+) loops=(\d+)"


def assert_no_more_than_a_page_is_sorted(plans):
    """PostgreSQL sorts a single row, too. An incremental sort reads a page, and the rows that ended
    in the same moment."""
    for sql, plan in plans:
        assert "actual rows=" in plan
        for rows, loops in re.findall(SORT, plan, re.DOTALL):
            assert float(rows) * int(loops) <= PAGE, f"{sql}\n{plan}"


LISTS = (
    ("deadevent_changelist", ""),
    ("deadevent_changelist", "?p=20"),
    ("deadevent_changelist", f"?group={'a' * 15}7"),
    ("deadevent_changelist", "?handler=shop.ship"),
    ("deadevent_groups", ""),
    ("eventlog_changelist", ""),
    ("eventlog_changelist", "?p=20"),
    ("eventlog_changelist", "?status=COMPLETED"),
    ("eventlog_changelist", "?status=FAILED"),
    ("eventlog_changelist", "?q=order:7"),
    ("eventlog_changelist", "?q=order.pl"),
    ("eventlog_changelist", "?q=nothing.of"),
    ("queuedevent_changelist", ""),
    ("queuedevent_changelist", "?p=20"),
    ("queuedevent_changelist", "?status=PENDING"),
    ("queuedevent_changelist", "?handed_off_to=shop.mail"),
    ("queuedevent_changelist", "?replay=7"),
    ("eventlane_changelist", ""),
    ("eventlane_changelist", "?p=20"),
    ("eventlane_changelist", "?state=blocked"),
    ("minutestatistics_changelist", ""),
)


def test_a_page_reads_only_the_rows_it_shows(chief, statistics):
    # All pages are in one test, because filling the tables takes longer than reading them.
    for name, query in LISTS:
        with explaining(analyze=True) as plans:
            assert chief.get(url(name, query=query)).status_code == 200
        assert_no_table_is_read(plans)
        assert_no_more_than_a_page_is_sorted(plans)


def test_a_search_reads_no_table_from_its_start(chief, statistics):
    places = (
        url("deadevent_changelist", query="?q=order:8"),
        url("deadevent_changelist", query=f"?q={CAUSE}"),
        url("eventlog_changelist", query=f"?q={CAUSE}"),
        url("queuedevent_changelist", query="?q=order:9"),
        url("deadevent_bulk", "retry"),
    )
    for place in places:
        with explaining() as plans:
            assert chief.get(place).status_code == 200
        assert_no_table_is_read(plans)


def test_the_effects_of_an_event_are_found_by_their_cause(chief, statistics):
    letter = DeadEvent.objects.earliest("pk")
    DeadEvent.objects.filter(pk=letter.pk).update(event_id=CAUSE)
    with explaining() as plans:
        assert chief.get(url("deadevent_change", letter.pk)).status_code == 200
    effects = [plan for sql, plan in plans if '"caused_by" = ' in sql]
    assert len(effects) == 3
    for plan in effects:
        assert re.search("eventbus_(log_)?caused", plan), plan


def test_the_copies_of_replays_are_found_by_indexes(chief, statistics):
    until = timezone.now()
    for _ in range(3):
        row = EventReplay.objects.create(type="*", until=until)
    for table in (QUEUE, LOG):
        run(f"UPDATE {table} SET replay_id = %s WHERE id <= 20", [row.pk])
    with explaining() as plans:
        page = chief.get(url("eventreplay_changelist"))
    newest = page.context["cl"].result_list[0].progress_shown
    assert (newest.waiting, newest.dead) == (20, 10)
    assert len(plans) == 2
    for (sql, plan), index in zip(plans, ("replayed", "log_replayed"), strict=True):
        assert f"eventbus_{index}" in plan, f"{sql}\n{plan}"
    with explaining() as plans:
        page = chief.get(url("deadevent_changelist", query=f"?replay={row.pk}"))
    assert len(page.context["cl"].result_list) == 10
    assert_no_table_is_read(plans)


def test_a_search_of_the_log_uses_the_index_of_its_keys(chief, statistics):
    with explaining() as plans:
        page = chief.get(url("eventlog_changelist", query="?q=order:7"))
    assert [event.key for event in page.context["cl"].result_list] == ["order:7"]
    for sql, plan in plans:
        assert "eventbus_log_key" in plan, f"{sql}\n{plan}"


def test_the_list_of_dead_letters_uses_their_index(statistics):
    with explaining(analyze=True) as plans:
        assert len(dead_letters.list()) == 100
        assert len(dead_letters.list(key="order:8")) == 1
    assert_no_table_is_read(plans)
    assert_no_more_than_a_page_is_sorted(plans[:1])


@pytest.mark.parametrize(
    ("query", "indexes"),
    [
        ("?handler=nobody", {"eventbus_log_handler"}),
        ("?q=order:8", {"eventbus_log_dead_key", "eventbus_log_dead_type"}),
        ("?q=nothing.of", {"eventbus_log_dead_key", "eventbus_log_dead_type"}),
    ],
)
def test_a_selective_filter_uses_an_index(chief, many_rows, query, indexes):
    with explaining() as plans:
        assert chief.get(url("deadevent_changelist", query=query)).status_code == 200
    assert plans
    for _, plan in plans:
        assert indexes <= set(re.findall(r"eventbus_log_\w+", plan)), plan


def test_a_page_costs_few_statements(chief, many_rows):
    for name, query in LISTS:
        with CaptureQueriesContext(connection) as queries:
            assert chief.get(url(name, query=query)).status_code == 200
        assert len(queries) < 25, queries.captured_queries


def test_the_groups_of_many_rows_are_all_shown_in_pages(chief, many_rows):
    page = chief.get(url("deadevent_groups"))
    assert len(page.context["groups"]) == 20
    assert page.context["next"] == 2
    rest = chief.get(url("deadevent_groups", query="?p=2")).context["groups"]
    assert len(rest) == FINGERPRINTS - 20
    found = {group["list_url"] for group in [*page.context["groups"], *rest]}
    assert len(found) == FINGERPRINTS
