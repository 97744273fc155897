"""The ticks of a cron line, computed from given moments."""

import sys
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_eventbus.exceptions import InvalidScheduleError, MissingLibraryError
from django_eventbus.models import EventSchedule
from django_eventbus.scheduling.cron import Cron, faults

BERLIN = ZoneInfo("Europe/Berlin")


def berlin(*moment, fold=0):
    return datetime(*moment, tzinfo=BERLIN, fold=fold)


def ticks(line, after, count, tz="Europe/Berlin"):
    """The next ticks in local time, each computed from the previous one."""
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


def test_the_next_tick_is_later_than_the_given_moment():
    six = berlin(2026, 3, 1, 6)
    assert ticks("0 6 * * *", six, 1) == ["02 06:00 CET"]
    assert ticks("0 6 * * *", six - timedelta(microseconds=1), 1) == ["01 06:00 CET"]


def test_a_sixth_field_at_the_start_is_the_second():
    cron = Cron("*/20 * * * * *", "UTC")
    first = cron.next_after(datetime(2026, 3, 1, 12, 0, 5, tzinfo=UTC))
    assert first == datetime(2026, 3, 1, 12, 0, 20, tzinfo=UTC)


# -- the night with a missing hour: 29 March 2026, 02:00 becomes 03:00


def test_a_fixed_time_in_a_missing_hour_fires_after_the_clock_change():
    evening_before = berlin(2026, 3, 28, 20)
    assert ticks("30 2 * * *", evening_before, 2) == ["29 03:00 CEST", "30 02:30 CEST"]


def test_several_fixed_times_in_a_missing_hour_fire_one_tick():
    evening_before = berlin(2026, 3, 28, 20)
    assert ticks("0,30 2 * * *", evening_before, 2) == ["29 03:00 CEST", "30 02:00 CEST"]


def test_an_hourly_tick_skips_the_missing_hour():
    assert ticks("30 * * * *", berlin(2026, 3, 29, 1), 2) == ["29 01:30 CET", "29 03:30 CEST"]


# -- the night with a repeated hour: 25 October 2026, 03:00 becomes 02:00


def test_a_fixed_time_in_a_repeated_hour_fires_in_the_first_pass():
    evening_before = berlin(2026, 10, 24, 20)
    assert ticks("30 2 * * *", evening_before, 2) == ["25 02:30 CEST", "26 02:30 CET"]


def test_a_fixed_time_does_not_fire_again_in_the_second_pass_of_an_hour():
    asked = berlin(2026, 10, 25, 2, 10, fold=1)
    assert ticks("30 2 * * *", asked, 1) == ["26 02:30 CET"]
    assert ticks("30 2,4 * * *", asked, 2) == ["25 04:30 CET", "26 02:30 CET"]


def test_an_hourly_tick_fires_in_both_passes():
    found = ticks("30 * * * *", berlin(2026, 10, 25, 1), 4)
    assert found == ["25 01:30 CEST", "25 02:30 CEST", "25 02:30 CET", "25 03:30 CET"]


def test_a_fixed_time_with_seconds_ignores_clock_changes():
    """cronsim applies the rules of Debian's cron only to lines of five fields."""
    assert ticks("0 30 2 * * *", berlin(2026, 3, 28, 20), 1) == ["30 02:30 CEST"]
    assert ticks("0 30 2 * * *", berlin(2026, 10, 24, 20), 2) == ["25 02:30 CEST", "25 02:30 CET"]


LINES = ["30 2 * * *", "0,30 2 * * *", "30 1-4 * * *", "*/20 * * * *", "0 */2 * * *", "0 2,3 * * *"]
#: Two days around each change of clocks of 2026.
NIGHTS = st.sampled_from([berlin(2026, 3, 28, 12), berlin(2026, 10, 24, 12)])
SECONDS = st.integers(0, 48 * 3600)


@given(st.sampled_from(LINES), NIGHTS, SECONDS)
def test_the_ticks_are_the_same_from_every_starting_point(line, night, seconds):
    """Otherwise the next tick would depend on when a worker computes it."""
    cron = Cron(line, "Europe/Berlin")
    start = night.astimezone(UTC)
    asked = start + timedelta(seconds=seconds)
    after = start
    while after <= asked:
        after = cron.next_after(after)
    assert cron.next_after(asked) == after


@given(st.sampled_from(LINES), NIGHTS, SECONDS, st.integers(1, 5))
def test_searching_backward_finds_the_same_ticks_as_searching_forward(line, night, seconds, most):
    cron = Cron(line, "Europe/Berlin")
    first = cron.next_after(night)
    now = first + timedelta(seconds=seconds)
    forward = [first]
    while (tick := cron.next_after(forward[-1])) <= now:
        forward.append(tick)
    assert cron.latest(first, now, most=most) == forward[-most:]


def test_years_of_missed_seconds_are_searched_quickly():
    cron = Cron("* * * * * *", "UTC")
    first, now = datetime(2000, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)
    assert cron.latest(first, now, most=2) == [now - timedelta(seconds=1), now]


def test_the_first_tick_is_included_even_if_the_cron_line_does_not_match_it():
    cron = Cron("0 6 * * *", "UTC")
    first = datetime(2026, 3, 1, 14, 3, tzinfo=UTC)
    assert cron.latest(first, first + timedelta(hours=1), most=5) == [first]


# -- in words


def test_a_line_is_described_in_words_with_its_next_runs():
    said = Cron("0 6 * * *", "Europe/Berlin").explain(berlin(2026, 3, 27, 12), count=3)
    assert said == (
        "at 06:00 every day, Europe/Berlin; "
        "next: 2026-03-28 06:00 CET, 2026-03-29 06:00 CEST, 2026-03-30 06:00 CEST"
    )


def test_seconds_are_described_if_the_line_has_them():
    said = Cron("30 0 6 * * *", "UTC").explain(berlin(2026, 3, 27, 12), count=1)
    assert said == "at 06:00:30 every day, UTC; next: 2026-03-28 06:00:30 UTC"


# -- lines that cannot fire


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("0 0 31 2 *", "can never fire: its months have no such day"),
        ("0 0 31 4,6 *", "can never fire: its months have no such day"),
        ("0 0 */20 * MON#5", "can never fire: no day fits all its fields"),
        ("0 0 32 * *", "is not a cron line (bad day-of-month)"),
        ("61 * * * *", "is not a cron line (bad minute)"),
        ("0 0 1 13 *", "is not a cron line (bad month)"),
        ("0 6 * *", "is not a cron line (wrong number of fields)"),
        ("@daily", "is not a cron line (wrong number of fields)"),
        ("", "is not a cron line (wrong number of fields)"),
        ("every day", "is not a cron line"),
        ("\u0663 * * * *", "is not a cron line (bad minute)"),
        (None, "must be a string"),
        (6, "must be a string"),
    ],
)
def test_a_line_that_cannot_fire_is_refused(line, why):
    with pytest.raises(InvalidScheduleError) as refused:
        Cron(line, "UTC")
    assert why in str(refused.value)


def test_a_rarely_firing_line_is_accepted():
    leap_day = Cron("0 0 29 2 *", "UTC")
    assert leap_day.next_after(datetime(2026, 3, 1, tzinfo=UTC)).year == 2028


@pytest.mark.parametrize(
    ("tz", "meant"),
    [
        ("Europe/Berlim", "did you mean 'Europe/Berlin'?"),
        ("europe/berlin", "did you mean 'Europe/Berlin'?"),
        ("Berlin", "did you mean 'Europe/Berlin'?"),
        ("new york", "did you mean 'America/New_York'?"),
        ("Middle-earth/Bree", "use a name such as"),
        ("../../etc/passwd", "use a name such as"),
        ("Europe", "there is no time zone"),
        ("", "there is no time zone"),
        (None, "there is no time zone"),
        ("x\0y", "there is no time zone"),
    ],
)
def test_an_unknown_time_zone_is_refused_with_a_similar_name(tz, meant):
    with pytest.raises(InvalidScheduleError) as refused:
        Cron("0 6 * * *", tz)
    assert meant in str(refused.value)


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'django-durable-events\[cron\]'"):
        Cron("0 6 * * *", "UTC")


GOOD = {"name": "n", "type": "t", "cron": "0 6 * * *", "tz": "UTC"}


def test_a_valid_schedule_has_no_errors():
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
def test_an_error_names_its_field_and_the_valid_values(field, value):
    (fault,) = faults(EventSchedule(**(GOOD | {field: value})))
    assert fault.field == field
    assert fault.wrong
    assert fault.right.endswith(".")
