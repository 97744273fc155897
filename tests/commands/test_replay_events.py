"""manage.py replay_events."""

import io
import json
from datetime import datetime, timedelta

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from django_eventbus import publish, replay
from django_eventbus.management.commands import replay_events
from django_eventbus.models import EventReplay
from django_eventbus.testing import drain
from tests.test_replay import handled

pytestmark = pytest.mark.django_db


def run(*arguments, stdout=None):
    stdout = io.StringIO() if stdout is None else stdout
    call_command("replay_events", *map(str, arguments), stdout=stdout, stderr=stdout)
    return stdout.getvalue()


@pytest.fixture
def seen():
    replay.register()
    found = handled()
    for number in range(3):
        publish("order.placed", number)
    drain()
    found.clear()
    return found


@pytest.fixture
def workers_run(monkeypatch):
    """Handle the events while the command waits."""
    monkeypatch.setattr(
        replay_events.time, "sleep", lambda seconds: drain(until=timedelta(minutes=1))
    )


def test_events_are_replayed_and_the_command_waits_for_the_end(seen, workers_run):
    out = run("--type", "order.*", "--yes")
    assert "Replay 1 is copied: 3 events handled." in out.replace(
        str(EventReplay.objects.get().pk), "1"
    )
    assert len(seen) == 3


def test_a_dry_run_only_counts(seen):
    assert run("--type", "order.*", "--dry-run") == "Would replay 3 events to all their handlers.\n"
    assert json.loads(run("--type", "order.*", "--dry-run", "--format", "json")) == {"selected": 3}
    assert not EventReplay.objects.exists()


def test_without_a_terminal_the_command_needs_a_yes(seen, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(CommandError, match=r"Replay 3 events to projection\? Not a terminal"):
        run("--type", "order.*", "--handler", "projection")


def test_a_missing_worker_is_reported_once(seen, workers_run):
    assert run("--type", "order.*", "--yes").count("No worker is running") == 1


def test_ctrl_c_leaves_the_replay_to_the_workers(seen, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(replay_events.time, "sleep", interrupt)
    assert "continues in the workers" in run("--type", "order.*", "--yes")
    drain(until=timedelta(minutes=1))
    assert len(seen) == 3


def test_a_replay_can_be_listed_followed_and_cancelled(seen, workers_run):
    started = json.loads(run("--type", "order.*", "--yes", "--detach", "--format", "json"))["id"]
    assert f"{started}  " in run("--list")
    assert run("--cancel", started) == f"Cancelled replay {started}.\n"
    assert run("--cancel", started) == f"Replay {started} has ended.\n"
    assert run("--follow", started).endswith("is cancelled: 0 events handled.\n")
    (listed,) = json.loads(run("--list", "--format", "json"))
    assert (listed["id"], listed["state"], listed["total"]) == (started, "CANCELLED", 3)


def test_a_terminal_shows_a_progress_bar(seen, workers_run):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = run("--type", "order.*", "--yes", stdout=Terminal())
    assert "[                    ] 0 of 3" in out


def test_no_matching_event_starts_no_replay(seen):
    assert run("--type", "mail.*", "--yes") == "No event matches the filters.\n"
    assert not EventReplay.objects.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "pass a filter"),
        (("--type", "*", "--dry-run", "--handler", "projektion"), "did you mean 'projection'"),
        (("--type", "*", "--dry-run", "--rate", "0"), "more than 0"),
        (("--follow", "9999999"), "no replay 9999999"),
        (("--cancel", "9999999"), "no replay 9999999"),
        (("--type", "*", "--since", "yesterday"), "'yesterday' is not a time"),
        (("--type", "*", "--since", "2026-13-01"), "'2026-13-01' is not a time"),
    ],
)
def test_wrong_arguments_are_refused(seen, arguments, message):
    with pytest.raises(CommandError, match=message):
        run(*arguments)


def test_times_can_be_dates_and_periods():
    midnight = datetime(2026, 11, 1, tzinfo=timezone.get_current_timezone())
    assert replay_events.moment("2026-11-01") == midnight
    assert replay_events.moment("2026-11-01T12:00+02:00").hour == 12
    assert replay_events.moment("7d") < replay_events.moment("6d")
