"""Histograms of durations: counts between fixed bounds, from which percentiles are estimated.

The bounds must not change, so that the counts of different workers and times can be added.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

#: The upper bound of each column in seconds. The lower bound is the upper bound of the previous
#: column.
BOUNDS = {
    "up_to_1ms": 0.001,
    "up_to_3ms": 0.003,
    "up_to_10ms": 0.01,
    "up_to_30ms": 0.03,
    "up_to_100ms": 0.1,
    "up_to_300ms": 0.3,
    "up_to_1s": 1.0,
    "up_to_3s": 3.0,
    "up_to_10s": 10.0,
    "up_to_30s": 30.0,
    "up_to_100s": 100.0,
    "up_to_300s": 300.0,
    "up_to_1000s": 1000.0,
}
#: The last column counts durations above the last bound.
COLUMNS = (*BOUNDS, "over_1000s")

_BOUNDS = tuple(BOUNDS.values())


def add_to(counts: list[int], seconds: list[float]) -> None:
    """Add durations to a histogram.

    The list of durations is sorted in place, so that the loop runs once per column and not once per
    duration.
    """
    seconds.sort()
    before = 0
    for column, bound in enumerate(_BOUNDS):
        upto = bisect_right(seconds, bound, before)
        counts[column] += upto - before
        before = upto
        if upto == len(seconds):
            return
    counts[-1] += len(seconds) - before


def percentile(counts: Sequence[int], share: float) -> float | None:
    """Return the seconds that a share of the durations did not exceed; None without durations.

    ``share`` is 0.95 for the 95th percentile. The result is interpolated between the two bounds of
    a column. It is never more than the last bound.
    """
    wanted = sum(counts) * share
    if not wanted:
        return None
    below, seen = 0.0, 0
    for bound, count in zip(_BOUNDS, counts, strict=False):
        if count and seen + count >= wanted:
            return below + (bound - below) * (wanted - seen) / count
        below, seen = bound, seen + count
    return below
