"""Checks of schedules and of the setup: each finds its fault, and is ok without it."""

from datetime import timedelta

import pytest

from django_eventbus import handler, schedule, schedules
from django_eventbus.models import EventSchedule, ScheduleOrigin
from tests.bus import drain

pytestmark = pytest.mark.django_db


@pytest.fixture
def report(now):
    """A planned schedule of the database."""
    handler("report", name="report")(lambda event: None)
    EventSchedule.objects.create(name="report", type="report", cron="0 3 * * *")
    drain(fires_schedules=True)
    row = EventSchedule.objects.get()
    assert row.next_at > now
    return row


@pytest.mark.parametrize("check_id", ["EB023", "EB024", "EB025"])
def test_a_planned_schedule_is_ok(check_id, diagnose, report):
    assert diagnose(check_id).verdict == "ok"


@pytest.mark.parametrize(("minutes", "verdict"), [(0.5, "ok"), (5, "warn"), (90, "fail")])
def test_a_late_schedule(diagnose, report, now, minutes, verdict):
    EventSchedule.objects.update(next_at=now - timedelta(minutes=minutes))
    found = diagnose("EB023")
    assert found.verdict == verdict


def test_a_declared_schedule_that_no_worker_has_stored(diagnose):
    schedule("report", cron="0 3 * * *")
    (result,) = diagnose("EB024").results
    assert result.verdict == "warn"
    assert "no worker has stored the schedule report" in result.summary


def test_a_stored_schedule_that_no_code_declares(diagnose, report):
    EventSchedule.objects.update(origin=ScheduleOrigin.CODE)
    (result,) = diagnose("EB024").results
    assert "does not declare the schedule report" in result.summary
    assert result.fix.endswith("run: manage.py event_schedules disable report")


def test_a_schedule_without_a_next_run(diagnose, report):
    EventSchedule.objects.update(next_at=None)
    (result,) = diagnose("EB024").results
    assert result.summary == "the schedule report has no next run"


@pytest.mark.parametrize(("days", "verdict"), [(2, "ok"), (40, "warn")])
def test_a_schedule_that_is_disabled_for_long(diagnose, report, now, days, verdict):
    schedules.disable("report")
    EventSchedule.objects.update(last_at=now - timedelta(days=days))
    found = diagnose("EB025")
    assert found.verdict == verdict
    assert diagnose("EB024").verdict == "ok"
    if verdict == "warn":
        assert found.results[0].fix == "manage.py event_schedules enable report"


#: Test modules declare event classes that have no handler.
OF_THE_SUITE = "django_eventbus.W006"


def test_system_checks_without_a_message_are_ok(diagnose, settings):
    settings.SILENCED_SYSTEM_CHECKS = [OF_THE_SUITE]
    assert diagnose("EB026").verdict == "ok"


def test_a_wrong_setting_fails(diagnose, settings):
    settings.EVENTBUS = {"BATCHSIZE": 7}
    settings.SILENCED_SYSTEM_CHECKS = [OF_THE_SUITE]
    (result,) = diagnose("EB026").results
    assert result.verdict == "fail"
    assert result.summary.startswith("django_eventbus.E002: ")
    assert "BATCH_SIZE" in result.fix


def test_a_silenced_system_check_is_not_reported(diagnose, settings):
    settings.EVENTBUS = {"BATCHSIZE": 7}
    settings.SILENCED_SYSTEM_CHECKS = [OF_THE_SUITE, "django_eventbus.E002"]
    assert diagnose("EB026").verdict == "ok"
