"""Handed-off events and unavailable brokers on the pages of the admin."""

import re

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import translation

from django_eventbus import handler, publish, publish_many, queued
from django_eventbus.models import EventLane, EventLog, FlowControl, QueuedEvent
from tests.admin.conftest import url
from tests.admin.test_dead_letters import text_of
from tests.admin.test_flow import act, messages_in
from tests.bus import drain, let_hand_off_expire

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("outbox"),
]

NAME = "shop.mail"
ONCE = {"max_retries": 0}


@pytest.fixture
def mail():
    return handler("order.placed", name=NAME, executor="celery")(lambda event: None)


@pytest.fixture
def broken(outbox, mail):
    """An executor whose broker is unavailable, with two held events and a held key."""
    outbox.is_down = True
    publish_many(("order.placed", n) for n in range(2))
    publish("order.placed", key="order:1")
    drain()
    return FlowControl.objects.get(kind="executor")


def page_of(client, event, name="queuedevent"):
    return text_of(client.get(url(f"{name}_change", event.pk), follow=True))


def listed(client, name, query=""):
    return client.get(url(f"{name}_changelist", query=query))


# -- the page of an event


@pytest.mark.parametrize("key", [None, "order:1"])
def test_the_page_of_a_handed_off_event_names_handler_executor_and_deadline(chief, mail, key):
    event = publish("order.placed", key=key)
    drain()
    page = page_of(chief, event)
    assert re.search(
        r"Handed off to shop\.mail Waiting for celery since .* Handed off again at", page
    )
    assert "Next attempt" not in page
    assert "Handed off to shop.mail (celery)" in page, "in the timeline"
    assert f"{NAME} handed off 0" in page, "in the table of handlers"


def test_the_page_counts_hand_offs_without_a_result(chief, mail):
    event = publish("order.placed")
    drain()
    assert "Hand-offs" not in page_of(chief, event)
    let_hand_off_expire()
    drain()
    assert "Hand-offs 2 Handed off again at" in page_of(chief, event)


def test_the_timeline_shows_the_hand_off_the_pick_up_and_the_end_in_order(chief, outbox, mail):
    event = publish("order.placed")
    drain()
    outbox.deliver()
    logged = EventLog.objects.get(event_id=event.event_id)
    page = page_of(chief, logged, "eventlog")
    process = logged.deliveries[NAME]["by"]
    expected = [
        "Published by",
        "Handed off to shop.mail (celery)",
        f"shop.mail picked up by {process} · waited",
        "shop.mail succeeded at attempt 1",
        "Ended: completed",
    ]
    assert sorted(expected, key=page.index) == expected


def test_the_timeline_of_a_dead_letter_shows_its_last_hand_off(chief, outbox):
    @handler("order.placed", name=NAME, executor="celery", retry=ONCE)
    def fail(event):
        raise ValueError

    publish("order.placed")
    drain()
    outbox.deliver()
    page = page_of(chief, EventLog.objects.get(), "deadevent")
    expected = ["Handed off to", "picked up by celery", "shop.mail failed at attempt 1"]
    assert sorted(expected, key=page.index) == expected


def test_a_handed_off_event_of_an_unknown_handler_has_a_page(chief):
    event = publish("order.placed")
    now = event.created_at.isoformat()
    state = {"gone": {"state": "handed_off", "failures": 0, "at": now}}
    QueuedEvent.objects.update(handed_off_to="gone", deliveries=state)
    page = page_of(chief, event)
    assert "Waiting for its executor since" in page
    assert "Handed off to gone" in page


def test_a_handed_off_event_that_was_cancelled_was_not_completed(chief, mail):
    event = publish("order.placed")
    drain()
    queued.cancel([event.event_id])
    page = page_of(chief, event, "deadevent")
    assert f"{NAME} not completed" in page
    assert "Handed off again" not in page


def test_an_event_whose_message_could_not_be_sent_is_not_shown_as_handed_off(chief, broken):
    event = QueuedEvent.objects.filter(key__isnull=True).first()
    page = page_of(chief, event)
    assert "held by flow control" in page
    assert f"{NAME} waiting 0" in page


# -- lists


def test_the_queue_shows_handed_off_events_as_such(chief, mail):
    publish("order.placed")
    publish("order.placed", key="order:1")
    publish("other")
    drain()
    page = listed(chief, "queuedevent")
    assert page.content.decode().count('<td class="field-shown_status">handed off</td>') == 2
    assert text_of(page).count("handed off to shop.mail (celery)") == 2


def test_the_queue_can_be_filtered_by_the_handler_of_hand_offs(chief, mail):
    event = publish("order.placed")
    drain()
    publish("order.placed")
    page = listed(chief, "queuedevent", f"?handed_off_to={NAME}")
    assert [row.pk for row in page.context["cl"].result_list] == [event.pk]


def test_a_project_without_executors_has_no_filter_of_hand_offs(chief):
    assert "handed_off_to" not in listed(chief, "queuedevent").content.decode()


def test_lanes_show_the_hand_off_of_their_first_event(chief, mail):
    publish_many((("order.placed", n) for n in range(3)), key="order:1")
    drain()
    lane = EventLane.objects.get()
    for page in (listed(chief, "eventlane"), chief.get(url("eventlane_change", lane.pk))):
        text = text_of(page)
        assert "handed off to shop.mail (celery)" in text
        assert "retry in" not in text


@pytest.mark.parametrize("name", ["queuedevent", "eventlane", "flowcontrol"])
def test_the_number_of_queries_does_not_grow_with_hand_offs(chief, broken, outbox, name):
    with CaptureQueriesContext(connection) as few:
        listed(chief, name)
    outbox.is_down = False
    FlowControl.objects.filter(pk=broken.pk).update(opened_at=None, probe_at=None)
    for number in range(20):
        handler("order.paid", name=f"h{number}", executor="celery")(lambda event: None)
    FlowControl.objects.bulk_create(
        FlowControl(namespace="default", kind="handler", name=f"h{number}") for number in range(20)
    )
    publish_many(("order.paid", n) for n in range(20))
    for number in range(20):
        publish("order.paid", key=f"order:{number}")
    drain()
    assert QueuedEvent.objects.filter(handed_off_to__isnull=False).exists()
    with CaptureQueriesContext(connection) as many:
        listed(chief, name)
    extra = {"postgresql": 3, "sqlite": 1, "mysql": 1}[connection.vendor]
    assert len(many) <= len(few) + extra


# -- flow control


def test_flow_control_shows_the_handed_off_events_of_a_handler(chief, mail, settings):
    settings.EVENTBUS = {**settings.EVENTBUS, "HANDOFF_WINDOW": 1500}
    publish_many(("order.placed", n) for n in range(3))
    drain()
    text = text_of(listed(chief, "flowcontrol"))
    assert "celery: 3 of at most 1,500 events handed off" in text
    assert re.search("celery executor( -)* broker available", text)
    assert text.count("not paused") == 1, "only of the handler"


def test_flow_control_shows_an_unavailable_broker(chief, broken):
    expected = (
        r"broker unavailable for [\d.]+ m?s, next attempt in [\d.]+ m?s; "
        r"held events: 3 \(all events of a key count as one\)"
    )
    page = listed(chief, "flowcontrol", "?state=unavailable")
    assert [row.pk for row in page.context["cl"].result_list] == [broken.pk]
    for each in (page, chief.get(url("flowcontrol_change", broken.pk))):
        assert re.search(expected, text_of(each))
        assert "next try" not in text_of(each)
    assert not listed(chief, "flowcontrol", "?state=open").context["cl"].result_list


@pytest.mark.parametrize("action", ["resume", "reset_breaker"])
def test_an_executor_is_skipped_by_actions(chief, broken, action):
    answer = act(chief, url("flowcontrol_changelist"), action, [broken])
    assert messages_in(answer)[0].startswith("1 skipped: ")
    broken.refresh_from_db()
    assert broken.opened_at is not None
    assert not LogEntry.objects.exists()


def test_an_executor_is_not_in_the_form_to_pause(chief, broken):
    assert "executor" not in text_of(chief.get(url("flowcontrol_pause")))
    answer = chief.post(url("flowcontrol_pause"), {"what": "executor:celery"})
    assert answer.context["form"].errors


# -- the overview


def test_the_overview_shows_an_unavailable_broker(chief, broken):
    page = listed(chief, "minutestatistics")
    text = text_of(page)
    assert "The broker of celery has been unavailable for" in text
    assert "circuit breaker" not in text
    assert re.search(rf"{NAME} 0 .* broker unavailable", text)
    link = next(link for each, link in page.context["problems"] if each.about == "executors")
    assert [row.pk for row in chief.get(link).context["cl"].result_list] == [broken.pk]


def test_the_overview_shows_handed_off_events_and_hand_offs(chief, outbox, mail):
    publish_many(("order.placed", n) for n in range(2))
    drain()
    outbox.messages.clear()
    QueuedEvent.objects.filter(pk=QueuedEvent.objects.first().pk).delete()
    text = text_of(listed(chief, "minutestatistics"))
    assert "Running 0 handed off: 1" in text
    assert "Hand-offs" in text
    assert "2 active, 1 of at most 1,000 events handed off" in text


def test_the_overview_of_a_project_without_executors_shows_no_hand_offs(chief):
    handler("order.placed", name="local")(lambda event: None)
    text = text_of(listed(chief, "minutestatistics"))
    assert "anded off" not in text
    assert "Hand-off" not in text


def test_the_overview_shows_ignored_messages_only_if_there_are_some(chief, outbox, mail):
    publish("order.placed")
    drain()
    assert "gnored messages" not in text_of(listed(chief, "minutestatistics"))
    outbox.messages *= 3
    outbox.deliver()
    text = text_of(listed(chief, "minutestatistics"))
    assert "Ignored messages to executors in the last hour: 2." in text


@pytest.mark.parametrize(("language", "label"), [("de", "übergeben"), ("zh-hans", "已移交")])
def test_the_pages_are_translated(chief, mail, language, label):
    publish("order.placed")
    drain()
    QueuedEvent.objects.update(created_at="2000-01-01T00:00:00Z")
    with translation.override(language):
        for name in ("queuedevent", "flowcontrol", "minutestatistics"):
            text = text_of(listed(chief, name)).lower()
            assert label in text
            assert "handed off" not in text
