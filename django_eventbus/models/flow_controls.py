"""Pauses, circuit breakers and limits on running handlers."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_eventbus.schema.names import MAX_NAME_LENGTH


class FlowControlKind(models.TextChoices):
    QUEUE = "queue", _("queue")
    TYPE = "type", _("event type")
    HANDLER = "handler", _("handler")
    EXECUTOR = "executor", _("executor")


class FlowControl(models.Model):
    """A rule that can keep events from being handled: a pause, a circuit breaker, or a limit.

    There is one row per queue, type pattern or handler that has ever had such a rule, and one per
    executor, which holds events while the broker of the executor is unavailable. The column
    ``held_by`` of events and lanes contains the id of a row of this table.
    """

    id = models.BigAutoField(primary_key=True)
    namespace = models.CharField(_("namespace"), max_length=64)
    kind = models.CharField(_("kind"), max_length=16)
    name = models.CharField(_("name"), max_length=MAX_NAME_LENGTH)
    paused_at = models.DateTimeField(_("paused at"), null=True)
    paused_by = models.CharField(_("paused by"), max_length=200, default="")
    reason = models.CharField(_("reason"), max_length=500, default="")
    # The circuit breaker is closed if opened_at is NULL. It is half-open while a worker (probe_by)
    # tries one call. The broker of an executor is available if opened_at is NULL. Otherwise,
    # probe_at is the time of the next attempt.
    opened_at = models.DateTimeField(_("opened at"), null=True)
    probe_at = models.DateTimeField(_("probe at"), null=True)
    probe_by = models.CharField(_("probe by"), max_length=64, default="")
    # The time since which no message of the handler could be sent although the broker is available,
    # and the last error; NULL if the last message was sent.
    unsent_since = models.DateTimeField(_("unsent since"), null=True)
    send_error = models.CharField(_("send error"), max_length=500, default="")
    calls = models.JSONField(_("calls"), default=dict)
    # A rate is a token bucket: the number of tokens in the bucket at the time ``tokens_at``.
    tokens = models.FloatField(_("tokens"), null=True)
    tokens_at = models.DateTimeField(_("tokens at"), null=True)
    # The number of slots that each thread of a worker owns, by the name of the thread.
    running = models.JSONField(_("running"), default=dict)

    class Meta:
        default_permissions = ("view",)
        verbose_name = _("flow control")
        verbose_name_plural = _("flow controls")
        permissions = (
            ("pause_flowcontrol", "Can pause and resume, release lanes and reset circuit breakers"),
        )
        constraints = (
            models.UniqueConstraint(
                name="eventbus_flow_control_name", fields=("namespace", "kind", "name")
            ),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"
