"""Schedules: one event per tick, whoever fires it, by the database's clock."""

import sys
import uuid
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.core.exceptions import ValidationError
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import Event, handler, schedule, schedules
from django_eventbus.exceptions import InvalidPayloadError, InvalidScheduleError
from django_eventbus.models import EventLog, EventSchedule, QueuedEvent
from django_eventbus.schedules import Scheduler
from django_eventbus.store import store_for
from tests.bus import drain

pytestmark = pytest.mark.django_db

MINUTE, HOUR, DAY = 60, 3600, 24 * 3600


def at(*moment):
    return datetime(*moment, tzinfo=UTC)


@pytest.fixture
def look(clock):
    """A worker comes by: it starts, if it is the first time, and fires what is due."""

    def look_now():
        store = store_for(clock=clock)
        schedules.synchronise(store)
        scheduler = Scheduler(store)
        while scheduler.look():
            pass
        return scheduler

    return look_now


def hand_made(**definition):
    """A row as somebody makes it in the admin."""
    return EventSchedule.objects.create(
        **{"name": "report", "type": "report.daily", "cron": "0 6 * * *", "tz": "UTC"} | definition
    )


def fired():
    """The ticks of all published events, in the order of publishing."""
    headers = QueuedEvent.objects.order_by("id").values_list("headers", flat=True)
    return [datetime.fromisoformat(each["scheduler"]["tick"]) for each in headers]


# -- declared in code


def test_a_declared_schedule_publishes_at_its_tick(clock, look):
    """M14. The clock of the tests starts on 2026-03-01 at 12:00 UTC."""
    schedule("report.daily", cron="0 6 * * *", tz="Europe/Berlin", payload={"to": "boss"})
    look()
    row = EventSchedule.objects.get()
    assert (row.name, row.origin, row.next_at) == ("report.daily", "CODE", at(2026, 3, 2, 5))
    assert not QueuedEvent.objects.exists()
    clock.now = at(2026, 3, 2, 5)
    look()
    event = QueuedEvent.objects.get()
    assert (event.type, event.payload) == ("report.daily", {"to": "boss"})
    row.refresh_from_db()
    assert (row.last_at, row.next_at) == (at(2026, 3, 2, 5), at(2026, 3, 3, 5))


def test_everything_said_about_the_event_is_said_of_each(clock, look, settings):
    settings.EVENTBUS = {"QUEUES": ["default", "reports"]}
    schedule(
        "report.daily",
        cron="0 6 * * *",
        tz=ZoneInfo("Europe/Berlin"),
        key="report",
        queue="reports",
        priority=7,
        headers={"asked_by": "finance"},
        name="the daily report",
    )
    look()
    clock.tick(DAY)
    look()
    event = QueuedEvent.objects.get()
    assert (event.key, event.queue, event.priority) == ("report", "reports", 7)
    assert event.headers == {
        "asked_by": "finance",
        "scheduler": {
            "name": "the daily report",
            "id": EventSchedule.objects.get().pk,
            "tick": "2026-03-02T05:00:00+00:00",
        },
    }


def test_a_typed_event_is_its_own_payload(clock, look):
    class Cleanup(Event, type="schedules.cleanup"):
        older_than: timedelta

    schedule(Cleanup(older_than=timedelta(days=30)), cron="0 6 * * *", tz="UTC")
    look()
    clock.tick(DAY)
    look()
    event = QueuedEvent.objects.get()
    assert event.type == "schedules.cleanup"
    assert event.payload == {"older_than": "P30DT00H00M00S"}


def test_the_time_zone_of_the_project_is_the_default(settings):
    settings.TIME_ZONE = "Asia/Tokyo"
    assert schedule("x", cron="0 6 * * *").tz == "Asia/Tokyo"


def test_two_schedules_cannot_have_one_name():
    schedule("x", cron="0 6 * * *")
    schedule("x", cron="0 6 * * *")  # its module imported twice
    schedule("x", cron="0 7 * * *", name="another")
    with pytest.raises(InvalidScheduleError, match="two schedules claim the name 'x'"):
        schedule("x", cron="0 7 * * *")


def test_a_schedule_without_a_name_or_type_is_refused_where_it_stands():
    with pytest.raises(InvalidPayloadError, match="the name of a schedule"):
        schedule("", cron="0 6 * * *")


def test_a_worker_that_starts_again_changes_nothing(look, clock):
    schedule("x", cron="0 6 * * *", payload={"day": datetime(2026, 1, 1, tzinfo=UTC)})
    look()
    with CaptureQueriesContext(connection) as queries:
        look()
    assert not [each for each in queries if not each["sql"].startswith("SELECT")]


def test_code_owns_the_definition_and_the_row_the_rest(clock, look):
    schedule("x", cron="0 6 * * *", tz="UTC", payload=1)
    look()
    EventSchedule.objects.update(payload=2, priority=5, enabled=False)
    look()
    row = EventSchedule.objects.get()
    assert (row.payload, row.priority, row.enabled) == (1, 0, False)


def test_a_changed_cron_line_is_planned_anew_from_now(clock, look, monkeypatch):
    schedule("x", cron="0 6 * * *", tz="UTC")
    look()
    monkeypatch.setattr(schedules, "_declared", {})
    schedule("x", cron="30 12 * * *", tz="UTC")
    look()
    assert EventSchedule.objects.get().next_at == at(2026, 3, 1, 12, 30)
    assert fired() == []


def test_a_changed_payload_leaves_the_plan_as_it_is(clock, look, monkeypatch):
    schedule("x", cron="0 6 * * *", tz="UTC", payload=1)
    look()
    clock.tick(DAY)
    monkeypatch.setattr(schedules, "_declared", {})
    schedule("x", cron="0 6 * * *", tz="UTC", payload=2)
    look()
    assert QueuedEvent.objects.get().payload == 2


def test_code_takes_over_a_row_of_the_same_name(clock, look):
    hand_made(name="x", type="y")
    schedule("x", cron="0 6 * * *", tz="UTC")
    look()
    row = EventSchedule.objects.get()
    assert (row.type, row.origin) == ("x", "CODE")


def test_a_worker_fires_only_what_its_own_code_declares(clock, look, monkeypatch):
    """During a deployment an old worker must not fire what it does not know, nor take it away."""
    schedule("x", cron="0 6 * * *", tz="UTC")
    look()
    monkeypatch.setattr(schedules, "_declared", {})
    clock.tick(DAY)
    look()
    assert fired() == []
    schedule("x", cron="0 6 * * *", tz="UTC")
    look()
    assert fired() == [at(2026, 3, 2, 6)]


def test_what_no_code_declares_for_a_week_is_forgotten(clock, look, monkeypatch):
    schedule("x", cron="0 6 * * *", tz="UTC")
    hand_made()
    look()
    monkeypatch.setattr(schedules, "_declared", {})
    clock.tick(7 * DAY)
    look()
    assert EventSchedule.objects.count() == 2
    clock.tick(DAY)
    look()
    assert EventSchedule.objects.get().name == "report"


def test_a_schedule_that_cannot_fire_is_left_out_and_told(clock, look, capture):
    """Whoever silenced the checks gets all the others."""
    schedule("bad", cron="0 0 31 2 *")
    schedule("good", cron="0 6 * * *")
    look()
    assert EventSchedule.objects.get().name == "good"
    assert "the schedule bad is left out: the cron line '0 0 31 2 *' can never fire" in capture.text


def test_code_schedules_are_fired_in_the_database_of_plain_events_only(clock, monkeypatch):
    """Else workers of two databases would publish it twice."""
    schedule("x", cron="0 6 * * *")
    monkeypatch.setattr(schedules, "default_alias", lambda: "another")
    assert schedules.declared_for(store_for()) == []


# -- made by hand


def test_a_row_made_by_hand_fires_without_any_code(clock, look):
    """M14."""
    hand_made(payload=[1, 2], headers={"a": 1})
    look()
    clock.tick(DAY)
    look()
    assert QueuedEvent.objects.get().payload == [1, 2]
    assert fired() == [at(2026, 3, 2, 6)]


@pytest.mark.parametrize("way", ["save", "update"])
def test_a_changed_row_is_planned_anew_however_it_was_changed(clock, look, way):
    row = hand_made()
    look()
    if way == "save":
        row.refresh_from_db()
        row.cron = "0 18 * * *"
        row.save()
    else:
        EventSchedule.objects.update(cron="0 18 * * *")
    look()
    assert EventSchedule.objects.get().next_at == at(2026, 3, 1, 18)


def test_a_next_run_set_by_hand_is_fired_as_a_tick(clock, look):
    hand_made()
    look()
    EventSchedule.objects.update(next_at=at(2026, 3, 1, 14, 3))
    clock.now = at(2026, 3, 1, 14, 5)
    look()
    assert fired() == [at(2026, 3, 1, 14, 3)]
    assert EventSchedule.objects.get().next_at == at(2026, 3, 2, 6)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("cron", "0 0 31 2 *", "can never fire"),
        ("cron", "daily", "Give five fields"),
        ("tz", "Berlin", "did you mean 'Europe/Berlin'"),
        ("queue", "defautl", "did you mean 'default'"),
        ("key", "", "non-empty"),
        ("misfire", "fire_one", "fire_once"),
        ("headers", {"scheduler": 1}, "without the key 'scheduler'"),
    ],
)
def test_a_row_that_could_not_fire_cannot_be_saved(field, value, said):
    with pytest.raises(ValidationError) as refused:
        hand_made(**{field: value})
    assert field in refused.value.message_dict
    assert field == "misfire" or said in str(refused.value)
    assert not EventSchedule.objects.exists()


def test_a_row_saved_without_the_library_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(ValidationError, match=r"django-eventbus\[cron\]"):
        hand_made()


def test_a_row_that_was_broken_behind_our_back_keeps_no_other_from_firing(clock, look, capture):
    hand_made(name="a")
    hand_made(name="b")
    look()
    EventSchedule.objects.filter(name="a").update(queue="gone")
    clock.tick(DAY)
    look()
    assert [each.headers["scheduler"]["name"] for each in QueuedEvent.objects.all()] == ["b"]
    assert "is not in EVENTBUS['QUEUES']" in capture.text
    EventSchedule.objects.update(queue=None)
    look()
    assert QueuedEvent.objects.count() == 2


def test_a_broken_row_is_not_tried_at_every_look(clock, look, capture):
    hand_made()
    look()
    EventSchedule.objects.update(queue="gone")
    clock.tick(DAY)
    scheduler = look()
    scheduler.look()
    assert capture.text.count("cannot fire") == 1
    assert scheduler.wait() > 0


# -- exactly one


def test_a_tick_is_fired_once_however_many_look(clock, look):
    hand_made()
    look()
    clock.tick(DAY)
    for _ in range(5):
        look()
    assert fired() == [at(2026, 3, 2, 6)]


def test_the_database_knows_a_tick_that_was_fired(clock, look):
    """The second wall: whatever went wrong with the row, a tick has one event id."""
    hand_made()
    look()
    clock.tick(DAY)
    look()
    EventSchedule.objects.update(next_at=at(2026, 3, 2, 6))
    look()
    assert fired() == [at(2026, 3, 2, 6)]
    event = QueuedEvent.objects.get()
    assert event.event_id == schedules.tick_id(EventSchedule.objects.get(), at(2026, 3, 2, 6))


def test_ticks_have_ids_of_their_own():
    one, other = EventSchedule(name="a", namespace="n"), EventSchedule(name="b", namespace="n")
    tick = at(2026, 3, 2, 6)
    ids = {
        schedules.tick_id(one, tick),
        schedules.tick_id(other, tick),
        schedules.tick_id(one, tick + timedelta(seconds=1)),
        schedules.tick_id(EventSchedule(name="a", namespace="m"), tick),
    }
    assert len(ids) == 4
    assert all(isinstance(each, uuid.UUID) for each in ids)


def test_nothing_is_fired_when_the_clock_goes_back(clock, look):
    """F36."""
    hand_made()
    look()
    clock.tick(DAY)
    look()
    clock.tick(-DAY)
    look()
    clock.tick(DAY)
    look()
    assert fired() == [at(2026, 3, 2, 6)]


# -- ticks that passed while nobody was there


@pytest.mark.parametrize(
    ("misfire", "days"), [("fire_once", [4]), ("skip", []), ("fire_all", [2, 3, 4])]
)
def test_three_ticks_of_downtime(clock, look, misfire, days):
    """F42."""
    hand_made(misfire=misfire)
    look()
    clock.now = at(2026, 3, 4, 12)
    look()
    assert fired() == [at(2026, 3, day, 6) for day in days]
    assert EventSchedule.objects.get().next_at == at(2026, 3, 5, 6)


@pytest.mark.parametrize("misfire", ["fire_once", "skip", "fire_all"])
def test_a_tick_that_is_a_little_late_was_not_missed(clock, look, misfire):
    hand_made(misfire=misfire)
    look()
    clock.now = at(2026, 3, 2, 6, 0, 59)
    look()
    assert fired() == [at(2026, 3, 2, 6)]


def test_one_tick_that_is_very_late_was_missed(clock, look):
    hand_made(misfire="skip")
    look()
    clock.now = at(2026, 3, 2, 6, 1, 1)
    look()
    assert fired() == []
    assert EventSchedule.objects.get().last_at is None


def test_a_tick_that_is_skipped_does_not_skip_the_one_that_is_due(clock, look):
    hand_made(misfire="skip")
    look()
    clock.now = at(2026, 3, 4, 6)
    look()
    assert fired() == [at(2026, 3, 4, 6)]


def test_no_more_than_a_hundred_missed_ticks_are_made_up_for(clock, look, capture):
    hand_made(misfire="fire_all", cron="* * * * *")
    look()
    clock.tick(10 * HOUR)
    look()
    newest = [clock.now - timedelta(minutes=n) for n in range(100)]
    assert fired() == newest[::-1]
    assert "report missed ticks since 2026-03-01 12:01:00+00:00: 100 published" in capture.text


# -- switched by a person


def test_a_disabled_schedule_does_not_fire_and_makes_up_for_nothing(clock, look):
    hand_made()
    look()
    schedules.disable("report")
    clock.tick(3 * DAY)
    look()
    schedules.enable("report")
    look()
    assert fired() == []
    assert EventSchedule.objects.get().next_at == at(2026, 3, 5, 6)


def test_a_schedule_disabled_by_the_admins_checkbox_is_the_same(clock, look):
    hand_made()
    look()
    EventSchedule.objects.update(enabled=False)
    clock.tick(3 * DAY)
    look()
    assert EventSchedule.objects.get().next_at is None
    EventSchedule.objects.update(enabled=True)
    look()
    assert fired() == []


def test_enabling_what_is_enabled_changes_nothing(clock, look):
    hand_made()
    look()
    clock.tick(DAY)
    schedules.enable("report")
    look()
    assert fired() == [at(2026, 3, 2, 6)]


def test_a_run_by_hand_is_beside_the_ticks(clock, look):
    schedule("x", cron="0 6 * * *", tz="UTC")
    event = schedules.run("x")
    assert event.headers["scheduler"]["name"] == "x"
    look()
    clock.tick(DAY)
    look()
    assert QueuedEvent.objects.count() == 2


@pytest.mark.parametrize("verb", [schedules.run, schedules.enable, schedules.disable])
def test_a_name_that_is_wrong_is_told_with_the_one_that_was_meant(verb):
    hand_made()
    with pytest.raises(InvalidScheduleError, match="no schedule 'reprot'; did you mean 'report'"):
        verb("reprot")


# -- in words


def test_a_schedule_is_explained():
    row = hand_made(tz="Europe/Berlin")
    assert schedules.explain(row, 2, after=at(2026, 3, 1)) == (
        "at 06:00 every day, Europe/Berlin; next: 2026-03-01 06:00 CET, 2026-03-02 06:00 CET"
    )
    assert "next: " in schedules.explain(schedule("x", cron="0 6 * * *"))
    assert schedules.next_runs(row, 1, after=at(2026, 3, 1)) == [at(2026, 3, 1, 5)]


def test_all_that_is_known_is_there_stored_or_not():
    hand_made()
    schedule("x", cron="0 6 * * *")
    assert [(each.name, each.pk is None) for each in schedules.every()] == [
        ("report", False),
        ("x", True),
    ]


# -- the worker


def test_a_worker_fires_and_handles_what_is_due():
    seen = []

    @handler("report.daily")
    def note(event):
        seen.append(event.headers["scheduler"]["name"])

    hand_made()
    Scheduler(store_for()).look()
    EventSchedule.objects.update(next_at=store_for().read_clock())
    drain()
    assert seen == ["report"]
    assert EventLog.objects.get().status == "COMPLETED"


def test_a_worker_knows_how_long_it_may_sleep(clock):
    hand_made()
    scheduler = Scheduler(store_for(clock=clock))
    scheduler.look()
    clock.now = at(2026, 3, 2, 5, 59, 30)
    scheduler.look()
    assert 0 < scheduler.wait() <= 30


def test_a_worker_without_schedules_asks_little_and_rarely():
    scheduler = Scheduler(store_for())
    scheduler.fire_due()
    with CaptureQueriesContext(connection) as queries:
        scheduler.look()
    assert len(queries) == 2
    with CaptureQueriesContext(connection) as queries:
        scheduler.fire_due()
    assert len(queries) == 0


def test_projects_that_share_a_database_do_not_fire_each_others_schedules(clock, look, settings):
    hand_made()
    look()
    clock.tick(DAY)
    settings.EVENTBUS = {"NAMESPACE": "another"}
    look()
    assert fired() == []
