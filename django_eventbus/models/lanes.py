"""Lanes: the keys that have waiting events."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_eventbus.schema.clock import DatabaseNow
from django_eventbus.schema.names import MAX_NAME_LENGTH


class EventLane(models.Model):
    """A key that has waiting events. Only the worker that owns the lane handles these events."""

    id = models.BigAutoField(primary_key=True)
    namespace = models.CharField(_("namespace"), max_length=64)
    queue = models.CharField(_("queue"), max_length=64)
    key = models.CharField(_("key"), max_length=MAX_NAME_LENGTH)
    # The time from which the lane can be claimed. NULL while the lane is held or blocked, because
    # the passing of time does not end a hold or a block. Claims search a range of times, so they
    # never read a lane with NULL.
    ready_at = models.DateTimeField(_("ready at"), null=True, db_default=DatabaseNow())
    # Routing an event to the lane increments this number. The update locks the row, so that a
    # transaction that wants to delete the lane waits, and then sees the new event.
    version = models.PositiveIntegerField(_("version"), default=0)
    claim_token = models.UUIDField(_("claim token"), null=True)
    claimed_by = models.UUIDField(_("claimed by"), null=True)
    # The id of the flow control that holds the first event of the lane; NULL if none holds it.
    held_by = models.BigIntegerField(_("held by"), null=True)
    # The event id of the dead letter that blocks the lane, if EVENTBUS["DEAD_HEAD"] is "block".
    blocked_by = models.UUIDField(_("blocked by"), null=True)

    class Meta:
        default_permissions = ("view",)
        verbose_name = _("lane")
        verbose_name_plural = _("lanes")
        constraints = (
            models.UniqueConstraint(name="eventbus_lane_key", fields=("namespace", "queue", "key")),
        )
        indexes = (
            # Claims find ready lanes by ``ready_at``. Held lanes have no ``ready_at`` and are found
            # by ``held_by``. There is no separate index for held lanes: it would be one more index
            # to write, and on MariaDB it would contain all lanes.
            models.Index(
                name="eventbus_lane_ready", fields=("namespace", "queue", "ready_at", "held_by")
            ),
        )

    def __str__(self) -> str:
        return self.key
