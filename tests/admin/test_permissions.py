"""The permission of every action, tested by forged requests and not by what a page offers.

S02 to S06 are numbers in the list of security requirements.
"""

from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.apps import apps
from django.contrib.admin.models import LogEntry
from django.contrib.admin.sites import site
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.test import Client

from django_eventbus import handler, pauses, publish, queued
from django_eventbus.admin.dead_letters import DeadEventAdminMixin
from django_eventbus.models import (
    DeadEvent,
    EventLane,
    EventLog,
    EventReplay,
    EventSchedule,
    EventWorker,
    FlowControl,
    QueuedEvent,
)
from django_eventbus.store import store_for
from tests.admin.conftest import MODELS, ROLES, url
from tests.test_dead_letters import NOON, dead_letter

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.skipif(
        connection.vendor != "sqlite",
        reason="permissions do not depend on the database",
    ),
]

APP = apps.get_app_config("django_eventbus")
EVERYBODY = set(ROLES) - {"stranger"}
PLAN = {"name": "nightly", "cron": "1 6 * * *", "tz": "UTC", "misfire": "skip", "type": "report"}
PLAN |= {"priority": "0", "payload": "1", "headers": "null"}
CHANGED = [
    ("deadevent_changelist", {"action": "delete_selected"}, set()),
    ("deadevent_changelist", {"action": "retry"}, {"retrier", "chief"}),
    ("deadevent_changelist", {"action": "retry_later"}, {"retrier", "chief"}),
    ("deadevent_changelist", {"action": "purge"}, {"purger", "chief"}),
    ("deadevent_changelist", {"action": "edit"}, {"editor", "chief"}),
    ("deadevent_changelist", {"action": "replay_events"}, {"replayer", "chief"}),
    ("deadevent_replay", {"confirmation": "?"}, {"replayer", "chief"}),
    ("deadevent_add", {}, set()),
    ("deadevent_change", {"type": "forged"}, set()),
    ("deadevent_delete", {"post": "yes"}, set()),
    ("deadevent_retry", {}, {"retrier", "chief"}),
    ("deadevent_retry", {"handler": "shop.ship"}, {"retrier", "chief"}),
    ("deadevent_edit", {"payload": "8"}, {"editor", "chief"}),
    ("deadevent_bulk:retry", {"run": "?"}, {"retrier", "chief"}),
    ("deadevent_bulk:retry_later", {"run": "?", "per_minute": "1"}, {"retrier", "chief"}),
    ("deadevent_bulk:purge", {"run": "?"}, {"purger", "chief"}),
    ("eventlog_changelist", {"action": "replay_events"}, {"replayer", "chief"}),
    ("eventlog_replay", {"confirmation": "?"}, {"replayer", "chief"}),
    ("eventlog_add", {}, set()),
    ("eventlog_change", {"type": "forged"}, set()),
    ("eventlog_delete", {"post": "yes"}, set()),
    ("queuedevent_changelist", {"action": "run"}, {"retrier", "chief"}),
    ("queuedevent_changelist", {"action": "cancel"}, {"purger", "chief"}),
    ("queuedevent_add", {}, set()),
    ("queuedevent_change", {"type": "forged"}, set()),
    ("queuedevent_delete", {"post": "yes"}, set()),
    ("queuedevent_run", {}, {"retrier", "chief"}),
    ("queuedevent_bulk:run", {"run": "?"}, {"retrier", "chief"}),
    ("queuedevent_bulk:cancel", {"run": "?"}, {"purger", "chief"}),
    ("eventlane_changelist", {"action": "release"}, {"pauser", "chief"}),
    ("eventlane_changelist", {"action": "skip_head"}, {"purger", "chief"}),
    ("eventlane_changelist", {"action": "skip_head", "confirmed": "yes"}, {"purger", "chief"}),
    ("eventlane_add", {}, set()),
    ("eventlane_change", {"key": "forged"}, set()),
    ("eventlane_delete", {"post": "yes"}, set()),
    ("eventworker_add", {}, set()),
    ("eventworker_change", {"host": "forged"}, set()),
    ("eventworker_delete", {"post": "yes"}, set()),
    ("flowcontrol_changelist", {"action": "resume"}, {"pauser", "chief"}),
    ("flowcontrol_changelist", {"action": "reset_breaker"}, {"pauser", "chief"}),
    ("flowcontrol_pause", {"what": "queue:default"}, {"pauser", "chief"}),
    ("flowcontrol_add", {}, set()),
    ("flowcontrol_change", {"name": "forged"}, set()),
    ("flowcontrol_delete", {"post": "yes"}, set()),
    ("eventreplay_changelist", {"action": "cancel"}, {"replayer", "chief"}),
    ("eventreplay_changelist", {"action": "cancel", "confirmed": "yes"}, {"replayer", "chief"}),
    ("eventreplay_add", {}, set()),
    ("eventreplay_change", {"handler": "forged"}, set()),
    ("eventreplay_delete", {"post": "yes"}, set()),
    ("eventschedule_changelist", {"action": "enable"}, {"planner", "chief"}),
    ("eventschedule_changelist", {"action": "disable"}, {"planner", "chief"}),
    ("eventschedule_changelist", {"action": "run_now"}, {"planner", "chief"}),
    ("eventschedule_add", {**PLAN, "name": "another"}, {"planner", "chief"}),
    ("eventschedule_change", PLAN, {"planner", "chief"}),
    ("eventschedule_delete", {"post": "yes"}, {"planner", "chief"}),
]
SEEN = [
    ("deadevent_changelist", EVERYBODY),
    ("deadevent_change", EVERYBODY),
    ("deadevent_history", EVERYBODY),
    ("deadevent_groups", EVERYBODY),
    ("deadevent_edit", {"editor", "chief"}),
    ("deadevent_bulk:retry", {"retrier", "chief"}),
    ("deadevent_bulk:retry_later", {"retrier", "chief"}),
    ("deadevent_bulk:purge", {"purger", "chief"}),
    ("eventlog_changelist", EVERYBODY),
    ("eventlog_change", EVERYBODY),
    ("eventlog_history", EVERYBODY),
    ("queuedevent_changelist", EVERYBODY),
    ("queuedevent_change", EVERYBODY),
    ("queuedevent_history", EVERYBODY),
    ("queuedevent_bulk:run", {"retrier", "chief"}),
    ("queuedevent_bulk:cancel", {"purger", "chief"}),
    *(
        (f"{model}_{view}", EVERYBODY)
        for model in ("eventlane", "eventworker", "flowcontrol", "eventschedule", "eventreplay")
        for view in ("changelist", "change", "history")
    ),
    ("flowcontrol_pause", {"pauser", "chief"}),
    ("eventschedule_add", {"planner", "chief"}),
    ("eventschedule_delete", {"planner", "chief"}),
    ("minutestatistics_changelist", EVERYBODY),
    ("minutestatistics_statistics", EVERYBODY),
    ("minutestatistics_checks", EVERYBODY),
]


@pytest.fixture
def rows():
    """A row of each model by the model's name."""
    letter = dead_letter(payload=7)
    waiting = publish("waiting", 7, delay=3600)
    now = store_for().read_clock()
    ours = {"namespace": "default"}
    pauses.pause(type="mail.*")
    handler("order.placed", name="shop.mail")(lambda event: None)
    return {
        "eventreplay": EventReplay.objects.create(type="order.*", until=now, total=1),
        "deadevent": letter,
        "eventlog": letter,
        "queuedevent": waiting,
        "eventlane": EventLane.objects.create(**ours, queue="default", key="k", ready_at=now),
        "eventworker": EventWorker.objects.create(
            **ours, host="web", pid=1, queues=["default"], expires_at=now
        ),
        "flowcontrol": FlowControl.objects.get(),
        "eventschedule": EventSchedule.objects.create(name="nightly", type="x", cron="0 6 * * *"),
    }


OF_A_ROW = ("change", "history", "delete", "retry", "edit", "run")


def address(name, rows):
    name, _, act = name.partition(":")
    model, view = name.split("_")
    if act:
        return url(name, act)
    return url(name, rows[model].pk) if view in OF_A_ROW else url(name)


def everything():
    """All rows that an action could change."""
    models = (QueuedEvent, EventLog, EventLane, EventWorker, FlowControl, EventSchedule)
    models += (EventReplay, LogEntry)
    return [list(model.objects.order_by("pk").values()) for model in models]


def test_every_url_is_tested():
    tried = {name.partition(":")[0] for name, *_ in [*CHANGED, *SEEN]}
    pages = [page for model, page in site._registry.items() if model in APP.get_models()]
    assert len(pages) == len(MODELS)
    ours = {each.name for page in pages for each in page.get_urls() if each.name}
    assert {name.removeprefix("django_eventbus_") for name in ours} == tried


@contextmanager
def rolled_back():
    """Roll back, so that each role starts with the same rows."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


@pytest.mark.parametrize(("name", "data", "allowed"), CHANGED)
def test_a_forged_request_changes_nothing_without_permission(client_of, rows, name, data, allowed):
    for role in ROLES:
        with rolled_back():
            forge(client_of(role), role, rows, name, data, allowed)


def forge(client, role, rows, name, data, allowed):
    place = address(name, rows)
    model = name.split("_")[0]
    if "action" in data:
        data = {**data, "_selected_action": [rows[model].pk]}
    if name == "deadevent_edit" and role in allowed:
        data = {**data, "before": client.get(place).context["form"].initial["before"]}
    if "run" in data and role in allowed:
        data = {**data, "run": client.get(place).context["token"]}
    if "confirmation" in data and role in allowed:
        chosen = {"action": "replay_events", "_selected_action": [rows[model].pk]}
        asked = client.post(url(f"{model}_changelist"), chosen)
        data = {**data, "confirmation": asked.context["token"]}
    before = everything()
    response = client.post(place, data)
    if role in allowed:
        assert response.status_code in (200, 302), role
        if "action" not in data:
            assert everything() != before, role
            assert LogEntry.objects.count() == 1, role
    else:
        # Django's own delete_selected is not among the actions: the list is simply shown again.
        ignored = data.get("action") == "delete_selected" and role != "stranger"
        assert response.status_code in ((200, 302) if ignored else (403,)), role
        assert everything() == before, role


@pytest.mark.parametrize(("name", "allowed"), SEEN)
def test_a_page_needs_its_permission(client_of, rows, name, allowed):
    before = everything()
    for role in ROLES:
        response = client_of(role).get(address(name, rows))
        assert response.status_code == (200 if role in allowed else 403), role
    assert everything() == before


@pytest.mark.parametrize("method", ["get", "head"])
@pytest.mark.parametrize(("name", "data", "_allowed"), CHANGED)
def test_nothing_changes_without_a_post(client_of, rows, method, name, data, _allowed):
    """S04."""
    client = client_of("chief")
    before = everything()
    getattr(client, method)(address(name, rows), data)
    assert everything() == before


@pytest.mark.parametrize(("name", "data", "_allowed"), CHANGED)
def test_nothing_changes_without_a_csrf_token(client_of, rows, name, data, _allowed):
    client = client_of("chief", enforce_csrf_checks=True)
    before = everything()
    assert client.post(address(name, rows), data).status_code == 403
    assert everything() == before


@pytest.mark.parametrize(("name", "data", "_allowed"), CHANGED)
def test_anonymous_users_are_redirected_to_the_login(rows, name, data, _allowed):
    customer = User.objects.create_user("customer", password="x")
    client = Client()
    for log_in in (lambda: None, lambda: client.force_login(customer)):
        log_in()
        before = everything()
        assert "/login/" in client.post(address(name, rows), data).url
        assert everything() == before


def test_payloads_need_their_permission(client_of):
    letter = dead_letter(payload={"color": "mauve"}, headers={"tenant": "vermilion"})
    EventLog.objects.update(
        edits=[{"at": "2026-01-01T00:00:00+00:00", "by": "x", "payload": "ochre"}]
    )
    for role, sees in (("viewer", False), ("editor", True), ("chief", True)):
        page = client_of(role).get(url("deadevent_change", letter.pk)).content.decode()
        for secret in ("mauve", "vermilion", "ochre"):
            assert (secret in page) is sees


def test_a_hidden_payload_is_not_read(client_of, django_assert_max_num_queries):
    letter, client = dead_letter(payload=1), client_of("viewer")
    with django_assert_max_num_queries(14) as queries:
        client.get(url("deadevent_change", letter.pk))
    assert not [query for query in queries.captured_queries if '"payload"' in query["sql"]]


@pytest.mark.parametrize("role", ["viewer", "purger"])
def test_pages_offer_only_permitted_actions(client_of, rows, role):
    client = client_of(role)
    pages = ("deadevent_changelist", "deadevent_change", "deadevent_groups")
    for name in (*pages, "queuedevent_changelist", "queuedevent_change"):
        page = client.get(address(name, rows)).content.decode()
        assert "Retry" not in page
        assert "Run now" not in page
        if role == "viewer":
            assert "Purge" not in page
            assert "Cancel" not in page


def test_actions_apply_only_to_rows_that_the_admin_shows(client_of, rows, monkeypatch):
    """S05: a project's own get_queryset() also limits actions and pages."""
    client = client_of("chief")
    hidden = rows["deadevent"]
    token = client.get(url("deadevent_bulk", "purge")).context["token"]
    chosen = {"action": "purge", "_selected_action": [hidden.pk]}
    chosen_token = client.post(url("deadevent_changelist"), chosen).context["token"]
    seen = DeadEventAdminMixin.get_queryset
    monkeypatch.setattr(
        DeadEventAdminMixin,
        "get_queryset",
        lambda self, request: seen(self, request).exclude(pk=hidden.pk),
        raising=False,
    )
    before = everything()
    assert client.post(url("deadevent_retry", hidden.pk)).status_code == 404
    assert client.get(url("deadevent_edit", hidden.pk)).status_code == 404
    assert client.get(url("deadevent_change", hidden.pk)).status_code == 302
    for each in (token, chosen_token):
        client.post(url("deadevent_bulk", "purge"), {"run": each})
    assert everything() == before


@pytest.fixture
def mine_only(monkeypatch):
    """A project whose admins show only what its own producer published."""

    def narrow(page):
        seen = page.get_queryset
        monkeypatch.setattr(
            page, "get_queryset", lambda request: seen(request).filter(producer="mine")
        )

    for model in (DeadEvent, EventLog, QueuedEvent):
        narrow(site._registry[model])


def test_groups_contain_only_visible_rows(client_of, mine_only):
    """S05."""
    client = client_of("chief")
    for who in ("mine", "mine", "theirs"):
        letter = dead_letter(error=KeyError(who))
        EventLog.objects.filter(pk=letter.pk).update(
            producer=who, error_fingerprint="a" * 16, finished_at=NOON
        )
    EventLog.objects.filter(producer="theirs").update(finished_at=NOON + timedelta(days=1))
    other = dead_letter("other", error=ValueError("theirs"), handler_name="their.handler")
    (group,) = client.get(url("deadevent_groups")).context["groups"]
    assert (str(group["count"]), group["last_at"], group["message"]) == ("2", NOON, "'mine'")
    fingerprint = EventLog.objects.get(pk=other.pk).error_fingerprint
    page = client.get(url("deadevent_changelist", query=f"?group={fingerprint}"))
    assert "their.handler" not in page.content.decode()


def test_only_related_events_that_the_admin_shows_are_listed(client_of, mine_only):
    """S05."""
    client, letter = client_of("chief"), dead_letter()
    cause, effect = publish("their.cause", delay=60), publish("their.effect", delay=60)
    EventLog.objects.update(producer="mine", caused_by=cause.event_id)
    QueuedEvent.objects.filter(pk=effect.pk).update(caused_by=letter.event_id)
    page = client.get(url("deadevent_change", letter.pk)).content.decode()
    assert "that you may not view" in page
    assert "their." not in page
    QueuedEvent.objects.update(producer="mine")
    page = client.get(url("deadevent_change", letter.pk)).content.decode()
    assert "their.cause" in page
    assert "their.effect" in page


def test_a_retry_can_change_neither_type_nor_payload(client_of):
    """S19."""
    letter = dead_letter(payload=7)
    forged = {"type": "forged", "payload": "8", "key": "k"}
    client_of("retrier").post(url("deadevent_retry", letter.pk), forged)
    event = QueuedEvent.objects.get()
    assert (event.type, event.payload, event.key) == (letter.type, 7, None)


def test_the_history_names_a_cancelled_event(client_of):
    client = client_of("purger")
    event = publish("waiting", 7, delay=3600)
    token = client.get(url("queuedevent_bulk", "cancel")).context["token"]
    client.post(url("queuedevent_bulk", "cancel"), {"run": token})
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.object_repr) == (str(event.pk), str(event.event_id))
    assert not queued.cancel([event.event_id])
