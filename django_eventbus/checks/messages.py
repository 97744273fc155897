"""Functions for the texts of system checks."""

from __future__ import annotations

from typing import Any

from django_eventbus.errors.text import one_line

TAG = "eventbus"


def shown(value: Any) -> str:
    """Return a value of a setting as one short line."""
    return one_line(repr(value), 80)


def closed(clause: str) -> str:
    """Return the clause with a full stop at its end, unless it is a question."""
    return clause if clause.endswith("?") else f"{clause}."


def check_id(number: str) -> str:
    return f"django_eventbus.{number}"
