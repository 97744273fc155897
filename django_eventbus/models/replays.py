"""Replays: which events of the log are copied into the queue again, and how far this has got."""

from __future__ import annotations

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.utils.translation import gettext_lazy as _

from django_eventbus.models.schedules import this_namespace
from django_eventbus.schema.clock import DatabaseNow
from django_eventbus.schema.names import MAX_NAME_LENGTH


class ReplayState(models.TextChoices):
    #: Settlements that began before the replay may still be uncommitted.
    STARTING = "STARTING", _("starting")
    COPYING = "COPYING", _("copying")
    #: All events were copied. Some copies may still wait in the queue.
    COPIED = "COPIED", _("copied")
    CANCELLED = "CANCELLED", _("cancelled")


ACTIVE_STATES = (ReplayState.STARTING, ReplayState.COPYING)


class EventReplay(models.Model):
    """A request to handle events of the log again.

    A handler of the bus copies the events into the queue, one chunk per transaction. The same
    transaction moves the position, so an interrupted replay continues without a gap and without a
    second copy.
    """

    id = models.BigAutoField(primary_key=True)
    namespace = models.CharField(
        _("namespace"), max_length=64, default=this_namespace, editable=False
    )
    # The filter. A type may end in "*"; an empty text selects all types, keys or statuses.
    type = models.CharField(_("event type"), max_length=MAX_NAME_LENGTH, default="")
    since = models.DateTimeField(_("ended since"), null=True)
    until = models.DateTimeField(_("ended until"))
    key = models.CharField(_("key"), max_length=MAX_NAME_LENGTH, default="")
    status = models.CharField(_("status"), max_length=32, default="")
    # The ids of single events that an operator selected; NULL if the other filters decide.
    event_ids = models.JSONField(_("event ids"), null=True, encoder=DjangoJSONEncoder)
    # The only handler that receives the copies; empty for all handlers.
    handler = models.CharField(_("handler"), max_length=MAX_NAME_LENGTH, default="")
    # The event types that ``handler`` receives; each may end in "*". NULL without a handler.
    handler_types = models.JSONField(null=True)
    # The queue of the copies; empty for the queue of each original event.
    queue = models.CharField(_("queue"), max_length=64, default="")
    rate = models.FloatField(_("events per second"), null=True)
    state = models.CharField(
        _("state"), max_length=16, choices=ReplayState.choices, default=ReplayState.STARTING
    )
    # The transactions that may still add events to the selected part of the log. Copying begins
    # when all of them have ended. NULL until the first step.
    waits_for = models.JSONField(null=True)
    # The number of selected events at the start.
    total = models.PositiveBigIntegerField(_("selected"), default=0)
    copied = models.PositiveBigIntegerField(_("copied"), default=0)
    # The end time and the row id of the last event that was copied.
    position_at = models.DateTimeField(_("position"), null=True)
    position_id = models.BigIntegerField(null=True)
    created_by = models.CharField(_("started by"), max_length=MAX_NAME_LENGTH, default="")
    created_at = models.DateTimeField(_("started at"), db_default=DatabaseNow())
    finished_at = models.DateTimeField(_("finished at"), null=True)

    class Meta:
        verbose_name = _("replay")
        verbose_name_plural = _("replays")
        default_permissions = ("view",)
        permissions = (("start_eventreplay", "Can replay events and cancel replays"),)
        indexes = (models.Index(name="eventbus_replay", fields=("namespace", "state", "id")),)

    def __str__(self) -> str:
        to = f" to {self.handler}" if self.handler else ""
        return f"{self.pk}: {self.type or '*'}{to}"

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE_STATES
