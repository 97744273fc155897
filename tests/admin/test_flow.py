"""Lanes, workers, pauses and circuit breakers in the admin."""

import re
import uuid
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import CircuitBreaker, RetryPolicy, breakers, handler, lanes, pauses, publish
from django_eventbus.models import (
    DeadEvent,
    EventLane,
    EventWorker,
    FlowControl,
    QueuedEvent,
)
from django_eventbus.publishing.publisher import publish_many
from tests.admin.people import client_with
from tests.bus import drain

pytestmark = pytest.mark.django_db

LANES = "/admin/django_eventbus/eventlane/"
WORKERS = "/admin/django_eventbus/eventworker/"
CONTROLS = "/admin/django_eventbus/flowcontrol/"
PAUSE = f"{CONTROLS}pause/"
VIEWS = ("view_eventlane", "view_eventworker", "view_flowcontrol")


@pytest.fixture
def viewer():
    return client_with(*VIEWS, name="viewer")


@pytest.fixture
def operator():
    return client_with(*VIEWS, "pause_flowcontrol", "purge_deadevent", name="operator")


@pytest.fixture
def stuck_lanes(settings):
    """Two keys whose first event waits for its retry, with another behind it."""

    @handler("bad", name="fails", retry=RetryPolicy(base_delay=30))
    def fail(event):
        raise ValueError

    for key in ("a", "b"):
        publish("bad", key=key)
        publish("good", key=key)
    drain()
    return list(EventLane.objects.order_by("key"))


def act(client, url, action, rows, **more):
    chosen = {"action": action, "_selected_action": [row.pk for row in rows]}
    return client.post(url, {**chosen, **more}, follow=True)


def messages_in(answer):
    return [str(each) for each in answer.context["messages"]]


def shown(client, url):
    return client.get(url).content.decode()


# -- lanes


def test_the_list_of_lanes_shows_their_wait(viewer, stuck_lanes):
    assert len(re.findall(r"retry in \d+ s", shown(viewer, LANES))) == 2


def test_the_page_of_a_lane_shows_its_first_event(viewer, stuck_lanes):
    page = shown(viewer, f"{LANES}{stuck_lanes[0].pk}/change/")
    first = QueuedEvent.objects.filter(key="a").order_by("id").first()
    assert str(first.event_id) in page
    assert "bad" in page


def test_a_released_lane_is_ready_and_recorded(operator, stuck_lanes):
    answer = act(operator, LANES, "release", stuck_lanes[:1])
    assert messages_in(answer) == ["Released 1 lane."]
    states = {lane.key: lane.state for lane in lanes.list()}
    assert states == {"a": "ready", "b": "waiting"}
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.object_repr, entry.change_message) == (
        "operator",
        "a",
        "released the lane",
    )


def test_held_and_blocked_lanes_are_shown_as_such(viewer, stuck_lanes):
    held, blocked = stuck_lanes
    EventLane.objects.filter(pk=held.pk).update(ready_at=None, held_by=7)
    EventLane.objects.filter(pk=blocked.pk).update(ready_at=None, blocked_by=uuid.uuid4())
    page = shown(viewer, LANES)
    assert page.count("held by flow control") == 1
    assert not re.search(r"(retry in|ready for) \d", page)
    assert f"/{blocked.pk}/" in shown(viewer, f"{LANES}?state=blocked")
    assert f"/{held.pk}/" not in shown(viewer, f"{LANES}?state=blocked")
    assert f"/{held.pk}/" in shown(viewer, f"{LANES}?state=waiting")


def test_a_lane_that_is_being_handled_is_skipped(operator, stuck_lanes, worker_id):
    lane = stuck_lanes[0]
    EventLane.objects.filter(pk=lane.pk).update(claim_token=worker_id)
    answer = act(operator, LANES, "release", [lane])
    assert messages_in(answer)[0].startswith("1 skipped: ")
    assert not LogEntry.objects.exists()


def test_skipping_needs_a_confirmation(operator, stuck_lanes):
    answer = act(operator, LANES, "skip_head", stuck_lanes)
    assert "The first events of 2 keys are skipped." in answer.content.decode()
    assert QueuedEvent.objects.count() == 4
    assert not LogEntry.objects.exists()


def test_a_skipped_event_is_a_dead_letter_with_the_reason(operator, stuck_lanes):
    answer = act(
        operator, LANES, "skip_head", stuck_lanes[:1], confirmed="yes", reason="cannot work"
    )
    assert messages_in(answer) == ["Skipped 1 event, which is now a dead letter."]
    letter = DeadEvent.objects.get()
    assert letter.errors[-1]["message"] == "cannot work"
    assert QueuedEvent.objects.filter(key="a").count() == 1
    assert LogEntry.objects.get().change_message == "skipped the first event: cannot work"


def test_one_request_acts_on_a_bounded_number_of_lanes(operator, stuck_lanes, monkeypatch):
    monkeypatch.setattr("django_eventbus.admin.lanes.MOST_AT_ONCE", 1)
    assert messages_in(act(operator, LANES, "release", stuck_lanes)) == ["Released 1 lane."]


@pytest.mark.parametrize(
    ("state", "keys"), [("waiting", {"a", "b"}), ("blocked", set()), ("nonsense", set())]
)
def test_lanes_are_filtered_by_state(viewer, stuck_lanes, state, keys):
    answer = viewer.get(LANES, {"state": state})
    assert {row.key for row in answer.context["cl"].result_list} == keys


def test_a_blocked_lane_is_found_and_released(operator, settings):
    settings.EVENTBUS = {"DEAD_HEAD": "block"}

    @handler("bad", name="fails", retry=RetryPolicy(max_retries=0))
    def fail(event):
        raise ValueError

    publish("bad", key="k")
    drain()
    answer = operator.get(LANES, {"state": "blocked"})
    (lane,) = answer.context["cl"].result_list
    assert "blocked by a dead letter" in answer.content.decode()
    act(operator, LANES, "release", [lane])
    assert not EventLane.objects.filter(blocked_by__isnull=False).exists()


def test_a_lane_of_another_namespace_is_not_found(operator, stuck_lanes):
    EventLane.objects.update(namespace="another")
    answer = act(operator, LANES, "release", stuck_lanes)
    assert EventLane.objects.filter(ready_at__gt=stuck_lanes[0].ready_at - timedelta(seconds=1))
    assert not LogEntry.objects.exists()
    assert answer.context["cl"].result_count == 0


# -- workers


def test_the_list_of_workers_shows_their_state(viewer, store):
    now = store.read_clock()
    common = {"namespace": "default", "queues": ["default", "mail"]}
    EventWorker.objects.create(host="a", pid=1, expires_at=now + timedelta(hours=1), **common)
    EventWorker.objects.create(
        host="b",
        pid=2,
        renewed_at=now - timedelta(minutes=4),
        expires_at=now - timedelta(minutes=3),
        **common,
    )
    page = shown(viewer, WORKERS)
    assert "alive" in page
    assert "4 min ago" in page
    assert "not responding: other workers take over its events" in page


# -- flow control


def test_a_pause_is_recorded_with_user_and_reason(operator):
    answer = operator.post(PAUSE, {"what": "queue:default", "reason": "disk full"}, follow=True)
    assert messages_in(answer) == ["Paused default."]
    control = FlowControl.objects.get()
    assert (control.paused_by, control.reason) == ("operator", "disk full")
    assert re.search(r"paused [\d.]+ m?s ago by", answer.content.decode())
    assert LogEntry.objects.get().change_message == "paused: disk full"


@pytest.mark.parametrize(
    ("given", "kind", "name"),
    [
        ({"what": "handler:handles"}, "handler", "handles"),
        ({"pattern": "order.*"}, "type", "order.*"),
    ],
)
def test_a_handler_or_an_event_type_is_paused(operator, given, kind, name):
    handler("x", name="handles")(lambda event: None)
    operator.post(PAUSE, given)
    control = FlowControl.objects.get(paused_at__isnull=False)
    assert (control.kind, control.name) == (kind, name)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"what": "queue:default", "pattern": "x"},
        {"what": "queue:nowhere"},
        {"what": "nonsense"},
        {"pattern": "x", "reason": "a" * 501},
        {"pattern": "x\x07"},
    ],
)
def test_an_invalid_pause_is_refused_with_a_message(operator, given):
    answer = operator.post(PAUSE, given)
    assert answer.status_code == 200
    assert answer.context["form"].errors
    assert not FlowControl.objects.exists()
    assert not LogEntry.objects.exists()


def test_pausing_twice_keeps_the_first_reason(operator):
    pauses.pause(queue="default", by="bob", reason="first")
    answer = operator.post(PAUSE, {"what": "queue:default", "reason": "second"}, follow=True)
    assert messages_in(answer) == ["default was already paused; the first reason is kept."]
    assert FlowControl.objects.get().reason == "first"
    assert not LogEntry.objects.exists()


def test_a_pause_is_ended(operator):
    pauses.pause(queue="default", by="bob")
    control = FlowControl.objects.get()
    assert messages_in(act(operator, CONTROLS, "resume", [control])) == ["Ended 1 pause."]
    assert pauses.list() == []
    assert LogEntry.objects.get().object_id == str(control.pk)


def test_m30_a_circuit_breaker_is_shown_and_reset(operator):
    @handler("x", name="pays", breaker=CircuitBreaker(min_calls=3))
    def fail(event):
        raise ConnectionError

    publish_many(("x", n) for n in range(3))
    drain()
    assert "next try in" in shown(operator, f"{CONTROLS}?state=open")
    control = FlowControl.objects.get(name="pays")
    answer = act(operator, CONTROLS, "reset_breaker", [control])
    assert messages_in(answer) == ["Reset 1 circuit breaker."]
    assert [each.state for each in breakers.list()] == ["closed"]
    assert LogEntry.objects.get().change_message == "reset the circuit breaker"


def test_a_reset_without_a_breaker_is_reported(operator):
    pauses.pause(queue="default")
    FlowControl.objects.create(namespace="default", kind="handler", name="gone")
    answer = act(operator, CONTROLS, "reset_breaker", FlowControl.objects.all())
    assert any("there is no handler 'gone'" in text for text in messages_in(answer))
    assert not LogEntry.objects.exists()


def test_a_change_and_its_history_entry_are_one_transaction(operator, stuck_lanes, monkeypatch):
    """S06: a change whose history entry fails is rolled back."""

    def fail(*args, **kwargs):
        raise RuntimeError("no history today")

    monkeypatch.setattr("django_eventbus.admin.row_actions.record", fail)
    with pytest.raises(RuntimeError):
        act(operator, LANES, "release", stuck_lanes)
    assert {lane.state for lane in lanes.list()} == {"waiting"}


# -- permissions


POSTS = [
    (LANES, {"action": "release"}),
    (LANES, {"action": "skip_head", "confirmed": "yes"}),
    (CONTROLS, {"action": "resume"}),
    (CONTROLS, {"action": "reset_breaker"}),
    (PAUSE, {"what": "queue:default"}),
    (f"{LANES}add/", {"key": "x"}),
    (f"{CONTROLS}add/", {"name": "x"}),
    (f"{WORKERS}add/", {"host": "x"}),
]


def everything():
    return [
        list(model.objects.order_by("pk").values())
        for model in (QueuedEvent, EventLane, FlowControl, EventWorker, DeadEvent, LogEntry)
    ]


@pytest.mark.parametrize(("url", "given"), POSTS)
@pytest.mark.parametrize(
    "rights", [(), VIEWS, (*VIEWS, "retry_deadevent"), (*VIEWS, "view_payload_eventlog")]
)
def test_forged_posts_change_nothing_without_the_permission(stuck_lanes, url, given, rights):
    pauses.pause(handler="fails", by="bob")
    before = everything()
    rows = EventLane.objects.all() if url == LANES else FlowControl.objects.all()
    client = client_with(*rights)
    answer = client.post(url, {**given, "_selected_action": [row.pk for row in rows]})
    assert answer.status_code == 403
    assert everything() == before


@pytest.mark.parametrize("right", ["pause_flowcontrol", "purge_deadevent"])
def test_a_permission_for_one_action_does_not_allow_another(stuck_lanes, right):
    client = client_with(*VIEWS, right)
    act(client, LANES, "release", stuck_lanes[:1])
    act(client, LANES, "skip_head", stuck_lanes[1:], confirmed="yes")
    done = {entry.change_message for entry in LogEntry.objects.all()}
    expected = "released the lane" if right == "pause_flowcontrol" else "skipped the first event"
    assert done == {expected}


@pytest.mark.parametrize(("url", "given"), POSTS)
def test_posts_need_a_csrf_token(stuck_lanes, url, given):
    before = everything()
    client = client_with(*VIEWS, "pause_flowcontrol", "purge_deadevent", strict=True)
    assert client.post(url, given).status_code == 403
    assert everything() == before


def test_no_form_changes_or_deletes_rows(operator, stuck_lanes):
    pauses.pause(queue="default")
    control, before = FlowControl.objects.get(), everything()
    lane = stuck_lanes[0]
    for url, row in ((LANES, lane), (CONTROLS, control)):
        assert operator.post(f"{url}{row.pk}/change/", {"key": "x", "name": "x"}).status_code == 403
        assert operator.post(f"{url}{row.pk}/delete/", {"post": "yes"}).status_code == 403
        assert act(operator, url, "delete_selected", [row], post="yes").status_code == 403
    assert everything() == before


def test_pausing_needs_the_permission_to_view():
    blind = client_with("pause_flowcontrol", name="blind")
    for answer in (blind.get(PAUSE), blind.post(PAUSE, {"what": "queue:default"})):
        assert answer.status_code == 403
    assert not FlowControl.objects.exists()


@pytest.mark.parametrize("url", [LANES, WORKERS, CONTROLS, PAUSE])
def test_viewing_changes_nothing(operator, stuck_lanes, url):
    pauses.pause(queue="default")
    before = everything()
    assert operator.get(url).status_code == 200
    assert operator.head(url).status_code == 200
    assert everything() == before


def test_the_button_needs_the_permission_to_pause(viewer, operator):
    assert PAUSE in shown(operator, CONTROLS)
    assert PAUSE not in shown(viewer, CONTROLS)


def test_hostile_text_is_shown_as_text(operator, store):
    nasty = "<img src=x onerror=alert(1)>"
    pauses.pause(type=nasty, by=nasty, reason=nasty)
    EventLane.objects.create(namespace="default", queue="default", key=nasty)
    EventWorker.objects.create(
        namespace="default", host=nasty, pid=1, queues=[nasty], expires_at=store.read_clock()
    )
    lane, control = EventLane.objects.get(), FlowControl.objects.get()
    for url in (
        LANES,
        WORKERS,
        CONTROLS,
        f"{LANES}{lane.pk}/change/",
        f"{CONTROLS}{control.pk}/change/",
    ):
        page = shown(operator, url)
        assert "&lt;img src=x" in page
        assert "<img src=x" not in page
    page = act(operator, LANES, "skip_head", [lane]).content.decode()
    assert "&lt;img src=x" in page
    assert "<img src=x" not in page


@pytest.mark.parametrize("url", [LANES, WORKERS, CONTROLS])
def test_the_number_of_queries_does_not_grow_with_the_list(operator, stuck_lanes, url):
    with CaptureQueriesContext(connection) as few:
        operator.get(url)
    EventLane.objects.bulk_create(
        EventLane(namespace="default", queue="default", key=f"k{n}") for n in range(60)
    )
    FlowControl.objects.bulk_create(
        FlowControl(namespace="default", kind="type", name=f"t{n}") for n in range(60)
    )
    with CaptureQueriesContext(connection) as many:
        operator.get(url)
    assert len(few) == len(many) < 15
    assert not [each for each in many if "DISTINCT" in each["sql"]]
