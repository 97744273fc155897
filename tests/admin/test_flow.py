"""Lanes, workers, pauses and circuit breakers in the admin."""

import re
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import CircuitBreaker, RetryPolicy, breakers, gates, handler, lanes, publish
from django_eventbus.admin import flow
from django_eventbus.models import (
    DeadEvent,
    EventGate,
    EventLane,
    EventWorker,
    QueuedEvent,
)
from django_eventbus.publishing import publish_many
from tests.admin.people import at_the_door
from tests.bus import drain

pytestmark = pytest.mark.django_db

LANES = "/admin/django_eventbus/eventlane/"
WORKERS = "/admin/django_eventbus/eventworker/"
GATES = "/admin/django_eventbus/eventgate/"
PAUSE = f"{GATES}pause/"
VIEWS = ("view_eventlane", "view_eventworker", "view_eventgate")


@pytest.fixture
def viewer():
    return at_the_door(*VIEWS, name="viewer")


@pytest.fixture
def operator():
    return at_the_door(*VIEWS, "pause_eventgate", "purge_deadevent", name="operator")


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


def said(answer):
    return [str(each) for each in answer.context["messages"]]


def shown(client, url):
    return client.get(url).content.decode()


# -- lanes


def test_lanes_are_listed_with_what_they_wait_for(viewer, stuck_lanes):
    assert len(re.findall(r"retried in \d+ s", shown(viewer, LANES))) == 2


def test_a_lane_tells_how_many_wait_and_who_is_first(viewer, stuck_lanes):
    page = shown(viewer, f"{LANES}{stuck_lanes[0].pk}/change/")
    first = QueuedEvent.objects.filter(key="a").order_by("id").first()
    assert str(first.event_id) in page
    assert "bad" in page


def test_a_released_lane_goes_on_now_and_it_is_known_who_did_it(operator, stuck_lanes):
    answer = act(operator, LANES, "release", stuck_lanes[:1])
    assert said(answer) == ["1 lane was released."]
    states = {lane.key: lane.state for lane in lanes.list()}
    assert states == {"a": "ready", "b": "waiting"}
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.object_repr, entry.change_message) == (
        "operator",
        "a",
        "released the lane",
    )


def test_a_lane_that_is_being_handled_is_passed_over(operator, stuck_lanes, worker_id):
    lane = stuck_lanes[0]
    EventLane.objects.filter(pk=lane.pk).update(claim_token=worker_id)
    answer = act(operator, LANES, "release", [lane])
    assert said(answer)[0].startswith("1 was passed over")
    assert not LogEntry.objects.exists()


def test_skipping_asks_first(operator, stuck_lanes):
    answer = act(operator, LANES, "skip_head", stuck_lanes)
    assert "The first events of 2 keys are skipped." in answer.content.decode()
    assert QueuedEvent.objects.count() == 4
    assert not LogEntry.objects.exists()


def test_a_skipped_event_is_a_dead_letter_with_the_reason(operator, stuck_lanes):
    answer = act(
        operator, LANES, "skip_head", stuck_lanes[:1], confirmed="yes", reason="cannot work"
    )
    assert said(answer) == ["1 event was skipped: it is a dead letter now."]
    letter = DeadEvent.objects.get()
    assert letter.errors[-1]["message"] == "cannot work"
    assert QueuedEvent.objects.filter(key="a").count() == 1
    assert LogEntry.objects.get().change_message == "skipped the first event: cannot work"


def test_one_request_acts_on_a_bounded_number_of_lanes(operator, stuck_lanes, monkeypatch):
    monkeypatch.setattr(flow, "MOST_AT_ONCE", 1)
    assert said(act(operator, LANES, "release", stuck_lanes)) == ["1 lane was released."]


@pytest.mark.parametrize(
    ("state", "keys"), [("waiting", {"a", "b"}), ("blocked", set()), ("nonsense", set())]
)
def test_a_state_can_be_chosen_and_one_that_is_not_known_shows_nothing(
    viewer, stuck_lanes, state, keys
):
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


def test_a_lane_of_another_project_is_not_there(operator, stuck_lanes):
    EventLane.objects.update(namespace="another")
    answer = act(operator, LANES, "release", stuck_lanes)
    assert EventLane.objects.filter(ready_at__gt=stuck_lanes[0].ready_at - timedelta(seconds=1))
    assert not LogEntry.objects.exists()
    assert answer.context["cl"].result_count == 0


# -- workers


def test_workers_are_told_alive_or_silent_in_words(viewer, store):
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
    assert "silent: its events are given to other workers" in page


# -- pauses and breakers


def test_a_queue_is_paused_with_a_reason_and_it_is_known_who_did_it(operator):
    answer = operator.post(PAUSE, {"what": "queue:default", "reason": "disk full"}, follow=True)
    assert said(answer) == ["default is paused now."]
    gate = EventGate.objects.get()
    assert (gate.paused_by, gate.reason) == ("operator", "disk full")
    assert "paused for" in answer.content.decode()
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
    gate = EventGate.objects.get(paused_at__isnull=False)
    assert (gate.kind, gate.name) == (kind, name)


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
def test_what_cannot_be_paused_is_refused_with_a_word(operator, given):
    answer = operator.post(PAUSE, given)
    assert answer.status_code == 200
    assert answer.context["form"].errors
    assert not EventGate.objects.exists()
    assert not LogEntry.objects.exists()


def test_pausing_twice_keeps_the_first_reason(operator):
    gates.pause(queue="default", by="bob", reason="first")
    answer = operator.post(PAUSE, {"what": "queue:default", "reason": "second"}, follow=True)
    assert said(answer) == ["default was paused before; its first reason stands."]
    assert EventGate.objects.get().reason == "first"
    assert not LogEntry.objects.exists()


def test_a_pause_is_ended(operator):
    gates.pause(queue="default", by="bob")
    gate = EventGate.objects.get()
    assert said(act(operator, GATES, "resume", [gate])) == ["1 pause was ended."]
    assert gates.list() == []
    assert LogEntry.objects.get().object_id == str(gate.pk)


def test_m30_a_circuit_breaker_is_seen_and_reset(operator):
    @handler("x", name="pays", breaker=CircuitBreaker(min_calls=3))
    def fail(event):
        raise ConnectionError

    publish_many(("x", n) for n in range(3))
    drain()
    assert "next try in" in shown(operator, f"{GATES}?state=open")
    gate = EventGate.objects.get(name="pays")
    answer = act(operator, GATES, "reset_breaker", [gate])
    assert said(answer) == ["1 circuit breaker was closed."]
    assert [each.state for each in breakers.list()] == ["closed"]
    assert LogEntry.objects.get().change_message == "reset the circuit breaker"


def test_what_has_no_breaker_is_said_and_nothing_is_written(operator):
    gates.pause(queue="default")
    EventGate.objects.create(namespace="default", kind="handler", name="gone")
    answer = act(operator, GATES, "reset_breaker", EventGate.objects.all())
    assert any("there is no handler 'gone'" in text for text in said(answer))
    assert not LogEntry.objects.exists()


def test_a_change_and_its_entry_are_one(operator, stuck_lanes, monkeypatch):
    """S06: who cannot be named has done nothing."""

    def fail(*args, **kwargs):
        raise RuntimeError("no history today")

    monkeypatch.setattr(flow, "record", fail)
    with pytest.raises(RuntimeError):
        act(operator, LANES, "release", stuck_lanes)
    assert {lane.state for lane in lanes.list()} == {"waiting"}


# -- who may


POSTS = [
    (LANES, {"action": "release"}),
    (LANES, {"action": "skip_head", "confirmed": "yes"}),
    (GATES, {"action": "resume"}),
    (GATES, {"action": "reset_breaker"}),
    (PAUSE, {"what": "queue:default"}),
    (f"{LANES}add/", {"key": "x"}),
    (f"{GATES}add/", {"name": "x"}),
    (f"{WORKERS}add/", {"host": "x"}),
]


def everything():
    return [
        list(model.objects.order_by("pk").values())
        for model in (QueuedEvent, EventLane, EventGate, EventWorker, DeadEvent, LogEntry)
    ]


@pytest.mark.parametrize(("url", "given"), POSTS)
@pytest.mark.parametrize(
    "rights", [(), VIEWS, (*VIEWS, "retry_deadevent"), (*VIEWS, "view_payload_eventlog")]
)
def test_forged_posts_change_nothing_without_the_permission(stuck_lanes, url, given, rights):
    gates.pause(handler="fails", by="bob")
    before = everything()
    rows = EventLane.objects.all() if url == LANES else EventGate.objects.all()
    client = at_the_door(*rights)
    answer = client.post(url, {**given, "_selected_action": [row.pk for row in rows]})
    assert answer.status_code == 403
    assert everything() == before


@pytest.mark.parametrize("right", ["pause_eventgate", "purge_deadevent"])
def test_a_right_to_one_thing_is_no_right_to_another(stuck_lanes, right):
    client = at_the_door(*VIEWS, right)
    act(client, LANES, "release", stuck_lanes[:1])
    act(client, LANES, "skip_head", stuck_lanes[1:], confirmed="yes")
    done = {entry.change_message for entry in LogEntry.objects.all()}
    expected = "released the lane" if right == "pause_eventgate" else "skipped the first event"
    assert done == {expected}


@pytest.mark.parametrize(("url", "given"), POSTS)
def test_posts_need_a_token(stuck_lanes, url, given):
    before = everything()
    client = at_the_door(*VIEWS, "pause_eventgate", "purge_deadevent", strict=True)
    assert client.post(url, given).status_code == 403
    assert everything() == before


def test_rows_are_neither_changed_nor_deleted_by_a_form(operator, stuck_lanes):
    gates.pause(queue="default")
    gate, before = EventGate.objects.get(), everything()
    lane = stuck_lanes[0]
    for url, row in ((LANES, lane), (GATES, gate)):
        assert operator.post(f"{url}{row.pk}/change/", {"key": "x", "name": "x"}).status_code == 403
        assert operator.post(f"{url}{row.pk}/delete/", {"post": "yes"}).status_code == 403
        assert act(operator, url, "delete_selected", [row], post="yes").status_code == 403
    assert everything() == before


def test_who_may_not_see_pauses_may_not_make_any():
    blind = at_the_door("pause_eventgate", name="blind")
    for answer in (blind.get(PAUSE), blind.post(PAUSE, {"what": "queue:default"})):
        assert answer.status_code == 403
    assert not EventGate.objects.exists()


@pytest.mark.parametrize("url", [LANES, WORKERS, GATES, PAUSE])
def test_looking_changes_nothing(operator, stuck_lanes, url):
    gates.pause(queue="default")
    before = everything()
    assert operator.get(url).status_code == 200
    assert operator.head(url).status_code == 200
    assert everything() == before


def test_the_button_is_for_those_who_may_press_it(viewer, operator):
    assert PAUSE in shown(operator, GATES)
    assert PAUSE not in shown(viewer, GATES)


def test_hostile_text_is_shown_as_text(operator, store):
    nasty = "<img src=x onerror=alert(1)>"
    gates.pause(type=nasty, by=nasty, reason=nasty)
    EventLane.objects.create(namespace="default", queue="default", key=nasty)
    EventWorker.objects.create(
        namespace="default", host=nasty, pid=1, queues=[nasty], expires_at=store.read_clock()
    )
    lane, gate = EventLane.objects.get(), EventGate.objects.get()
    for url in (LANES, WORKERS, GATES, f"{LANES}{lane.pk}/change/", f"{GATES}{gate.pk}/change/"):
        page = shown(operator, url)
        assert "&lt;img src=x" in page
        assert "<img src=x" not in page
    page = act(operator, LANES, "skip_head", [lane]).content.decode()
    assert "&lt;img src=x" in page
    assert "<img src=x" not in page


@pytest.mark.parametrize("url", [LANES, WORKERS, GATES])
def test_a_list_costs_the_same_however_long_it_is(operator, stuck_lanes, url):
    with CaptureQueriesContext(connection) as few:
        operator.get(url)
    EventLane.objects.bulk_create(
        EventLane(namespace="default", queue="default", key=f"k{n}") for n in range(60)
    )
    EventGate.objects.bulk_create(
        EventGate(namespace="default", kind="type", name=f"t{n}") for n in range(60)
    )
    with CaptureQueriesContext(connection) as many:
        operator.get(url)
    assert len(few) == len(many) < 15
    assert not [each for each in many if "DISTINCT" in each["sql"]]
