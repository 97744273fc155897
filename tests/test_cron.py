"""When a cron line fires. Pure: every moment is given."""

import sys
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_eventbus.cron import Cron, faults
from django_eventbus.exceptions import InvalidScheduleError, MissingLibraryError
from django_eventbus.models import EventSchedule

BERLIN = ZoneInfo("Europe/Berlin")


def berlin(*moment, fold=0):
    return datetime(*moment, tzinfo=BERLIN, fold=fold)


def ticks(line, after, count, tz="Europe/Berlin"):
    """The next ticks, as the wall clock there shows them, each asked for after the one before."""
    cron, found = Cron(line, tz), []
    for _ in range(count):
        after = cron.next_after(after)
        assert after.tzinfo is UTC
        found.append(f"{after.astimezone(cron.zone):%d %H:%M %Z}")
    return found


def test_a_line_fires_by_the_clock_of_its_time_zone():
    assert ticks("0 6 * * *", berlin(2026, 3, 1, 12), 2) == ["02 06:00 CET", "03 06:00 CET"]
    noon_in_berlin = berlin(2026, 3, 1, 12)
    assert ticks("0 6 * * *", noon_in_berlin, 1, tz="America/New_York") == ["02 06:00 EST"]


def test_a_tick_is_never_the_moment_it_is_asked_after():
    six = berlin(2026, 3, 1, 6)
    assert ticks("0 6 * * *", six, 1) == ["02 06:00 CET"]
    assert ticks("0 6 * * *", six - timedelta(microseconds=1), 1) == ["01 06:00 CET"]


def test_a_sixth_field_in_front_is_the_second():
    cron = Cron("*/20 * * * * *", "UTC")
    first = cron.next_after(datetime(2026, 3, 1, 12, 0, 5, tzinfo=UTC))
    assert first == datetime(2026, 3, 1, 12, 0, 20, tzinfo=UTC)


# -- the night when an hour is missing: 29 March 2026, 02:00 is 03:00


def test_a_fixed_time_that_does_not_exist_is_made_up_for_when_clocks_have_changed():
    evening_before = berlin(2026, 3, 28, 20)
    assert ticks("30 2 * * *", evening_before, 2) == ["29 03:00 CEST", "30 02:30 CEST"]


def test_several_fixed_times_that_do_not_exist_are_made_up_for_by_one_tick():
    evening_before = berlin(2026, 3, 28, 20)
    assert ticks("0,30 2 * * *", evening_before, 2) == ["29 03:00 CEST", "30 02:00 CEST"]


def test_a_tick_every_hour_leaves_out_the_hour_that_does_not_exist():
    assert ticks("30 * * * *", berlin(2026, 3, 29, 1), 2) == ["29 01:30 CET", "29 03:30 CEST"]


# -- the night when an hour comes twice: 25 October 2026, 03:00 is 02:00


def test_a_fixed_time_that_comes_twice_fires_the_first_time():
    evening_before = berlin(2026, 10, 24, 20)
    assert ticks("30 2 * * *", evening_before, 2) == ["25 02:30 CEST", "26 02:30 CET"]


def test_asked_in_the_second_pass_of_an_hour_a_fixed_time_is_not_in_the_past():
    asked = berlin(2026, 10, 25, 2, 10, fold=1)
    assert ticks("30 2 * * *", asked, 1) == ["26 02:30 CET"]
    assert ticks("30 2,4 * * *", asked, 2) == ["25 04:30 CET", "26 02:30 CET"]


def test_a_tick_every_hour_fires_in_both_passes():
    found = ticks("30 * * * *", berlin(2026, 10, 25, 1), 4)
    assert found == ["25 01:30 CEST", "25 02:30 CEST", "25 02:30 CET", "25 03:30 CET"]


def test_a_fixed_time_with_seconds_knows_nothing_of_changing_clocks():
    """As cronsim has it: the rules of Debian's cron are for lines of five fields."""
    assert ticks("0 30 2 * * *", berlin(2026, 3, 28, 20), 1) == ["30 02:30 CEST"]
    assert ticks("0 30 2 * * *", berlin(2026, 10, 24, 20), 2) == ["25 02:30 CEST", "25 02:30 CET"]


LINES = ["30 2 * * *", "0,30 2 * * *", "30 1-4 * * *", "*/20 * * * *", "0 */2 * * *", "0 2,3 * * *"]
#: Two days around each change of clocks of 2026.
NIGHTS = st.sampled_from([berlin(2026, 3, 28, 12), berlin(2026, 10, 24, 12)])
SECONDS = st.integers(0, 48 * 3600)


@given(st.sampled_from(LINES), NIGHTS, SECONDS)
def test_wherever_one_asks_from_the_ticks_are_the_same(line, night, seconds):
    """Else the tick that follows would hang on when a worker looked."""
    cron = Cron(line, "Europe/Berlin")
    start = night.astimezone(UTC)
    asked = start + timedelta(seconds=seconds)
    after = start
    while after <= asked:
        after = cron.next_after(after)
    assert cron.next_after(asked) == after


@given(st.sampled_from(LINES), NIGHTS, SECONDS, st.integers(1, 5))
def test_looking_back_finds_what_looking_forward_found(line, night, seconds, most):
    cron = Cron(line, "Europe/Berlin")
    first = cron.next_after(night)
    now = first + timedelta(seconds=seconds)
    forward = [first]
    while (tick := cron.next_after(forward[-1])) <= now:
        forward.append(tick)
    assert cron.latest(first, now, most=most) == forward[-most:]


def test_years_of_missed_seconds_are_looked_through_in_no_time():
    cron = Cron("* * * * * *", "UTC")
    first, now = datetime(2000, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)
    assert cron.latest(first, now, most=2) == [now - timedelta(seconds=1), now]


def test_a_first_tick_set_by_hand_counts_though_no_line_says_so():
    cron = Cron("0 6 * * *", "UTC")
    first = datetime(2026, 3, 1, 14, 3, tzinfo=UTC)
    assert cron.latest(first, first + timedelta(hours=1), most=5) == [first]


# -- in words


def test_a_line_is_said_in_words_with_its_next_runs():
    said = Cron("0 6 * * *", "Europe/Berlin").explain(berlin(2026, 3, 27, 12), count=3)
    assert said == (
        "at 06:00 every day, Europe/Berlin; "
        "next: 2026-03-28 06:00 CET, 2026-03-29 06:00 CEST, 2026-03-30 06:00 CEST"
    )


def test_seconds_are_said_where_there_are_any():
    said = Cron("30 0 6 * * *", "UTC").explain(berlin(2026, 3, 27, 12), count=1)
    assert said == "at 06:00:30 every day, UTC; next: 2026-03-28 06:00:30 UTC"


# -- what cannot fire


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("0 0 31 2 *", "can never fire: its months have no such day"),
        ("0 0 31 4,6 *", "can never fire: its months have no such day"),
        ("0 0 */20 * MON#5", "can never fire: no day fits all its fields"),
        ("0 0 32 * *", "is no cron line (bad day-of-month)"),
        ("61 * * * *", "is no cron line (bad minute)"),
        ("0 0 1 13 *", "is no cron line (bad month)"),
        ("0 6 * *", "is no cron line (wrong number of fields)"),
        ("@daily", "is no cron line (wrong number of fields)"),
        ("", "is no cron line (wrong number of fields)"),
        ("every day", "is no cron line"),
        ("\u0663 * * * *", "is no cron line (bad minute)"),
        (None, "must be a string"),
        (6, "must be a string"),
    ],
)
def test_a_line_that_cannot_fire_is_refused(line, why):
    with pytest.raises(InvalidScheduleError) as refused:
        Cron(line, "UTC")
    assert why in str(refused.value)


def test_a_rare_line_is_not_taken_for_one_that_cannot_fire():
    leap_day = Cron("0 0 29 2 *", "UTC")
    assert leap_day.next_after(datetime(2026, 3, 1, tzinfo=UTC)).year == 2028


@pytest.mark.parametrize(
    ("tz", "meant"),
    [
        ("Europe/Berlim", "did you mean 'Europe/Berlin'?"),
        ("europe/berlin", "did you mean 'Europe/Berlin'?"),
        ("Berlin", "did you mean 'Europe/Berlin'?"),
        ("new york", "did you mean 'America/New_York'?"),
        ("Middle-earth/Bree", "name one like"),
        ("../../etc/passwd", "name one like"),
        ("Europe", "there is no time zone"),
        ("", "there is no time zone"),
        (None, "there is no time zone"),
        ("x\0y", "there is no time zone"),
    ],
)
def test_an_unknown_time_zone_is_refused_with_the_one_that_was_meant(tz, meant):
    with pytest.raises(InvalidScheduleError) as refused:
        Cron("0 6 * * *", tz)
    assert meant in str(refused.value)


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'django-eventbus\[cron\]'"):
        Cron("0 6 * * *", "UTC")


GOOD = {"name": "n", "type": "t", "cron": "0 6 * * *", "tz": "UTC"}


def test_a_good_schedule_has_no_faults():
    assert list(faults(EventSchedule(**GOOD, payload={"a": 1}, key="k", headers={"h": 1}))) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "x" * 201),
        ("type", "a\nb"),
        ("cron", "0 0 31 2 *"),
        ("cron", "0,0" + ",0" * 200 + " * * * *"),
        ("tz", "Mars"),
        ("payload", {1, 2}),
        ("payload", float("nan")),
        ("key", ""),
        ("key", "k" * 201),
        ("queue", "nowhere"),
        ("priority", "high"),
        ("priority", True),
        ("priority", 40_000),
        ("headers", ["a"]),
        ("headers", {"a": object()}),
        ("headers", {"scheduler": "me"}),
        ("misfire", "fire_twice"),
    ],
)
def test_a_fault_names_its_field_and_what_would_be_right(field, value):
    (fault,) = faults(EventSchedule(**(GOOD | {field: value})))
    assert fault.field == field
    assert fault.wrong
    assert fault.right.endswith(".")
