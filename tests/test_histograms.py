import pytest

from django_eventbus.schema.histograms import BOUNDS, COLUMNS, add_to, percentile


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
def test_every_value_has_a_bucket(seconds, column):
    assert dict(zip(COLUMNS, counted(seconds), strict=True)) == dict.fromkeys(COLUMNS, 0) | {
        column: 1
    }


def test_counting_many_values_equals_counting_each_of_them():
    seconds = [2000.0, 0.5, 0.002, 0.5, 9.0, 0.0, 0.002, 5000.0]
    alone = [sum(column) for column in zip(*map(counted, seconds), strict=True)]
    assert counted(*seconds) == alone


def test_bounds_increase():
    assert list(BOUNDS.values()) == sorted(BOUNDS.values())


def test_an_empty_histogram_has_no_percentile():
    assert percentile(counted(), 0.5) is None


def test_a_percentile_is_between_the_bounds_of_its_bucket():
    counts = counted(*[0.002] * 90, *[2.0] * 10)
    assert 0.001 < percentile(counts, 0.5) <= 0.003
    assert 1.0 < percentile(counts, 0.95) <= 3.0


def test_a_percentile_is_interpolated_within_a_bucket():
    assert percentile(counted(*[2.0] * 100), 0.5) == pytest.approx(2.0)


def test_a_percentile_beyond_the_last_bound_is_the_last_bound():
    assert percentile(counted(1e6), 0.95) == 1000.0
