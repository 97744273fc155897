"""The tables: an event still owed to somebody, an event that ended, a key, a worker, and so on.

No transitions here: only the store locks or writes these rows.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.exceptions import ValidationError
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.utils.timezone import get_default_timezone_name
from django.utils.translation import gettext_lazy as _

from django_eventbus.clock import DatabaseNow
from django_eventbus.conf import settings
from django_eventbus.cron import Misfire, faults
from django_eventbus.events import LARGEST_STORED, MAX_NAME_LENGTH, uuid7
from django_eventbus.exceptions import MissingLibraryError
from django_eventbus.indexes import PartialIndex, UniqueWhenSet, no_larger_than


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
    created_at = models.DateTimeField(_("created at"), db_default=DatabaseNow())
    # Since when it could be handled, if not since it was published: it had a delay, or came back
    # from the dead letters. Who measures how long it waits begins here. ``available_at`` of the
    # queue is the next moment to try it.
    due_at = models.DateTimeField(_("due at"), null=True)
    processing_started_at = models.DateTimeField(_("processing started at"), null=True)
    claimed_by = models.UUIDField(_("claimed by"), null=True)
    # Per handler: done (when, and in how many seconds), dead, or due when. NULL if all goes well at
    # once.
    deliveries = models.JSONField(_("deliveries"), null=True, encoder=DjangoJSONEncoder)
    errors = models.JSONField(_("errors"), null=True, encoder=DjangoJSONEncoder)
    # The payloads that an operator replaced, with when and by whom. No claim reads it.
    edits = models.JSONField(_("edits"), null=True, encoder=DjangoJSONEncoder)

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
    # The limit it counts for: kind and name of a queue, key or type. NULL is "no limit".
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
                condition=models.Q(key__isnull=True, available_at__isnull=True),
                full_fields=("namespace", "queue", "available_at", "key", "-priority", "id"),
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
        )
        constraints = (
            UniqueWhenSet(
                name="eventbus_dedup",
                fields=("namespace", "dedup_key"),
                condition=models.Q(dedup_key__isnull=False),
            ),
            # The second wall: rows come by other ways than publish(), too.
            no_larger_than(LARGEST_STORED, "payload", "headers", name="eventbus_size"),
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
        default_permissions = ("view",)
        permissions = (("view_payload_eventlog", "Can see payloads and headers of events"),)
        indexes = (
            models.Index(name="eventbus_log_finished", fields=("namespace", "finished_at")),
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
            # Dead letters have a fingerprint, and nothing else has: their groups are found by
            # stepping from one to the next.
            PartialIndex(
                name="eventbus_log_group",
                fields=("namespace", "error_fingerprint", "finished_at"),
                condition=models.Q(error_fingerprint__gt=""),
            ),
            PartialIndex(
                name="eventbus_log_caused",
                fields=("caused_by",),
                condition=models.Q(caused_by__isnull=False),
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
        default_permissions = ("view",)
        permissions = (
            ("retry_deadevent", "Can retry events, and let waiting ones run now"),
            ("edit_deadevent", "Can edit the payload of dead letters and retry them"),
            ("purge_deadevent", "Can purge dead letters and cancel waiting events"),
        )


class EventLane(models.Model):
    """One row per key that has events waiting. Owning the lane is owning the key."""

    id = models.BigAutoField(primary_key=True)
    namespace = models.CharField(_("namespace"), max_length=64)
    queue = models.CharField(_("queue"), max_length=64)
    key = models.CharField(_("key"), max_length=MAX_NAME_LENGTH)
    ready_at = models.DateTimeField(_("ready at"), db_default=DatabaseNow())
    # Moves with every event routed here, so that a lane is not deleted under a newcomer.
    version = models.PositiveIntegerField(_("version"), default=0)
    claim_token = models.UUIDField(_("claim token"), null=True)
    claimed_by = models.UUIDField(_("claimed by"), null=True)
    # The dead letter that holds up the key where EVENTBUS["DEAD_HEAD"] is "block".
    blocked_by = models.UUIDField(_("blocked by"), null=True)

    class Meta:
        default_permissions = ("view",)
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


class EventMark(models.Model):
    """Something that happens once: the key of a published event, or of a handler's effect."""

    # Made before the insert: whoever finds it in the table knows that its own insert made it.
    id = models.UUIDField(primary_key=True, default=uuid7)
    namespace = models.CharField(_("namespace"), max_length=64)
    # The handler's name; empty for publishers.
    scope = models.CharField(_("scope"), max_length=MAX_NAME_LENGTH, blank=True)
    key = models.CharField(_("key"), max_length=MAX_NAME_LENGTH)
    event_id = models.UUIDField(_("event id"))
    # NULL is "never".
    expires_at = models.DateTimeField(_("expires at"), null=True)

    class Meta:
        verbose_name = _("mark")
        verbose_name_plural = _("marks")
        constraints = (
            models.UniqueConstraint(name="eventbus_mark", fields=("namespace", "scope", "key")),
        )
        indexes = (
            PartialIndex(
                name="eventbus_mark_expiry",
                fields=("namespace", "expires_at"),
                condition=models.Q(expires_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.scope}: {self.key}" if self.scope else self.key


class EventWorker(models.Model):
    """One row per worker process: its claims are good until ``expires_at``, which it renews."""

    id = models.UUIDField(primary_key=True, default=uuid7)
    namespace = models.CharField(_("namespace"), max_length=64)
    host = models.CharField(_("host"), max_length=64)
    pid = models.PositiveIntegerField(_("process id"))
    queues = models.JSONField(_("queues"))
    started_at = models.DateTimeField(_("started at"), db_default=DatabaseNow())
    renewed_at = models.DateTimeField(_("renewed at"), db_default=DatabaseNow())
    expires_at = models.DateTimeField(_("expires at"))
    # Rows it runs alone because they are suspected of killing workers: whom to blame if it dies.
    suspects = models.JSONField(_("suspects"), default=list)

    class Meta:
        default_permissions = ("view",)
        verbose_name = _("worker")
        verbose_name_plural = _("workers")

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


class ScheduleOrigin(models.TextChoices):
    CODE = "CODE", _("declared in code")
    DATABASE = "DATABASE", _("made in the database")


def this_namespace() -> str:
    return settings.NAMESPACE


class EventSchedule(models.Model):
    """An event that is published whenever its cron line says so.

    Of one declared in code the code owns the definition (type to misfire), and a worker that
    starts writes it here. The row owns the rest.
    """

    id = models.BigAutoField(primary_key=True)
    namespace = models.CharField(
        _("namespace"), max_length=64, default=this_namespace, editable=False
    )
    name = models.CharField(_("name"), max_length=MAX_NAME_LENGTH)
    origin = models.CharField(
        _("origin"),
        max_length=16,
        choices=ScheduleOrigin.choices,
        default=ScheduleOrigin.DATABASE,
        editable=False,
    )
    type = models.CharField(_("event type"), max_length=MAX_NAME_LENGTH)
    cron = models.CharField(_("cron line"), max_length=MAX_NAME_LENGTH)
    tz = models.CharField(_("time zone"), max_length=64, default=get_default_timezone_name)
    payload = models.JSONField(_("payload"), null=True, blank=True, encoder=DjangoJSONEncoder)
    key = models.CharField(  # noqa: DJ001 - NULL is "no key"
        _("key"), max_length=MAX_NAME_LENGTH, null=True, blank=True
    )
    queue = models.CharField(  # noqa: DJ001 - NULL is the project's default queue
        _("queue"), max_length=64, null=True, blank=True
    )
    priority = models.SmallIntegerField(_("priority"), default=0)
    headers = models.JSONField(_("headers"), null=True, blank=True, encoder=DjangoJSONEncoder)
    misfire = models.CharField(
        _("missed ticks"), max_length=16, choices=Misfire.choices, default=Misfire.FIRE_ONCE
    )
    enabled = models.BooleanField(_("enabled"), default=True)
    #: The tick that is fired next. NULL until a worker has worked it out, and while disabled.
    next_at = models.DateTimeField(_("next run"), null=True, editable=False)
    last_at = models.DateTimeField(_("last run"), null=True, editable=False)
    # What next_at was worked out from: whoever changes the cron line, by whatever means, a worker
    # notices.
    planned_for = models.CharField(max_length=300, default="", editable=False)

    class Meta:
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        constraints = (
            models.UniqueConstraint(name="eventbus_schedule_name", fields=("namespace", "name")),
        )

    def __str__(self) -> str:
        return self.name

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Refuses, with a ValidationError, what would only fail when its time has come."""
        self.clean_fields()
        self.clean()
        super().save(*args, **kwargs)

    def clean(self) -> None:
        try:
            wrong = {each.field: str(each) for each in faults(self)}
        except MissingLibraryError as error:
            raise ValidationError(str(error)) from None
        if wrong:
            raise ValidationError(wrong)

    @property
    def plan(self) -> str:
        """What ``planned_for`` has to be; the store says the same in SQL."""
        return f"{self.cron} {self.tz}" if self.enabled else ""


class GateKind(models.TextChoices):
    QUEUE = "queue", _("queue")
    TYPE = "type", _("event type")
    HANDLER = "handler", _("handler")


class EventGate(models.Model):
    """What may keep events from being handled: a pause, a circuit breaker, a limit on running.

    One row per queue, type pattern or handler that has ever had one. Events held up by it are
    parked at a moment of its own, see ``store.gates``.
    """

    id = models.BigAutoField(primary_key=True)
    namespace = models.CharField(_("namespace"), max_length=64)
    kind = models.CharField(_("kind"), max_length=16)
    name = models.CharField(_("name"), max_length=MAX_NAME_LENGTH)
    paused_at = models.DateTimeField(_("paused at"), null=True)
    paused_by = models.CharField(_("paused by"), max_length=200, default="")
    reason = models.CharField(_("reason"), max_length=500, default="")
    # The breaker: closed without opened_at, half-open while somebody (probe_by) tries.
    opened_at = models.DateTimeField(_("opened at"), null=True)
    probe_at = models.DateTimeField(_("probe at"), null=True)
    probe_by = models.CharField(_("probe by"), max_length=64, default="")
    calls = models.JSONField(_("calls"), default=dict)
    # The rate: what was in the bucket, and when.
    tokens = models.FloatField(_("tokens"), null=True)
    tokens_at = models.DateTimeField(_("tokens at"), null=True)
    # How many run, by who runs them.
    running = models.JSONField(_("running"), default=dict)

    class Meta:
        default_permissions = ("view",)
        verbose_name = _("pause or circuit breaker")
        verbose_name_plural = _("pauses and circuit breakers")
        permissions = (
            ("pause_eventgate", "Can pause and resume, release lanes and reset breakers"),
        )
        constraints = (
            models.UniqueConstraint(
                name="eventbus_gate_name", fields=("namespace", "kind", "name")
            ),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def _count() -> Any:
    return models.PositiveIntegerField(default=0)


class EventMinute(models.Model):
    """What one worker did in one minute for a queue: how its events fared or, where a handler is
    named, how the runs of that handler did. Each worker writes rows of its own.
    """

    id = models.BigAutoField(primary_key=True)
    namespace = models.CharField(_("namespace"), max_length=64)
    minute = models.DateTimeField(_("minute"))
    # No foreign key: workers come and go.
    worker_id = models.UUIDField(_("worker"))
    queue = models.CharField(_("queue"), max_length=64)
    # Empty: of the events themselves.
    handler = models.CharField(_("handler"), max_length=MAX_NAME_LENGTH, default="")
    # Events that ended well, went back to be retried, ended as dead letters; runs likewise.
    done = _count()
    retried = _count()
    dead = _count()
    discarded = _count()
    # In sum: of an event from its publishing to its end, of a run its duration.
    seconds = models.FloatField(_("seconds"), default=0.0)
    # How long each took: see ``histograms``.
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
        verbose_name = _("overview")
        # What the admin shows of them.
        verbose_name_plural = _("overview")
        default_permissions = ("view",)
        constraints = (
            # In this order it is also the index by which the last hour is read and the oldest
            # rows are deleted.
            models.UniqueConstraint(
                name="eventbus_minute",
                fields=("namespace", "minute", "worker_id", "queue", "handler"),
            ),
        )

    def __str__(self) -> str:
        return f"{self.minute:%Y-%m-%d %H:%M} {self.handler or self.queue}"
