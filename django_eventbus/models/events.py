"""Models of events: the queue, the log, and the dead letters, which are a part of the log."""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.utils.translation import gettext_lazy as _

from django_eventbus.conf import settings
from django_eventbus.events import uuid7
from django_eventbus.schema.clock import DatabaseNow
from django_eventbus.schema.indexes import PartialIndex, UniqueWhenSet, no_larger_than
from django_eventbus.schema.names import MAX_NAME_LENGTH
from django_eventbus.schema.payloads import LARGEST_STORED


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
    """The columns that the queue and the log share."""

    event_id = models.UUIDField(_("event id"), unique=True, default=uuid7, editable=False)
    namespace = models.CharField(_("namespace"), max_length=64)
    queue = models.CharField(_("queue"), max_length=64)
    type = models.CharField(_("type"), max_length=MAX_NAME_LENGTH)
    version = models.PositiveSmallIntegerField(_("version"), default=1)
    payload = models.JSONField(_("payload"), null=True, encoder=DjangoJSONEncoder)
    headers = models.JSONField(_("headers"), null=True, encoder=DjangoJSONEncoder)
    # NULL means "no key". An empty key is invalid.
    key = models.CharField(_("key"), max_length=MAX_NAME_LENGTH, null=True)  # noqa: DJ001
    priority = models.SmallIntegerField(_("priority"), default=0)
    producer = models.CharField(_("producer"), max_length=64)
    caused_by = models.UUIDField(_("caused by"), null=True)
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    # The number of times that the worker process died while a handler of this event was running.
    crashes = models.PositiveSmallIntegerField(_("crashes"), default=0)
    # The number of claims that ended without a result although no handler of the event is known to
    # have been running: the worker's host disappeared, or the event could not be read or settled.
    interruptions = models.PositiveSmallIntegerField(_("interruptions"), default=0)
    created_at = models.DateTimeField(_("created at"), db_default=DatabaseNow())
    # The time from which the event could be handled, if it had a delay or is a retried dead letter.
    # NULL means the time of publishing. Waiting times are measured from this time. In contrast,
    # ``available_at`` of the queue is the time of the next attempt.
    due_at = models.DateTimeField(_("due at"), null=True)
    processing_started_at = models.DateTimeField(_("processing started at"), null=True)
    claimed_by = models.UUIDField(_("claimed by"), null=True)
    # The state of each handler that was called or handed off: done (with the time and the
    # duration), dead, discarded, due for a retry (with the time of the retry), or handed off. NULL
    # if no handler was called or handed off yet, and if all handlers succeeded at the first
    # attempt.
    deliveries = models.JSONField(_("deliveries"), null=True, encoder=DjangoJSONEncoder)
    errors = models.JSONField(_("errors"), null=True, encoder=DjangoJSONEncoder)
    # The earlier lives of an event that was retried as a dead letter: for each life, its errors and
    # the operator who retried the event. Claims do not read this column.
    history = models.JSONField(_("history"), null=True, encoder=DjangoJSONEncoder)
    # The retry of a dead letter sets this column and the next one. This column is the time at which
    # the event first became a dead letter with the error ``first_dead_of``. NULL if the event was
    # never retried.
    first_dead_at = models.DateTimeField(_("first dead at"), null=True)
    # The fingerprint of the error of the retried dead letter. NULL if the event was never retried.
    first_dead_of = models.CharField(  # noqa: DJ001
        _("first dead of"), max_length=16, null=True
    )
    # The payloads that an operator replaced, with the time and the operator of each edit. Claims do
    # not read this column.
    edits = models.JSONField(_("edits"), null=True, encoder=DjangoJSONEncoder)
    # The id of the replay that copied this event from the log. NULL for an event that was
    # published. This is not a foreign key, because the row of a replay may be deleted before its
    # events.
    replay_id = models.BigIntegerField(_("replay"), null=True)
    # The id of the event that was copied. NULL for an event that was published.
    replay_of = models.UUIDField(_("replay of"), null=True)
    # The only handler that receives the copy. NULL if all handlers receive the event.
    only_handler = models.CharField(  # noqa: DJ001
        _("only for the handler"), max_length=MAX_NAME_LENGTH, null=True
    )

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.type} {self.event_id}"

    @property
    def life(self) -> int:
        """The number of this life: 1 for a new event, 2 after the first retry as a dead letter."""
        return int(self.history[-1]["life"]) + 1 if self.history else 1


class QueuedEvent(EventFields):
    """An event that still has to be handled.

    No index, and no condition of an index, contains a column that a claim changes (status,
    attempts, processing_started_at, claim_token, claimed_by). So PostgreSQL can update the row
    without writing to any index (HOT), which makes claims fast.
    """

    id = models.BigAutoField(primary_key=True)
    status = models.CharField(_("status"), max_length=16, default=QueuedStatus.PENDING)
    # The earliest time of the next attempt. NULL means that the event is due now: a worker sets
    # NULL when the time has come. An event with a key is then routed to its lane, and
    # ``EventLane.ready_at`` is the time from which the lane can be claimed.
    available_at = models.DateTimeField(_("available at"), null=True)
    # The id of the flow control that holds the event; 0 if several flow controls hold the event
    # (``store.waits.SEVERAL``); NULL if none holds it. This is not a foreign key, because flow
    # controls may be deleted and a foreign key would lock their rows. For an event in a lane,
    # ``EventLane.held_by`` is used instead.
    held_by = models.BigIntegerField(_("held by"), null=True)
    # The token of the claim. For an event that is handed off: the token with which its executor can
    # claim it.
    claim_token = models.UUIDField(_("claim token"), null=True)
    # The handler that another executor, such as Celery, has to run. NULL if the event is not handed
    # off, or as soon as a worker or the executor has claimed it.
    handed_off_to = models.CharField(  # noqa: DJ001
        _("handed off to"), max_length=MAX_NAME_LENGTH, null=True
    )
    # The id of the event's lane. NULL for an event without a key, and until a worker has routed the
    # event to its lane. This is not a foreign key, because lanes are created and deleted all the
    # time.
    lane_id = models.BigIntegerField(_("lane"), null=True)
    dedup_key = models.CharField(  # noqa: DJ001 - NULL is "no dedup"
        _("dedup key"), max_length=MAX_NAME_LENGTH, null=True
    )
    # The limit that counts this event: its kind (queue, key or type) and its name. NULL means that
    # no limit counts the event.
    counted_as = models.CharField(  # noqa: DJ001
        _("counted as"), max_length=MAX_NAME_LENGTH + 10, null=True
    )

    class Meta:
        verbose_name = _("queued event")
        verbose_name_plural = _("queued events")
        default_permissions = ("view",)
        indexes = (
            PartialIndex(
                name="eventbus_ready",
                fields=("namespace", "queue", "-priority", "id"),
                condition=models.Q(
                    key__isnull=True, available_at__isnull=True, held_by__isnull=True
                ),
                full_fields=(
                    "namespace",
                    "queue",
                    "available_at",
                    "held_by",
                    "key",
                    "-priority",
                    "id",
                ),
            ),
            PartialIndex(
                name="eventbus_delayed",
                fields=("namespace", "available_at"),
                condition=models.Q(available_at__isnull=False),
            ),
            PartialIndex(
                name="eventbus_held",
                fields=("namespace", "held_by", "id"),
                condition=models.Q(held_by__isnull=False),
            ),
            PartialIndex(
                name="eventbus_unrouted",
                fields=("namespace", "queue", "id"),
                condition=models.Q(
                    key__isnull=False, lane_id__isnull=True, available_at__isnull=True
                ),
                # On databases without partial indexes, this index also contains all events without
                # a key. ``held_by`` precedes ``id``, so that the search for unrouted events skips
                # the held events among them.
                full_fields=("namespace", "queue", "lane_id", "held_by", "id"),
            ),
            PartialIndex(
                name="eventbus_lane",
                fields=("lane_id", "id"),
                condition=models.Q(lane_id__isnull=False),
            ),
            PartialIndex(
                name="eventbus_counted",
                fields=("namespace", "counted_as", "id"),
                condition=models.Q(counted_as__isnull=False),
            ),
            PartialIndex(
                name="eventbus_caused",
                fields=("caused_by",),
                condition=models.Q(caused_by__isnull=False),
            ),
            PartialIndex(
                name="eventbus_handed_off",
                fields=("namespace", "handed_off_to", "id"),
                condition=models.Q(handed_off_to__isnull=False),
            ),
            PartialIndex(
                name="eventbus_replayed",
                fields=("replay_id", "id"),
                condition=models.Q(replay_id__isnull=False),
            ),
        )
        constraints = (
            UniqueWhenSet(
                name="eventbus_dedup",
                fields=("namespace", "dedup_key"),
                condition=models.Q(dedup_key__isnull=False),
            ),
            # publish() checks the size too, but rows can also be inserted without publish().
            no_larger_than(LARGEST_STORED, "payload", "headers", name="eventbus_size"),
        )


class EventLog(EventFields):
    """An event that ended, with the row id that it had in the queue.

    Workers read the log only to find out whether the event with an ``event_id`` has already ended.
    """

    id = models.BigIntegerField(primary_key=True)
    status = models.CharField(_("status"), max_length=32)
    finished_at = models.DateTimeField(_("finished at"))
    # The name of the first handler that gave up. The columns ``deliveries`` and ``errors`` have the
    # details of all handlers.
    dead_handler = models.CharField(_("handler"), max_length=MAX_NAME_LENGTH, default="")
    error_type = models.CharField(_("error type"), max_length=MAX_NAME_LENGTH, default="")
    error_fingerprint = models.CharField(_("error fingerprint"), max_length=16, default="")

    class Meta:
        verbose_name = _("logged event")
        verbose_name_plural = _("event log")
        default_permissions = ("view",)
        permissions = (("view_payload_eventlog", "Can view payloads and headers of events"),)
        indexes = (
            models.Index(name="eventbus_log_finished", fields=("namespace", "finished_at")),
            # Most searches of the log are by key ("what happened to order 4711?") and include
            # completed events. Only events with a key cost a write to this index, at their end.
            PartialIndex(
                name="eventbus_log_key",
                fields=("namespace", "key", "finished_at"),
                condition=models.Q(key__isnull=False),
            ),
            PartialIndex(
                name="eventbus_log_dead",
                fields=("namespace", "finished_at", "id"),
                condition=~models.Q(status=LogStatus.COMPLETED),
                full_fields=("namespace", "status", "finished_at"),
            ),
            PartialIndex(
                name="eventbus_log_handler",
                fields=("namespace", "dead_handler", "finished_at", "id"),
                condition=~models.Q(status=LogStatus.COMPLETED),
                full_fields=("namespace", "dead_handler", "finished_at"),
            ),
            # Only dead letters have a fingerprint. The query for dead letters by error reads one
            # fingerprint after the other in this index.
            PartialIndex(
                name="eventbus_log_group",
                fields=("namespace", "error_fingerprint", "finished_at"),
                condition=models.Q(error_fingerprint__gt=""),
            ),
            PartialIndex(
                name="eventbus_log_first_dead",
                fields=("namespace", "error_fingerprint", "first_dead_at"),
                condition=models.Q(first_dead_at__isnull=False),
            ),
            PartialIndex(
                name="eventbus_log_caused",
                fields=("caused_by",),
                condition=models.Q(caused_by__isnull=False),
            ),
            PartialIndex(
                name="eventbus_log_replayed",
                fields=("replay_id", "status"),
                condition=models.Q(replay_id__isnull=False),
            ),
        )


class DeadEventManager(models.Manager["DeadEvent"]):
    def get_queryset(self) -> models.QuerySet[DeadEvent]:
        dead = ~models.Q(status=LogStatus.COMPLETED)
        return super().get_queryset().filter(dead, namespace=settings.NAMESPACE)


class DeadEvent(EventLog):
    """A dead letter: an event in the log that ended without success."""

    objects: ClassVar[Any] = DeadEventManager()

    class Meta:
        proxy = True
        verbose_name = _("dead letter")
        verbose_name_plural = _("dead letters")
        default_permissions = ("view",)
        permissions = (
            ("retry_deadevent", "Can retry dead letters and run waiting events now"),
            ("edit_deadevent", "Can edit the payload of dead letters and retry them"),
            ("purge_deadevent", "Can purge dead letters and cancel waiting events"),
        )
