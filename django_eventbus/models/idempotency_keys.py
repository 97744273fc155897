"""Idempotency keys of published events and of the effects of handlers."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_eventbus.events import uuid7
from django_eventbus.schema.indexes import PartialIndex
from django_eventbus.schema.names import MAX_NAME_LENGTH


class IdempotencyKey(models.Model):
    """The idempotency key of a published event, or of a handler's effect."""

    # The id is created before the insert, and the insert ignores a duplicate key. A transaction
    # that then finds its own id in the table knows that its insert succeeded.
    id = models.UUIDField(primary_key=True, default=uuid7)
    namespace = models.CharField(_("namespace"), max_length=64)
    # The name of the handler that uses the key. Empty for the ``dedup_key`` of a publisher.
    scope = models.CharField(_("scope"), max_length=MAX_NAME_LENGTH, blank=True)
    key = models.CharField(_("key"), max_length=MAX_NAME_LENGTH)
    event_id = models.UUIDField(_("event id"))
    # NULL means that the key never expires.
    expires_at = models.DateTimeField(_("expires at"), null=True)

    class Meta:
        verbose_name = _("idempotency key")
        verbose_name_plural = _("idempotency keys")
        constraints = (
            models.UniqueConstraint(
                name="eventbus_idempotency_key", fields=("namespace", "scope", "key")
            ),
        )
        indexes = (
            PartialIndex(
                name="eventbus_key_expiry",
                fields=("namespace", "expires_at"),
                condition=models.Q(expires_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.scope}: {self.key}" if self.scope else self.key
