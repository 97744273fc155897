"""The page of an event: its timeline, handlers, related events, payload and actions."""

import re
import uuid
from datetime import timedelta
from html.parser import HTMLParser

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import dead_letters, finalize, handler, pauses, poll, publish, queued
from django_eventbus.admin import payloads
from django_eventbus.admin.payloads import MOST_SHOWN, Redaction, shown
from django_eventbus.models import DeadEvent, EventLog, QueuedEvent
from tests.admin.conftest import url
from tests.admin.test_dead_letters import text_of
from tests.bus import drain, drain_with_retries, logged
from tests.test_dead_letters import NOON, dead_letter

pytestmark = pytest.mark.django_db

ONCE = {"max_retries": 0}


def page_of(client, event, name="deadevent"):
    return client.get(url(f"{name}_change", event.pk), follow=True)


def test_the_timeline_of_a_dead_letter_has_every_attempt(chief):
    @handler("order.placed", name="shop.ship", retry={"max_retries": 2, "jitter": 0.0})
    def fail(event):
        raise KeyError(f"stock {event.attempt}")

    handler("order.placed", name="shop.bill")(lambda event: None)
    event = publish("order.placed", {"order": 7}, key="order:7", headers={"tenant": "north"})
    drain_with_retries()
    page = text_of(page_of(chief, logged(event)))
    for part in (
        "completed with errors",
        "Published by",
        "shop.ship failed at attempt 1: KeyError",
        "stock 1",
        "shop.ship failed at attempt 3: KeyError",
        "Traceback (most recent call last)",
        "shop.bill done",
        "shop.ship dead 3",
        '"order": 7',
        '"tenant": "north"',
        "order:7",
    ):
        assert part in page
    assert page.index("attempt 1") < page.index("attempt 2") < page.index("Ended:")


def test_an_attempt_has_its_wait_and_its_duration(chief):
    letter = dead_letter()
    errors = [
        {**letter.errors[0], "at": (NOON + timedelta(seconds=at)).isoformat(), "seconds": took}
        for at, took in ((10, 2.5), (400, 0.25))
    ]
    EventLog.objects.update(errors=errors, created_at=NOON, finished_at=NOON + timedelta(hours=1))
    page = text_of(page_of(chief, letter))
    assert "waited 7.5 s · took 2.5 s" in page
    assert "waited 6 min · took 250 ms" in page


def test_the_timeline_has_the_successful_handlers(chief):
    handler("order.placed", name="shop.bill")(lambda event: None)
    letter = dead_letter()
    states = letter.deliveries
    assert states["shop.bill"]["seconds"] < 60
    states["shop.bill"] |= {"at": (NOON + timedelta(seconds=2)).isoformat(), "seconds": 0.003}
    errors = [{**letter.errors[0], "at": (NOON + timedelta(seconds=9)).isoformat()}]
    EventLog.objects.update(deliveries=states, errors=errors, created_at=NOON)
    page = text_of(page_of(chief, letter))
    assert "shop.bill succeeded at attempt 1 · took 3 ms" in page
    assert page.index("shop.bill succeeded at attempt") < page.index("shop.ship failed at attempt")


def test_the_timeline_has_the_actions_of_operators(chief):
    letter = dead_letter()
    chief.post(url("deadevent_retry", letter.pk))
    page = text_of(page_of(chief, letter, "queuedevent"))
    assert "Retried by chief" in page
    other = dead_letter()
    assert "by chief" not in text_of(page_of(chief, other))


def test_the_timeline_has_the_earlier_lives(chief):
    letter = dead_letter(error=ValueError("in the first life"))
    chief.post(url("deadevent_retry", letter.pk))
    handler("order.placed", name="shop.ship", retry={"max_retries": 0})(lambda event: 1 / 0)
    drain()
    page = text_of(page_of(chief, letter))
    expected = [
        "shop.ship failed at attempt 1: ValueError",
        "in the first life",
        "Life 1 ended: failed (attempts: 1)",
        "Retried by chief: life 2 begins",
        "shop.ship failed at attempt 1: ZeroDivisionError",
        "Ended: failed",
    ]
    assert sorted(expected, key=page.rindex) == expected
    assert page.count("by chief") == 1
    assert "Life 2" in page


def test_a_bulk_retry_is_in_the_timeline_of_each_event(chief):
    letters = [dead_letter(), dead_letter()]
    dead_letters.retry(letters, by="cron")
    for letter in letters:
        page = text_of(page_of(chief, letter, "queuedevent"))
        assert "Retried by cron: life 2 begins" in page


def test_a_retry_of_one_handler_names_it(chief):
    letter = dead_letter()
    chief.post(url("deadevent_retry", letter.pk), {"handler": "shop.ship"})
    page = text_of(page_of(chief, letter, "queuedevent"))
    assert "Retried for handler shop.ship by chief: life 2 begins" in page
    assert page.count("by chief") == 1


def test_omitted_lives_and_errors_are_counted(chief):
    letter = dead_letter()
    omitted = {**letter.errors[0], "omitted": 84}
    EventLog.objects.update(errors=[letter.errors[0], omitted, letter.errors[0]])
    dead_letters.retry(letter)
    row = QueuedEvent.objects.get()
    row.history = [row.history[0], {"omitted": 6}, {**row.history[0], "life": 8}]
    row.save()
    page = text_of(page_of(chief, letter, "queuedevent"))
    assert page.count("84 errors are not stored.") == 2
    assert "6 lives are not stored." in page
    assert "life 9 begins" in page


def test_the_summary_of_an_event_that_crashed_workers(chief):
    event = publish("order.placed", {})
    QueuedEvent.objects.update(crashes=3)
    handler("order.placed", name="shop.ship")(lambda event: None)
    drain()
    page = text_of(page_of(chief, logged(event)))
    assert "The event crashed its worker process 3 times; no handler completed." in page
    assert "first attempt" not in page


def test_a_handler_that_waited_for_a_retry_when_its_event_died_did_not_complete(chief):
    handler("order.placed", name="shop.ship", retry={"base_delay": 60})(lambda event: 1 / 0)
    event = publish("order.placed", {})
    drain()
    QueuedEvent.objects.update(crashes=3, available_at=None)
    drain()
    page = text_of(page_of(chief, logged(event)))
    assert "shop.ship not completed 1" in page
    assert "waiting for a retry" not in page


def test_the_summary_of_a_cancelled_event(chief):
    event = publish("order.placed", {})
    queued.cancel([event.event_id])
    page = text_of(page_of(chief, logged(event)))
    assert "The event was discarded before any handler completed: Cancelled." in page
    assert "first attempt" not in page


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"failed": True}, "No handler completed. Last error: ValueError."),
        ({}, "The code that polled the event reported errors: ValueError."),
    ],
)
def test_the_summary_of_a_polled_event_that_failed(chief, how, text):
    event = publish("order.placed", {})
    finalize(poll(), [ValueError("no")], **how)
    page = text_of(page_of(chief, logged(event)))
    assert text in page
    assert "first attempt" not in page


def test_the_summary_of_a_retried_event_names_its_life(chief):
    letter = dead_letter()
    dead_letters.retry(letter)
    handler("order.placed", name="shop.ship")(lambda event: None)
    drain()
    page = text_of(page_of(chief, logged(letter), "eventlog"))
    assert "Every handler succeeded at the first attempt of life 2." in page


def test_an_edit_is_one_entry_of_the_timeline(chief, client_of):
    letter = dead_letter(payload=1)
    before = chief.get(url("deadevent_edit", letter.pk)).context["form"].initial["before"]
    chief.post(url("deadevent_edit", letter.pk), {"payload": "2", "before": before})
    page = text_of(page_of(chief, letter, "queuedevent"))
    assert page.count("by chief") == 1
    assert "by chief with an edited payload" in page
    assert "edited and retried by chief" in text_of(
        page_of(client_of("viewer"), letter, "queuedevent")
    )


def test_hidden_attempts_are_counted(chief):
    letter = dead_letter()
    EventLog.objects.update(errors=[letter.errors[0]] * 103)
    page = text_of(page_of(chief, letter))
    assert "3 earlier attempts are not shown." in page
    assert page.count("failed at attempt") == 100


def test_the_summary_of_a_completed_event_names_its_handlers(chief):
    handler("x", name="shop.bill")(lambda event: None)
    event = publish("x", 1)
    drain()
    page = text_of(page_of(chief, logged(event), "eventlog"))
    text = "Every handler succeeded at the first attempt. The handlers registered now: shop.bill."
    assert text in page


def test_the_due_column_is_shown_only_if_a_handler_is_due(chief):
    letter = dead_letter()
    assert "Handler State Failures Actions" in text_of(page_of(chief, letter))
    handler("y", name="h", retry={"max_retries": 1, "base_delay": 60})(lambda event: 1 / 0)
    event = publish("y", 1)
    drain()
    page = text_of(page_of(chief, event, "queuedevent"))
    assert "Handler State Failures Due Actions" in page


def test_pages_with_times_name_the_zone_once(chief, settings):
    settings.TIME_ZONE = "Asia/Tokyo"
    letter = dead_letter()
    for page in (page_of(chief, letter), chief.get(url("deadevent_groups"))):
        assert text_of(page).count("Times are in the time zone Asia/Tokyo.") == 1


def test_the_cause_and_the_published_events_are_linked(chief):
    @handler("order.placed", name="orders")
    def place(event):
        publish("stock.reserved", 1)
        publish("mail.sent", 2, delay=3600)

    handler("stock.reserved", name="stock")(lambda event: None)
    order = publish("order.placed", 0)
    drain()
    page = page_of(chief, logged(order), "eventlog")
    effects = page.context["event_page"].effects
    assert {(each.type, each.status) for each in effects} == {
        ("stock.reserved", "completed"),
        ("mail.sent", "pending"),
    }
    for each in effects:
        caused = chief.get(each.url)
        assert caused.context["event_page"].cause.event_id == order.event_id
        assert "Caused by order.placed" in text_of(caused)


def test_the_number_of_published_events_shown_is_limited(chief):
    order = publish("order.placed", 0, delay=60)
    for _ in range(25):
        publish("effect", 1)
    QueuedEvent.objects.filter(type="effect").update(caused_by=order.event_id)
    page = page_of(chief, order, "queuedevent")
    assert text_of(page).count("effect ") == 20
    assert "Only the first 20 are shown." in text_of(page)


def test_a_deleted_cause_is_shown_by_its_id(chief):
    letter, cause = dead_letter(), uuid.uuid4()
    EventLog.objects.update(caused_by=cause)
    assert f"an event that was deleted or that you may not view {cause}" in text_of(
        page_of(chief, letter)
    )


def test_the_page_needs_few_queries(chief):
    letter = dead_letter()
    EventLog.objects.update(caused_by=uuid.uuid4())
    with CaptureQueriesContext(connection) as queries:
        page_of(chief, letter)
    assert len(queries) < 15


def test_the_url_of_a_moved_event_redirects_to_its_page(chief):
    letter = dead_letter()
    response = chief.post(url("deadevent_retry", letter.pk), follow=True)
    assert response.redirect_chain[-1][0] == url("queuedevent_change", letter.pk)
    assert "It is in the queue again." in text_of(response)
    handler("order.placed", name="shop.ship")(lambda event: None)
    drain()
    ended = page_of(chief, letter, "queuedevent")
    assert ended.redirect_chain[-1][0] == url("eventlog_change", letter.pk)
    assert "Every handler" in text_of(ended) or "completed" in text_of(ended)


@pytest.mark.parametrize("name", ["deadevent", "eventlog", "queuedevent"])
@pytest.mark.parametrize("pk", ["999999999", "9" * 30, "9" * 4400, "x", "0x1", "-1", "²"])
def test_an_unknown_id_is_reported_as_missing(chief, name, pk):
    response = chief.get(url(f"{name}_change", pk), follow=True)
    assert "exist. Perhaps it was deleted?" in text_of(response)


def test_a_queued_event_lists_its_untried_handlers(chief):
    handler("x", name="shop.ship")(lambda event: None)
    event = publish("x", 1, delay=3600)
    page = text_of(page_of(chief, event, "queuedevent"))
    assert "shop.ship not tried yet" in page
    assert "pending" in page
    assert "Due" in page
    chief.post(url("queuedevent_run", event.pk))
    assert QueuedEvent.objects.get().available_at is None
    assert LogEntry.objects.get().change_message == "made ready to run"
    again = chief.post(url("queuedevent_run", event.pk), follow=True)
    assert "Event not changed: it is already ready" in text_of(again)


def test_a_held_event_is_shown_as_such_in_the_list_and_on_its_page(chief):
    handler("x", name="shop.ship")(lambda event: None)
    pauses.pause(handler="shop.ship")
    event = publish("x", 1)
    drain()
    page = text_of(page_of(chief, event, "queuedevent"))
    assert "Next attempt held by flow control" in page
    listed = text_of(chief.get(url("queuedevent_changelist")))
    assert "held by flow control" in listed
    chief.post(url("queuedevent_run", event.pk))
    assert QueuedEvent.objects.get().held_by is None


def test_an_event_cancelled_before_its_due_time_has_no_due_entry(chief):
    event = publish("x", 1, delay=3600)
    queued.cancel([event.event_id])
    page = text_of(page_of(chief, logged(event), "eventlog"))
    assert "Ended: discarded" in page
    assert "Due" not in page


def test_one_handler_of_a_dead_letter_is_retried(chief):
    handler("order.placed", name="a", retry=ONCE)(lambda event: 1 / 0)
    letter = dead_letter(handler_name="b")
    assert "Retry this handler b" in text_of(page_of(chief, letter))
    chief.post(url("deadevent_retry", letter.pk), {"handler": "b"})
    assert list(QueuedEvent.objects.get().deliveries) == ["a"]
    assert LogEntry.objects.get().change_message == "retried for handler b"


def test_a_handler_that_is_done_or_unknown_is_not_retried(chief):
    handler("order.placed", name="fine")(lambda event: None)
    letter = dead_letter()
    for name in ("c", "fine"):
        assert chief.post(url("deadevent_retry", letter.pk), {"handler": name}).status_code == 404
    assert DeadEvent.objects.exists()


def test_a_dead_letter_is_purged_after_a_confirmation(chief):
    letter = dead_letter()
    data = {"action": "purge", "_selected_action": letter.pk}
    page = chief.post(url("deadevent_changelist"), data)
    assert "Purge 1 dead letter?" in text_of(page)
    chief.post(url("deadevent_bulk", "purge"), {"run": page.context["token"]})
    assert not EventLog.objects.exists()
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.is_deletion()) == (str(letter.pk), True)


# -- payloads


def test_a_large_payload_is_cut(chief):
    letter = dead_letter(payload="x" * (MOST_SHOWN + 100))
    page = page_of(chief, letter)
    assert "102 more characters are not shown" in text_of(page)
    assert "x" * MOST_SHOWN not in page.content.decode()


@pytest.mark.parametrize(
    "name", ["password", "Password", "new_password", "X-API-Key", "apiKey", "auth_token", "Cookie"]
)
def test_sensitive_fields_are_not_shown(name):
    value = {"fine": 1, "list": [{name: {"deep": "hunter2"}}]}
    assert "hunter2" not in shown(value).text
    assert '"fine": 1' in shown(value).text
    assert Redaction(value).restored(Redaction(value).public) == value


def test_sensitive_fields_are_a_setting(settings):
    settings.EVENTBUS = {"REDACT_FIELDS": ["iban"]}
    text = shown({"iban": "DE02", "password": "hunter2"}).text
    assert "DE02" not in text
    assert "hunter2" in text


def test_a_huge_payload_is_cut_before_it_is_escaped(monkeypatch):
    looked_at = []
    monkeypatch.setattr(payloads, "printable", lambda text: looked_at.append(len(text)) or text)
    shown("x" * 10 * MOST_SHOWN)
    assert looked_at == [MOST_SHOWN]


def test_a_payload_cannot_reverse_the_text_direction():
    text = shown({"a": "\u202eevil\u2066\x7f\u00ad"}).text
    assert all(c.isprintable() or c == "\n" for c in text)
    assert r"\u202eevil" in text


# -- hostile text

HOSTILE = (
    "</script></pre><img src=x onerror=alert(1)>\"' onclick=x {{ 7|add:70000000 }} &lt; \u202e<b>"
)


class Skeleton(HTMLParser):
    """Elements and the names of their attributes, without any text."""

    def __init__(self, page):
        super().__init__()
        self.parts = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.parts.append((tag, *(name for name, _ in attrs)))


def fill(text):
    """A dead letter and a queued event with the text in every field that takes one."""
    names = ("queue", "type", "key", "producer")
    error = {
        "handler": text,
        "type": text,
        "message": text,
        "traceback": text,
        "where": text,
        "attempt": 1,
        "at": NOON.isoformat(),
    }
    common = {
        **dict.fromkeys(names, text[:64]),
        "payload": {text: [text]},
        "headers": {text: text},
        "edits": [{"at": NOON.isoformat(), "by": text, "payload": text}],
        "errors": [error],
        "deliveries": {text: {"state": "dead", "failures": 1}},
        "caused_by": uuid.UUID(int=1),
    }
    letter = dead_letter()
    EventLog.objects.filter(pk=letter.pk).update(
        **common, dead_handler=text, error_type=text, error_fingerprint=text[:16]
    )
    event = publish("x", 1, delay=60)
    QueuedEvent.objects.filter(pk=event.pk).update(**common)
    return letter, event


def pages(client, text):
    """All pages that show the text, including messages and history."""
    letter, event = fill(text)
    group = client.get(url("deadevent_groups")).context["groups"][0]
    yield client.get(url("deadevent_changelist"))
    yield client.get(url("deadevent_changelist"), {"handler": text, "q": text, "queue": text})
    yield client.get(group["list_url"])
    yield client.get(group["actions"][0]["url"])
    yield client.get(url("deadevent_groups"))
    yield client.get(url("deadevent_bulk", "retry"), {"handler": text, "q": text})
    yield client.get(url("deadevent_edit", letter.pk))
    yield client.post(url("deadevent_edit", letter.pk), {"payload": text, "before": "x"})
    yield client.get(url("deadevent_change", letter.pk))
    yield client.get(url("eventlog_changelist"))
    yield client.get(url("eventlog_change", letter.pk))
    yield client.get(url("queuedevent_changelist"))
    yield client.get(url("queuedevent_change", event.pk))
    query = {"QUERY_STRING": f"handler={'%'.join(['', *text.encode().hex(' ').split()])}"}
    question = client.get(url("deadevent_bulk", "retry"), **query)
    token = {"run": question.context["token"]}
    yield client.post(url("deadevent_bulk", "retry"), token, follow=True, **query)
    yield client.get(url("queuedevent_history", letter.pk))
    yield client.get("/admin/")
    for model in (EventLog, QueuedEvent, LogEntry):
        model.objects.all().delete()


def test_hostile_text_in_every_field_renders_inert(chief):
    """S01: the pages have the elements and attributes that they have with harmless text."""
    hostile = [page.content.decode() for page in pages(chief, HOSTILE)]
    harmless = [page.content.decode() for page in pages(chief, "a" * len(HOSTILE))]
    for bad, good in zip(hostile, harmless, strict=True):
        assert Skeleton(bad).parts == Skeleton(good).parts
        echoed = re.sub("<textarea.*?</textarea>", "", bad, flags=re.DOTALL)
        assert "\u202e" not in re.sub('value="[^"]*"', "", echoed)
        assert "70000007" not in bad


def test_no_page_has_inline_scripts_or_styles(chief):
    """A strict policy forbids inline code; the scripts of the range filters carry the nonce."""
    for page in pages(chief, "a"):
        content = re.sub(
            r"<details data-filter-title.*?</details>", "", page.content.decode(), flags=re.S
        )
        assert not re.search(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)[^>]*>", content)
        assert "<style" not in content
        assert not re.search(r"<[^>]+ (style|on\w+)=", content)


@pytest.mark.parametrize(
    "columns",
    [
        {"deliveries": {"h": {"state": "handed off"}, "g": {"state": "done", "failures": 0}}},
        {"deliveries": ["of a newer version"]},
        {"errors": {"of": "a newer version"}},
        {"errors": [{"of": "a newer version"}]},
    ],
)
def test_the_page_of_an_event_that_cannot_be_read_shows_the_rest_of_it(chief, columns):
    letter = dead_letter()
    EventLog.objects.filter(pk=letter.pk).update(**columns)
    assert "order.placed" in text_of(page_of(chief, letter))
    waiting = publish("order.placed", {})
    QueuedEvent.objects.filter(pk=waiting.pk).update(**columns)
    assert "order.placed" in text_of(page_of(chief, waiting, "queuedevent"))
    assert dead_letters.retry(letter.event_id) == 1


def test_the_page_of_an_interrupted_event_counts_its_interruptions(chief):
    letter = dead_letter()
    EventLog.objects.filter(pk=letter.pk).update(interruptions=5)
    assert "Interruptions 5" in text_of(page_of(chief, letter))
