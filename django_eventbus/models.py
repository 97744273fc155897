"""The tables: an event still owed to somebody, an event that ended, a key, a worker.

No transitions here: only the store locks or writes these rows.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from django_eventbus.conf import settings
from django_eventbus.events import MAX_NAME_LENGTH, uuid7
from django_eventbus.indexes import PartialIndex, UniqueWhenSet


class QueuedStatus(models.TextChoices):
    PENDING = "PENDING", _("pending")
    PROCESSING = "PROCESSING", _("processing")


class LogStatus(models.TextChoices):
    COMPLETED = "COMPLETED", _("completed")
    COMPLETED_WITH_ERRORS = "COMPLETED_WITH_ERRORS", _("completed with errors")
    FAILED = "FAILED", _("failed")
    DISCARDED = "DISCARDED", _("discarded")


DEAD_STATUSES = (LogStatus.COMPLETED_WITH_ERRORS, LogStatus.FAILED, LogStatus.DISCARDED)


class EventFields(models.Model):
    """What an event carries through its whole life, queued or ended."""

    event_id = models.UUIDField(_("event id"), unique=True, default=uuid7, editable=False)
    namespace = models.CharField(_("namespace"), max_length=64)
    queue = models.CharField(_("queue"), max_length=64)
    type = models.CharField(_("type"), max_length=MAX_NAME_LENGTH)
    version = models.PositiveSmallIntegerField(_("version"), default=1)
    payload = models.JSONField(_("payload"), null=True, encoder=DjangoJSONEncoder)
    headers = models.JSONField(_("headers"), null=True, encoder=DjangoJSONEncoder)
    # NULL is "no key"; an empty key is refused.
    key = models.CharField(_("key"), max_length=MAX_NAME_LENGTH, null=True)  # noqa: DJ001
    priority = models.SmallIntegerField(_("priority"), default=0)
    producer = models.CharField(_("producer"), max_length=64)
    caused_by = models.UUIDField(_("caused by"), null=True)
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    crashes = models.PositiveSmallIntegerField(_("crashes"), default=0)
    created_at = models.DateTimeField(_("created at"), db_default=Now())
    processing_started_at = models.DateTimeField(_("processing started at"), null=True)
    claimed_by = models.UUIDField(_("claimed by"), null=True)
    # Per handler: done, dead, or due when. NULL until something fails.
    deliveries = models.JSONField(_("deliveries"), null=True, encoder=DjangoJSONEncoder)
    errors = models.JSONField(_("errors"), null=True, encoder=DjangoJSONEncoder)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.type} {self.event_id}"


class QueuedEvent(EventFields):
    """An event still owed to somebody.

    No column that a claim changes (status, attempts, processing_started_at, claim_token,
    claimed_by) stands in an index or its condition: PostgreSQL then updates rows in place (HOT),
    which a claim's speed hangs on.
    """

    id = models.BigAutoField(primary_key=True)
    status = models.CharField(_("status"), max_length=16, default=QueuedStatus.PENDING)
    # NULL means now; a date means not before, until a worker finds it due and sets NULL. An event
    # with a key joins its lane when it is due; from then on the lane knows when it is ready.
    available_at = models.DateTimeField(_("available at"), null=True)
    claim_token = models.UUIDField(_("claim token"), null=True)
    # The lane of its key, once a worker has routed it there. Lanes come and go: no foreign key.
    lane_id = models.BigIntegerField(_("lane"), null=True)
    dedup_key = models.CharField(  # noqa: DJ001 - NULL is "no dedup"
        _("dedup key"), max_length=MAX_NAME_LENGTH, null=True
    )

    class Meta:
        verbose_name = _("queued event")
        verbose_name_plural = _("queued events")
        indexes = (
            PartialIndex(
                name="eventbus_ready",
                fields=("namespace", "queue", "-priority", "id"),
                condition=models.Q(key__isnull=True, available_at__isnull=True),
            ),
            PartialIndex(
                name="eventbus_delayed",
                fields=("namespace", "available_at"),
                condition=models.Q(available_at__isnull=False),
            ),
            PartialIndex(
                name="eventbus_unrouted",
                fields=("namespace", "queue", "id"),
                condition=models.Q(
                    key__isnull=False, lane_id__isnull=True, available_at__isnull=True
                ),
                full_fields=("namespace", "queue", "lane_id", "id"),
            ),
            PartialIndex(
                name="eventbus_lane",
                fields=("lane_id", "id"),
                condition=models.Q(lane_id__isnull=False),
            ),
        )
        constraints = (
            UniqueWhenSet(
                name="eventbus_dedup",
                fields=("namespace", "dedup_key"),
                condition=models.Q(dedup_key__isnull=False),
            ),
        )


class EventLog(EventFields):
    """An event that ended, under the id it had in the queue. The engine never reads it."""

    id = models.BigIntegerField(primary_key=True)
    status = models.CharField(_("status"), max_length=32)
    finished_at = models.DateTimeField(_("finished at"))
    # Of the first handler that died; the full story is in deliveries and errors.
    dead_handler = models.CharField(_("handler"), max_length=MAX_NAME_LENGTH, default="")
    error_type = models.CharField(_("error type"), max_length=MAX_NAME_LENGTH, default="")
    error_fingerprint = models.CharField(_("error fingerprint"), max_length=16, default="")

    class Meta:
        verbose_name = _("logged event")
        verbose_name_plural = _("event log")
        indexes = (
            models.Index(name="eventbus_log_finished", fields=("namespace", "finished_at")),
            PartialIndex(
                name="eventbus_log_dead",
                fields=("namespace", "finished_at", "id"),
                condition=~models.Q(status=LogStatus.COMPLETED),
                full_fields=("namespace", "status", "finished_at"),
            ),
        )


class DeadEventManager(models.Manager["DeadEvent"]):
    def get_queryset(self) -> models.QuerySet[DeadEvent]:
        dead = ~models.Q(status=LogStatus.COMPLETED)
        return super().get_queryset().filter(dead, namespace=settings.NAMESPACE)


class DeadEvent(EventLog):
    """The dead letter queue: the part of the log that did not go well."""

    objects: ClassVar[Any] = DeadEventManager()

    class Meta:
        proxy = True
        verbose_name = _("dead letter")
        verbose_name_plural = _("dead letters")


class EventLane(models.Model):
    """One row per key that has events waiting. Owning the lane is owning the key."""

    id = models.BigAutoField(primary_key=True)
    namespace = models.CharField(_("namespace"), max_length=64)
    queue = models.CharField(_("queue"), max_length=64)
    key = models.CharField(_("key"), max_length=MAX_NAME_LENGTH)
    ready_at = models.DateTimeField(_("ready at"), db_default=Now())
    # Moves with every event routed here, so that a lane is not deleted under a newcomer.
    version = models.PositiveIntegerField(_("version"), default=0)
    claim_token = models.UUIDField(_("claim token"), null=True)
    claimed_by = models.UUIDField(_("claimed by"), null=True)

    class Meta:
        verbose_name = _("lane")
        verbose_name_plural = _("lanes")
        constraints = (
            models.UniqueConstraint(name="eventbus_lane_key", fields=("namespace", "queue", "key")),
        )
        indexes = (
            models.Index(name="eventbus_lane_ready", fields=("namespace", "queue", "ready_at")),
        )

    def __str__(self) -> str:
        return self.key


class EventWorker(models.Model):
    """One row per worker process: its claims are good until ``expires_at``, which it renews."""

    id = models.UUIDField(primary_key=True, default=uuid7)
    namespace = models.CharField(_("namespace"), max_length=64)
    host = models.CharField(_("host"), max_length=64)
    pid = models.PositiveIntegerField(_("process id"))
    queues = models.JSONField(_("queues"))
    started_at = models.DateTimeField(_("started at"), db_default=Now())
    renewed_at = models.DateTimeField(_("renewed at"), db_default=Now())
    expires_at = models.DateTimeField(_("expires at"))
    # Rows it runs alone because they are suspected of killing workers: whom to blame if it dies.
    suspects = models.JSONField(_("suspects"), default=list)

    class Meta:
        verbose_name = _("worker")
        verbose_name_plural = _("workers")

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"
