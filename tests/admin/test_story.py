"""The page of an event reads as its story, whatever is in it and wherever it is."""

import re
import uuid
from datetime import timedelta
from html.parser import HTMLParser

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import handler, publish, queued
from django_eventbus.admin import payloads
from django_eventbus.admin.payloads import MOST_SHOWN, Redaction, shown
from django_eventbus.models import DeadEvent, EventLog, QueuedEvent
from tests.admin.conftest import url
from tests.admin.test_dead import text_of
from tests.bus import drain, drain_with_retries, logged
from tests.test_dead_letters import NOON, dead_letter

pytestmark = pytest.mark.django_db

ONCE = {"max_retries": 0}


def story_of(client, event, name="deadevent"):
    return client.get(url(f"{name}_change", event.pk), follow=True)


def test_a_dead_letter_tells_of_every_attempt(chief):
    @handler("order.placed", name="shop.ship", retry={"max_retries": 2, "jitter": 0.0})
    def fail(event):
        raise KeyError(f"stock {event.attempt}")

    handler("order.placed", name="shop.bill")(lambda event: None)
    event = publish("order.placed", {"order": 7}, key="order:7", headers={"tenant": "north"})
    drain_with_retries()
    page = text_of(story_of(chief, logged(event)))
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


def test_a_story_tells_how_long_each_attempt_waited_and_took(chief):
    letter = dead_letter()
    errors = [
        {**letter.errors[0], "at": (NOON + timedelta(seconds=at)).isoformat(), "seconds": took}
        for at, took in ((10, 2.5), (400, 0.25))
    ]
    EventLog.objects.update(errors=errors, created_at=NOON, finished_at=NOON + timedelta(hours=1))
    page = text_of(story_of(chief, letter))
    assert "waited 7.5 s · took 2.5 s" in page
    assert "waited 6 min · took 250 ms" in page


def test_a_story_tells_of_the_handlers_that_made_it(chief):
    handler("order.placed", name="shop.bill")(lambda event: None)
    letter = dead_letter()
    states = letter.deliveries
    assert states["shop.bill"]["seconds"] < 60
    states["shop.bill"] |= {"at": (NOON + timedelta(seconds=2)).isoformat(), "seconds": 0.003}
    errors = [{**letter.errors[0], "at": (NOON + timedelta(seconds=9)).isoformat()}]
    EventLog.objects.update(deliveries=states, errors=errors, created_at=NOON)
    page = text_of(story_of(chief, letter))
    assert "shop.bill done at attempt 1 · took 3 ms" in page
    assert page.index("shop.bill done at attempt") < page.index("shop.ship failed at attempt")


def test_a_story_tells_what_operators_did(chief):
    letter = dead_letter()
    chief.post(url("deadevent_retry", letter.pk))
    page = text_of(story_of(chief, letter, "queuedevent"))
    assert "Retried by chief" in page
    other = dead_letter()
    assert "by chief" not in text_of(story_of(chief, other))


def test_an_edit_is_told_once(chief, client_of):
    letter = dead_letter(payload=1)
    before = chief.get(url("deadevent_edit", letter.pk)).context["form"].initial["before"]
    chief.post(url("deadevent_edit", letter.pk), {"payload": "2", "before": before})
    page = text_of(story_of(chief, letter, "queuedevent"))
    assert page.count("by chief") == 1
    assert "by chief with another payload" in page
    assert "edited, and retried by chief" in text_of(
        story_of(client_of("viewer"), letter, "queuedevent")
    )


def test_attempts_that_are_left_out_are_counted(chief):
    letter = dead_letter()
    EventLog.objects.update(errors=[letter.errors[0]] * 103)
    page = text_of(story_of(chief, letter))
    assert "3 earlier attempts are not shown." in page
    assert page.count("failed at attempt") == 100


def test_an_event_that_went_well_at_once_names_its_handlers(chief):
    handler("x", name="shop.bill")(lambda event: None)
    event = publish("x", 1)
    drain()
    page = text_of(story_of(chief, logged(event), "eventlog"))
    assert "Every handler did it at the first attempt. Today these are: shop.bill." in page


def test_only_a_story_with_something_due_has_a_column_for_it(chief):
    letter = dead_letter()
    assert "Handler State Failures Actions" in text_of(story_of(chief, letter))
    handler("y", name="h", retry={"max_retries": 1, "base_delay": 60})(lambda event: 1 / 0)
    event = publish("y", 1)
    drain()
    page = text_of(story_of(chief, event, "queuedevent"))
    assert "Handler State Failures Due Actions" in page


def test_pages_with_times_name_the_zone_once(chief, settings):
    settings.TIME_ZONE = "Asia/Tokyo"
    letter = dead_letter()
    for page in (story_of(chief, letter), chief.get(url("deadevent_groups"))):
        assert text_of(page).count("Times are those of Asia/Tokyo.") == 1


def test_a_story_names_the_cause_and_what_was_published_in_turn(chief):
    @handler("order.placed", name="orders")
    def place(event):
        publish("stock.reserved", 1)
        publish("mail.sent", 2, delay=3600)

    handler("stock.reserved", name="stock")(lambda event: None)
    order = publish("order.placed", 0)
    drain()
    page = story_of(chief, logged(order), "eventlog")
    effects = page.context["story"].effects
    assert {(each.type, each.status) for each in effects} == {
        ("stock.reserved", "completed"),
        ("mail.sent", "pending"),
    }
    for each in effects:
        caused = chief.get(each.url)
        assert caused.context["story"].cause.event_id == order.event_id
        assert "Caused by order.placed" in text_of(caused)


def test_only_so_many_effects_are_shown(chief):
    order = publish("order.placed", 0, delay=60)
    for _ in range(25):
        publish("effect", 1)
    QueuedEvent.objects.filter(type="effect").update(caused_by=order.event_id)
    page = story_of(chief, order, "queuedevent")
    assert text_of(page).count("effect ") == 20
    assert "There are more." in text_of(page)


def test_a_cause_that_is_gone_is_still_named(chief):
    letter, cause = dead_letter(), uuid.uuid4()
    EventLog.objects.update(caused_by=cause)
    assert f"an event that is gone, or not for you to see {cause}" in text_of(
        story_of(chief, letter)
    )


def test_a_story_is_told_by_few_queries(chief):
    letter = dead_letter()
    EventLog.objects.update(caused_by=uuid.uuid4())
    with CaptureQueriesContext(connection) as queries:
        story_of(chief, letter)
    assert len(queries) < 15


def test_an_event_that_moved_on_is_shown_where_it_is(chief):
    letter = dead_letter()
    response = chief.post(url("deadevent_retry", letter.pk), follow=True)
    assert response.redirect_chain[-1][0] == url("queuedevent_change", letter.pk)
    assert "The event is back in the queue." in text_of(response)
    handler("order.placed", name="shop.ship")(lambda event: None)
    drain()
    ended = story_of(chief, letter, "queuedevent")
    assert ended.redirect_chain[-1][0] == url("eventlog_change", letter.pk)
    assert "Every handler" in text_of(ended) or "completed" in text_of(ended)


@pytest.mark.parametrize("name", ["deadevent", "eventlog", "queuedevent"])
@pytest.mark.parametrize("pk", ["999999999", "9" * 30, "9" * 4400, "x", "0x1", "-1", "²"])
def test_an_event_that_never_was_is_missing(chief, name, pk):
    response = chief.get(url(f"{name}_change", pk), follow=True)
    assert "exist. Perhaps it was deleted?" in text_of(response)


def test_a_queued_event_tells_whom_it_waits_for(chief):
    handler("x", name="shop.ship")(lambda event: None)
    event = publish("x", 1, delay=3600)
    page = text_of(story_of(chief, event, "queuedevent"))
    assert "shop.ship not tried yet" in page
    assert "pending" in page
    assert "Due" in page
    chief.post(url("queuedevent_run", event.pk))
    assert QueuedEvent.objects.get().available_at is None
    assert LogEntry.objects.get().change_message == "run now"
    again = chief.post(url("queuedevent_run", event.pk), follow=True)
    assert "Nothing was done" in text_of(again)


def test_an_event_that_was_cancelled_before_its_time_was_never_due(chief):
    event = publish("x", 1, delay=3600)
    queued.cancel([event.event_id])
    page = text_of(story_of(chief, logged(event), "eventlog"))
    assert "Ended: discarded" in page
    assert "Due" not in page


def test_one_handler_of_a_letter_is_retried(chief):
    handler("order.placed", name="a", retry=ONCE)(lambda event: 1 / 0)
    letter = dead_letter(handler_name="b")
    assert "Retry this handler b" in text_of(story_of(chief, letter))
    chief.post(url("deadevent_retry", letter.pk), {"handler": "b"})
    assert list(QueuedEvent.objects.get().deliveries) == ["a"]
    assert LogEntry.objects.get().change_message == "retried for b"


def test_a_handler_that_is_done_or_unknown_is_not_retried(chief):
    handler("order.placed", name="fine")(lambda event: None)
    letter = dead_letter()
    for name in ("c", "fine"):
        assert chief.post(url("deadevent_retry", letter.pk), {"handler": name}).status_code == 404
    assert DeadEvent.objects.exists()


def test_a_letter_is_discarded_after_a_question(chief):
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
    page = story_of(chief, letter)
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


def test_the_project_says_which_fields_are_sensitive(settings):
    settings.EVENTBUS = {"REDACT_FIELDS": ["iban"]}
    text = shown({"iban": "DE02", "password": "hunter2"}).text
    assert "DE02" not in text
    assert "hunter2" in text


def test_of_a_huge_payload_only_what_is_shown_is_looked_at(monkeypatch):
    looked_at = []
    monkeypatch.setattr(payloads, "printable", lambda text: looked_at.append(len(text)) or text)
    shown("x" * 10 * MOST_SHOWN)
    assert looked_at == [MOST_SHOWN]


def test_nothing_in_a_payload_can_turn_the_text_around():
    text = shown({"a": "\u202eevil\u2066\x7f\u00ad"}).text
    assert all(c.isprintable() or c == "\n" for c in text)
    assert r"\u202eevil" in text


# -- hostile text

HOSTILE = "</script></pre><img src=x onerror=alert(1)>\"' onclick=x {{ 7|add:7000 }} &lt; \u202e<b>"


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
    """Everything that shows something of them, messages and history included."""
    letter, event = fill(text)
    group = client.get(url("deadevent_groups")).context["groups"][0]
    yield client.get(url("deadevent_changelist"))
    yield client.get(url("deadevent_changelist"), {"handler": text, "q": text, "queue": text})
    yield client.get(group["list_url"])
    yield client.get(group["acts"][0]["url"])
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
        assert "7007" not in bad


def test_no_page_of_ours_has_scripts_or_styles_of_its_own(chief):
    """A strict policy forbids them; those of the range filters carry the nonce."""
    for page in pages(chief, "a"):
        content = re.sub(
            r"<details data-filter-title.*?</details>", "", page.content.decode(), flags=re.S
        )
        assert not re.search(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)[^>]*>", content)
        assert "<style" not in content
        assert not re.search(r"<[^>]+ (style|on\w+)=", content)
