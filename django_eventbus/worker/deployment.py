"""The versions and settings of this process, which a worker writes into its registration.

``event_doctor`` compares the registrations to find workers of an earlier deployment.
"""

from __future__ import annotations

import hashlib
import json
import platform
from functools import cache
from typing import Any

from django import get_version
from django.apps import apps

from django_eventbus import conf

#: Settings that may differ between the processes of one deployment.
OF_ONE_PROCESS = frozenset(
    {"BATCH_SIZE", "MAX_MEMORY", "POLL_INTERVAL", "PRODUCER", "SHUTDOWN_TIMEOUT"}
)


@cache
def version() -> str:
    """Return ``0.1.0, Django 5.2.8, Python 3.13.1``."""
    own: Any = apps.get_app_config("django_eventbus").module
    return f"{own.__version__}, Django {get_version()}, Python {platform.python_version()}"


def settings_digests() -> dict[str, str]:
    """Return a short digest of each setting that the project overrides, by its name."""
    return {
        name: _digest(value)
        for name, value in sorted(conf.overridden().items())
        if name not in OF_ONE_PROCESS
    }


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=_stable)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _stable(value: Any) -> Any:
    """Return a value that is the same in each process, which the address of an object is not."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return f"{type(value).__module__}.{type(value).__qualname__}"
