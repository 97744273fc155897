"""Named places where a test may make things go wrong.

There is no switch: a test puts a function of its own here. Without one, passing a place does
nothing, whatever the environment and the settings say.
"""

from __future__ import annotations

from collections.abc import Callable

on_reaching: Callable[[str], None] | None = None


def reached(place: str) -> None:
    if on_reaching is not None:
        on_reaching(place)
