"""manage.py event_schedules: list, run, enable and disable."""

import io
import json

import pytest
from django.core.management import CommandError, call_command

from django_eventbus import schedule, schedules
from django_eventbus.models import EventSchedule, QueuedEvent
from django_eventbus.store import store_for
from django_eventbus.worker.firing import Scheduler
from tests.test_schedules import hand_made

pytestmark = pytest.mark.django_db


def run(*arguments):
    stdout = io.StringIO()
    call_command("event_schedules", *arguments, stdout=stdout)
    return stdout.getvalue()


def listed():
    return {each["name"]: each for each in json.loads(run("list", "--format", "json"))}


def test_an_empty_list_of_schedules():
    assert run("list") == "No schedules.\n"


def test_the_table_describes_the_cron_line():
    hand_made(tz="Europe/Berlin")
    Scheduler(store_for()).fire_some()
    EventSchedule.objects.update(last_at="2026-03-01T05:00:00Z")
    header, row = run("list").splitlines()
    assert header.split() == ["name", "event", "state", "last", "run", "when"]
    assert row.startswith(
        "report  report.daily  enabled  2026-03-01 06:00 CET  "
        "at 06:00 every day, Europe/Berlin; next: "
    )
    assert row.count(" 06:00 CE") == 1 + 3


def test_the_list_shows_the_next_run_of_the_row():
    hand_made(tz="UTC")
    Scheduler(store_for()).fire_some()
    EventSchedule.objects.update(next_at="2999-03-01T05:30:00Z")
    assert "next: 2999-03-01 05:30 UTC, 2999-03-01 06:00 UTC, " in run("list")
    assert listed()["report"]["next_runs"][0] == "2999-03-01T05:30:00Z"


def test_every_state_is_listed(monkeypatch):
    schedule("gone", cron="0 6 * * *")
    schedules.synchronize(store_for())
    monkeypatch.setattr(schedules, "_declared", {})
    schedule("declared", cron="0 6 * * *")
    schedules.synchronize(store_for())
    schedule("unwritten", cron="0 6 * * *")
    hand_made(name="by hand")
    hand_made(name="off", enabled=False)
    assert {name: each["state"] for name, each in listed().items()} == {
        "gone": "not in code",
        "declared": "enabled",
        "unwritten": "new",
        "by hand": "enabled",
        "off": "disabled",
    }
    silent = [line.split()[0] for line in run("list").splitlines() if "next: " not in line]
    assert silent == ["name", "gone", "off"]


def test_a_schedule_that_cannot_fire_is_listed_with_the_reason():
    hand_made()
    EventSchedule.objects.update(tz="Berlin", last_at="2026-03-01T05:00:00Z")
    assert "cannot fire: there is no time zone 'Berlin'; did you mean" in run("list")
    record = listed()["report"]
    assert (record["words"], record["next_runs"]) == (None, [])
    assert "no time zone" in record["error"]


def test_json_output_has_every_field():
    hand_made(payload={"a": 1}, key="k")
    record = listed()["report"]
    assert (record["payload"], record["key"], record["cron"]) == ({"a": 1}, "k", "0 6 * * *")
    assert record["words"] == "at 06:00 every day, UTC"
    assert len(record["next_runs"]) == 3


def test_a_name_cannot_control_the_terminal():
    hand_made()
    EventSchedule.objects.update(name="\x1b[2Jx")
    assert "\x1b" not in run("list")
    assert "\x1b" not in run("list", "--format", "json")


def test_run_publishes_now():
    hand_made(payload=7)
    output = run("run", "report")
    event = QueuedEvent.objects.get()
    assert event.payload == 7
    assert output == f"Published report.daily {event.event_id}.\n"


def test_a_declared_schedule_can_be_switched_before_any_worker_has_started():
    schedule("x", cron="0 6 * * *", tz="UTC")
    assert run("disable", "x") == "Disabled x.\n"
    assert not EventSchedule.objects.get().enabled
    assert run("enable", "x").startswith("Enabled x: at 06:00 every day, UTC; next: ")
    assert EventSchedule.objects.get().enabled


@pytest.mark.parametrize("action", ["run", "enable", "disable"])
def test_an_unknown_name_is_refused_with_a_similar_one(action):
    hand_made()
    with pytest.raises(CommandError, match="did you mean 'report'"):
        run(action, "repotr")


def test_an_unknown_database_is_refused():
    with pytest.raises(CommandError, match="there is no database 'defualt'"):
        run("list", "--database", "defualt")
