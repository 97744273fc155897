"""The app configuration.

It registers the checks, installs the tracer if OpenTelemetry is installed, and imports the modules
``events`` and ``handlers`` of all apps.
"""

from __future__ import annotations

from importlib.util import find_spec

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class EventBusConfig(AppConfig):
    name = "django_eventbus"
    verbose_name = _("Event bus")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_eventbus import checks  # noqa: F401 - the import registers the checks
        from django_eventbus.counters import process

        process.connect()
        if _has_opentelemetry():
            from django_eventbus.integrations import opentelemetry

            opentelemetry.install()

        autodiscover_modules("events", "handlers")


def _has_opentelemetry() -> bool:
    # ``opentelemetry`` is a namespace package. Other distributions than opentelemetry-api also
    # create it.
    return find_spec("opentelemetry") is not None and find_spec("opentelemetry.trace") is not None
