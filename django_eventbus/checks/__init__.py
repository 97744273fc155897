"""System checks: ``manage.py check`` reports a wrong setup before an event is affected.

Each message says what is wrong, and its hint says what is allowed. The id of a check never changes,
because projects silence checks by id. docs/reference/checks.md explains each check.
"""

from __future__ import annotations

from django_eventbus.checks.databases import check_databases
from django_eventbus.checks.executors import check_executors
from django_eventbus.checks.handlers import check_handlers, check_unhandled_types
from django_eventbus.checks.messages import TAG
from django_eventbus.checks.schedules import check_schedules
from django_eventbus.checks.settings import check_admin, check_settings, check_time_zones

__all__ = [
    "TAG",
    "check_admin",
    "check_databases",
    "check_executors",
    "check_handlers",
    "check_schedules",
    "check_settings",
    "check_time_zones",
    "check_unhandled_types",
]
