"""manage.py event_schedules: what fires when, and a hand on the switch."""

import io
import json

import pytest
from django.core.management import CommandError, call_command

from django_eventbus import schedule, schedules
from django_eventbus.models import EventSchedule, QueuedEvent
from django_eventbus.schedules import Scheduler
from django_eventbus.store import store_for
from tests.test_schedules import hand_made

pytestmark = pytest.mark.django_db


def run(*arguments):
    stdout = io.StringIO()
    call_command("event_schedules", *arguments, stdout=stdout)
    return stdout.getvalue()


def listed():
    return {each["name"]: each for each in json.loads(run("list", "--format", "json"))}


def test_no_schedules_are_told_as_such():
    assert run("list") == "No schedules.\n"


def test_the_table_tells_in_words_what_fires_when():
    hand_made(tz="Europe/Berlin")
    Scheduler(store_for()).look()
    EventSchedule.objects.update(last_at="2026-03-01T05:00:00Z")
    header, row = run("list").splitlines()
    assert header.split() == ["name", "event", "state", "last", "run", "when"]
    assert row.startswith(
        "report  report.daily  enabled  2026-03-01 06:00 CET  "
        "at 06:00 every day, Europe/Berlin; next: "
    )
    assert row.count(" 06:00 CE") == 1 + 3


def test_every_state_is_told(monkeypatch):
    schedule("gone", cron="0 6 * * *")
    schedules.synchronise(store_for())
    monkeypatch.setattr(schedules, "_declared", {})
    schedule("declared", cron="0 6 * * *")
    schedules.synchronise(store_for())
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


def test_a_script_gets_all_there_is_to_know():
    hand_made(payload={"a": 1}, key="k")
    record = listed()["report"]
    assert (record["payload"], record["key"], record["cron"]) == ({"a": 1}, "k", "0 6 * * *")
    assert record["words"] == "at 06:00 every day, UTC"
    assert len(record["next_runs"]) == 3


def test_a_name_cannot_drive_the_terminal():
    hand_made()
    EventSchedule.objects.update(name="\x1b[2Jx")
    assert "\x1b" not in run("list")
    assert "\x1b" not in run("list", "--format", "json")


def test_run_publishes_now():
    hand_made(payload=7)
    said = run("run", "report")
    event = QueuedEvent.objects.get()
    assert event.payload == 7
    assert said == f"Published report.daily {event.event_id}.\n"


def test_a_declared_schedule_can_be_switched_before_any_worker_has_started():
    schedule("x", cron="0 6 * * *", tz="UTC")
    assert run("disable", "x") == "Disabled x.\n"
    assert not EventSchedule.objects.get().enabled
    assert run("enable", "x").startswith("Enabled x: at 06:00 every day, UTC; next: ")
    assert EventSchedule.objects.get().enabled


@pytest.mark.parametrize("action", ["run", "enable", "disable"])
def test_an_unknown_name_is_refused_with_the_one_that_was_meant(action):
    hand_made()
    with pytest.raises(CommandError, match="did you mean 'report'"):
        run(action, "repotr")


def test_an_unknown_database_is_refused():
    with pytest.raises(CommandError, match="there is no database 'defualt'"):
        run("list", "--database", "defualt")
