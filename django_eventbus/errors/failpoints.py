"""Failpoints: named lines of code where a test can cause an error.

No setting and no environment variable enables failpoints. A test assigns a function to
``on_reaching``.
"""

from __future__ import annotations

from collections.abc import Callable

on_reaching: Callable[[str], None] | None = None


def reached(failpoint: str) -> None:
    if on_reaching is not None:
        on_reaching(failpoint)
