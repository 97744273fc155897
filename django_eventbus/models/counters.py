"""Counters that only increase, for monitoring systems."""

from __future__ import annotations

import uuid
from typing import Any

from django.db import models

from django_eventbus.schema.clock import DatabaseNow
from django_eventbus.schema.names import MAX_NAME_LENGTH

#: The values of ``EventCounter.measure``.
EVENTS, STARTS, RUNS, PUBLISHING = ("events", "starts", "runs", "publishing")

#: The source of the rows with the counts of processes that have ended.
FOLDED = uuid.UUID(int=0)


def _count() -> Any:
    return models.BigIntegerField(default=0)


class EventCounter(models.Model):
    """The counts of one process for one queue, handler or event type.

    The value of a counter is the sum over all sources. Each process writes only its own rows. After
    the process has ended, its rows are added to the rows of the source ``FOLDED``, and deleted. So
    the number of rows does not grow with the number of processes that ever ran.
    """

    id = models.BigAutoField(primary_key=True)
    namespace = models.CharField(max_length=64)
    source = models.UUIDField()
    # "events": events by their result, with the time from publishing to the end.
    # "starts": the time from publishing to the first start of a handler.
    # "runs": the runs of a handler by their result, with their durations.
    # "publishing": events that were published, dropped or coalesced.
    measure = models.CharField(max_length=16)
    queue = models.CharField(max_length=64)
    # The name of the handler. Empty except for "runs".
    handler = models.CharField(max_length=MAX_NAME_LENGTH, default="")
    # The event type, or "other". Empty except for "publishing".
    event_type = models.CharField(max_length=MAX_NAME_LENGTH, default="")
    # The time of the last write, by the clock of the database.
    written_at = models.DateTimeField(db_default=DatabaseNow())
    done = _count()
    retried = _count()
    dead = _count()
    discarded = _count()
    handed_off = _count()
    ignored_messages = _count()
    # The number of events whose claim was lost to another worker.
    lost = _count()
    published = _count()
    dropped = _count()
    coalesced = _count()
    # The sum of the durations, and their histogram (see ``schema.histograms``).
    seconds = models.FloatField(default=0.0)
    up_to_1ms = _count()
    up_to_3ms = _count()
    up_to_10ms = _count()
    up_to_30ms = _count()
    up_to_100ms = _count()
    up_to_300ms = _count()
    up_to_1s = _count()
    up_to_3s = _count()
    up_to_10s = _count()
    up_to_30s = _count()
    up_to_100s = _count()
    up_to_300s = _count()
    up_to_1000s = _count()
    over_1000s = _count()

    class Meta:
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(
                name="eventbus_counter",
                fields=("namespace", "source", "measure", "queue", "handler", "event_type"),
            ),
        )

    def __str__(self) -> str:
        return f"{self.measure} {self.queue} {self.handler or self.event_type}".strip()
