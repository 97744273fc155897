"""Schedules: cron lines, and the events that they publish."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.utils.timezone import get_default_timezone_name
from django.utils.translation import gettext_lazy as _

from django_eventbus.conf import settings
from django_eventbus.exceptions import MissingLibraryError
from django_eventbus.scheduling.cron import Misfire, faults
from django_eventbus.schema.names import MAX_NAME_LENGTH


class ScheduleOrigin(models.TextChoices):
    CODE = "CODE", _("declared in code")
    DATABASE = "DATABASE", _("created in the database")


def this_namespace() -> str:
    return settings.NAMESPACE


class EventSchedule(models.Model):
    """A cron line, and the event that it publishes.

    If a schedule is declared in code, the code determines its definition: the columns from ``type``
    to ``misfire``. Each worker writes the definition to this row when it starts. The other columns
    are never overwritten by the code.
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
    #: The tick that is fired next. NULL while the schedule is disabled, and until a worker has
    #: computed the tick.
    next_at = models.DateTimeField(_("next run"), null=True, editable=False)
    last_at = models.DateTimeField(_("last run"), null=True, editable=False)
    # The value of ``plan`` from which next_at was computed. If ``plan`` differs now, the cron line,
    # the time zone or ``enabled`` was changed (also by SQL), and a worker computes next_at again.
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
        """Save the schedule; raise ValidationError for values that would fail at the next tick."""
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
        """The value that ``planned_for`` has if ``next_at`` is up to date.

        The store computes the same value in SQL.
        """
        return f"{self.cron} {self.tz}" if self.enabled else ""
