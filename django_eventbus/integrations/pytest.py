"""Fixtures for pytest, found by its entry point in every project that installs the bus.

Pytest imports this before Django is set up, and in projects without Django: only fixtures that a
test asks for may import more.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def eventbus(db: Any) -> Iterator[ModuleType]:
    """``django_eventbus.testing``; handlers that the test declares are forgotten when it ends."""
    from django_eventbus import testing

    with testing.own_handlers():
        yield testing


@pytest.fixture
def isolated_event_handlers() -> Iterator[None]:
    """Only handlers that the test declares are there."""
    from django_eventbus import testing

    with testing.isolated_handlers():
        yield
