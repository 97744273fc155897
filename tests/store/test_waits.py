"""Waits are values: seconds that pass, or a flow control that has to end."""

from django_eventbus.store import AT_ONCE, SEVERAL, After, HeldBy, soonest


def test_a_delay_in_seconds_is_not_a_flow_control():
    assert After(5) != HeldBy(5)
    assert len({After(5), HeldBy(5), After(5), HeldBy(5)}) == 2


def test_the_earliest_wait_is_the_shortest_delay_and_never_a_hold():
    assert soonest(After(5), After(3), HeldBy(1)) == After(3)
    assert soonest(HeldBy(SEVERAL), AT_ONCE) == AT_ONCE
    assert soonest(HeldBy(7)) == HeldBy(7)
