"""Worker processes, and their statistics per minute."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_eventbus.events import uuid7
from django_eventbus.schema.clock import DatabaseNow
from django_eventbus.schema.names import MAX_NAME_LENGTH


class EventWorker(models.Model):
    """A worker process. Its claims are valid until ``expires_at``, which is renewed regularly."""

    id = models.UUIDField(primary_key=True, default=uuid7)
    namespace = models.CharField(_("namespace"), max_length=64)
    host = models.CharField(_("host"), max_length=64)
    pid = models.PositiveIntegerField(_("process id"))
    queues = models.JSONField(_("queues"))
    started_at = models.DateTimeField(_("started at"), db_default=DatabaseNow())
    renewed_at = models.DateTimeField(_("renewed at"), db_default=DatabaseNow())
    expires_at = models.DateTimeField(_("expires at"))
    # The number of handlers that the worker can run at the same time, and the number that it ran
    # when the registration was renewed. Both are 0 for a process of another executor.
    slots = models.PositiveIntegerField(default=0)
    busy = models.PositiveIntegerField(default=0)
    # Row ids of events that the worker runs alone, because an earlier claim of the event ended
    # without a result. If the worker dies, these events are charged.
    suspects = models.JSONField(_("suspects"), default=list)
    # The patterns of event types of each handler, by the name of the handler. NULL until the worker
    # has started. Other workers read ``handlers_digest`` once a second, and read ``handlers`` only
    # if the digest has changed.
    handlers = models.JSONField(null=True)
    handlers_digest = models.CharField(max_length=32, default="")
    # The versions of the package, of Django and of Python. Empty for a lease of poll().
    version = models.CharField(_("version"), max_length=100, default="")
    # A digest of each setting that the project overrides, by the name of the setting.
    settings_digests = models.JSONField(default=dict)

    class Meta:
        default_permissions = ("view",)
        verbose_name = _("worker")
        verbose_name_plural = _("workers")

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


def _count() -> Any:
    return models.PositiveIntegerField(default=0)


class MinuteStatistics(models.Model):
    """The statistics of one worker, minute and queue.

    If ``handler`` is empty, the row counts events by their result. Otherwise the row counts the
    calls of that handler. Each worker writes only its own rows.
    """

    id = models.BigAutoField(primary_key=True)
    namespace = models.CharField(_("namespace"), max_length=64)
    minute = models.DateTimeField(_("minute"))
    # This is not a foreign key, because worker rows are deleted before their statistics.
    worker_id = models.UUIDField(_("worker"))
    queue = models.CharField(_("queue"), max_length=64)
    # The name of the handler. Empty in the row that counts events.
    handler = models.CharField(_("handler"), max_length=MAX_NAME_LENGTH, default="")
    # The numbers of events (or of calls of the handler) by their result: succeeded, to be retried,
    # dead, and discarded.
    done = _count()
    retried = _count()
    dead = _count()
    discarded = _count()
    # The number of events that were handed off to the executor of the handler.
    handed_off = _count()
    # The number of messages to an executor that the process ignored: malformed, late, repeated or
    # forged ones. Only a row that counts events has it. Its ``queue`` is empty if the message was
    # malformed.
    ignored_messages = _count()
    # For events that ended, the sum of the times from publishing, or from ``due_at`` if it is
    # later, to the end. For calls of a handler, the sum of their durations.
    seconds = models.FloatField(_("seconds"), default=0.0)
    # A histogram of the times that ``seconds`` sums up (see ``schema.histograms``).
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
        verbose_name = _("minute statistics")
        # The admin shows the overview page instead of a list of the rows.
        verbose_name_plural = _("overview")
        default_permissions = ("view",)
        constraints = (
            # With this order of columns, the index also serves the query for the last hour and the
            # deletion of the oldest rows.
            models.UniqueConstraint(
                name="eventbus_statistics",
                fields=("namespace", "minute", "worker_id", "queue", "handler"),
            ),
        )

    def __str__(self) -> str:
        return f"{self.minute:%Y-%m-%d %H:%M} {self.handler or self.queue}"
