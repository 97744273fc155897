"""Searching the log: exactly by id and key, among the newest events by type."""

from datetime import UTC, datetime, timedelta

import pytest

from django_eventbus.admin import events
from django_eventbus.models import EventLog
from tests.admin.conftest import url
from tests.admin.test_dead_letters import text_of

pytestmark = pytest.mark.django_db

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def log(settings, monkeypatch):
    """Ten events, one per hour, of which a search by type reads four."""
    settings.TIME_ZONE = "UTC"
    monkeypatch.setattr(events, "MOST_SEARCHED", 4)
    EventLog.objects.bulk_create(
        EventLog(
            id=n,
            namespace="default",
            type="order.placed" if n % 2 else "stock.empty",
            key=f"order:{n // 5}",
            queue="default",
            created_at=NOON,
            status="COMPLETED",
            finished_at=NOON + timedelta(hours=n),
        )
        for n in range(10)
    )


def found(client, query):
    page = client.get(url("eventlog_changelist", query=query))
    return [event.pk for event in page.context["cl"].result_list], text_of(page)


def test_a_key_is_searched_in_the_whole_log(chief, log):
    rows, text = found(chief, "?q=order:0")
    assert rows == [4, 3, 2, 1, 0]
    assert "were searched by type" not in text


def test_a_key_is_searched_together_with_filters(chief, log):
    EventLog.objects.filter(pk=3).update(status="FAILED")
    assert found(chief, "?q=order:0&status=FAILED")[0] == [3]


def test_an_event_id_is_searched_in_the_whole_log(chief, log):
    oldest = EventLog.objects.get(pk=0)
    assert found(chief, f"?q={oldest.event_id}")[0] == [0]


def test_a_search_by_type_is_limited_and_reported(chief, log):
    rows, text = found(chief, "?q=order.pl")
    # The event at the boundary is read too.
    assert rows == [9, 7, 5]
    assert "Only the newest 4 events were searched by type" in text


def test_a_search_by_type_begins_at_the_end_of_the_chosen_time(chief, log):
    until = "&finished_at__range__lte_0=2026-03-01&finished_at__range__lte_1=18:00:00"
    rows, text = found(chief, f"?q=order.pl{until}")
    assert rows == [5, 3]
    assert "Only the newest 4 events were searched by type" in text


def test_a_small_log_is_searched_by_type_without_a_note(chief, log, monkeypatch):
    monkeypatch.setattr(events, "MOST_SEARCHED", 10)
    rows, text = found(chief, "?q=order.pl")
    assert rows == [9, 7, 5, 3, 1]
    assert "were searched by type" not in text
