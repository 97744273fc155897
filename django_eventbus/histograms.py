"""How long things took, in few numbers: counts between fixed bounds, percentiles read from them.

The bounds are fixed for good: what different workers counted, at different times, can be added up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

#: By the column that counts what took no longer (and longer than the one before it), in seconds.
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
#: The last one counts what took even longer.
COLUMNS = (*BOUNDS, "over_1000s")

_BOUNDS = tuple(BOUNDS.values())


def add_to(counts: list[int], seconds: list[float]) -> None:
    """Count these, each in its place. The list is sorted on the way: so many at once cost little
    more than one."""
    seconds.sort()
    before = 0
    for place, bound in enumerate(_BOUNDS):
        upto = bisect_right(seconds, bound, before)
        counts[place] += upto - before
        before = upto
        if upto == len(seconds):
            return
    counts[-1] += len(seconds) - before


def percentile(counts: Sequence[int], share: float) -> float | None:
    """Seconds that this share (0.5, 0.95) did not exceed; None if nothing was counted.

    Even between two bounds; beyond the last bound nothing is known, so it is the answer.
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
