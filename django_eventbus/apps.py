"""The app configuration.

It registers the checks and imports the modules ``events`` and ``handlers`` of all apps.
"""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class EventBusConfig(AppConfig):
    name = "django_eventbus"
    verbose_name = _("Event bus")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_eventbus import checks  # noqa: F401 - the import registers the checks

        autodiscover_modules("events", "handlers")
