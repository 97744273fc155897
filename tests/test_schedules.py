"""Schedules: one event per tick, by the clock of the database."""

import sys
import uuid
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.core.exceptions import ValidationError
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import Event, handler, schedule, schedules
from django_eventbus.errors import failpoints
from django_eventbus.exceptions import InvalidPayloadError, InvalidScheduleError
from django_eventbus.models import EventLog, EventSchedule, QueuedEvent
from django_eventbus.publishing import limits
from django_eventbus.store import store_for
from django_eventbus.worker import firing
from django_eventbus.worker.firing import Scheduler
from tests.bus import drain

pytestmark = pytest.mark.django_db

MINUTE, HOUR, DAY = 60, 3600, 24 * 3600


def at(*moment):
    return datetime(*moment, tzinfo=UTC)


@pytest.fixture
def look(clock):
    """Run one round of a worker: synchronize the declared schedules and fire due ticks."""

    def look_now():
        store = store_for(clock=clock)
        schedules.synchronize(store)
        scheduler = Scheduler(store)
        while scheduler.fire_some():
            pass
        return scheduler

    return look_now


def hand_made(**definition):
    """A row as an operator adds it in the admin."""
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


def test_every_published_event_has_the_options_of_its_schedule(clock, look, settings):
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


def test_the_fields_of_an_event_instance_are_the_payload_of_its_ticks(clock, look):
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
    schedule("x", cron="0 6 * * *")  # As if its module were imported twice.
    schedule("x", cron="0 7 * * *", name="another")
    with pytest.raises(InvalidScheduleError, match="two schedules have the name 'x'"):
        schedule("x", cron="0 7 * * *")


def test_a_schedule_without_a_name_or_type_is_refused_when_it_is_declared():
    with pytest.raises(InvalidPayloadError, match="the name of a schedule"):
        schedule("", cron="0 6 * * *")


def test_a_restarted_worker_does_not_change_the_schedule(look, clock):
    schedule("x", cron="0 6 * * *", payload={"day": datetime(2026, 1, 1, tzinfo=UTC)})
    look()
    with CaptureQueriesContext(connection) as queries:
        look()
    assert not [each for each in queries if not each["sql"].startswith("SELECT")]


def test_the_code_owns_the_definition_and_the_row_owns_the_state(clock, look):
    schedule("x", cron="0 6 * * *", tz="UTC", payload=1)
    look()
    EventSchedule.objects.update(payload=2, priority=5, enabled=False)
    look()
    row = EventSchedule.objects.get()
    assert (row.payload, row.priority, row.enabled) == (1, 0, False)


def test_a_changed_cron_line_is_rescheduled_from_now(clock, look, monkeypatch):
    schedule("x", cron="0 6 * * *", tz="UTC")
    look()
    monkeypatch.setattr(schedules, "_declared", {})
    schedule("x", cron="30 12 * * *", tz="UTC")
    look()
    assert EventSchedule.objects.get().next_at == at(2026, 3, 1, 12, 30)
    assert fired() == []


def test_a_changed_payload_does_not_change_the_next_run(clock, look, monkeypatch):
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


def test_a_worker_fires_only_schedules_that_its_own_code_declares(clock, look, monkeypatch):
    """During a deployment an old worker neither fires nor deletes unknown schedules."""
    schedule("x", cron="0 6 * * *", tz="UTC")
    look()
    monkeypatch.setattr(schedules, "_declared", {})
    clock.tick(DAY)
    look()
    assert fired() == []
    schedule("x", cron="0 6 * * *", tz="UTC")
    look()
    assert fired() == [at(2026, 3, 2, 6)]


def test_a_schedule_that_no_code_declares_for_a_week_is_deleted(clock, look, monkeypatch):
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


def test_a_schedule_that_cannot_fire_is_skipped_and_logged(clock, look, capture):
    """The system check reports it. If it is silenced, the other schedules still fire."""
    schedule("bad", cron="0 0 31 2 *")
    schedule("good", cron="0 6 * * *")
    look()
    assert EventSchedule.objects.get().name == "good"
    assert (
        "skipped the invalid schedule bad: the cron line '0 0 31 2 *' can never fire"
        in capture.text
    )


def test_code_schedules_are_fired_in_the_database_of_plain_events_only(clock, monkeypatch):
    """Otherwise workers of two databases would publish it twice."""
    schedule("x", cron="0 6 * * *")
    monkeypatch.setattr(schedules, "default_alias", lambda: "another")
    assert schedules.declared_for(store_for()) == []


# -- rows added by operators


def test_a_row_created_by_an_operator_fires_without_code(clock, look):
    """M14."""
    hand_made(payload=[1, 2], headers={"a": 1})
    look()
    clock.tick(DAY)
    look()
    assert QueuedEvent.objects.get().payload == [1, 2]
    assert fired() == [at(2026, 3, 2, 6)]


@pytest.mark.parametrize("way", ["save", "update"])
def test_a_row_changed_by_any_means_is_rescheduled(clock, look, way):
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


def test_a_next_run_set_by_an_operator_fires_as_a_tick(clock, look):
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
        ("cron", "daily", "Use five fields"),
        ("tz", "Berlin", "did you mean 'Europe/Berlin'"),
        ("queue", "defautl", "did you mean 'default'"),
        ("key", "", "non-empty"),
        ("misfire", "fire_one", "fire_once"),
        ("headers", {"scheduler": 1}, "without the key 'scheduler'"),
    ],
)
def test_a_row_that_cannot_fire_cannot_be_saved(field, value, said):
    with pytest.raises(ValidationError) as refused:
        hand_made(**{field: value})
    assert field in refused.value.message_dict
    assert field == "misfire" or said in str(refused.value)
    assert not EventSchedule.objects.exists()


def test_saving_a_row_without_cronsim_names_the_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(ValidationError, match=r"django-durable-events\[cron\]"):
        hand_made()


def test_an_invalid_row_does_not_keep_other_schedules_from_firing(clock, look, capture):
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


def test_an_invalid_row_is_not_tried_in_every_round(clock, look, capture):
    hand_made()
    look()
    EventSchedule.objects.update(queue="gone")
    clock.tick(DAY)
    scheduler = look()
    scheduler.fire_some()
    assert capture.text.count("failed, retrying in a minute") == 1
    assert scheduler.wait() > 0


# -- exactly one event per tick


def test_a_tick_fires_once_however_many_workers_see_it(clock, look):
    hand_made()
    look()
    clock.tick(DAY)
    for _ in range(5):
        look()
    assert fired() == [at(2026, 3, 2, 6)]


def test_the_event_id_of_a_tick_keeps_it_from_firing_twice(clock, look):
    """The unique event id of a tick protects even against a wrong row."""
    hand_made()
    look()
    clock.tick(DAY)
    look()
    EventSchedule.objects.update(next_at=at(2026, 3, 2, 6))
    look()
    assert fired() == [at(2026, 3, 2, 6)]
    event = QueuedEvent.objects.get()
    assert event.event_id == firing.tick_id(EventSchedule.objects.get(), at(2026, 3, 2, 6))


def test_every_tick_has_its_own_event_id():
    one, other = EventSchedule(name="a", namespace="n"), EventSchedule(name="b", namespace="n")
    tick = at(2026, 3, 2, 6)
    ids = {
        firing.tick_id(one, tick),
        firing.tick_id(other, tick),
        firing.tick_id(one, tick + timedelta(seconds=1)),
        firing.tick_id(EventSchedule(name="a", namespace="m"), tick),
    }
    assert len(ids) == 4
    assert all(isinstance(each, uuid.UUID) for each in ids)


def test_no_tick_fires_when_the_clock_goes_back(clock, look):
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


# -- a clock that was wrong for a while


@pytest.mark.parametrize("misfire", ["fire_once", "skip", "fire_all"])
def test_a_clock_that_jumps_ahead_briefly_does_not_stop_a_schedule(clock, look, misfire):
    """The round at the wrong time fires a tick of tomorrow, and plans the one after it."""
    hand_made(cron="0 * * * *", misfire=misfire)
    look()
    clock.tick(DAY + 30 * MINUTE)
    look()
    clock.tick(-DAY)
    look().review()
    assert EventSchedule.objects.get().next_at == at(2026, 3, 1, 13)
    clock.tick(30 * MINUTE)
    look()
    assert fired().count(at(2026, 3, 1, 13)) == 1
    assert EventSchedule.objects.get().next_at == at(2026, 3, 1, 14)


def test_a_schedule_created_while_the_clock_was_ahead_is_rescheduled(clock, look):
    """It has no last run that would reveal the wrong time."""
    clock.tick(DAY)
    hand_made()
    look()
    clock.tick(-DAY)
    scheduler = look()
    assert EventSchedule.objects.get().next_at == at(2026, 3, 3, 6)
    scheduler.review()
    assert EventSchedule.objects.get().next_at == at(2026, 3, 2, 6)


def test_a_review_covers_all_schedules_in_chunks(clock, look, monkeypatch):
    monkeypatch.setattr(firing, "REVIEW_CHUNK", 2)
    clock.tick(DAY)
    for name in "abcde":
        hand_made(name=name)
    look()
    clock.tick(-DAY)
    scheduler = look()
    for _ in range(3):
        scheduler.review()
    assert set(EventSchedule.objects.values_list("next_at", flat=True)) == {at(2026, 3, 2, 6)}


def test_a_clock_that_goes_back_briefly_repeats_no_tick_that_was_purged(clock, look):
    hand_made()
    look()
    clock.tick(DAY)
    look()
    QueuedEvent.objects.all().delete()
    clock.tick(-DAY)
    look().review()
    clock.tick(DAY)
    look()
    assert fired() == []
    assert EventSchedule.objects.get().next_at == at(2026, 3, 3, 6)


# -- many at once, and full queues


def limited(settings, overflow):
    settings.EVENTBUS = {"LIMITS": {"default": {"max_size": 1, "overflow": overflow}}}


@pytest.fixture
def no_waiting(monkeypatch):
    """Fail the test if publishing waits for room."""

    def sleep(seconds):
        raise AssertionError("firing waits for room in the queue")

    monkeypatch.setattr(limits.time, "sleep", sleep)


@pytest.mark.parametrize("overflow", ["block", "halt"])
def test_a_full_queue_delays_a_tick_without_blocking_the_worker(
    clock, look, settings, capture, no_waiting, overflow
):
    limited(settings, overflow)
    hand_made()
    look()
    clock.tick(DAY)
    QueuedEvent.objects.create(
        namespace="default", queue="default", type="x", counted_as="queue:default"
    )
    scheduler = look()
    scheduler.fire_some()
    assert QueuedEvent.objects.count() == 1
    assert EventSchedule.objects.get().next_at == at(2026, 3, 2, 6)
    assert capture.text.count("schedule report waits because the queue is full") == 1
    assert 0 < scheduler.wait() <= firing.QUERY_EVERY
    QueuedEvent.objects.all().delete()
    look()
    assert fired() == [at(2026, 3, 2, 6)]


def test_missed_ticks_that_do_not_fit_in_the_queue_are_fired_later(
    clock, look, settings, no_waiting
):
    limited(settings, "block")
    hand_made(misfire="fire_all")
    look()
    clock.tick(3 * DAY)
    seen = []
    for _ in range(4):
        look()
        seen += fired()
        QueuedEvent.objects.all().delete()
    assert seen == [at(2026, 3, day, 6) for day in (2, 3, 4)]


def test_a_full_queue_does_not_delay_schedules_of_other_queues(clock, look, settings, no_waiting):
    settings.EVENTBUS = {
        "QUEUES": ["default", "full"],
        "LIMITS": {"full": {"max_size": 1, "overflow": "block"}},
    }
    for number in range(3):
        hand_made(name=f"full {number}", queue="full")
    hand_made(name="free")
    look()
    clock.tick(DAY)
    look()
    assert sorted(QueuedEvent.objects.values_list("queue", flat=True)) == ["default", "full"]


def test_many_schedules_are_fired_in_few_transactions(clock, look):
    for number in range(firing.CHUNK + 10):
        hand_made(name=str(number))
    look()
    clock.tick(DAY)
    commits = []

    def count(place):
        if place == "schedule.committed":
            commits.append(place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoints, "on_reaching", count)
        look()
    assert len(fired()) == firing.CHUNK + 10
    assert len(commits) == 2


def test_a_worker_claims_events_between_two_rounds_of_firing(clock, monkeypatch):
    """A round ends when its time is up, with at least one schedule fired."""
    monkeypatch.setattr(firing, "FIRE_FOR", -1.0)
    for number in range(3):
        hand_made(name=str(number))
    scheduler = Scheduler(store_for(clock=clock))
    for _ in range(4):
        scheduler.fire_due()
    clock.tick(DAY)
    scheduler._query_at = 0.0
    rounds = []
    for _ in range(4):
        scheduler.fire_due()
        rounds.append((len(fired()), scheduler.wait() == 0))
    assert rounds == [(1, True), (2, True), (3, True), (3, False)]


# -- ticks that were missed while no worker ran


@pytest.mark.parametrize(
    ("misfire", "days"), [("fire_once", [4]), ("skip", []), ("fire_all", [2, 3, 4])]
)
def test_the_misfire_policy_decides_about_three_missed_ticks(clock, look, misfire, days):
    """F42."""
    hand_made(misfire=misfire)
    look()
    clock.now = at(2026, 3, 4, 12)
    look()
    assert fired() == [at(2026, 3, day, 6) for day in days]
    assert EventSchedule.objects.get().next_at == at(2026, 3, 5, 6)


@pytest.mark.parametrize("misfire", ["fire_once", "skip", "fire_all"])
def test_a_slightly_late_tick_is_not_a_misfire(clock, look, misfire):
    hand_made(misfire=misfire)
    look()
    clock.now = at(2026, 3, 2, 6, 0, 59)
    look()
    assert fired() == [at(2026, 3, 2, 6)]


def test_a_very_late_tick_is_a_misfire(clock, look):
    hand_made(misfire="skip")
    look()
    clock.now = at(2026, 3, 2, 6, 1, 1)
    look()
    assert fired() == []
    assert EventSchedule.objects.get().last_at is None


def test_a_skipped_misfire_does_not_skip_the_tick_that_is_due(clock, look):
    hand_made(misfire="skip")
    look()
    clock.now = at(2026, 3, 4, 6)
    look()
    assert fired() == [at(2026, 3, 4, 6)]


def test_at_most_a_hundred_missed_ticks_are_fired_later(clock, look, capture):
    hand_made(misfire="fire_all", cron="* * * * *")
    look()
    clock.tick(10 * HOUR)
    look()
    newest = [clock.now - timedelta(minutes=n) for n in range(100)]
    assert fired() == newest[::-1]
    assert (
        "report missed ticks since 2026-03-01 12:01:00+00:00; events published: 100" in capture.text
    )


# -- enabled, disabled and run by operators


def test_ticks_during_which_a_schedule_was_disabled_are_never_fired(clock, look):
    hand_made()
    look()
    schedules.disable("report")
    clock.tick(3 * DAY)
    look()
    schedules.enable("report")
    look()
    assert fired() == []
    assert EventSchedule.objects.get().next_at == at(2026, 3, 5, 6)


def test_a_schedule_disabled_in_the_database_fires_no_missed_ticks(clock, look):
    hand_made()
    look()
    EventSchedule.objects.update(enabled=False)
    clock.tick(3 * DAY)
    look()
    assert EventSchedule.objects.get().next_at is None
    EventSchedule.objects.update(enabled=True)
    look()
    assert fired() == []


def test_enabling_an_enabled_schedule_changes_nothing(clock, look):
    hand_made()
    look()
    clock.tick(DAY)
    schedules.enable("report")
    look()
    assert fired() == [at(2026, 3, 2, 6)]


def test_a_manual_run_does_not_replace_a_tick(clock, look):
    schedule("x", cron="0 6 * * *", tz="UTC")
    event = schedules.run("x")
    assert event.headers["scheduler"]["name"] == "x"
    look()
    clock.tick(DAY)
    look()
    assert QueuedEvent.objects.count() == 2


@pytest.mark.parametrize("verb", [schedules.run, schedules.enable, schedules.disable])
def test_the_error_for_an_unknown_name_suggests_a_similar_one(verb):
    hand_made()
    with pytest.raises(InvalidScheduleError, match="no schedule 'reprot'; did you mean 'report'"):
        verb("reprot")


# -- in words


def test_a_schedule_can_be_explained_in_words():
    row = hand_made(tz="Europe/Berlin")
    assert schedules.explain(row, 2, after=at(2026, 3, 1)) == (
        "at 06:00 every day, Europe/Berlin; next: 2026-03-01 06:00 CET, 2026-03-02 06:00 CET"
    )
    assert "next: " in schedules.explain(schedule("x", cron="0 6 * * *"))
    assert schedules.next_runs(row, 1, after=at(2026, 3, 1)) == [at(2026, 3, 1, 5)]


def test_the_list_has_stored_schedules_and_declared_ones():
    hand_made()
    schedule("x", cron="0 6 * * *")
    assert [(each.name, each.pk is None) for each in schedules.every()] == [
        ("report", False),
        ("x", True),
    ]


# -- the worker


def test_a_worker_fires_and_handles_due_events():
    seen = []

    @handler("report.daily")
    def note(event):
        seen.append(event.headers["scheduler"]["name"])

    hand_made()
    Scheduler(store_for()).fire_some()
    EventSchedule.objects.update(next_at=store_for().read_clock())
    drain()
    assert seen == ["report"]
    assert EventLog.objects.get().status == "COMPLETED"


def test_a_worker_sleeps_until_the_next_tick(clock):
    hand_made()
    scheduler = Scheduler(store_for(clock=clock))
    scheduler.fire_some()
    clock.now = at(2026, 3, 2, 5, 59, 30)
    scheduler.fire_some()
    assert 0 < scheduler.wait() <= 30


def test_a_worker_without_schedules_sends_few_queries():
    scheduler = Scheduler(store_for())
    scheduler.fire_due()
    with CaptureQueriesContext(connection) as queries:
        scheduler.fire_some()
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
