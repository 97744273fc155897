import pytest

from django_eventbus.histograms import BOUNDS, COLUMNS, add_to, percentile


def counted(*seconds):
    counts = [0] * len(COLUMNS)
    add_to(counts, list(seconds))
    return counts


@pytest.mark.parametrize(
    ("seconds", "column"),
    [
        (-1, "up_to_1ms"),
        (0.001, "up_to_1ms"),
        (0.0011, "up_to_3ms"),
        (1000, "up_to_1000s"),
        (1e9, "over_1000s"),
    ],
)
def test_everything_has_its_place(seconds, column):
    assert dict(zip(COLUMNS, counted(seconds), strict=True)) == dict.fromkeys(COLUMNS, 0) | {
        column: 1
    }


def test_many_at_once_are_counted_as_each_of_them_would_be():
    seconds = [2000.0, 0.5, 0.002, 0.5, 9.0, 0.0, 0.002, 5000.0]
    alone = [sum(column) for column in zip(*map(counted, seconds), strict=True)]
    assert counted(*seconds) == alone


def test_bounds_rise():
    assert list(BOUNDS.values()) == sorted(BOUNDS.values())


def test_nothing_counted_has_no_percentile():
    assert percentile(counted(), 0.5) is None


def test_a_percentile_lies_between_the_bounds_of_its_place():
    counts = counted(*[0.002] * 90, *[2.0] * 10)
    assert 0.001 < percentile(counts, 0.5) <= 0.003
    assert 1.0 < percentile(counts, 0.95) <= 3.0


def test_within_a_place_it_is_even():
    assert percentile(counted(*[2.0] * 100), 0.5) == pytest.approx(2.0)


def test_beyond_the_last_bound_it_is_the_last_bound():
    assert percentile(counted(1e6), 0.95) == 1000.0
