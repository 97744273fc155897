"""Schedules in the admin: add, change, enable, disable, run."""

from datetime import timedelta

import pytest
from django.contrib.admin.models import ADDITION, LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import schedule, schedules
from django_eventbus.models import EventSchedule, QueuedEvent, ScheduleOrigin
from django_eventbus.store import store_for
from tests.admin.people import client_with

pytestmark = pytest.mark.django_db

SCHEDULES = "/admin/django_eventbus/eventschedule/"
ADD = f"{SCHEDULES}add/"
ALL = tuple(f"{verb}_eventschedule" for verb in ("view", "add", "change", "delete"))
GIVEN = {
    "name": "nightly",
    "enabled": "on",
    "cron": "0 6 * * *",
    "tz": "Europe/Berlin",
    "misfire": "fire_once",
    "type": "report.daily",
    "priority": "0",
    "payload": '{"full": true}',
    "headers": "null",
}


@pytest.fixture
def keeper():
    return client_with(*ALL, "view_payload_eventlog", name="keeper")


@pytest.fixture
def viewer():
    return client_with("view_eventschedule", name="viewer")


@pytest.fixture
def nightly():
    row = EventSchedule(name="nightly", type="report.daily", cron="0 6 * * *", payload={"a": "b"})
    row.save()
    return row


@pytest.fixture
def declared():
    """A schedule that code declares, with the row that a worker inserts."""
    schedule("tidy", cron="*/5 * * * *")
    schedules.synchronize(store_for())
    return EventSchedule.objects.get(name="tidy")


def act(client, action, *rows):
    chosen = {"action": action, "_selected_action": [row.pk for row in rows]}
    return client.post(SCHEDULES, chosen, follow=True)


def messages_in(answer):
    return [str(each) for each in answer.context["messages"]]


def shown(client, url):
    return client.get(url).content.decode()


def test_m14_an_operator_adds_a_schedule(keeper):
    answer = keeper.post(ADD, GIVEN)
    assert answer.status_code == 302, answer.context["adminform"].form.errors
    made = EventSchedule.objects.get()
    assert (made.cron, made.payload, made.key, made.origin, made.namespace) == (
        "0 6 * * *",
        {"full": True},
        None,
        ScheduleOrigin.DATABASE,
        "default",
    )
    assert LogEntry.objects.get().action_flag == ADDITION


@pytest.mark.parametrize(
    ("field", "value"),
    [("cron", "0 25 * * *"), ("tz", "Berlin"), ("queue", "nowhere"), ("type", "")],
)
def test_a_schedule_that_cannot_fire_is_refused_with_an_error_at_its_field(keeper, field, value):
    answer = keeper.post(ADD, {**GIVEN, field: value})
    assert answer.status_code == 200
    assert field in answer.context["adminform"].form.errors
    assert not EventSchedule.objects.exists()


def test_a_schedule_is_changed_and_described(keeper, nightly):
    keeper.post(f"{SCHEDULES}{nightly.pk}/change/", {**GIVEN, "cron": "30 7 * * *"})
    page = shown(keeper, f"{SCHEDULES}{nightly.pk}/change/")
    assert "at 07:30 every day" in page
    assert "next: " in page


def test_the_list_shows_the_next_runs(viewer, nightly, declared):
    EventSchedule.objects.filter(pk=nightly.pk).update(enabled=False)
    page = shown(viewer, SCHEDULES)
    assert "every fifth minute of every hour" in page
    assert "disabled" in page
    assert "declared in code" in page


def test_a_schedule_that_should_have_run_is_overdue(viewer, nightly, store):
    EventSchedule.objects.update(next_at=store.read_clock() - timedelta(minutes=12))
    assert "overdue for 12 min" in shown(viewer, SCHEDULES)


def test_an_invalid_row_does_not_break_the_list(viewer, nightly):
    EventSchedule.objects.update(cron="rubbish", tz="Nowhere")
    assert viewer.get(SCHEDULES).status_code == 200
    assert viewer.get(f"{SCHEDULES}{nightly.pk}/change/").status_code == 200


def test_a_declared_schedule_can_only_be_enabled_and_disabled(keeper, declared):
    url = f"{SCHEDULES}{declared.pk}/change/"
    assert 'name="cron"' not in shown(keeper, url)
    keeper.post(url, {**GIVEN, "enabled": ""})
    declared.refresh_from_db()
    assert (declared.name, declared.cron, declared.enabled) == ("tidy", "*/5 * * * *", False)
    assert keeper.post(f"{SCHEDULES}{declared.pk}/delete/", {"post": "yes"}).status_code == 403
    assert EventSchedule.objects.filter(pk=declared.pk).exists()


def test_a_schedule_added_in_the_admin_can_be_deleted(keeper, nightly):
    keeper.post(f"{SCHEDULES}{nightly.pk}/delete/", {"post": "yes"})
    assert not EventSchedule.objects.exists()
    assert LogEntry.objects.get().object_repr == "nightly"


def test_schedules_cannot_be_deleted_in_bulk(keeper, nightly):
    assert act(keeper, "delete_selected", nightly).status_code == 403
    assert EventSchedule.objects.exists()


def test_schedules_are_disabled_and_enabled(keeper, nightly, declared):
    assert messages_in(act(keeper, "disable", nightly, declared)) == ["Disabled 2 schedules."]
    assert not EventSchedule.objects.filter(enabled=True).exists()
    assert messages_in(act(keeper, "enable", nightly)) == ["Enabled 1 schedule."]
    assert EventSchedule.objects.get(enabled=True) == nightly
    entries = list(LogEntry.objects.order_by("pk").values_list("object_repr", "change_message"))
    assert sorted(entries) == [
        ("nightly", "disabled"),
        ("nightly", "enabled"),
        ("tidy", "disabled"),
    ]


def test_a_schedule_is_run_now(keeper, nightly):
    assert messages_in(act(keeper, "run_now", nightly)) == ["Published 1 event."]
    assert QueuedEvent.objects.get().payload == {"a": "b"}
    assert LogEntry.objects.get().change_message == "run manually"


def test_the_payload_needs_its_permission(nightly):
    nightly.payload = {"token": "hush-hush"}
    nightly.save()
    url = f"{SCHEDULES}{nightly.pk}/change/"
    editor = client_with(*ALL, name="editor")
    assert "hush-hush" not in shown(editor, url)
    editor.post(url, {**GIVEN, "payload": '"forged"'})
    nightly.refresh_from_db()
    assert nightly.payload == {"token": "hush-hush"}
    assert nightly.tz == "Europe/Berlin"


def test_only_the_form_shows_secrets(keeper, nightly):
    EventSchedule.objects.update(payload={"token": "hush-hush", "n": 7}, headers={"cookie": "c00k"})
    reader = client_with("view_eventschedule", "view_payload_eventlog", name="reader")
    url = f"{SCHEDULES}{nightly.pk}/change/"
    page = shown(reader, url)
    assert "&quot;n&quot;: 7" in page
    assert "hush-hush" not in page
    assert "c00k" not in page
    assert "hush-hush" in shown(keeper, url)
    EventSchedule.objects.update(origin=ScheduleOrigin.CODE)
    assert "hush-hush" not in shown(keeper, url), "code changes it, so here it is only read"


@pytest.mark.parametrize("action", ["enable", "disable", "run_now", "delete_selected"])
@pytest.mark.parametrize(
    "rights", [(), ("view_eventschedule",), ("view_eventschedule", "add_eventschedule")]
)
def test_forged_posts_change_nothing_without_the_permission(nightly, action, rights):
    answer = act(client_with(*rights), action, nightly)
    assert answer.status_code == 403
    unchanged = EventSchedule.objects.get()
    assert unchanged.enabled
    assert not QueuedEvent.objects.exists()
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("url", [ADD, f"{SCHEDULES}1/change/", f"{SCHEDULES}1/delete/"])
def test_forms_need_their_permission(viewer, nightly, url):
    EventSchedule.objects.filter(pk=nightly.pk).update(id=1)
    assert viewer.post(url, GIVEN).status_code == 403
    assert EventSchedule.objects.get().cron == "0 6 * * *"


def test_posts_need_a_csrf_token(nightly):
    client = client_with(*ALL, strict=True)
    assert act(client, "disable", nightly).status_code == 403
    assert EventSchedule.objects.get().enabled


def test_hostile_text_is_shown_as_text(keeper):
    nasty = "<img src=x onerror=alert(1)>"
    row = EventSchedule(name=nasty, type=nasty, cron="0 6 * * *", payload={"a": nasty}, key=nasty)
    row.save()
    for url in (SCHEDULES, f"{SCHEDULES}{row.pk}/change/"):
        page = shown(keeper, url)
        assert "&lt;img src=x" in page
        assert "<img src=x" not in page


def test_the_number_of_queries_does_not_grow_with_the_list(viewer, nightly):
    with CaptureQueriesContext(connection) as few:
        viewer.get(SCHEDULES)
    for number in range(20):
        EventSchedule(name=f"s{number}", type="x", cron="0 6 * * *").save()
    with CaptureQueriesContext(connection) as many:
        viewer.get(SCHEDULES)
    assert len(few) == len(many) < 15
