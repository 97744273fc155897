"""Retry database operations until an unavailable database is available again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from django.db import Error

from django_eventbus.errors import failures
from django_eventbus.logs import about
from django_eventbus.store.rows import Rows, is_outage

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_WAIT = 0.1
LONGEST_WAIT = 5.0


def through_outage(store: Rows, action: Callable[[], T], pause: Callable[[float], bool]) -> T:
    """Call ``action``; if the database is unavailable, call it again after increasing pauses.

    ``pause`` waits for the given seconds and returns whether to try again. If ``pause`` returns
    False, the database error is raised. Errors that do not mean an outage are raised at once.
    Errors inside a transaction are also raised at once, because the whole transaction is lost.
    """
    wait = FIRST_WAIT
    while True:
        try:
            return action()
        except Error as error:
            if store.connection.in_atomic_block or not is_outage(error):
                raise
            store.connection.close()
            logger.warning(
                "database error, retrying in %.1f s: %s",
                wait,
                failures.in_a_line(error),
                extra=about(),
            )
            if not pause(wait):
                raise
            wait = min(wait * 2, LONGEST_WAIT)
