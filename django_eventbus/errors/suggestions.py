"""Refuse misspelled names, with suggestions as part of the error message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from django_eventbus.conf import settings
from django_eventbus.exceptions import UnknownQueueError


def check_queue(name: Any) -> None:
    """Raise UnknownQueueError if the setting QUEUES does not have the queue."""
    if name not in settings.QUEUES:
        hint = did_you_mean(str(name), settings.QUEUES)
        raise UnknownQueueError(f"{name!r} is not in EVENTBUS['QUEUES']{hint}")


def did_you_mean(word: str, choices: Any) -> str:
    """Return text to append to an error message: the most similar choice, or else all choices."""
    known = sorted(map(str, choices))
    if close := closest(word, known):
        return f"; did you mean {close!r}?"
    return f"; choose from {', '.join(map(repr, known))}" if known else ""


def closest(word: str, choices: Iterable[str], *, similarity: float = 0.6) -> str | None:
    """Return the most similar choice, or None if none is similar enough."""
    return next(iter(difflib.get_close_matches(word, choices, n=1, cutoff=similarity)), None)
