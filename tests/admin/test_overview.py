"""The overview: content, permissions and number of queries."""

import re
import time
import uuid
from dataclasses import replace
from datetime import timedelta

import pytest
from django.contrib.staticfiles import finders
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import translation

from django_eventbus import RetryPolicy, handler, pauses, publish, publish_many, status
from django_eventbus.admin.overview import NOTHING, bars
from django_eventbus.diagnosis import watching
from django_eventbus.diagnosis.examination import Bus
from django_eventbus.models import EventWorker, MinuteStatistics, QueuedEvent
from tests.admin.people import client_with
from tests.bus import drain
from tests.plans import that_read

pytestmark = pytest.mark.django_db

OVERVIEW = "/admin/django_eventbus/minutestatistics/"
STATISTICS = f"{OVERVIEW}statistics/"
CHECKS = f"{OVERVIEW}checks/"
VIEWS = ("view_minutestatistics", "view_queuedevent", "view_deadevent", "view_eventworker")


@pytest.fixture
def operator():
    return client_with("view_minutestatistics")


def minute(now, ago=1, **values):
    MinuteStatistics.objects.create(
        namespace="default",
        minute=now.replace(second=0, microsecond=0) - timedelta(minutes=ago),
        worker_id=uuid.uuid4(),
        queue="default",
        **values,
    )


def tiles(answer):
    return {tile.label: tile.value for tile in answer.context["tiles"]}


def text_of(answer):
    return answer.content.decode()


def test_an_empty_bus_has_empty_tiles(operator):
    shown = tiles(operator.get(OVERVIEW))
    assert shown["Pending"] == shown["Dead letters"] == shown["Workers"] == "0"
    assert shown["Failure rate"] == NOTHING


def test_the_tiles_show_the_metrics_of_the_status(operator, store):
    @handler("bad", name="billing.charge", retry=RetryPolicy(max_retries=0))
    def fail(event):
        raise ValueError

    publish("bad")
    drain()
    publish_many(("later", n) for n in range(1200))
    minute(store.read_clock(), done=10, up_to_3ms=10)
    answer = operator.get(OVERVIEW)
    assert (tiles(answer)["Pending"], tiles(answer)["Dead letters"]) == ("1,200", "1")
    assert tiles(answer)["Events per minute"] == "2.0"
    assert "1 dead letter in billing.charge: ValueError" in text_of(answer)
    assert "No worker is running: run manage.py run_event_worker" in text_of(answer)


def test_a_capped_count_is_marked(operator, monkeypatch):
    monkeypatch.setattr(status, "COUNTED_UP_TO", 3)
    publish_many(("a", n) for n in range(5))
    assert tiles(operator.get(OVERVIEW))["Pending"] == "3+"


def test_the_script_fetches_the_content_without_the_page_frame(operator):
    publish("a")
    fragment = operator.get(STATISTICS)
    assert tiles(fragment)["Pending"] == "1"
    assert "<html" not in text_of(fragment)
    assert f'data-url="{STATISTICS}"' in text_of(operator.get(OVERVIEW))


def test_problems_and_tiles_lead_to_the_pages_this_user_may_see(store):
    few = client_with("view_minutestatistics", name="few")
    many = client_with(*VIEWS, name="many")
    link = f'href="{reverse("admin:django_eventbus_eventworker_changelist")}"'
    assert link in text_of(many.get(STATISTICS))
    assert link not in text_of(few.get(STATISTICS))


def test_the_tiles_of_the_queue_lead_to_the_events_they_count():
    urls = {t.label: t.url for t in client_with(*VIEWS).get(STATISTICS).context["tiles"]}
    assert urls["Running"].endswith("?status=PROCESSING")
    for label in ("Pending", "Retrying", "Scheduled"):
        assert urls[label].endswith("?status=PENDING")


def test_the_time_zone_is_named(operator, settings):
    settings.TIME_ZONE = "Asia/Tokyo"
    assert re.search(r"As of \d\d:\d\d:\d\d, Asia/Tokyo", text_of(operator.get(OVERVIEW)))
    assert "Asia/Tokyo" in text_of(operator.get(STATISTICS))


def test_a_problem_links_to_exactly_its_rows(settings):
    settings.EVENTBUS = {"DEAD_HEAD": "block"}

    @handler("bad", name="fails", retry=RetryPolicy(max_retries=0))
    def fail(event):
        raise ValueError

    publish("bad", key="k")
    drain()
    pauses.pause(queue="default")
    client = client_with("view_eventlane", "view_flowcontrol", *VIEWS)
    links = {each.about: url for each, url in client.get(STATISTICS).context["problems"] if url}
    assert links.keys() == {"workers", "dead", "lanes", "pauses"}
    for about in ("dead", "lanes", "pauses"):
        (row,) = client.get(links[about]).context["cl"].result_list
        assert row
    assert not client.get(links["pauses"].replace("paused", "open")).context["cl"].result_list


@pytest.mark.parametrize("url", [OVERVIEW, STATISTICS])
def test_the_overview_needs_its_permission(client, url):
    assert client.get(url).status_code == 302
    assert client_with("view_deadevent", name="other").get(url).status_code == 403
    assert (
        client_with("view_minutestatistics", name="guest", staff=False).get(url).status_code == 302
    )


@pytest.mark.parametrize("url", [OVERVIEW, STATISTICS])
def test_the_overview_accepts_no_post(operator, url):
    assert operator.post(url).status_code == 405


def test_the_page_of_the_app_links_to_the_overview():
    assert OVERVIEW in text_of(client_with("view_minutestatistics").get("/admin/django_eventbus/"))
    other = client_with("view_deadevent", name="other").get("/admin/django_eventbus/")
    assert OVERVIEW not in text_of(other)


def test_hostile_names_are_shown_as_text(operator, store):
    nasty = "</script><img src=x onerror=alert(1)>"
    now = store.read_clock()
    minute(now, handler=nasty, done=1)
    EventWorker.objects.create(
        namespace="default", host=nasty, pid=1, queues=["default"], expires_at=now
    )
    EventWorker.objects.create(
        namespace="default",
        host="well",
        pid=2,
        queues=["default"],
        expires_at=now + timedelta(hours=1),
    )
    pauses.pause(queue="default", by=nasty, reason=nasty)
    shown = text_of(operator.get(OVERVIEW))
    assert shown.count("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;") >= 3
    assert "<img src=x" not in shown


@pytest.mark.parametrize("url", [OVERVIEW, STATISTICS])
def test_the_page_has_no_inline_code_that_a_strict_policy_forbids(operator, store, url):
    minute(store.read_clock(), done=1, up_to_1s=1)
    shown = text_of(operator.get(url))
    assert not re.search(r"\sstyle=|<style|\son\w+=|javascript:", shown)
    assert not re.search(r"<script(?![^>]*\ssrc=)", shown)


def test_the_static_files_exist():
    for name in ("overview.js", "overview.css", "eventbus.css"):
        assert finders.find(f"django_eventbus/{name}")


def test_sparklines_have_words_and_whole_numbers_in_every_language(operator, store):
    minute(store.read_clock(), done=1234, up_to_1s=1234)
    with translation.override("de"):
        shown = text_of(operator.get(STATISTICS))
    assert "1.234" in shown, "German number format"
    paths = re.findall(r' d="([^"]*)"', shown)
    assert len(paths) == 3
    assert all(re.fullmatch(r"[MvhzV0-9 -]*", path) for path in paths)
    assert shown.count('role="img"') == shown.count("<title>") == 3


def test_every_minute_with_a_value_has_a_bar():
    assert bars([0, 0, 0]) == ""
    assert bars([0, 10, 5]) == "M4 40v-40h3v40z M8 40v-20h3v20z"
    assert bars([10_000, 1]).endswith("v-1h3v1z"), "a small value has a visible bar"


def test_the_busiest_handlers_come_first(operator, store):
    now = store.read_clock()
    minute(now, handler="a", done=1)
    minute(now, handler="b", done=5)
    rows = operator.get(STATISTICS).context["handlers"]
    assert [row["name"] for row in rows] == ["b", "a"]


def test_the_overview_costs_fewer_than_fifteen_queries(store):
    client = client_with(*VIEWS)
    publish_many(("a", n) for n in range(50))
    for ago in range(60):
        minute(store.read_clock(), ago, done=1, handler=f"h{ago}")
    with CaptureQueriesContext(connection) as queries:
        client.get(OVERVIEW)
    assert len(that_read(queries)) < 15


# -- the failing checks of event_doctor


def failing(answer):
    return {each.check.id for each in answer.context["failing_checks"]}


@pytest.fixture
def unhandled(store):
    """A fault that only a query finds: a queued event without a handler."""
    publish("nobody.handles.this")


def test_the_page_shows_failing_checks_of_the_status_at_once(operator, worker_id):
    EventWorker.objects.update(version="0.0.1", settings_digests={})
    answer = operator.get(OVERVIEW)
    assert "EB004" in failing(answer)
    assert "live workers have another version than this process" in text_of(answer)
    assert f'href="{CHECKS}#EB004"' in text_of(answer)


def test_a_refresh_runs_the_checks_that_need_queries(operator, unhandled):
    assert "EB011" not in failing(operator.get(OVERVIEW))
    assert "EB011" in failing(operator.get(STATISTICS))
    assert "EB011" in failing(operator.get(OVERVIEW))


def test_the_checks_run_at_most_once_a_minute(operator, unhandled):
    operator.get(STATISTICS)
    QueuedEvent.objects.all().delete()
    assert "EB011" in failing(operator.get(STATISTICS))
    (last,) = watching._last.values()
    watching._last["default"] = replace(last, expires_at=time.monotonic())
    assert "EB011" not in failing(operator.get(STATISTICS))


def test_a_refresh_with_known_results_costs_fewer_than_fifteen_queries(operator, unhandled):
    operator.get(STATISTICS)
    with CaptureQueriesContext(connection) as queries:
        operator.get(STATISTICS)
    assert len(that_read(queries)) < 15


def test_a_fact_is_not_shown_twice(operator, unhandled):
    """The problem says that no worker is running, so the check EB001 is not shown."""
    answer = operator.get(STATISTICS)
    assert "No worker is running: run manage.py run_event_worker" in text_of(answer)
    assert not {"EB001", "EB002"} & failing(answer)


def test_all_checks_are_on_a_page_of_their_own(operator, unhandled, store):
    answer = operator.get(CHECKS)
    shown = {each.check.id for each in answer.context["diagnoses"]}
    assert {"EB001", "EB011", "EB026"} <= shown
    assert ("EB030" in shown) == (store.database_name == "SQLite")
    assert 'id="EB011"' in text_of(answer)
    assert "Add @handler(&quot;nobody.handles.this&quot;)" in text_of(answer)


def test_a_user_without_the_permission_sees_no_checks():
    assert client_with("view_eventworker").get(CHECKS).status_code == 403


def test_while_another_request_examines_the_page_asks_to_reload(operator):
    with watching._examining:
        assert "Reload the page" in text_of(operator.get(CHECKS))


def test_an_examination_ends_in_time(store, monkeypatch):
    monkeypatch.setattr(watching, "ALL_SECONDS", 0.0)
    found = watching.examined(Bus(store))
    assert {each.verdict for each in found.diagnoses} == {"skipped"}
    assert found.diagnoses[0].results[0].summary == "the earlier checks took more than 0 seconds"
