"""Fixtures for pytest. An entry point loads them in every project that installs the package.

Pytest imports this module before Django is set up, and also in projects without Django. So this
module imports no Django code at the top; each fixture imports what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def eventbus(db: Any) -> Iterator[ModuleType]:
    """Provide ``django_eventbus.testing``. Handlers of the test are removed after the test."""
    from django_eventbus import testing

    with testing.own_handlers():
        yield testing


@pytest.fixture
def isolated_event_handlers() -> Iterator[None]:
    """Deactivate all handlers except the handlers that the test registers."""
    from django_eventbus import testing

    with testing.isolated_handlers():
        yield
